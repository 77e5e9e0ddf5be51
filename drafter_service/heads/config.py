"""A head's configuration, resolved from a checkpoint's config.json with the source of every value. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drafter_service.heads.provenance import ConfigReader, Level, ResolvedValue
from drafter_service.heads.record import ArchitectureRecord, Dimension, HiddenSource, RecycleSource
from drafter_service.heads.records import PLANNED_MODEL_TYPES, known_model_types, record_for
from drafter_service.heads.rope import RopeSettings, read_rope
from drafter_service.heads.safetensors_header import CheckpointError, read_json_object

CONFIG_NAME: Final = "config.json"
_TEXT_CONFIG: Final = "text_config"
ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class HeadConfig:
    """Everything about a head's computation that its record leaves open.

    `vocab_size` is the true one: checkpoints may pad their tables beyond it. `dtype` is what the head computes in
    and its K/V is kept in. `max_position` is the number of positions that RoPE was made for.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSettings
    tie_word_embeddings: bool
    dtype: str
    hidden_source: HiddenSource
    recycle: RecycleSource

    @property
    def rope_theta(self) -> float:
        """The base of the rotary frequencies."""
        return self.rope.theta

    @property
    def rotary_dim(self) -> int:
        """How many elements of each head are rotated."""
        return self.rope.rotary_dim

    @property
    def hidden_width(self) -> int:
        """Elements of the target's hidden state that each pair carries."""
        return self.hidden_size

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of K and V of one pair, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    def dimension(self, dimension: Dimension) -> int:
        """The size that a record's symbolic dimension has in this head."""
        sizes = {
            Dimension.HIDDEN: self.hidden_size,
            Dimension.JOINED: 2 * self.hidden_size,
            Dimension.QUERY_AND_GATE: 2 * self.num_heads * self.head_dim,
            Dimension.QUERY: self.num_heads * self.head_dim,
            Dimension.KEY_VALUE: self.num_kv_heads * self.head_dim,
            Dimension.HEAD: self.head_dim,
            Dimension.INTERMEDIATE: self.intermediate_size,
        }
        return sizes[dimension]


@dataclass(frozen=True)
class ConfigReading:
    """What a config.json says, before the stored tensors have had their word."""

    record: ArchitectureRecord
    config: HeadConfig
    values: tuple[ResolvedValue, ...]
    notes: tuple[str, ...]


def read_config(
    directory: Path,
    *,
    dtype: str = "float32",
    hidden_source: HiddenSource | None = None,
    recycle: RecycleSource | None = None,
) -> ConfigReading:
    """Resolves DIRECTORY/config.json. `hidden_source` and `recycle` override the record, for an A/B.

    Raises CheckpointError naming the key if the family is unknown or a value is missing, contradictory,
    or changes the computation in a way that is not supported.
    """
    levels = read_config_levels(directory)
    model_type, record = _find_record(directory, levels)
    reader = ConfigReader(directory / CONFIG_NAME, record, levels)
    for fixed in record.fixed_values:
        reader.check_fixed(fixed)
    _check_sliding_window(reader)
    config = _resolve(reader, model_type, dtype, hidden_source, recycle)
    return ConfigReading(record, config, tuple(reader.values), tuple(reader.notes))


def read_config_levels(directory: Path) -> tuple[Level, ...]:
    """The objects of DIRECTORY/config.json that values are looked up in, the text model's first."""
    top = Level("", read_json_object(directory / CONFIG_NAME), "")
    text = top.section(_TEXT_CONFIG)
    return (top,) if text is None else (Level(text.path, text.values, text.path), top)


def _find_record(directory: Path, levels: tuple[Level, ...]) -> tuple[str, ArchitectureRecord]:
    found: ArchitectureRecord | None = None
    outermost = ""
    for level in levels:
        model_type = level.values.get("model_type")
        if model_type is None and level.path:
            continue
        record = record_for(str(model_type))
        where = f"{directory / CONFIG_NAME}: {level.path}model_type {model_type!r}"
        if record is None and model_type in PLANNED_MODEL_TYPES:
            raise CheckpointError(f"{where} is not supported yet (supported: {', '.join(known_model_types())})")
        if record is None or found not in {None, record}:
            raise CheckpointError(f"{where} is not a supported family (supported: {', '.join(known_model_types())})")
        found, outermost = record, str(model_type)
    assert found is not None  # The document itself is always a level, and never skipped.
    return outermost, found


def _check_sliding_window(reader: ConfigReader) -> None:
    # Qwen configs carry a window size that an explicit `use_sliding_window: false` switches off.
    switched_off = any(level.values.get("use_sliding_window") is False for level in reader.levels)
    window = reader.raw("sliding_window", ("sliding_window",))
    if window is not None and not switched_off:
        source = reader.source_of("sliding_window")
        raise reader.error(f"{source} is {window!r}: sliding windows are not supported yet")


def _layer_count(reader: ConfigReader) -> int:
    keys = reader.record.layer_count_keys
    count = reader.raw("num_layers", keys)
    if count is None or count == 0:
        raise reader.error(f"no MTP layers: {' and '.join(keys)} are absent or 0")
    if count != 1 or type(count) is not int:
        source = reader.source_of("num_layers")
        raise reader.error(f"{source} is {count!r}: more than 1 MTP layer is not supported yet")
    return count


def _resolve(
    reader: ConfigReader,
    model_type: str,
    dtype: str,
    hidden_source: HiddenSource | None,
    recycle: RecycleSource | None,
) -> HeadConfig:
    record = reader.record
    num_layers = _layer_count(reader)
    num_heads, num_kv_heads = reader.integer("num_attention_heads"), reader.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.error(f"{num_heads} attention heads do not divide among {num_kv_heads} KV heads")
    head_dim, max_position = reader.integer("head_dim"), reader.integer("max_position_embeddings")
    rope = read_rope(reader, head_dim, max_position)
    if rope.yarn is not None and (stretched := int(rope.yarn.factor * rope.yarn.original_max_position)) > max_position:
        max_position = stretched
        reader.add("max_position", max_position, "factor * original_max_position_embeddings")
    for name, chosen, of_record in (
        ("hidden_source", hidden_source, record.hidden_source),
        ("recycle", recycle, record.recycle),
    ):
        reader.add(name, (chosen or of_record).value, "override" if chosen else f"record of {record.family}")
    return HeadConfig(
        model_type=model_type,
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        max_position=max_position,
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        dtype=dtype,
        hidden_source=hidden_source or record.hidden_source,
        recycle=recycle or record.recycle,
    )
