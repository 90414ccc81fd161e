"""Open bundles in the compiled library."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_int64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.bundle.bundle import Bundle
from tfexport.contract import DECODER, WEIGHTS, has_speculation
from tfexport.errors import BackendError, raise_all
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.precision import Accuracy
from tfexport.runtime.checked import CheckedScoring, CheckedSession, check_step
from tfexport.runtime.cpu import Threads, choose_threads, step_weight_bytes
from tfexport.runtime.native._library import BeamArrays, Library, NextTensor, TensorView, address, find_library
from tfexport.runtime.native._plan import config_of, config_problems, problems, tensors
from tfexport.runtime.native._weights import Tensor
from tfexport.runtime.registry import AUTO, Graphs, LoadOptions
from tfexport.runtime.session import (
    ONE,
    Beams,
    BeamSteps,
    Candidates,
    FinishedBeam,
    Floats,
    GreedySteps,
    Ids,
    Limits,
    Prompts,
    close_up,
    rows_of,
)
from tfexport.runtime.sources import Sources
from tfexport.sources import SOURCE_IDS

_REMEDY = "use --backend ort"
# Weights that a step reads, up to which it is chosen by itself: small ones on one thread, quantized ones on the numbers
# of threads that were measured. Of others, ONNX Runtime is faster with several threads, or by ranking tokens.
SMALL_STEP_BYTES, QUANTIZED_STEP_BYTES, MEASURED_THREADS = 4 * 2**20, 40 * 2**20, 2


class _Object:
    """An object of the library, freed when nothing refers to it."""

    held: object = None  # what it reads

    def __init__(self, library: Library, kind: str, *arguments: Any) -> None:
        self.library, self._kind = library, kind
        self.address = library.make(kind, *arguments)

    def __del__(self) -> None:
        if address := getattr(self, "address", 0):
            self.library.free(self._kind, address)


def _model(library: Library, config: TransformerConfig, tensors: Iterator[Tensor | None]) -> _Object:
    """Copy tensors into a model one at a time; tables stay in the mapped file."""
    current: Tensor | None = None  # is read until the next one is asked for
    tables, errors = list[Tensor](), list[BaseException]()

    def give(to: Any) -> int:
        nonlocal current
        try:
            current = next(tensors)
            to[0] = TensorView() if current is None else current.view()
        except StopIteration:
            return 1
        except BaseException as error:  # noqa: BLE001 - is raised below, because it would not pass through C++
            errors.append(error)
            return 1
        if current is not None and current.is_table:
            tables.append(current)
        return 0

    try:
        made = _Object(library, "model", config_of(config), NextTensor(give))
    except BackendError:
        if errors:
            raise errors[0] from None
        raise
    made.held = tables
    return made


class NativeSession(CheckedSession):
    """A model in the compiled library; calls may start threads."""

    backend = "native"

    def __init__(
        self,
        config: TransformerConfig,
        weights: Path,
        accuracy: Accuracy = "fp32",
        *,
        threads: int = 1,
        subject: object = "model",
        library: Library | None = None,
    ) -> None:
        """Copy the weights of a file; `library` None uses the fastest one."""
        raise_all(BackendError, f"native: {subject}", config_problems(config), remedy=_REMEDY)
        self.spec, self.accuracy = model_spec(config, "fp32"), accuracy
        self.limits, self.threads = Limits.of(self.spec), Threads(threads, threads)
        self._model: _Object | None = _model(library or find_library(), config, tensors(config, weights))

    @property
    def _is_open(self) -> bool:
        return self._model is not None

    def _batch(self, width: int) -> NativeBatch:
        model = self._model
        assert model is not None
        return NativeBatch(self, model, width)

    def _encode(self, sources: Sources, output: str) -> Floats:
        raise NotImplementedError  # encoder-only models are refused

    def close(self) -> None:
        """Free the weights when the last open batch is freed."""
        self._model = None


class NativeBatch(CheckedScoring):
    """Sources being decoded; implements `MultiStep` and `MultiBeam`."""

    def __init__(self, session: NativeSession, model: _Object, width: int) -> None:
        super().__init__(session.spec, width)
        self._session, self._model, self._library = session, model, model.library
        self._batch = _Object(model.library, "batch", model.address, width, session.threads.decoder)
        self._buffers: _Buffers | None = None

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        ids = np.ascontiguousarray(sources.inputs[SOURCE_IDS])
        lengths, read = sources.lengths, np.array([len(prompt) for prompt in prompts])
        tokens = np.array([token for prompt in prompts for token in prompt])
        addresses = [address(array) for array in (lengths, tokens, read)]
        self._library.call("add", self._batch.address, len(ids), address(ids), ids.shape[1], *addresses)
        self.lengths = np.concatenate((self.lengths, (read - 1).repeat(self.width)))

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        return self._run(target_ids, num_candidates)

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        return self._run(target_ids, 1, np.ascontiguousarray(next_ids))

    def _run(self, target_ids: Ids, num_candidates: int, given: Ids | None = None) -> Candidates:
        rows, buffers = target_ids.size, self._reserved(num_candidates)
        buffers.target_ids[:] = target_ids
        given_address = None if given is None else address(given)
        self._library.call(
            "step",
            self._batch.address,
            buffers.addresses[0],
            rows,
            num_candidates,
            given_address,
            *buffers.addresses[1:],
        )
        self.lengths = self.lengths + ONE
        return Candidates(buffers.token_ids.copy(), buffers.logits.copy(), buffers.log_normalizer.copy())

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        """Take several greedy steps, of a batch with one row for each source."""
        most, num_candidates, stop_ids, banned_ids, _ = steps
        check_step(self._spec, self.lengths, target_ids, num_candidates, most)
        rows, ids = target_ids.size, np.ascontiguousarray(target_ids)
        stops, banned = np.array([*stop_ids], np.int64), np.array([*banned_ids], np.int64)
        token_ids = np.empty((most, rows, num_candidates), np.int64)
        logits = np.empty((most, rows, num_candidates), np.float32)
        log_normalizer = np.empty((most, rows), np.float32)
        taken = c_int64()
        found = [address(array) for array in (token_ids, logits, log_normalizer)]
        ends = address(stops), stops.size, address(banned), banned.size
        given = address(ids), rows, num_candidates, most, *ends
        self._library.call("steps", self._batch.address, *given, *found, byref(taken))
        count = taken.value
        self.lengths = self.lengths + count
        return Candidates(token_ids[:count], logits[:count], log_normalizer[:count])

    def beam_steps(self, beams: Beams, steps: int) -> BeamSteps:
        """Take several steps of the beam searches of all sources."""
        rows, most = self.lengths.size, 2 * self.lengths.size
        places = np.arange(rows), self.lengths
        check_step(self._spec, self.lengths, beams.tokens[places], beams.num_candidates, steps)
        room, states = beams.tokens.shape[1], np.zeros(rows // self.width, np.int64)
        ends = np.array(beams.end_ids, np.int64)
        early = 2 if beams.early_stopping == "never" else int(beams.early_stopping)
        numbers, ids = np.empty((2, most), np.int64), np.empty((most, room), np.int64)
        values = np.empty((2, most), np.float32)
        state = (ends, beams.divisors, beams.limits, beams.shortest, beams.num_new, states, beams.tokens)
        arrays = (*state, beams.running, beams.scores, *numbers, ids, *values)
        sizes = (beams.num_candidates, beams.num_extensions, early, room, ends.size, beams.divisors.size, most, 0)
        given, taken = BeamArrays(*sizes, *(address(array) for array in arrays)), c_int64()
        self._library.call("beams", self._batch.address, byref(given), rows, steps, byref(taken))
        self.lengths = self.lengths + taken.value
        found = [array[..., : given.num_finished].tolist() for array in (*numbers, *values)]
        finished = [
            FinishedBeam(source, ids[number, :length].tolist(), score, log_prob)
            for number, (source, length, score, log_prob) in enumerate(zip(*found, strict=True))
        ]
        done, broken = (np.flatnonzero(states == state).tolist() for state in (1, 2))
        return BeamSteps(taken.value, finished, done, broken)

    def _reserved(self, num_candidates: int) -> _Buffers:
        rows = self.lengths.size
        if self._buffers is None or self._buffers.logits.shape != (rows, num_candidates):
            self._buffers = _Buffers(rows, num_candidates)
        return self._buffers

    def _reorder(self, rows: Ids) -> None:
        order = np.ascontiguousarray(rows)
        self._library.call(
            "reorder", self._batch.address, address(order), order.size
        )  # rows of a source are equally long

    def _remove(self, sources: Ids) -> None:
        kept = close_up(self.lengths.size // self.width, sources)
        self._library.call("remove", self._batch.address, address(kept), kept.size)
        self.lengths = self.lengths[rows_of(kept, self.width)]


class _Buffers:
    """Arrays of a step; looking up an address takes longer than copying few numbers."""

    def __init__(self, rows: int, num_candidates: int) -> None:
        self.target_ids = np.empty(rows, np.int64)
        self.token_ids: Ids = np.empty((rows, num_candidates), np.int64)
        self.logits: Floats = np.empty((rows, num_candidates), np.float32)
        self.log_normalizer: Floats = np.empty(rows, np.float32)
        arrays: list[NDArray[Any]] = [self.target_ids, self.token_ids, self.logits, self.log_normalizer]
        self.addresses = [address(array) for array in arrays]


def is_fastest(bundle: Bundle, options: LoadOptions) -> bool:
    """Return whether ONNX Runtime is slower and has nothing that is asked for."""
    manifest, step_bytes = bundle.manifest, step_weight_bytes(bundle)
    decoders = [graph.spec for name, graph in manifest.graphs.items() if name in DECODER.values()]
    has_more = manifest.alignment is not None or any(map(has_speculation, decoders))
    if has_more or step_bytes is None or options.variant is not None or options.device != "cpu":
        return False
    if step_bytes < SMALL_STEP_BYTES:
        is_faster = options.threads in (AUTO, 1)
    else:
        is_quantized = manifest.quantization is not None and step_bytes < QUANTIZED_STEP_BYTES
        is_faster = is_quantized and options.threads is not None and _threads(bundle, options) <= MEASURED_THREADS
    return is_faster and not problems(bundle)


def _threads(bundle: Bundle, options: LoadOptions) -> int:
    """Return the threads of a step; small ones end before another thread has started."""
    found, step_bytes = choose_threads(options.threads, bundle, is_shared=options.is_shared), step_weight_bytes(bundle)
    is_small = step_bytes is not None and step_bytes < SMALL_STEP_BYTES
    return 1 if found is None or is_small else found.decoder


def open_bundle(bundle: Bundle, options: LoadOptions) -> NativeSession:
    """Open a bundle in the fastest library that this CPU can run."""
    if options.variant is not None:
        raise BackendError(
            f"native: decoder variant {options.variant} is a graph, which this backend does not run; leave it out"
        )
    return _open(bundle, options)


def _open(bundle: Bundle, options: LoadOptions) -> NativeSession:
    manifest = bundle.manifest
    raise_all(BackendError, f"native: {bundle.path}", problems(bundle), remedy=_REMEDY)
    assert manifest.config is not None
    threads = _threads(bundle, options)
    return NativeSession(manifest.config, bundle.file(WEIGHTS), manifest.accuracy, threads=threads, subject=bundle.path)


def parity_sessions(graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, NativeSession]]:
    """Open the session to compare with the eager model."""
    if graphs.bundle is None:
        raise BackendError("native: an export is verified on the graphs that it writes; use --backend ort")
    yield "native", _open(graphs.bundle, options)


def probe(library: str, model: str) -> dict[str, str]:
    """Load the library; return the problem by device, or ""."""
    try:
        find_library()
    except BackendError as error:
        return {"cpu": str(error)}
    return {"cpu": ""}
