"""The demo: a small target, a head trained for it, held-out texts, and a run that shows both at work.

A leaf: only the command line imports it.
"""

__all__: list[str] = []
