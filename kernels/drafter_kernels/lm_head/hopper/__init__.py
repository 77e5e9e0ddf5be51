"""The LM head's first stage for NVFP4 on Hopper, in Gluon: where registers and shared memory are laid out by hand."""

__all__: list[str] = []
