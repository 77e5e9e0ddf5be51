"""The service's device operations: one folder each, with the reference that specifies it."""
