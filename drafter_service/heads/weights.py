"""A head's weights by role, as they are stored: projections [out, in], norm weights [width]."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from drafter_kernels.linear import LinearWeight
from drafter_kernels.lm_head import LmHeadWeight
from drafter_service.heads.projections import tensors_of


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. The projections are in the head's dtype or narrower, the norms in float32."""

    input_norm: Tensor
    ffn_norm: Tensor
    q_proj: LinearWeight
    k_proj: LinearWeight
    v_proj: LinearWeight
    o_proj: LinearWeight
    q_norm: Tensor
    k_norm: Tensor
    gate_proj: LinearWeight
    up_proj: LinearWeight
    down_proj: LinearWeight


@dataclass(frozen=True)
class HeadWeights:
    """A whole head. `embedding` is [vocab_size, hidden_size], `lm_head` [draft vocabulary, hidden_size].

    They are one tensor if they are tied and the LM head is neither cut nor rounded. `draft_ids`, int64 of the
    draft vocabulary, are the target ids of the rows of `lm_head`, ascending; None = row i is id i.
    """

    embedding: Tensor
    lm_head: LmHeadWeight
    join_proj: LinearWeight
    embedding_norm: Tensor
    hidden_norm: Tensor
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]
    draft_ids: Tensor | None = None

    def num_bytes(self) -> int:
        """Bytes on the device; a tied table counts once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._tensors()}.values())

    def _tensors(self) -> Iterator[Tensor]:
        for owner in (self, *self.layers):
            for value in vars(owner).values():
                if value is not None and not isinstance(value, tuple):
                    yield from tensors_of(value)
