"""Make, edit and refuse a small bundle whose graphs compute nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import seal
from tfexport.bundle.bundle import Builder, Bundle, create_bundle, open_bundle
from tfexport.bundle.manifest import Draft
from tfexport.contract import GraphEntry, TokenIds, decoder_graph, encoder_graph
from tfexport.errors import BundleError
from tfexport.nn.config import StackConfig, TransformerConfig, model_spec

CONFIG = TransformerConfig(
    d_model=8,
    source_vocab=10,
    target_vocab=10,
    max_source_length=16,
    max_target_length=16,
    encoder=StackConfig(layers=1, num_heads=2, d_ff=8, norm_place="pre", final_norm=True),
    decoder=StackConfig(layers=2, num_heads=2, d_ff=8, norm_place="pre", final_norm=True),
    tokens=TokenIds(pad=0, start=1, eos=2, unk=3),
)
SPEC = model_spec(CONFIG, "fp32")
GRAPHS = {
    "encoder": GraphEntry.of("encoder.onnx", 18, encoder_graph(SPEC)),
    "decoder": GraphEntry.of("decoder.onnx", 18, decoder_graph(SPEC, "concat")),
    "decoder_static": GraphEntry.of("decoder_static.onnx", 24, decoder_graph(SPEC, "static")),
}


def graph(entry: GraphEntry) -> bytes:
    """Return bytes in place of a graph; they are not read before a session is created."""
    return f"the graph of {entry.file}".encode()


def another(name: str) -> bytes:
    """Return other content for a file of the bundle."""
    return CONTENT[name] + b"something else"


CONTENT = {
    **{entry.file: graph(entry) for entry in GRAPHS.values()},
    "weights.safetensors": bytes(range(256)),
    "tokenizer.json": b"{}",
    "parity.json": b"{}",
    "deep/er.bin": b"",
}
FACTS: dict[str, Any] = {
    "spec": SPEC,
    "config": CONFIG,
    "graphs": GRAPHS,
    "versions": {"tfexport": "0.1.0", "onnx": "1.21.0"},
    "parity": {"passed": True, "worst": 1e-6},
}


def fill(builder: Builder, content: dict[str, bytes] = CONTENT, **facts: Any) -> None:
    for name, data in content.items():
        (builder.path / name).parent.mkdir(exist_ok=True)
        (builder.path / name).write_bytes(data)
    builder.finish(Draft(**(FACTS | facts)))


def make_contrib(path: Path, graphs: dict[str, GraphEntry]) -> Bundle:
    """Make a bundle with these graphs and the contrib ones."""
    contrib = {
        "encoder_contrib": GraphEntry.of("encoder_contrib.onnx", 18, encoder_graph(SPEC)),
        "decoder_contrib": GraphEntry.of("decoder_contrib.onnx", 18, decoder_graph(SPEC, "contrib")),
    }
    with create_bundle(path) as builder:
        fill(builder, CONTENT | {entry.file: graph(entry) for entry in contrib.values()}, graphs=graphs | contrib)
    return builder.bundle


def make(path: Path, content: dict[str, bytes] = CONTENT, *, force: bool = False) -> Bundle:
    with create_bundle(path, force=force) as builder:
        fill(builder, content)
    return builder.bundle


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and correct its own hash, as an attacker would."""
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    data.pop("self_sha256", None)
    (path / "manifest.json").write_bytes(seal(data))


def reseal(path: Path) -> None:
    """Correct every hash of a bundle; new files become part of it."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    entries = {str(file.relative_to(path)): FileEntry.of(file).to_dict() for file in files}
    edit(path, lambda data: data.update(files=entries))


def siblings(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir() if other != path)


def refused(path: Path, *messages: str) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    text = str(caught.value)
    for message in messages:
        assert message in text
    return text


def cannot_create(output: Path, message: str, *, force: bool = False) -> None:
    """Expect an error before the block of `create_bundle` runs."""
    with pytest.raises(BundleError) as caught, create_bundle(output, force=force):
        pytest.fail("the block must not run")
    assert message in str(caught.value)
