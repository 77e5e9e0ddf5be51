"""What each program of the kernels for Hopper does: x in shared memory, rows of the weight past it, what is written."""

__all__: list[str] = []
