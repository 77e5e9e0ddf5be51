"""Products of one row of x on Hopper, in Gluon: where registers and shared memory are laid out by hand."""

__all__: list[str] = []
