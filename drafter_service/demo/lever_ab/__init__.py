"""Every lever against the default, on the same positions of held-out files."""

__all__: list[str] = []
