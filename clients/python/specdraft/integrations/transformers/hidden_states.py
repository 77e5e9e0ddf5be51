"""Reading the hidden states that a head drafts from, while the target runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from specdraft.options import SessionOptions
from specdraft.words import DType, HiddenSource

__all__ = ["HiddenTap"]

_NORMS: Final = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_LAYERS: Final = ("layers", "h", "blocks")


class HiddenTap:
    """Hooks in the target that keep the hidden states of one forward.

    POST_NORM is what the base model (`model.base_model`) returns as `last_hidden_state`. Asking for all hidden states
    would keep every layer's, and the LM head itself sees the last position only. In the first forward the LM head's
    input is compared with it, so that a model in which something else lies between the two is refused.
    PRE_NORM is the input of the base model's final norm; LAYERS the outputs of the decoder layers named.
    """

    def __init__(self, model: Any, options: SessionOptions, *, is_on_gpu: bool = False) -> None:
        """Finds the places that the session's `hidden_source` means.

        Args:
            model: the target.
            options: of the session.
            is_on_gpu: whether the session takes rows where the target has them; otherwise they go to the CPU.

        Raises:
            ValueError: this model does not have them where they are looked for.
        """
        self._model = model
        self._source = options.hidden_source
        self._is_on_gpu = is_on_gpu
        self._dtype = torch.bfloat16 if options.dtype is DType.BFLOAT16 else torch.float32
        base = model.base_model
        if base is model:
            raise ValueError(f"{type(model).__name__} has no base model to take hidden states from")
        inner = getattr(base, "language_model", None) or getattr(base, "decoder", None) or base
        self._places = self._find(base, inner, options.layer_ids)
        self._parts: dict[int, torch.Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """For one forward: what the model computes for somebody else in between is not kept."""
        self._parts.clear()
        with ExitStack() as stack:
            for index, module in enumerate(self._places):
                handle = self._hook(index, module)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def checked(self) -> Iterator[None]:
        """For the first forward: also watches what the LM head reads.

        Raises:
            ValueError: it is not what this tap keeps, or the target computes NaN.
        """
        head = self._model.get_output_embeddings()
        if self._source is not HiddenSource.POST_NORM or head is None:
            yield
            return
        seen: list[torch.Tensor] = []
        handle = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        try:
            yield
        finally:
            handle.remove()
        if not seen or not self._parts or not torch.equal(seen[-1][0, -1], self._parts[0][0, -1].to(seen[-1].device)):
            if self._parts and bool(self._parts[0].isnan().any()):  # NaN equals nothing, not even itself
                raise ValueError(
                    f"the hidden states of {type(self._model).__name__} hold NaN after the prompt: the target itself "
                    "computes nothing of use"
                )
            raise ValueError(
                f"the LM head of {type(self._model).__name__} does not read its base model's last_hidden_state: "
                "its POST_NORM hidden states are not known"
            )

    def rows(self) -> torch.Tensor:
        """Hidden states of the forward listened to: [tokens fed, width], in the session's dtype."""
        parts = [self._parts[index][0] for index in range(len(self._places))]
        joined = parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts], dim=-1)
        device = joined.device if self._is_on_gpu else "cpu"
        return joined.detach().to(device, self._dtype).contiguous()

    def _find(self, base: Any, inner: Any, layer_ids: Sequence[int]) -> list[Any]:
        if self._source is HiddenSource.POST_NORM:
            # Some models (OPT) call the decoder inside their base model, and never the base model itself.
            return [getattr(base, "decoder", None) or base]
        names = _NORMS if self._source is HiddenSource.PRE_NORM else _LAYERS
        found = next((getattr(inner, name) for name in names if hasattr(inner, name)), None)
        if found is None:
            raise ValueError(f"{type(inner).__name__} has none of {', '.join(names)} to take hidden states from")
        return [found] if self._source is HiddenSource.PRE_NORM else [found[layer_id] for layer_id in layer_ids]

    def _hook(self, index: int, module: Any) -> Any:
        def keep_input(_module: Any, args: tuple[Any, ...]) -> None:
            self._parts[index] = args[0]

        def keep_output(_module: Any, _args: Any, output: Any) -> None:
            self._parts[index] = output if isinstance(output, torch.Tensor) else output[0]

        if self._source is HiddenSource.PRE_NORM:
            return module.register_forward_pre_hook(keep_input)
        return module.register_forward_hook(keep_output)
