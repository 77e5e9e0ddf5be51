"""Products of one row of x, without tensor cores."""

__all__: list[str] = []
