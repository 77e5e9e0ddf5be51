"""Looking a config value up where it may stand, and remembering where it was found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from drafter_service.heads.record import ArchitectureRecord, FixedValue
from drafter_service.heads.safetensors_header import CheckpointError

# Far beyond any real configuration, and small enough that products of two stay finite.
_INTEGER_MAX: Final = 2**31 - 1
_NUMBER_MAX: Final = 1e15


@dataclass(frozen=True)
class ResolvedValue:
    """One value of the head's configuration and its source, such as `text_config.rope_parameters.rope_theta`."""

    name: str
    value: object
    source: str


@dataclass(frozen=True)
class Level:
    """One object of a config.json. `path` is its name with a trailing dot, empty for the document itself.

    `model` is the path of the model's own object that it belongs to: `text_config.` for `text_config.rope_scaling.`.
    """

    path: str
    values: Mapping[str, object]
    model: str

    def section(self, key: str) -> "Level | None":
        """The object under a key, or None if the key is absent or null. Raises CheckpointError for another type."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json: {self.path}{key} is not an object")
        return Level(f"{self.path}{key}.", values, self.model)


@dataclass
class ConfigReader:
    """Resolves keys over levels, the nearest to the text model first; collects values and notes on the way.

    A value that the text model's object and its wrapper give differently is resolved to the text model's and
    noted; one that a single model's object gives twice, differently, is refused. Null counts as absent.
    """

    file: Path
    record: ArchitectureRecord
    levels: tuple[Level, ...]
    values: list[ResolvedValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, source: str) -> None:
        """Records a value that was not looked up in the config."""
        self.values.append(ResolvedValue(name, value, source))

    def raw(self, name: str, keys: tuple[str, ...], levels: tuple[Level, ...] | None = None) -> object | None:
        """The first value under any of the keys, level by level, else the family's default, else None.

        Raises CheckpointError for a value that one model's object gives twice, differently.
        """
        found = [
            (level, key)
            for level in (self.levels if levels is None else levels)
            for key in keys
            if level.values.get(key) is not None
        ]
        if not found:
            value = self.record.default(name)
            if value is not None:
                self.add(name, value, f"default of {self.record.model_types[0]}")
            return value
        level, key = found[0]
        value, source = level.values[key], f"{level.path}{key}"
        for other_level, other_key in found[1:]:
            other, other_source = other_level.values[other_key], f"{other_level.path}{other_key}"
            if other == value:
                continue
            contradiction = f"{source} says {value!r}, {other_source} says {other!r}"
            if other_level.model == level.model:
                raise self.error(contradiction)
            self.notes.append(f"{contradiction}: {source} is used")
        self.add(name, value, source)
        return value

    def integer(self, name: str) -> int:
        """A required whole number from 1 to 2^31 - 1. Raises CheckpointError naming the key."""
        value = self._required(name, None)
        if type(value) is not int or not 1 <= value <= _INTEGER_MAX:
            raise self.unsupported(name, value, f"a whole number from 1 to {_INTEGER_MAX}")
        return value

    def number(self, name: str, levels: tuple[Level, ...] | None = None) -> float:
        """A required number above 0. Raises CheckpointError naming the key."""
        return self._positive(name, self._required(name, levels))

    def optional_number(
        self, name: str, levels: tuple[Level, ...], default: tuple[float, str] | None = None
    ) -> float | None:
        """A number above 0, or the default (value, source) if it is absent. Raises CheckpointError."""
        value = self.raw(name, (name,), levels)
        if value is not None:
            return self._positive(name, value)
        if default is not None:
            self.add(name, *default)
            return default[0]
        return None

    def boolean(self, name: str) -> bool:
        """A required true or false. Raises CheckpointError naming the key."""
        value = self._required(name, None)
        if not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return value

    def check_fixed(self, fixed: FixedValue) -> None:
        """Refuses a value that would change the computation. Raises CheckpointError naming the key."""
        value = self.raw(fixed.key, (fixed.key,))
        if value is None:
            return
        if not any(type(value) is type(accepted) and value == accepted for accepted in fixed.accepted):
            raise self.unsupported(fixed.key, value, " or ".join(repr(accepted) for accepted in fixed.accepted))

    def source_of(self, name: str) -> str:
        """Where the latest value of this name came from."""
        return next((value.source for value in reversed(self.values) if value.name == name), name)

    def error(self, text: str) -> CheckpointError:
        """An error about this file."""
        return CheckpointError(f"{self.file}: {text}")

    def unsupported(self, name: str, value: object, wanted: str) -> CheckpointError:
        """An error about a value that was found, naming where."""
        return self.error(f"{self.source_of(name)} is {value!r}: supported is {wanted}")

    def _required(self, name: str, levels: tuple[Level, ...] | None) -> object:
        value = self.raw(name, (name,), levels)
        if value is None:
            places = ", ".join(f"{level.path}{name}" for level in (self.levels if levels is None else levels))
            raise self.error(f"no value for {name} (looked at {places})")
        return value

    def _positive(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _NUMBER_MAX:
            raise self.unsupported(name, value, f"a number above 0, at most {_NUMBER_MAX}")
        return float(value)
