"""A head's weights by role, as they are stored: projections [out, in], norm weights [width]."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. The projections are in the head's dtype, the norms in float32."""

    input_norm: Tensor
    ffn_norm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True)
class HeadWeights:
    """A whole head. `embedding` is [vocab_size, hidden_size], `lm_head` [draft vocabulary, hidden_size].

    They are one tensor if they are tied and the LM head is neither cut nor rounded. `draft_ids`, int64 of the
    draft vocabulary, are the target ids of the rows of `lm_head`, ascending; None = row i is id i.
    """

    embedding: Tensor
    lm_head: Tensor
    join_proj: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]
    draft_ids: Tensor | None = None

    def num_bytes(self) -> int:
        """Bytes on the device; a tied table counts once."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        tensors += [tensor for layer in self.layers for tensor in vars(layer).values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
