"""Rotary position settings: read from a config, and the frequencies that follow from them. No torch.

Source of the formulas: the YaRN paper (arXiv 2309.00071) as transformers' reference computes it.
"""

import math
from dataclasses import dataclass
from typing import Final

from drafter_service.heads.provenance import ConfigReader, Level

_SECTIONS: Final = ("rope_parameters", "rope_scaling")
_KINDS: Final = ("default", "yarn")
_KNOWN_KEYS: Final = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        # Three-part positions: with text alone the three are equal, which is plain RoPE.
        "mrope_section",
        "mrope_interleaved",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)


@dataclass(frozen=True)
class YarnSettings:
    """How YaRN stretches the context: by `factor`, from `original_max_position` positions."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class RopeSettings:
    """The first `rotary_dim` elements of each head are rotated; the others pass unchanged."""

    rope_type: str
    theta: float
    partial_rotary_factor: float
    rotary_dim: int
    yarn: YarnSettings | None

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each pair of elements: rotary_dim / 2 of them."""
        dims = range(0, self.rotary_dim, 2)
        plain = tuple(self.theta ** (-dim / self.rotary_dim) for dim in dims)
        if self.yarn is None:
            return plain
        low, high = self._correction_range(self.yarn)
        stretched = []
        for index, frequency in enumerate(plain):
            interpolated = min(max((index - low) / (high - low), 0.0), 1.0)
            stretched.append(frequency * (1 - interpolated) + frequency / self.yarn.factor * interpolated)
        return tuple(stretched)

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def _correction_range(self, yarn: YarnSettings) -> tuple[float, float]:
        def element(rotations: float) -> float:
            wavelength = yarn.original_max_position / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = element(yarn.beta_fast), element(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        # The reference does the same to keep the ramp finite.
        return low, high + 0.001 if low == high else high


def read_rope(reader: ConfigReader, head_dim: int, max_position: int) -> RopeSettings:
    """The rotary settings of a config. Raises CheckpointError naming an unknown type, key or impossible value."""
    sections_of = [(level, _sections(level)) for level in reader.levels]
    sections = tuple(section for _, found in sections_of for section in found)
    for section in sections:
        unknown = sorted(set(section.values) - _KNOWN_KEYS)
        if unknown:
            raise reader.error(f"{section.path}{unknown[0]} is not a known RoPE setting")
    rope_type = reader.raw("rope_type", ("rope_type", "type"), sections)
    if rope_type is None:
        rope_type = "default"
        reader.add("rope_type", rope_type, "no RoPE type given")
    if rope_type not in _KINDS:
        raise reader.unsupported("rope_type", rope_type, " or ".join(_KINDS))
    # Older configs keep the base and the rotated part beside the section, not in it.
    levels = tuple(place for level, found in sections_of for place in (*found, level))
    theta = reader.number("rope_theta", levels)
    if theta <= 1:
        raise reader.unsupported("rope_theta", theta, "a number above 1")
    partial = reader.number("partial_rotary_factor", levels)
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        wanted = f"what rotates an even number of the {head_dim} elements, not {rotary_dim}"
        raise reader.unsupported("partial_rotary_factor", partial, wanted)
    yarn = _read_yarn(reader, levels, max_position) if rope_type == "yarn" else None
    return RopeSettings(str(rope_type), theta, partial, rotary_dim, yarn)


def _read_yarn(reader: ConfigReader, levels: tuple[Level, ...], max_position: int) -> YarnSettings:
    factor = reader.number("factor", levels)
    if factor < 1:
        raise reader.unsupported("factor", factor, "1 or more")
    mscale = reader.optional_number("mscale", levels)
    mscale_all_dim = reader.optional_number("mscale_all_dim", levels)
    inferred = _amplitude(factor, 1.0)
    if mscale is not None and mscale_all_dim is not None:
        inferred = _amplitude(factor, mscale) / _amplitude(factor, mscale_all_dim)
    truncate = reader.raw("truncate", ("truncate",), levels)
    if not isinstance(truncate, bool | None):
        raise reader.unsupported("truncate", truncate, "true or false")

    def number(name: str, default: float) -> float:
        return reader.optional_number(name, levels, (default, "default of yarn")) or default

    return YarnSettings(
        factor=factor,
        original_max_position=int(number("original_max_position_embeddings", max_position)),
        attention_factor=number("attention_factor", inferred),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=truncate is not False,
    )


def _sections(level: Level) -> tuple[Level, ...]:
    return tuple(section for key in _SECTIONS if (section := level.section(key)) is not None)


def _amplitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0
