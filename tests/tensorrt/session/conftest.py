"""Run models/dates on doubles of engines, and row by row without a cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.tensorrt.session.trt_double import DoubleSession, trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import DECODER, ENCODER, ModelSpec, Variant
from tfexport.runtime.sources import pad_sources
from tfexport.tensorrt.session._batch import TrtBatch

SOURCES = 24


class Model:
    """The graphs of a bundle and sources for them."""

    def __init__(self, bundle: Path) -> None:
        opened = open_bundle(bundle)
        self.path = bundle
        self.spec: ModelSpec = opened.manifest.spec
        self.graphs = {name: opened.file(graph.file) for name, graph in opened.manifest.graphs.items()}
        rng = np.random.default_rng(0)
        self.sources = [rng.integers(3, self.spec.source_vocab, rng.integers(1, 20)).tolist() for _ in range(SOURCES)]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._encoder, self._decoder = (
            ort.InferenceSession(self.graphs[name], options, providers=["CPUExecutionProvider"])
            for name in (ENCODER, DECODER["concat"])
        )
        self.logits = cache(self._logits)

    @property
    def start(self) -> int:
        return self.spec.tokens.start

    def trt(self, variant: Variant = "static", **options: Any) -> DoubleSession:
        return trt_session(self.graphs, self.spec, variant, **options)

    def add(self, batch: TrtBatch, sources: list[list[int]], prompts: list[list[int]] | None = None) -> None:
        batch.add(pad_sources(self.spec.source, sources), prompts or [[self.start]] * len(sources))

    def started(self, session: DoubleSession, num_sources: int, width: int = 1) -> tuple[TrtBatch, np.ndarray]:
        """Return a batch of the first sources and the first tokens of its rows."""
        batch = session.batch(width)
        self.add(batch, self.sources[:num_sources])
        return batch, np.full(num_sources * width, self.start)

    def _logits(self, source: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
        """Return the next logits of one row in plain onnxruntime, float32 [vocab]."""
        feed = {"source_ids": np.array([source]), "source_mask": np.ones((1, len(source)), np.bool_)}
        names = [output.name for output in self._encoder.get_outputs()]
        cross = dict(zip(names, self._encoder.run(None, feed), strict=True))
        past = {name.replace("cross", "past"): value[:, :, :0] for name, value in cross.items()}
        rest = {"target_ids": np.array([tokens]), "num_candidates": np.array([1])}
        found: np.ndarray = self._decoder.run(
            ["logits"], {**rest, **cross, **past, "source_mask": feed["source_mask"]}
        )[0][0]
        return found

    def greedy(self, source: list[int], prompt: list[int], limit: int) -> list[int]:
        """Decode one source by itself."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + limit and tokens[-1] != self.spec.tokens.eos:
            tokens.append(int(self.logits(tuple(source), tuple(tokens)).argmax()))
        return tokens


@pytest.fixture(scope="package")
def dates(dates_bundle: Path) -> Model:
    return Model(dates_bundle)


@pytest.fixture(autouse=True, scope="package")
def _short_collections() -> Iterator[None]:
    """Exclude existing objects from the many garbage collections of these tests."""
    gc.freeze()
    yield
    gc.unfreeze()
