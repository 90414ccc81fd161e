"""A backend that is registered by a test: plain ONNX Runtime without a cache, each row read anew in every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.bundle.bundle import Bundle
from tfexport.contract import Accuracy, ModelSpec, key_value_names
from tfexport.errors import BackendError
from tfexport.runtime.registry import Backend, Graphs, OpenOptions, Requirement
from tfexport.runtime.session import (
    Candidates,
    Floats,
    Ids,
    Limits,
    Mask,
    Prompts,
    check_prompts,
    check_rows,
    check_source,
    check_sources,
    check_step,
    close_up,
)


class ToySession:
    """The portable graphs of a model."""

    backend = "toy"
    accuracy: Accuracy = "fp32"

    def __init__(self, graphs: Mapping[str, Path], spec: ModelSpec) -> None:
        self.spec, self.limits = spec, Limits.of(spec)
        names = ["encoder", "decoder"] if spec.has_decoder else ["encoder"]
        self.graphs: dict[str, ort.InferenceSession] | None = {
            name: ort.InferenceSession(str(graphs[name]), providers=["CPUExecutionProvider"]) for name in names
        }

    def batch(self, width: int = 1) -> ToyBatch:
        self.run("encoder", None)
        if not self.spec.has_decoder:
            raise BackendError("toy: an encoder alone generates nothing")
        return ToyBatch(self, width)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        if self.spec.has_decoder:
            raise BackendError("toy: the model has a decoder")
        check_source(self.spec, source_ids, source_mask)
        hidden: Floats = self.run("encoder", {"source_ids": source_ids, "source_mask": source_mask})[0]
        return hidden

    def run(self, name: str, feed: dict[str, np.ndarray] | None) -> list[np.ndarray]:
        if self.graphs is None:
            raise BackendError("toy: this session is closed")
        return [] if feed is None else self.graphs[name].run(None, feed)

    def close(self) -> None:
        self.graphs = None


class ToyBatch:
    """What each source says to the decoder, and what each row has read."""

    can_join = True

    def __init__(self, session: ToySession, width: int) -> None:
        self.width, self._session, self._spec = width, session, session.spec
        self._sources: list[dict[str, np.ndarray]] = []
        self._histories: list[list[int]] = []

    @property
    def lengths(self) -> Ids:
        return np.array([len(history) for history in self._histories], np.int64)

    def add(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        check_source(self._spec, source_ids, source_mask)
        check_prompts(self._spec, len(source_ids), prompts)
        for ids, mask, prompt in zip(source_ids, source_mask, prompts, strict=True):
            source = {"source_ids": ids[mask][None], "source_mask": mask[mask][None]}
            cross = zip(key_value_names("cross", self._spec.layers), self._session.run("encoder", source), strict=True)
            self._sources.append({"source_mask": source["source_mask"], **dict(cross)})
            self._histories += [list(prompt[:-1]) for _ in range(self.width)]

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        check_step(self._spec, self.lengths, target_ids, num_candidates)
        found = []
        for row, (history, token) in enumerate(zip(self._histories, target_ids.tolist(), strict=True)):
            history.append(token)
            source = self._sources[row // self.width]
            cross = {name: value for name, value in source.items() if name != "source_mask"}
            past = {name.replace("cross", "past"): value[:, :, :0] for name, value in cross.items()}
            feed = {"target_ids": np.array([history]), "num_candidates": np.array([num_candidates])}
            found.append(self._session.run("decoder", {**feed, **source, **past})[1:4])
        token_ids, logits, log_normalizer = (np.concatenate(part) for part in zip(*found, strict=True))
        return Candidates(token_ids, logits, log_normalizer[:, 0])

    def reorder(self, rows: Ids) -> None:
        check_rows(self.lengths, self.width, rows)
        self._histories = [list(self._histories[row]) for row in rows]

    def remove(self, sources: Ids) -> None:
        check_sources(len(self._sources), sources)
        kept = close_up(len(self._sources), sources)
        rows = (kept[:, None] * self.width + np.arange(self.width)).ravel()
        self._sources = [self._sources[source] for source in kept]
        self._histories = [self._histories[row] for row in rows]


def open_bundle(bundle: Bundle, options: OpenOptions) -> ToySession:
    graphs = Graphs.of(bundle)
    return ToySession(graphs.paths, graphs.spec)


def rungs(graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, ToySession]]:
    yield "toy", ToySession(graphs.paths, graphs.spec)


TOY = Backend(
    name="toy",
    title="Toy",
    home=__name__,
    trial=__name__,
    requirements=(Requirement("onnxruntime", "onnxruntime"),),
    runs="graphs",
)
