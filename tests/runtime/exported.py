"""Small models exported once for all tests that run their graphs, and what they are asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfexport.graph.write import write_graphs
from tfexport.models.config import TransformerConfig, model_spec
from tfexport.models.transformer import Transformer
from tfexport.runtime.ort.session import OrtSession
from tfexport.runtime.session import Ids, Mask
from tfexport.spec import Form, ModelSpec

Once = Callable[[str, Callable[[Path], object]], Path]


def exported(model: Transformer, once: Once) -> tuple[dict[str, Path], ModelSpec]:
    """Export a model once for all workers and tests."""
    spec = model_spec(model.config, "fp32")
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    weights.update(json.dumps(model.config.to_dict()).encode())

    def make(path: Path) -> None:
        path.mkdir()
        write_graphs(model, spec, path, forms=("concat", "static", "contrib"), opset=18, report=lambda line: None)

    return {path.stem: path for path in once(f"graphs-{weights.hexdigest()[:16]}", make).glob("*.onnx")}, spec


def ort_session(model: Transformer, form: Form, once: Once, *, host_caches: bool = True) -> OrtSession:
    graphs, spec = exported(model, once)
    return OrtSession(graphs, spec, form if spec.has_decoder else None, threads=1, host_caches=host_caches)


def sources(config: TransformerConfig, lengths: tuple[int, ...] = (9, 4, 1, 6), seed: int = 0) -> tuple[Ids, Mask]:
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(0, config.source_vocab, mask.shape)
    return np.where(mask, ids, config.tokens.pad), mask
