"""Weights, references and model directories."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.from_scratch.numbered_blocks import NumberedBlocks
from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tests import tiny
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tests.importing.layout.test_layout import IDENTITY
from tfexport._io.names import CONFIG
from tfexport.importing._files import read_checkpoint
from tfexport.importing.layout.apply import apply_layout
from tfexport.importing.layout.layout import read_layout, render_layout
from tfexport.importing.reference.outputs import read_reference, record_reference
from tfexport.nn.directory import load_model, save_model
from tfexport.text.config import TextConfig


def prepare(folder: Path) -> None:
    """Write one of each format."""
    small = tiny.config(encoder={"layers": 1, "d_ff": 8}, decoder={"layers": 1, "d_ff": 8}, d_model=8)
    model = tiny.model(small, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    torch.save({"model_state_dict": state, "epoch": 3}, folder / "weights.pt")
    torch.save(state, folder / "weights.legacy", _use_new_zipfile_serialization=False)
    torch.manual_seed(0)
    record_reference(
        NumberedBlocks(),
        lambda model, *inputs: model(*inputs),
        folder / "reference.safetensors",
        source_vocab=SOURCE,
        target_vocab=TARGET,
        heads=HEADS,
    )
    save_model(model, folder / "directory")
    (folder / "layout.yaml").write_text(render_layout(IDENTITY), "utf-8")


def digest(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Read every byte of tensors."""
    return {name: None if tensor is None else _fingerprint(tensor) for name, tensor in tensors.items()}


def _fingerprint(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def weights(name: str, *, is_summed: bool) -> Callable[[Path, Path], Kind]:
    """Return the kind of files of weights."""

    def make(folder: Path, scratch: Path) -> Kind:
        original = (folder / name).read_bytes()
        path = scratch / name

        def use(raw: bytes) -> dict[str, Any]:
            path.unlink(missing_ok=True)  # what is mapped is not to be cut short
            path.write_bytes(raw)
            return digest(apply_layout(IDENTITY, read_checkpoint(path).tensors, heads=4).tensors)

        return Kind(mutated(original), use, use(original), is_summed=is_summed)

    return make


def references(folder: Path, scratch: Path) -> Kind:
    """Return the kind of recorded outputs."""
    original = (folder / "reference.safetensors").read_bytes()
    path = scratch / "reference.safetensors"

    def use(raw: bytes) -> list[Any]:
        path.unlink(missing_ok=True)
        path.write_bytes(raw)
        found = read_reference(path)
        own = {name: getattr(found, name) for name in ("source_ids", "source_mask", "target_ids", "logits")}
        parts = (own, found.state, found.attributes, found.real)
        return [*map(digest, parts), found.heads, found.pad_source, found.pad_target, found.baseline]

    return Kind(mutated(original), use, use(original))


def directories(folder: Path, scratch: Path) -> Kind:
    """Return the kind of configurations of model directories."""
    directory = scratch / "directory"
    shutil.copytree(folder / "directory", directory)

    def use(raw: bytes) -> Any:
        (directory / CONFIG).write_bytes(raw)
        return load_model(directory).config

    original = (directory / CONFIG).read_bytes()
    return Kind(mutated_json(json.loads(original)), use, use(original))


def texts(folder: Path, scratch: Path) -> Kind:
    """Return the kind of recorded texts of model directories."""
    from tests.conftest import DATES
    from tfexport._io.strict_json import read_json

    path = scratch / "text.json"
    document = json.loads((DATES / "text.json").read_bytes())
    document["samples"] = document["samples"][:2]

    def use(raw: bytes) -> Any:
        path.write_bytes(raw)
        return TextConfig.from_dict(read_json(path, "text.json"), subject="text")

    return Kind(mutated_json(document), use, use(json.dumps(document).encode()))


def layouts(folder: Path, scratch: Path) -> Kind:
    """Return the kind of layout files, as text."""
    return _layouts(scratch, mutated((folder / "layout.yaml").read_bytes()), folder)


def layouts_json(folder: Path, scratch: Path) -> Kind:
    """Return the kind of layout files in JSON, which is YAML too."""
    import yaml

    document = yaml.safe_load((folder / "layout.yaml").read_text("utf-8"))
    return _layouts(scratch, mutated_json(document), folder)


def _layouts(scratch: Path, examples: Any, folder: Path) -> Kind:
    path = scratch / "layout.yaml"
    tensors = read_checkpoint(folder / "weights.safetensors").tensors

    def use(raw: bytes) -> Any:
        path.write_bytes(raw)
        layout = read_layout(path)
        return layout, digest(apply_layout(layout, tensors, heads=4).tensors)

    return Kind(examples, use, use((folder / "layout.yaml").read_bytes()))
