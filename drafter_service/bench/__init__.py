"""`drafter-service bench`: what the service costs, measured beside its floor.

A leaf: only the command line imports it.
"""

__all__: list[str] = []
