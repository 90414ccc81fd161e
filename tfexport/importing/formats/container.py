"""Containers: the files that state dicts come in, read without running anything that is in them.

Safetensors, `torch.save` files of tensors and plain values, and directories as
Hugging Face writes them. A file is read once, into memory, and its tensors lie
where it was read to: reading takes the memory of the weights once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfexport._io.names import CONFIG
from tfexport._io.strict_json import plain_problem, read_json
from tfexport.errors import CheckpointError, ConfigError, printable, raise_all, shortened
from tfexport.importing.formats import kinds
from tfexport.importing.formats.folder import INDEX, weights_in
from tfexport.importing.formats.snapshot import FileSum, Snapshot, snapshot
from tfexport.importing.formats.torch_file import STATE_DICT_ONLY, is_torch_file, read_torch

# Under which a training loop puts the state dict, the likelier first.
_WRAPPERS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights", "params")
# What DistributedDataParallel, torch.compile and Lightning put before every key.
_PREFIXES = ("module.", "_orig_mod.", "model.")
# What torch.compile, FSDP and activation checkpointing put into keys, where a part of a model was wrapped.
_INFIX = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Beside a model under one name: how many weights AveragedModel has averaged, the weights of a loss, of a metric.
_BESIDE = re.compile(r"n_averaged|(criterion|loss|loss_fn|loss_func|metric|metrics)(\.|_fn\.|_func\.).*")
_GENERATION = "generation_config.json"
# Weights that are averaged over the training.
_AVERAGED = re.compile(r"ema|average|swa|shadow")
# Beside the model, and with tensors of their own.
_NO_MODEL = re.compile(r"optim|sched|scaler|ema|rng")
_MAX_DEPTH = 4
_MAX_SHARDS = 1_000

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A state dict as it was found.

    `tensors` lie in the memory that their file was read to and must not be
    changed. `files` has the sums of the files that they were read from, by name.
    `hf_config` is the config.json of a Hugging Face directory, `hf_generation` its
    generation_config.json, empty where there is none. `notes` says what was
    taken off: wrappers, prefixes, entries that are no tensors.
    """

    tensors: Mapping[str, Tensor]
    files: Mapping[str, FileSum] = field(default_factory=dict)
    hf_config: Mapping[str, Any] | None = None
    hf_generation: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path | str, entry: str | None = None) -> Checkpoint:
    """Read a state dict.

    Args:
        path: a safetensors file, a file of `torch.save`, the index of shards, a Hugging Face directory, or a folder of
            accelerate or Lightning with one checkpoint in it.
        entry: which of several state dicts in a file: the name of its entry, with dots between names one in another, or
            what its keys begin with; None for the only one.

    Returns:
        The tensors in the dtypes of the file; what happens to the file afterwards does not change them.

    Raises:
        CheckpointError: missing, empty, damaged, cut short, too large for the memory, or holding anything but tensors
            and plain values; lists every tensor that is no plain array of numbers.
    """
    path = Path(path)
    notes: list[str] = []
    try:
        if path.is_dir():
            weights = weights_in(path)
            if (path / CONFIG).exists():
                return _read_hugging_face(path, weights, entry)
            notes.append(f"taken from {weights.relative_to(path)}")
            path = weights
        if problem := plain_problem(path):
            raise CheckpointError(f"{path}: {problem}; give a state dict file or a Hugging Face directory")
        tensors, sums = _read_files(path, entry, notes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    return Checkpoint(without_prefix(tensors, notes), sums, notes=tuple(notes))


def _read_hugging_face(path: Path, weights: Path, entry: str | None) -> Checkpoint:
    notes: list[str] = []
    try:
        config = _object(path / CONFIG)
        generation = _object(path / _GENERATION) if (path / _GENERATION).exists() else {}
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    tensors, sums = _read_files(weights, entry, notes)
    return Checkpoint(tensors, sums, config, generation, tuple(notes))


def _read_files(weights: Path, entry: str | None, notes: list[str]) -> tuple[dict[str, Tensor], dict[str, FileSum]]:
    """Read a file, or the shards that an index names."""
    tensors: dict[str, Tensor] = {}
    sums: dict[str, FileSum] = {}
    for file in _shards(weights) if weights.name.endswith(INDEX) else [weights]:
        part, sums[printable(file.name)] = _read_file(file, entry, notes)
        if twice := sorted(part.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: has {twice[0][:120]}, as another shard has; save the checkpoint again")
        tensors |= part
    return tensors, sums


def _object(path: Path) -> dict[str, Any]:
    data = read_json(path, str(path))
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is {shortened(data)}, expected an object")
    return data


def _shards(index: Path) -> list[Path]:
    try:
        data = read_json(index, str(index))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
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


def _read_file(path: Path, entry: str | None, notes: list[str]) -> tuple[dict[str, Tensor], FileSum]:
    """Read the state dict of one file, and the sum of the very bytes that it was read from."""
    with snapshot(path) as copy:
        content = _content(copy, path)
        if entry:
            content = _entry(path, content, entry)
            notes.append(f"taken from the entry {entry!r}")
        tensors = _unwrap(path, content, notes)
        raise_all(CheckpointError, str(path), kinds.problems(tensors, copy.sum.bytes))
        return kinds.plain(tensors), copy.sum


def _content(copy: Snapshot, path: Path) -> Any:
    if copy.sum.bytes == 0:
        raise CheckpointError(f"{path}: is empty; copy it again")
    with copy.path.open("rb") as file:
        head = file.read(16)
    return read_torch(copy.path, path) if is_torch_file(head) else _read_safetensors(copy.path, path)


def _read_safetensors(copy: Path, path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(copy, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except Exception as error:  # besides its own, what PyTorch says of kinds that it lacks
        kind = "" if isinstance(error, SafetensorError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{path}: is neither safetensors nor a file of torch.save, or damaged or cut short ({kind}{error}); "
            "copy it again"
        ) from error


def _unwrap(path: Path, data: Any, notes: list[str]) -> dict[str, Tensor]:
    """Find the one state dict in what a training loop saved."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path}: holds {type(data).__name__}, expected a state dict; {STATE_DICT_ONLY}")
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
            raise CheckpointError(
                f"{path}: holds several state dicts, {', '.join(names)}; choose with --entry {names[0]}, or another"
            )
        if names or len(inner) == 1:
            name = names[0] if names else next(iter(inner))
            notes.append(f"taken from the entry {name!r}{_others(data, name)}")
            data = inner[name]
            continue
        parts = {name: part for name, part in inner.items() if not _NO_MODEL.search(name)}
        notes.append(f"joined the entries {', '.join(map(repr, parts))}")
        return _tensors(path, {f"{name}.{key}": v for name, part in parts.items() for key, v in part.items()}, notes)
    raise CheckpointError(f"{path}: holds no tensors; {STATE_DICT_ONLY}")


def _entry(path: Path, data: Any, entry: str) -> Any:
    """Return what lies under a name, or the tensors whose keys begin with it."""
    names = [str(name) for name in data] if isinstance(data, Mapping) else []
    for name in names:
        if isinstance(data.get(name), Mapping) and (entry == name or entry.startswith(f"{name}.")):
            rest = entry[len(name) + 1 :]
            return _entry(path, data[name], rest) if rest else data[name]
    under = {name.removeprefix(f"{entry}."): data[name] for name in names if name.startswith(f"{entry}.")}
    if not under:
        raise CheckpointError(
            f"{path}: has no entry {entry!r}; there is {shortened(', '.join(names))}; leave --entry out to be told more"
        )
    return under


def _others(data: Mapping[Any, object], taken: str) -> str:
    """Name the other weights of the same model, which a loop keeps as a running mean."""
    names = [str(name) for name, value in data.items() if isinstance(value, Mapping) and name != taken]
    others = [name for name in names if _AVERAGED.search(name)]
    return f"; {others[0]!r} is there too: take it with --entry {others[0]}" if others else ""


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
    names = [key for key, value in data.items() if isinstance(value, Tensor)]
    if strange := [name for name in names if not (isinstance(name, str) and name.isprintable())]:
        raise CheckpointError(f"{path}: has tensors under {shortened(strange[0])}, expected names; {STATE_DICT_ONLY}")
    return {key: value.detach() for key, value in data.items() if isinstance(value, Tensor)}


def without_prefix(tensors: Mapping[str, T], notes: list[str]) -> Mapping[str, T]:
    """Take off what training wrappers put before every key and into some, and say so in `notes`."""
    if beside := _beside(tensors):
        notes.append(f"left out what is no part of the model: {shortened(', '.join(beside))}")
        tensors = {key: value for key, value in tensors.items() if key not in beside}
    for prefix in _stripped(tensors):
        notes.append(f"took the prefix {prefix!r} off every key")
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    if infixes := sorted({found[1] for key in tensors for found in _INFIX.finditer(key)}):
        notes.append(f"took {', '.join(map(repr, infixes))} out of the keys")
        tensors = {_INFIX.sub("", key): value for key, value in tensors.items()}
    return tensors


def _beside(tensors: Mapping[str, object]) -> list[str]:
    """Name what alone keeps all keys from having one prefix."""
    beside = [key for key in tensors if _BESIDE.fullmatch(key)]
    others = [key for key in tensors if key not in beside]
    return beside if beside and any(all(key.startswith(p) for key in others) for p in _PREFIXES) else []


def _stripped(tensors: Mapping[str, object]) -> Iterator[str]:
    start = ""
    while tensors and (
        found := [p for p in _PREFIXES if all(key.startswith(start + p) and key != start + p for key in tensors)]
    ):
        yield found[0]
        start += found[0]
