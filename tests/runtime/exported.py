"""Small models that are exported once for all tests that run their graphs, and sources for them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests import tiny
from tests.stranger import senses
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import WEIGHTS, AlignmentHeads, ModelSpec, Variant
from tfexport.export import export_bundle
from tfexport.export._weights import write_weights
from tfexport.export.config import ExportConfig
from tfexport.export.decoders.contrib import joint_weights
from tfexport.export.write import write_graphs
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.ort._cache import FIRST_CAPACITY
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Ids, Mask

Once = Callable[[str, Callable[[Path], object]], Path]
# Buffers of the target double twice, the second time up to the limit.
LONG = tiny.config(max_source_length=200, max_target_length=3 * FIRST_CAPACITY)
# ONNX Runtime's CUDA provider selects from a vocabulary of this size by radix.
VOCAB = 600


def variant_bundle(name: str, once: Once) -> Path:
    """Export a variant of `tests/tiny.py` with all decoder variants; its model directory is NAME-model next to it."""
    config = ExportConfig(alignment=AlignmentHeads(layer=-1, heads=(1, 2)))

    def make(path: Path) -> None:
        directory = path.with_name(f"{path.name}-model")
        save_model(tiny.model(tiny.VARIANTS[name], dtype=torch.float32), directory)
        export_bundle(str(directory), path, config)

    return once(f"variant-{name}", make)


def exported(model: Transformer, once: Once) -> tuple[dict[str, Path], ModelSpec]:
    """Return the graphs of a model, which models of one configuration share, with their own weight files."""
    spec, seeded = model_spec(model.config, "fp32"), tiny.model(model.config, dtype=torch.float32)
    folder = _seeded(seeded, spec, once)
    if digest(model) != digest(seeded):

        def make(path: Path) -> None:
            shutil.copytree(folder, path)
            (path / WEIGHTS).unlink()
            write_weights(path / WEIGHTS, dict(model.named_parameters()), (), joint=joint_weights(model))

        folder = once(f"graphs-{digest(model)}", make)
    return {path.stem: path for path in folder.glob("*.onnx")}, spec


def _seeded(model: Transformer, spec: ModelSpec, once: Once) -> Path:
    for name, config in tiny.VARIANTS.items():
        if model.config == config:
            return variant_bundle(name, once)

    def make(path: Path) -> None:
        path.mkdir()
        write_graphs(model, spec, path, variants=("concat", "static", "contrib"), opset=18, report=lambda line: None)

    return once(f"graphs-{digest(model)}", make)


def digest(model: Transformer) -> str:
    """Name a model by its weights and configuration."""
    found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    found.update(json.dumps(model.config.to_dict()).encode())
    return found.hexdigest()[:16]


def sense_graphs(kind: str, once: Once) -> Graphs:
    """Export a module of `tests/stranger/senses.py` once; a fixed number of frames changes only its spec."""
    name = "features" if kind == "fixed" else kind
    own, config = senses.OWN[name](), ExportConfig(alignment=None if kind == "states" else senses.ALIGNMENT)
    path = once(f"senses-{name}", lambda path: export_bundle(own, path, config, verify=False))
    return replace(Graphs.of(open_bundle(path)), spec=senses.OWN[kind]().spec)


def ort_session(model: Transformer, variant: Variant, once: Once, *, host_caches: bool = True) -> OrtSession:
    graphs, spec = exported(model, once)
    return OrtSession(Graphs(graphs, spec), variant if spec.has_decoder else None, threads=1, host_caches=host_caches)


def sources(config: TransformerConfig, lengths: tuple[int, ...] = (9, 4, 1, 6), seed: int = 0) -> tuple[Ids, Mask]:
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(0, config.source_vocab, mask.shape)
    return np.where(mask, ids, config.tokens.pad), mask


def wide(vocab: int = VOCAB) -> TransformerConfig:
    """Configure a model with many tokens, whose sources may be longer than its short targets."""
    return tiny.config(max_source_length=11, max_target_length=6, target_vocab=vocab, d_model=64)


def with_logits(row: np.ndarray, config: TransformerConfig) -> Transformer:
    """Return a model whose logits are `row`, whatever it reads."""
    model = tiny.model(config, dtype=torch.float32)
    assert model.out is not None
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.copy_(torch.from_numpy(row))
    return model


def planted(vocab: int, levels: int) -> tuple[Transformer, np.ndarray]:
    """Return a model whose logits have at most `levels` different values, and the logits."""
    row = np.random.default_rng(0).integers(0, levels, vocab).astype(np.float32)
    return with_logits(row, wide(vocab)), row


def ranked(row: np.ndarray) -> np.ndarray:
    """Rank the ids of a row: highest first, equal ones in order of id."""
    return np.lexsort((np.arange(row.size), -row))
