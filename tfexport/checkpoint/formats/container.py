"""Containers: the files that state dicts come in, read without running anything that is in them.

Safetensors, `torch.save` files of tensors and plain values, and directories as
Hugging Face writes them. Tensors are memory-mapped: reading costs no memory for
the weights.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, shortened
from tfexport.files.names import CONFIG, MODEL_WEIGHTS
from tfexport.files.strict_json import plain_problem, read_json

# Under which a training loop puts the state dict, the likelier first.
_WRAPPERS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights", "params")
# What DistributedDataParallel, torch.compile and Lightning put before every key.
_PREFIXES = ("module.", "_orig_mod.", "model.")
_HUGGING_FACE = (
    MODEL_WEIGHTS,
    f"{MODEL_WEIGHTS}.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_GENERATION = "generation_config.json"
# Beside the model, and with tensors of their own.
_NO_MODEL = re.compile(r"optim|sched|scaler|ema|rng")
_ZIP = b"PK\x03\x04"
_MAX_DEPTH = 4
_MAX_SHARDS = 1_000
_STATE_DICT_ONLY = "save the state dict alone: torch.save(model.state_dict(), FILE), or safetensors.torch.save_file"


@dataclass(frozen=True)
class Checkpoint:
    """A state dict as it was found.

    `tensors` are memory-mapped and must not be changed. `hf_config` is the
    config.json of a Hugging Face directory, `hf_generation` its
    generation_config.json, empty where there is none. `notes` says what was
    taken off: wrappers, prefixes, entries that are no tensors.
    """

    tensors: Mapping[str, Tensor]
    hf_config: Mapping[str, Any] | None = None
    hf_generation: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a state dict.

    Args:
        path: a safetensors file, a file of `torch.save`, or a Hugging Face directory.

    Returns:
        The tensors, memory-mapped and in the dtypes of the file; no weight is read yet.

    Raises:
        CheckpointError: missing, empty, damaged, cut short, or holding anything but tensors and plain values.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _read_directory(path)
        if problem := plain_problem(path):
            raise CheckpointError(f"{path}: {problem}; give a state dict file or a Hugging Face directory")
        data = _read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    notes: list[str] = []
    tensors = _unwrap(path, data, notes)
    return Checkpoint(without_prefix(tensors, notes), notes=tuple(notes))


def _read_directory(path: Path) -> Checkpoint:
    weights = next((path / name for name in _HUGGING_FACE if (path / name).exists()), None)
    if weights is None or not (path / CONFIG).exists():
        raise CheckpointError(
            f"{path}: is a directory without config.json and weights ({', '.join(_HUGGING_FACE)}); "
            "give a state dict file or a Hugging Face directory"
        )
    try:
        config = _object(path / CONFIG)
        generation = _object(path / _GENERATION) if (path / _GENERATION).exists() else {}
        files = _shards(weights) if weights.name.endswith(".index.json") else [weights]
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    for file in files:
        part = _unwrap(file, _read_file(file), notes)
        if twice := sorted(part.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: has {twice[0][:120]}, as another shard has; save the checkpoint again")
        tensors |= part
    return Checkpoint(tensors, config, generation, tuple(notes))


def _object(path: Path) -> dict[str, Any]:
    data = read_json(path, str(path))
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is {shortened(data)}, expected an object")
    return data


def _shards(index: Path) -> list[Path]:
    data = read_json(index, str(index))
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names; save the checkpoint again")
    files = sorted(set(names.values()))
    outside = [name for name in files if not re.fullmatch(r"[\w.-]+", name) or name in (".", "..")]
    if outside or not files or len(files) > _MAX_SHARDS:
        raise CheckpointError(f"{index}: names {shortened((outside or files)[:3])}, expected files beside it")
    if missing := [name for name in files if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index}: {', '.join(missing[:8])} missing; copy every shard")
    return [index.parent / name for name in files]


def _read_file(path: Path) -> Any:
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path}: is empty; copy it again")
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(_ZIP):
        return _read_torch(path, mapped=True)
    if head[:1] == b"\x80":
        # Written before PyTorch 1.6, or with the old serialisation: cannot be mapped.
        return _read_torch(path, mapped=False)
    return _read_safetensors(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: is neither safetensors nor a file of torch.save, or damaged or cut short ({error}); copy it again"
        ) from error


def _read_torch(path: Path, *, mapped: bool) -> Any:
    if mapped:
        _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are refused a moment later
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # on a torn file its reader fails in every way there is
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path}: holds more than tensors and plain values ({found[1]}), which would have to be run to be "
                f"read, and that is not done; {_STATE_DICT_ONLY}"
            ) from error
        reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({_first_line(error)})"
        raise CheckpointError(
            f"{path}: is damaged, cut short or no file of torch.save{reason}; copy it again"
        ) from error


def _first_line(error: Exception) -> str:
    return shortened(str(error).splitlines()[0] if str(error) else type(error).__name__)


def _check_archive(path: Path) -> None:
    """Refuse what only looks like a file of torch.save: it stores its parts as they are, and a bomb would not."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: is damaged or cut short ({error}); copy it again") from error
    if packed:
        raise CheckpointError(f"{path}: is a compressed archive, expected a file of torch.save; unpack it")


def _unwrap(path: Path, data: Any, notes: list[str]) -> dict[str, Tensor]:
    """Find the one state dict in what a training loop saved."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path}: holds {type(data).__name__}, expected a state dict; {_STATE_DICT_ONLY}")
        inner = {str(key): value for key, value in data.items() if _has_tensors(value)}
        names = [name for name in _WRAPPERS if name in inner]
        # JoeyNMT keeps the state of its sampler, a tensor, beside the state dict.
        if not names and any(isinstance(value, Tensor) for value in data.values()):
            return _tensors(path, data, notes)
        if not inner:
            break
        if names and isinstance(data.get("generator"), Mapping) and "generator" in inner:
            # OpenNMT-py keeps the output projection beside the model.
            notes.append(f"taken from the entries {names[0]!r} and 'generator'")
            parts = {"": inner[names[0]], "generator.": inner["generator"]}
            return _tensors(path, {f"{p}{key}": v for p, part in parts.items() for key, v in part.items()}, notes)
        if len(names) > 1:
            raise CheckpointError(f"{path}: holds several state dicts, {', '.join(names)}; save the one that is meant")
        if names or len(inner) == 1:
            name = names[0] if names else next(iter(inner))
            notes.append(f"taken from the entry {name!r}")
            data = inner[name]
            continue
        parts = {name: part for name, part in inner.items() if not _NO_MODEL.search(name)}
        notes.append(f"joined the entries {', '.join(map(repr, parts))}")
        return _tensors(path, {f"{name}.{key}": v for name, part in parts.items() for key, v in part.items()}, notes)
    raise CheckpointError(f"{path}: holds no tensors; {_STATE_DICT_ONLY}")


def _has_tensors(value: Any, depth: int = 1) -> bool:
    if not isinstance(value, Mapping):
        return False
    if any(isinstance(inner, Tensor) for inner in value.values()):
        return all(isinstance(key, str) for key in value)
    return depth < _MAX_DEPTH and any(k in _WRAPPERS and _has_tensors(v, depth + 1) for k, v in value.items())


def _tensors(path: Path, data: Mapping[Any, Any], notes: list[str]) -> dict[str, Tensor]:
    others = [str(key) for key, value in data.items() if not isinstance(value, Tensor)]
    if others:
        notes.append(f"left out what is no tensor: {shortened(', '.join(others))}")
    if strange := [key for key, value in data.items() if isinstance(value, Tensor) and not isinstance(key, str)]:
        raise CheckpointError(f"{path}: has tensors under {shortened(strange[0])}, expected names; {_STATE_DICT_ONLY}")
    tensors = {key: value.detach() for key, value in data.items() if isinstance(value, Tensor)}
    if unusual := [key for key, value in tensors.items() if value.layout != torch.strided or value.is_quantized]:
        raise CheckpointError(f"{path}: {unusual[0][:120]} is sparse or quantised, expected plain weights")
    return tensors


def without_prefix(tensors: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Take off what training wrappers put before every key, and say so in `notes`."""
    for prefix in _stripped(tensors):
        notes.append(f"took the prefix {prefix!r} off every key")
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _stripped(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    start = ""
    while found := [p for p in _PREFIXES if all(key.startswith(start + p) and key != start + p for key in tensors)]:
        yield found[0]
        start += found[0]
