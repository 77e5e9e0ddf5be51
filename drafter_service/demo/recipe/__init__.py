"""How the demo's two small models were made: corpus, tokenizer, target, MTP head, measurement.

Run it with ``python -m drafter_service.demo.recipe``; README.md beside this file says how.
"""

__all__: list[str] = []
