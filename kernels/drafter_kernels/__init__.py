"""The service's device operations: one folder each, with the reference that specifies it."""

__all__: list[str] = []
