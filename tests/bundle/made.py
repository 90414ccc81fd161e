"""A small bundle of graphs that compute nothing, made, edited and refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    """Return bytes in place of a graph: nothing reads them before a session is made."""
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
    """Change the manifest and make its own sum right again, as an attacker would."""
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    data.pop("self_sha256", None)
    data["self_sha256"] = hashlib.sha256((json.dumps(data, indent=2, sort_keys=True) + "\n").encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def reseal(path: Path) -> None:
    """Make every sum of a bundle right again; files that are new become part of it."""

    def stock(data: dict[str, Any]) -> None:
        files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
        data["files"] = {
            str(file.relative_to(path)): {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in files
        }

    edit(path, stock)


def siblings(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir() if other != path)


def refused(path: Path, *messages: str) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    text = str(caught.value)
    assert "\n" not in text
    for message in messages:
        assert message in text
    return text
