"""Read and write model directories."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tfexport._io.atomic import locked, publish, recover, restore, temporary
from tfexport._io.names import (
    CERTIFICATE,
    CONFIG,
    GENERATION,
    LAYOUT,
    MANIFEST,
    MODEL_WEIGHTS,
    PROCESSOR,
    TARGET_TOKENIZER,
    TEXT,
    TOKENIZER,
    checked_path,
)
from tfexport._io.strict_json import plain_problem, read_json
from tfexport.errors import CheckpointError, ConfigError, raise_all
from tfexport.nn.config import TransformerConfig
from tfexport.nn.stored import StoredTensor, read_header
from tfexport.nn.transformer import Transformer, on_meta

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
# A zip archive, which torch.save writes today, and a pickle of protocol 2 to 5, which it wrote before.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PICKLE_REMEDY = (
    "a pickle, which can run any code when opened; convert it to safetensors: "
    "torch.load(weights_only=True), then safetensors.torch.save_file"
)
_MAX_LISTED = 8
# A directory with other files is not replaced.
_FILES = (CONFIG, MODEL_WEIGHTS, TOKENIZER, TARGET_TOKENIZER, TEXT, PROCESSOR, GENERATION, CERTIFICATE, LAYOUT)


def load_model(path: Path | str) -> Transformer:
    """Read a model directory, without unpickling, into a float32 model in eval mode.

    If a writer was killed while replacing the directory, the previous one is restored. Errors list every problem.
    """
    directory = checked_path(path, "model")
    try:
        restore(Path(os.path.realpath(directory)))
        _check_files(directory)
        config = TransformerConfig.from_dict(read_json(directory / CONFIG, CONFIG))
        return load_weights(directory / MODEL_WEIGHTS, config)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror or error}") from error


def save_model(
    model: Transformer,
    path: Path | str,
    tokenizer: Path | None = None,
    *,
    files: Mapping[str, bytes] | Callable[[Path], Mapping[str, bytes]] | None = None,
    force: bool = False,
) -> None:
    """Write a model directory, which appears complete or not at all.

    Parameters are stored in their dtype, tied parameters once. Missing parents are created; a symbolic link is
    followed. `tokenizer` is a tokenizer.json to copy, and `files` are others by name, or a function that returns them
    for the folder with the model. `force` replaces an existing model directory, which is kept until the new one is
    complete.
    """
    check_free(path, force=force)
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target):
            recover(target)
            _check_free(target, path, force)
            with temporary(target) as folder:
                _write(model, folder)
                if tokenizer is not None:
                    shutil.copyfile(tokenizer, folder / TOKENIZER)
                for name, content in (files(folder) if callable(files) else files or {}).items():
                    (folder / name).write_bytes(content)
                publish(folder, target, lambda former: _check_free(former, path, force))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def check_free(path: Path | str, *, force: bool) -> None:
    """Check early that `save_model` may write a directory."""
    target = Path(os.path.realpath(path))
    try:
        restore(target)
        _check_free(target, path, force)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def _check_free(folder: Path, path: Path | str, force: bool) -> None:
    try:
        folder.lstat()
    except FileNotFoundError:
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{path} exists and is not an empty directory; remove it or choose another name")
    try:
        TransformerConfig.from_dict(read_json(folder / CONFIG, CONFIG))
    except ConfigError as error:
        problem = "is not a model directory, and --force replaces only model directories"
        raise CheckpointError(f"{path} {problem}; choose another name ({error})") from error
    if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in _FILES or not entry.is_file()):
        listed = ", ".join(map(repr, foreign[:10]))
        problem = f"has files that do not belong to a model directory: {listed}"
        raise CheckpointError(f"{path} {problem}; move them elsewhere, or choose another name")


def check_weights(found: Mapping[str, StoredTensor], config: TransformerConfig, subject: str = MODEL_WEIGHTS) -> None:
    """Compare stored tensors with a configuration."""
    with on_meta():
        expected = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name} {list(info.shape)}" for name, info in found.items() if name not in expected]
    for name in [name for name in expected if name in found]:
        if found[name].shape != expected[name]:
            problems.append(f"{name} is {list(found[name].shape)}, expected {list(expected[name])}")
        if found[name].dtype not in _DTYPES:
            problems.append(f"{name} is {found[name].dtype}, expected {', '.join(_DTYPES)}")
    raise_all(CheckpointError, f"{subject} does not fit {CONFIG}", _capped(problems))


def _capped(items: Sequence[str]) -> list[str]:
    more = len(items) - _MAX_LISTED
    return [*items[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]


def _check_files(directory: Path) -> None:
    if directory.suffix in _PICKLE_SUFFIXES and directory.is_file():
        raise CheckpointError(f"{directory} is {_PICKLE_REMEDY}")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a model directory ({CONFIG}, {MODEL_WEIGHTS}), as import writes it")
    if (directory / MANIFEST).is_file() and not (directory / CONFIG).exists():
        raise CheckpointError(f"{directory} is a bundle; expected the model directory that it was made from")
    problems = [f"{name} {problem}" for name in (CONFIG, MODEL_WEIGHTS) if (problem := plain_problem(directory / name))]
    if problems:
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLE_SUFFIXES)
        is_unconverted = pickles and not os.path.lexists(directory / MODEL_WEIGHTS)
        problems[-1] += f", and {pickles[0]} is {_PICKLE_REMEDY}" if is_unconverted else "; write it with save_model"
    raise_all(CheckpointError, str(directory), problems)


def load_weights(path: Path, config: TransformerConfig) -> Transformer:
    """Read a safetensors file with the canonical names into a model, as `load_model`."""
    try:
        found = read_header(path)
    except CheckpointError as error:
        with path.open("rb") as head:
            if head.read(4).startswith(_PICKLE_STARTS):
                raise CheckpointError(f"{path} is {_PICKLE_REMEDY}") from error
        raise
    check_weights(found, config, str(path))
    model, not_finite = Transformer.unfilled(config), list[str]()
    with path.open("rb") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_tensor(found[name], file, path))
            if not parameter.isfinite().all():
                not_finite.append(name)
    if not_finite:
        problem = f"holds NaN or infinity, as float32, in {', '.join(_capped(not_finite))}"
        raise CheckpointError(f"{path} {problem}; take a checkpoint from before the training diverged")
    return model.eval()


def _tensor(stored: StoredTensor, file: BinaryIO, path: Path) -> torch.Tensor:
    # Not memory-mapped, because truncating a mapped file would kill the process.
    raw = bytearray(stored.num_bytes)
    file.seek(stored.offset)
    if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]  # every binary file has it
        raise CheckpointError(f"{path} was cut short while it was read; copy it again")
    return torch.frombuffer(raw, dtype=_DTYPES[stored.dtype]).reshape(stored.shape)


def _write(model: Transformer, folder: Path) -> None:
    config, weights = folder / CONFIG, folder / MODEL_WEIGHTS
    config.write_text(json.dumps(model.config.to_dict(), indent=2) + "\n", encoding="utf-8")
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, weights, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read.
    weights.chmod(config.stat().st_mode & 0o777)
