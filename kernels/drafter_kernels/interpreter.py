"""What Triton's interpreter lacks for our kernels."""

from typing import Any

from drafter_kernels.dispatch import is_interpreted


def let_scalars_be_indices() -> None:
    """Lets kernels loop to a bound that they have loaded; nothing happens unless kernels are interpreted.

    Triton 3.6's interpreter holds scalars as arrays of one element, which NumPy 2.4 no longer takes for integers.
    """
    if not is_interpreted():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor  # noqa: SLF001  # there is no other way in
    if getattr(patch, "lets_scalars_be_indices", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.lets_scalars_be_indices = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched  # noqa: SLF001  # the same
