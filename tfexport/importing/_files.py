"""Read state dicts from files without running code stored in them.

Each file is copied once into private memory, where it is checked and hashed. The tensors stay mapped to the copy.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple, TypeVar

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfexport._io.names import CONFIG, MODEL_WEIGHTS
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import plain_problem, read_json
from tfexport.errors import CheckpointError, ConfigError, printable, raise_all, shortened
from tfexport.importing._buffers import buffer_kind
from tfexport.importing._torch_file import STATE_DICT_ONLY, is_torch_file, read_torch
from tfexport.importing.layout.layout import Layout
from tfexport.nn.switches import Value

GENERATION_CONFIG = "generation_config.json"
INDEX = ".index.json"
# File names of transformers and accelerate, in order of preference.
WEIGHTS = (MODEL_WEIGHTS, f"{MODEL_WEIGHTS}{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
# Lightning writes checkpoints to the folder of a version or its subfolder "checkpoints".
_FOLDERS, SUFFIXES = (".", "checkpoints"), (".ckpt", ".pt", ".pth", ".safetensors")
# Keys under which training loops save the state dict, in order of preference.
_WRAPPERS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights", "params")
# DistributedDataParallel, torch.compile and Lightning add these prefixes to every key.
_PREFIXES = ("module.", "_orig_mod.", "model.")
# torch.compile, FSDP and activation checkpointing insert these into keys if they wrap a submodule.
_INFIX = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Keys next to a wrapped model: the counter of AveragedModel, the weights of a loss or a metric.
_OTHER = re.compile(r"n_averaged|(criterion|loss|loss_fn|loss_func|metric|metrics)(\.|_fn\.|_func\.).*")
_AVERAGED = re.compile(r"ema|average|swa|shadow")
# Entries with tensors that are not weights.
_NO_MODEL = re.compile(r"optim|sched|scaler|(?<![a-z])(ema|rng)(?![a-z])")
# Why the tensors of entries next to the state dict are left out; others need an explanation.
_KNOWN_ENTRIES = {
    "state of the optimizer": re.compile("optim"),
    "averaged weights, see --entry": re.compile(r"(?<![a-z])(ema|swa)(?![a-z])|average|shadow"),
    "state of the training loop": re.compile(r"sched|scaler|train_iter|(?<![a-z])rng(?![a-z])"),
    "weights of a loss or metric": re.compile(r"(?<![a-z])(criterion|loss|metrics?)(?![a-z])"),
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX_DEPTH = 4
_MAX_SHARDS = 1_000
_MAX_NAME = 400  # characters
_CHUNK_BYTES = 8 * 1024 * 1024

T = TypeVar("T")


class LeftOut(NamedTuple):
    """Tensors outside of the state dict; without a reason, they are unexplained."""

    name: str
    reason: str
    size: int
    number: int = 1


@dataclass(frozen=True)
class Described:
    """The layout and the settings of a file that describes its own model."""

    layout: Layout
    settings: Mapping[str, Value]
    source_suffix: tuple[int, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """State dict and metadata of a checkpoint; do not modify the tensors."""

    tensors: Mapping[str, Tensor]
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    hf_config: Mapping[str, Any] | None = None
    hf_generation: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()  # about removed wrappers, prefixes and entries
    described: Described | None = None


def read_checkpoint(path: Path | str, entry: str | None = None) -> Checkpoint:
    """Read a state dict; later changes to the file do not change the tensors.

    `entry` is the name of an entry of the file, with dots if nested, or a prefix of keys.
    """
    path = Path(path)
    notes: list[str] = []
    left: list[LeftOut] = []
    config: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] = {}
    tensors: Mapping[str, Tensor] = {}
    sums: dict[str, FileEntry] = {}
    try:
        if not path.is_dir() and (problem := plain_problem(path)):
            raise CheckpointError(f"{path}: {problem}; give a state dict file or a Hugging Face directory")
        weights = _weights_in(path) if path.is_dir() else path
        if path.is_dir() and (path / CONFIG).exists():
            config = _read_object(path / CONFIG)
            generation = _read_object(path / GENERATION_CONFIG) if (path / GENERATION_CONFIG).exists() else {}
        elif weights != path:
            notes.append(f"taken from {weights.relative_to(path)}")
        for file in _shards(weights) if weights.name.endswith(INDEX) else [weights]:
            part, sums[printable(file.name)] = _read_file(file, entry, notes, left)
            if twice := sorted(part.keys() & tensors.keys()):
                raise CheckpointError(f"{file}: {twice[0][:120]} is in another shard too; save the checkpoint again")
            tensors = {**tensors, **part}
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    if config is None:
        before, tensors = tensors, without_prefix(tensors, notes)
        if len(tensors) < len(before):
            others = ((key, tensor.numel()) for key, tensor in before.items() if _OTHER.fullmatch(key))
            left += [LeftOut(key, "not part of the model", size) for key, size in others]
    return Checkpoint(tensors, sums, config, generation, tuple(left), tuple(notes))


def _weights_in(folder: Path) -> Path:
    if known := next((folder / name for name in WEIGHTS if (folder / name).exists()), None):
        return known
    found = [file for name in _FOLDERS for file in sorted((folder / name).glob("*")) if file.suffix in SUFFIXES]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8])
        raise CheckpointError(f"{folder}: holds {len(found)} checkpoints, {names}; give one of them")
    if (folder / "zero_to_fp32.py").exists():
        remedy = f"it was sharded by DeepSpeed: join it with python {folder / 'zero_to_fp32.py'} {folder} JOINED"
    elif shards := next(folder.rglob("*.distcp"), None):
        remedy = f"it was sharded by FSDP: join it with accelerate merge-weights {shards.parent} JOINED"
    else:
        remedy = "give a state dict file or a Hugging Face directory"
    problem = f"is a directory without {CONFIG} and weights ({', '.join(WEIGHTS)}) or one checkpoint"
    raise CheckpointError(problem, subject=str(folder), remedy=remedy)


def _shards(index: Path) -> list[Path]:
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names; save the checkpoint again")
    files = sorted(set(names.values()))
    outside = [name for name in files if not re.fullmatch(r"[\w.-]+", name) or name in (".", "..")]
    if outside or not files or len(files) > _MAX_SHARDS:
        names = shortened((outside or files)[:3])
        raise CheckpointError(f"{index}: has shards {names}, expected files in the same directory")
    if missing := [name for name in files if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index}: {', '.join(missing[:8])} not found; copy every shard")
    return [index.parent / name for name in files]


def _read_object(path: Path) -> dict[str, Any]:
    data = read_json(path, str(path))
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is {shortened(data)}, expected an object")
    return data


def _read_file(
    path: Path, entry: str | None, notes: list[str], left: list[LeftOut]
) -> tuple[dict[str, Tensor], FileEntry]:
    with snapshot(path) as (copy, file_sum):
        content = _read_content(copy, path)
        if entry is not None:
            taken = f"{entry}."
            others = {k: v for k, v in _items(content) if not (taken.startswith(f"{k}.") or k.startswith(taken))}
            left += [one._replace(reason=f"not in --entry {entry}") for one in _left_out(others)]
            content = _entry(path, content, entry)
            notes.append(f"taken from the entry {entry!r}")
        tensors = _unwrap(path, content, notes, left)
        raise_all(CheckpointError, str(path), tensor_problems(tensors, file_sum.bytes))
    # `expand` stores one number for many elements, so these tensors are copied.
    plain = {key: t.contiguous() if t.is_floating_point() and _repeats(t) else t for key, t in tensors.items()}
    return plain, file_sum


@contextmanager
def snapshot(path: Path) -> Iterator[tuple[Path, FileEntry]]:
    """Copy a file into private memory; yield the path, for this block, and checksum."""
    with path.open("rb", buffering=0) as file, _private_file() as (copy, place):
        before = os.fstat(file.fileno())
        memory = psutil.virtual_memory().total
        if before.st_size > memory:
            raise CheckpointError(f"{path}: has {before.st_size} bytes, more than this machine's memory of {memory}")
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
        copy.flush()
        size, after = copy.tell(), os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (size, after.st_mtime_ns):
            raise CheckpointError(f"{path}: was changed while it was read; try again when it is complete")
        yield place, FileEntry(bytes=size, sha256=digest.hexdigest())


@contextmanager
def _private_file() -> Iterator[tuple[BinaryIO, Path]]:
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("checkpoint"), "w+b") as copy:
            yield copy, Path(f"/proc/self/fd/{copy.fileno()}")
    else:
        with TemporaryDirectory() as folder, Path(folder, "checkpoint").open("w+b") as copy:
            yield copy, Path(folder, "checkpoint")


def unmapped(tensor: Tensor) -> Tensor:
    """Copy a tensor from a file if the system deletes no mapped files, as Windows."""
    return tensor.clone() if sys.platform == "win32" else tensor


def _read_content(copy: Path, path: Path) -> Any:
    with copy.open("rb") as opened:
        head = opened.read(16)
    if not head:
        raise CheckpointError(f"{path}: is empty; copy it again")
    if is_torch_file(head):
        return read_torch(copy, path)
    try:
        with safe_open(copy, "pt") as file:
            return {name: unmapped(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118, not a mapping
    except Exception as error:  # also PyTorch errors about unsupported dtypes
        kind = "" if isinstance(error, SafetensorError) else f"{type(error).__name__}: "
        problem = f"is damaged, cut short, or not safetensors or a file of torch.save ({kind}{error})"
        raise CheckpointError(f"{path}: {problem}; copy it again") from error


def _entry(path: Path, data: Any, entry: str) -> Any:
    names = [str(name) for name in data] if isinstance(data, Mapping) else []
    for name in names:
        if isinstance(data.get(name), Mapping) and (entry == name or entry.startswith(f"{name}.")):
            rest = entry[len(name) + 1 :]
            return _entry(path, data[name], rest) if rest else data[name]
    under = {name.removeprefix(f"{entry}."): data[name] for name in names if name.startswith(f"{entry}.")}
    if not under:
        whole = [name for name in names if "optim" not in name and isinstance(data.get(name), Mapping)]
        parts = [name for name in whole if _nested(name, data[name])]
        parts = parts or sorted({name.partition(".")[0] for name in names if "." in name})
        remedy = f"choose one of {', '.join(parts)[:300]}" if parts else "omit --entry"
        raise CheckpointError(f"{path}: has no entry {entry!r} with tensors; {remedy}")
    return under


def _unwrap(path: Path, data: Any, notes: list[str], left: list[LeftOut]) -> dict[str, Tensor]:
    for _ in range(_MAX_DEPTH):
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path}: holds {type(data).__name__}, expected a state dict; {STATE_DICT_ONLY}")
        inner = {str(key): value for key, value in data.items() if _has_tensors(value)}
        names = [name for name in _WRAPPERS if name in inner]
        # JoeyNMT stores the state of its sampler, a tensor, next to the state dict.
        if not names and any(isinstance(value, Tensor) for value in data.values()):
            left += _left_out({key: value for key, value in data.items() if not isinstance(value, Tensor)})
            return _tensors(path, data, notes)
        if not inner:
            break
        if names and isinstance(data.get("generator"), Mapping) and "generator" in inner:
            # OpenNMT-py stores the output projection next to the model.
            notes.append(f"taken from the entries {names[0]!r} and 'generator'")
            left += _left_out({key: value for key, value in data.items() if key not in (names[0], "generator")})
            return _tensors(path, _joined({"": inner[names[0]], "generator.": inner["generator"]}), notes)
        if len(names) > 1:
            raise CheckpointError(f"{path}: holds several state dicts, {', '.join(names)}; choose one with --entry")
        if names or len(inner) == 1:
            name = names[0] if names else next(iter(inner))
            others = [str(key) for key, value in data.items() if isinstance(value, Mapping) and key != name]
            averaged = next(filter(_AVERAGED.search, others), None)
            more = f"; to take {averaged!r} instead, give --entry {averaged}" if averaged else ""
            notes.append(f"taken from the entry {name!r}{more}")
            left += _left_out({key: value for key, value in data.items() if key != name})
            data = inner[name]
            continue
        parts = {name: part for name, part in inner.items() if not _NO_MODEL.search(name)}
        notes.append(f"joined the entries {', '.join(map(repr, parts))}")
        left += _left_out({key: value for key, value in data.items() if key not in parts})
        return _tensors(path, _joined({f"{name}.": part for name, part in parts.items()}), notes)
    raise CheckpointError(f"{path}: holds no tensors; {STATE_DICT_ONLY}")


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(key if isinstance(key, str) else shortened(key), inner) for key, inner in value.items()]
    return [(str(i), inner) for i, inner in enumerate(value)] if isinstance(value, list | tuple) else []


def _left_out(entries: Mapping[Any, Any]) -> list[LeftOut]:
    """Describe tensors of unused entries; a known entry is counted as a whole."""
    found = list[LeftOut]()
    for key, value in _items(entries):
        name = printable(key[:_MAX_NAME])
        tensors = _nested(name, value)
        reason = next((why for why, pattern in _KNOWN_ENTRIES.items() if pattern.search(name)), "")
        if reason and tensors:
            size = sum(tensor.numel() for tensor in tensors.values())
            found.append(LeftOut(name if name in tensors else f"{name}.*", reason, size, len(tensors)))
        elif not reason:
            found += [LeftOut(one, buffer_kind(one, tensor), tensor.numel()) for one, tensor in tensors.items()]
    return found


def _nested(name: str, value: Any) -> dict[str, Tensor]:
    tensors, left, seen = dict[str, Tensor](), [(name, value)], set[int]()
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor):
            tensors[name] = value
        elif id(value) not in seen:  # a file may refer to one object many times
            seen.add(id(value))
            left += [(f"{name}.{key}"[:_MAX_NAME], inner) for key, inner in _items(value)]
    return {printable(name): tensor for name, tensor in tensors.items()}


def _has_tensors(value: Any, depth: int = 1) -> bool:
    if not isinstance(value, Mapping):
        return False
    if any(isinstance(inner, Tensor) for inner in value.values()):
        return all(isinstance(key, str) for key in value)
    return depth < _MAX_DEPTH and any(k in _WRAPPERS and _has_tensors(v, depth + 1) for k, v in value.items())


def _joined(parts: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    return {f"{prefix}{key}": value for prefix, part in parts.items() for key, value in part.items()}


def _tensors(path: Path, data: Mapping[Any, Any], notes: list[str]) -> dict[str, Tensor]:
    if others := [str(key) for key, value in data.items() if not isinstance(value, Tensor)]:
        notes.append(f"left out entries that are not tensors: {shortened(', '.join(others))}")
    found = {key: value.detach() for key, value in data.items() if isinstance(value, Tensor)}
    if strange := [key for key in found if not (isinstance(key, str) and key.isprintable())]:
        raise CheckpointError(f"{path}: has a tensor named {shortened(strange[0])}, expected text; {STATE_DICT_ONLY}")
    return found


def tensor_problems(tensors: Mapping[str, Tensor], num_bytes: int) -> list[str]:
    """Describe every tensor that is not a plain array or is larger than its file."""
    return [f"{key[:120]} {problem}" for key, tensor in tensors.items() if (problem := _problem(tensor, num_bytes))]


def _problem(tensor: Tensor, num_bytes: int) -> str:
    expected, problem = "expected plain weights", ""
    if tensor.is_nested:
        problem = f"is nested, rows of unequal length, {expected}; save each row under its own name"
    elif tensor.layout != torch.strided:
        problem = f"is sparse ({tensor.layout}), {expected}; save its to_dense()"
    elif tensor.is_quantized:
        problem = f"is quantized ({tensor.dtype}), {expected}; save its dequantize()"
    elif tensor.is_meta:
        problem = f"is on the device meta and has no values, {expected}; save the state dict of a materialized model"
    elif tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        floats = ", ".join(map(str, _FLOATS))
        problem = f"is {tensor.dtype}, expected {floats}; multiply it by its scale, if any, and save it as bfloat16"
    elif tensor.is_floating_point() and _repeats(tensor) and tensor.numel() * tensor.itemsize > num_bytes:
        size = list(tensor.shape)
        problem = f"is expanded to {size}, larger than the whole file, expected stored values; save its contiguous()"
    return problem


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share memory, as after `expand`."""
    return tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()


def without_prefix(tensors: Mapping[str, T], notes: list[str]) -> Mapping[str, T]:
    """Remove what training wrappers add to keys, and describe it in `notes`."""
    own = [key for key in tensors if not _OTHER.fullmatch(key)]
    if len(own) < len(tensors) and any(all(key.startswith(prefix) for key in own) for prefix in _PREFIXES):
        others = ", ".join(key for key in tensors if _OTHER.fullmatch(key))
        notes.append(f"left out keys that are not part of the model: {shortened(others)}")
        tensors = {key: tensors[key] for key in own}
    while prefix := next(
        (p for p in _PREFIXES if tensors and all(key.startswith(p) and key != p for key in tensors)), ""
    ):
        notes.append(f"removed the prefix {prefix!r} from every key")
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    if infixes := sorted({found[1] for key in tensors for found in _INFIX.finditer(key)}):
        notes.append(f"removed {', '.join(map(repr, infixes))} from the keys")
        tensors = {_INFIX.sub("", key): value for key, value in tensors.items()}
    return tensors
