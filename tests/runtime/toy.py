"""A backend for tests: plain ONNX Runtime without a cache, which reads whole rows in every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.bundle.bundle import Bundle
from tfexport.contract import ModelSpec
from tfexport.precision import Accuracy
from tfexport.runtime.checked import CheckedBatch, CheckedSession
from tfexport.runtime.registry import Backend, Graphs, LoadOptions, Requirement
from tfexport.runtime.session import Candidates, Floats, Ids, Limits, Prompts, close_up
from tfexport.runtime.sources import Sources


class ToySession(CheckedSession):
    """The portable graphs of a model."""

    backend = "toy"
    accuracy: Accuracy = "fp32"

    def __init__(self, graphs: Mapping[str, Path], spec: ModelSpec) -> None:
        self.spec, self.limits = spec, Limits.of(spec)
        names = ["encoder", "decoder"] if spec.has_decoder else ["encoder"]
        self.graphs: dict[str, ort.InferenceSession] | None = {
            name: ort.InferenceSession(str(graphs[name]), providers=["CPUExecutionProvider"]) for name in names
        }

    @property
    def _is_open(self) -> bool:
        return self.graphs is not None

    def _batch(self, width: int) -> ToyBatch:
        return ToyBatch(self, width)

    def _encode(self, sources: Sources, output: str) -> Floats:
        hidden: Floats = self.run("encoder", dict(sources.inputs))[output == "logits"]
        return hidden

    def run(self, name: str, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        self._check_open()
        assert self.graphs is not None
        return self.graphs[name].run(None, feed)

    def close(self) -> None:
        self.graphs = None


class ToyBatch(CheckedBatch):
    """The encoder's outputs of each source, and the tokens of each row."""

    def __init__(self, session: ToySession, width: int) -> None:
        super().__init__(session.spec, width)
        self._session = session
        self._sources: list[dict[str, np.ndarray]] = []
        self._histories: list[list[int]] = []

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        for ids, mask, prompt in zip(*sources.inputs.values(), prompts, strict=True):
            source = {"source_ids": ids[mask][None], "source_mask": mask[mask][None]}
            cross = zip(self._spec.cross.names("cross"), self._session.run("encoder", source), strict=True)
            self._sources.append({"source_mask": source["source_mask"], **dict(cross)})
            self._histories += [list(prompt[:-1]) for _ in range(self.width)]
        self._measure()

    def _measure(self) -> None:
        self.lengths = np.array([len(history) for history in self._histories], np.int64)

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        found = []
        for row, (history, token) in enumerate(zip(self._histories, target_ids.tolist(), strict=True)):
            history.append(token)
            kind, feed = self._spec.cache, {"num_candidates": np.array([num_candidates])}
            feed |= self._sources[row // self.width]
            feed |= dict(zip(kind.names("past"), (np.zeros(s, kind.dtype) for s in kind.shapes(1, 0)), strict=True))
            if kind.grows:
                outputs = self._session.run("decoder", {**feed, "target_ids": np.array([history])})
            else:
                for place, read in enumerate(history):
                    new = {"target_ids": np.array([[read]]), "cache_lengths": np.array([place])}
                    outputs = self._session.run("decoder", {**feed, **new})
                    feed |= dict(zip(kind.names("past"), outputs[4:], strict=True))
            found.append(outputs[1:4])
        token_ids, logits, log_normalizer = (np.concatenate(part) for part in zip(*found, strict=True))
        self._measure()
        return Candidates(token_ids, logits, log_normalizer[:, 0])

    def _reorder(self, rows: Ids) -> None:
        self._histories = [list(self._histories[row]) for row in rows]

    def _remove(self, sources: Ids) -> None:
        kept = close_up(len(self._sources), sources)
        rows = (kept[:, None] * self.width + np.arange(self.width)).ravel()
        self._sources = [self._sources[source] for source in kept]
        self._histories = [self._histories[row] for row in rows]
        self._measure()


def open_bundle(bundle: Bundle, options: LoadOptions) -> ToySession:
    graphs = Graphs.of(bundle)
    return ToySession(graphs.paths, graphs.spec)


def parity_sessions(graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, ToySession]]:
    yield "toy", ToySession(graphs.paths, graphs.spec)


TOY = Backend(
    name="toy",
    title="Toy",
    module=__name__,
    probe_module=__name__,
    requirements=(Requirement("onnxruntime", "onnxruntime"),),
    runs="graphs",
)
