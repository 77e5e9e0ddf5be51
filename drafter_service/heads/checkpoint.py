"""A checkpoint directory: which tensors it holds, and where. Headers only, no torch, no tensor data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drafter_service.heads.safetensors_header import (
    CheckpointError,
    SafetensorsHeader,
    StoredTensor,
    read_header,
    read_json_object,
)

__all__ = ["Checkpoint", "CheckpointError", "StoredTensor"]

_INDEX_NAME: Final = "model.safetensors.index.json"
_NAMES_SHOWN: Final = 3


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a directory by name. `notes` are facts that its owner should know."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Reads the header of every safetensors file in the directory.

        With an index, the index decides between files that hold the same name; what it leaves out is found all
        the same and noted, because exporters forget side-car shards. Raises CheckpointError in one line.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        index = _read_index(directory)
        paths = sorted(set(directory.glob("*.safetensors")) | {directory / file for file in index.values()})
        if not paths:
            raise CheckpointError(f"{directory}: no *.safetensors file")
        headers = {path.name: _read_torch_header(path) for path in paths}
        tensors = _indexed(directory, index, headers)
        unindexed = _unindexed(tensors, headers)
        notes = _notes(index, headers, unindexed)
        return cls(directory, {**tensors, **unindexed}, notes)

    def first_of(self, names: tuple[str, ...]) -> StoredTensor | None:
        """The tensor under the first of several alternative names, or None."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / _INDEX_NAME
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: no weight_map")
    for name, file in weight_map.items():
        # A plain file name only: an index must not reach outside its directory.
        if not isinstance(file, str) or not file or Path(file).name != file or file in {".", ".."}:
            raise CheckpointError(f"{path}: tensor {name} is mapped to {file!r}, which is not a file name")
        if not (directory / file).is_file():
            raise CheckpointError(f"{path}: names {file} (for {name}), which does not exist")
    return weight_map


def _read_torch_header(path: Path) -> SafetensorsHeader:
    header = read_header(path)
    if header.metadata.get("format") == "mlx":
        # Such files hold 1 + w where this family's own files hold w, and nothing else tells them apart.
        raise CheckpointError(f"{path}: written for MLX, whose norm weights are stored differently: not supported")
    return header


def _indexed(
    directory: Path, index: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]
) -> dict[str, StoredTensor]:
    for name, file in index.items():
        if name not in headers[file].tensors:
            raise CheckpointError(f"{directory / _INDEX_NAME}: says that {file} holds {name}, which it does not")
    return {name: headers[file].tensors[name] for name, file in index.items()}


def _unindexed(
    indexed: Mapping[str, StoredTensor], headers: Mapping[str, SafetensorsHeader]
) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in indexed:
                continue
            if name in found:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} is also in {found[name].file.name}: which is meant?"
                )
            found[name] = tensor
    return found


def _notes(
    index: Mapping[str, str], headers: Mapping[str, SafetensorsHeader], unindexed: Mapping[str, StoredTensor]
) -> tuple[str, ...]:
    if not index:
        return (f"no index: all of {', '.join(headers)} were read",) if len(headers) > 1 else ()
    notes = []
    for file in headers:
        names = [name for name, tensor in unindexed.items() if tensor.file.name == file]
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            notes.append(f"{file} holds {len(names)} tensors that the index omits ({shown}): used all the same")
    return tuple(notes)
