"""What one family of heads computes and what its checkpoints call it, as data.

Code reads a record; a new family is a new record in `records.py`, never a new class.
"""

from dataclasses import dataclass
from enum import StrEnum


class HiddenSource(StrEnum):
    """Which of the target's hidden states the head was trained on."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"


class RecycleSource(StrEnum):
    """Which of the head's own states feeds its next draft forward: before or after its final norm."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"


class NormKind(StrEnum):
    """How a stored RMSNorm weight w scales the normalised state."""

    PLAIN = "w"
    ONE_PLUS_WEIGHT = "1+w"


class ConcatOrder(StrEnum):
    """The order in which the two normalised inputs enter the joining projection."""

    EMBEDDING_HIDDEN = "embedding,hidden"
    HIDDEN_EMBEDDING = "hidden,embedding"


class AttentionKind(StrEnum):
    """The attention of the head's decoder layer."""

    # Grouped queries; q_proj holds, head by head, the query and then its sigmoid gate; norms on q and k.
    GATED_GQA = "gated_gqa"


class FfnKind(StrEnum):
    """The feed-forward part of the head's decoder layer."""

    DENSE_SWIGLU = "dense_swiglu"


class Dimension(StrEnum):
    """A size that follows from the config; tensor shapes are tuples of these."""

    HIDDEN = "hidden_size"
    JOINED = "2*hidden_size"
    QUERY_AND_GATE = "2*num_heads*head_dim"
    QUERY = "num_heads*head_dim"
    KEY_VALUE = "num_kv_heads*head_dim"
    HEAD = "head_dim"
    INTERMEDIATE = "intermediate_size"


@dataclass(frozen=True)
class TensorRole:
    """One tensor: the name code uses, the name the checkpoint uses, and its shape.

    In a layer's tensors `{layer}` stands for the layer's number.
    """

    role: str
    name: str
    shape: tuple[Dimension, ...]


@dataclass(frozen=True)
class FixedValue:
    """A config key for which only some values are computed here; any other value is refused at load.

    An absent or null key counts as the first accepted value.
    """

    key: str
    accepted: tuple[object, ...]


@dataclass(frozen=True)
class ArchitectureRecord:
    """One family of heads. `model_types[0]` is the text model's own type and names the defaults."""

    family: str
    model_types: tuple[str, ...]
    # Every tensor under this prefix must have a role: one that has none is computed by nobody.
    tensor_prefix: str
    tensors: tuple[TensorRole, ...]
    layer_tensors: tuple[TensorRole, ...]
    embedding_names: tuple[str, ...]
    lm_head_names: tuple[str, ...]
    concat: ConcatOrder
    norm: NormKind
    hidden_source: HiddenSource
    recycle: RecycleSource
    attention: AttentionKind
    ffn: FfnKind
    # The RoPE position of pair k is k + this.
    rope_position_offset: int
    layer_count_keys: tuple[str, ...]
    defaults: tuple[tuple[str, object], ...]
    fixed_values: tuple[FixedValue, ...]

    def default(self, key: str) -> object | None:
        """The family's value of a config key that the config leaves out, or None if it must be given."""
        return dict(self.defaults).get(key)

    def named_tensors(self, num_layers: int) -> tuple[tuple[str, int | None, TensorRole], ...]:
        """(checkpoint name, layer or None, role) of every tensor of a head with this many layers."""
        own = tuple((tensor.name, None, tensor) for tensor in self.tensors)
        layers = tuple(
            (tensor.name.format(layer=layer), layer, tensor)
            for layer in range(num_layers)
            for tensor in self.layer_tensors
        )
        return own + layers
