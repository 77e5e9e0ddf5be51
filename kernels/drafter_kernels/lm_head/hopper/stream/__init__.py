"""What each program of the kernel for several rows of x does with a step of the weight."""

__all__: list[str] = []
