"""The session that drives TensorRT, on doubles of engines and CUDA; what every backend keeps to is tested elsewhere."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tfexport
from tests.runtime.trt.trt_double import (
    LIBRARY,
    DoubleSession,
    FakeContext,
    FakeEngine,
    RtxEngine,
    make_engines,
    trt_session,
)
from tests.trt.cuda_double import CudaDouble
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.cli import main
from tfexport.decode.batch import decode
from tfexport.decode.config import DecodeConfig
from tfexport.errors import BackendError, EngineError, InputError
from tfexport.export import export_bundle
from tfexport.graph.config import ExportConfig
from tfexport.runtime.ort.session import OrtSession
from tfexport.runtime.registry import get, registered
from tfexport.runtime.session import pad_right
from tfexport.runtime.trt.session import TrtSession
from tfexport.runtime.trt.unit import MAX_FREE_UNITS
from tfexport.spec import DECODER, ENCODER, Form, ModelSpec
from tfexport.trt.config import EngineConfig

FORMS: tuple[Form, ...] = ("static", "concat")
SOURCES = 24


class Model:
    """The graphs of models/dates and sources for them."""

    def __init__(self, bundle: Path) -> None:
        opened = open_bundle(bundle)
        self.path = bundle
        self.spec: ModelSpec = opened.manifest.spec
        self.graphs = {name: opened.file(graph.file) for name, graph in opened.manifest.graphs.items()}
        rng = np.random.default_rng(0)
        self.sources = [rng.integers(3, self.spec.source_vocab, rng.integers(1, 20)).tolist() for _ in range(SOURCES)]

    def trt(self, form: Form = "static", **options: Any) -> DoubleSession:
        return trt_session(self.graphs, self.spec, form, **options)

    def ort(self, form: Form = "static") -> OrtSession:
        return OrtSession(self.graphs, self.spec, form, threads=1)


@pytest.fixture(scope="module")
def dates(dates_bundle: Path) -> Model:
    return Model(dates_bundle)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "odd beams": {"num_beams": 3, "length_penalty": 0.5, "early_stopping": "never"},
    "filters": {"no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "samples": {"do_sample": True, "top_k": 5, "num_return_sequences": 3, "seed": 1},
    "short": {"max_new_tokens": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", [False, True], ids=["late", "at once"])
def test_decodes_as_onnx_runtime_does(dates: Model, form: Form, prompt: bool, options: dict[str, Any]) -> None:
    config = DecodeConfig(**options)
    session = dates.trt(form, cuda=CudaDouble(prompt=prompt), max_batch=20)
    prefixes = [[5] * (place % 3) for place in range(SOURCES)]
    for given in (None, prefixes):
        found = decode(session, dates.sources, config, prefixes=given, batch_size=7)
        expected = decode(dates.ort(form), dates.sources, config, prefixes=given, batch_size=7)
        assert [[h.token_ids for h in text] for text in found] == [[h.token_ids for h in text] for text in expected]
        scores, wanted = ([h.score for text in results for h in text] for results in (found, expected))
        np.testing.assert_allclose(scores, wanted, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_decodes_a_random_preset_as_onnx_runtime_does(
    once: Callable[[str, Callable[[Path], object]], Path], form: Form
) -> None:
    settings = ExportConfig(seed=3, max_target_length=24)
    model = Model(once("tiny-seed-3", lambda path: export_bundle("preset:tiny", path, settings, verify=False)))
    for config in (DecodeConfig(), DecodeConfig(num_beams=3), DecodeConfig(num_beams=2, length_penalty=2.0)):
        found = decode(model.trt(form, max_batch=16), model.sources, config, batch_size=5)
        expected = decode(model.ort(form), model.sources, config, batch_size=5)
        assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]


def test_no_text_depends_on_batch_mates_or_lanes(dates: Model) -> None:
    session, config = dates.trt(max_batch=6), DecodeConfig()
    alone = [decode(session, [source], config)[0][0].token_ids for source in dates.sources]
    for batch_size in (2, 3, 5, 6):
        found = decode(session, dates.sources, config, batch_size=batch_size)
        assert [text[0].token_ids for text in found] == alone


def greedy_steps(session: TrtSession, model: Model, num_steps: int, batch: int = 3) -> None:
    ids, mask = pad_right(model.sources[:batch], model.spec.tokens.pad)
    state = session.encode(ids, mask)
    new = np.full((batch, 1), model.spec.tokens.start)
    for _ in range(num_steps):
        new = session.step(state, new, 1).token_ids


def test_greedy_steps_are_replayed_one_ahead(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    greedy_steps(session, dates, 6)
    # Six steps and the one that was begun ahead: the first directly, the others from the graphs of two slots.
    assert cuda.counts["launch"] == 6
    assert cuda.counts["capture"] == 2
    # The library is asked once directly, and once for each capture; never for a step that is replayed.
    assert cuda.counts["enqueue decoder_static"] == 1 + 2
    before = cuda.counts.copy()
    gc.collect()
    greedy_steps(session, dates, 6)
    # The next batch like it finds graphs and contexts: one more graph, for a first step from the host.
    assert cuda.counts["launch"] - before["launch"] == 7
    assert cuda.counts["capture"] - before["capture"] == 1
    assert cuda.counts["context"] == before["context"]
    before = cuda.counts.copy()
    gc.collect()
    greedy_steps(session, dates, 6)
    assert cuda.counts["capture"] == before["capture"]
    assert cuda.counts["enqueue decoder_static"] == before["enqueue decoder_static"]


def test_no_step_waits_for_the_stream(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:3], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    new = session.step(state, np.full((3, 1), dates.spec.tokens.start), 1).token_ids
    before = cuda.counts["synchronize"]
    for _ in range(4):
        new = session.step(state, new, 1).token_ids
        assert any(stream.waiting for stream in cuda._streams.values()), "the next step is under way"
    assert cuda.counts["synchronize"] == before


@pytest.mark.parametrize("num_candidates", [1, 8])
def test_what_comes_back_is_candidates_alone(dates: Model, num_candidates: int) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda, max_batch=8)
    ids, mask = pad_right(dates.sources[:8], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    new = np.full((8, 1), dates.spec.tokens.start)
    session.step(state, new, num_candidates)  # captures, which counts what a graph downloads once
    session.step(state, new, num_candidates)
    one_step = 8 * (num_candidates * (8 + 4) + 4)
    assert cuda.counts["download bytes"] % one_step == 0
    assert cuda.counts["download bytes"] <= 4 * one_step
    assert one_step < 8 * dates.spec.vocab * 4


def test_a_step_that_was_begun_ahead_is_dropped_when_the_host_decides_otherwise(dates: Model) -> None:
    session, reference = dates.trt(), dates.ort()
    ids, mask = pad_right(dates.sources[:4], dates.spec.tokens.pad)
    rng, states = np.random.default_rng(3), (session.encode(ids, mask), reference.encode(ids, mask))
    new = np.full((4, 1), dates.spec.tokens.start)
    for position in range(8):
        found, expected = session.step(states[0], new, 1), reference.step(states[1], new, 1)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
        new = found.token_ids.copy()
        if position % 2:  # one row goes another way
            new[rng.integers(len(new))] = rng.integers(3, dates.spec.vocab)
        if position == 4:
            for one, state in ((session, states[0]), (reference, states[1])):
                one.reorder(state, np.array([2, 0, 3]))
            new = new[[2, 0, 3]]


def test_rows_that_leave_move_nothing_until_half_the_lanes_are_free(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:8], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    new = session.step(state, np.full((8, 1), dates.spec.tokens.start), 1).token_ids
    session.reorder(state, np.array([7, 1, 2, 6, 4]))
    assert cuda.counts["enqueue reorder"] == 0
    assert state.lanes.width == 8
    new = session.step(state, new[[7, 1, 2, 6, 4]], 1).token_ids
    session.reorder(state, np.array([0, 2, 3]))
    assert cuda.counts["enqueue reorder"] > 0
    assert (state.lanes.width, state.batch, state.rows) == (4, 3, 3)
    found = session.step(state, new[[0, 2, 3]], 3)
    reference = dates.ort()
    alone = reference.encode(*pad_right([dates.sources[row] for row in (7, 2, 6)], dates.spec.tokens.pad))
    start = np.full((3, 1), dates.spec.tokens.start)
    second = reference.step(alone, start, 1).token_ids
    third = reference.step(alone, second, 1).token_ids
    np.testing.assert_array_equal(found.token_ids, reference.step(alone, third, 3).token_ids)


def assert_same_steps(
    session: TrtSession, dates: Model, moves: list[tuple[list[int], ...]], num_candidates: int
) -> None:
    """Step and reorder as onnxruntime does; each entry of `moves` is one step's orders, one after the other.

    Row r is fed what was best in place r, whatever was moved there; behind the first step, something else in
    every second row, so that the rows of one source part.
    """
    reference = dates.ort()
    ids, mask = pad_right(dates.sources[:3], dates.spec.tokens.pad)
    states = session.encode(ids, mask), reference.encode(ids, mask)
    new = np.full((3, 1), dates.spec.tokens.start)
    for number, orders in enumerate(moves):
        found, expected = (
            one.step(state, new, num_candidates) for one, state in zip((session, reference), states, strict=True)
        )
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
        for order in orders:
            for one, state in zip((session, reference), states, strict=True):
                one.reorder(state, np.array(order))
        new = np.resize(found.token_ids[:, 0], (len(orders[-1]) if orders else len(new), 1))
        if number == 0:
            new[1::2] = 5


def test_a_step_begun_ahead_is_not_used_when_its_rows_have_moved(dates: Model) -> None:
    swapped = [1, 0, 3, 2, 5, 4]
    assert_same_steps(dates.trt(), dates, [([0, 0, 1, 1, 2, 2],), (), (swapped,), (swapped,), (swapped,), ()], 1)


def test_moves_may_follow_one_another(dates: Model) -> None:
    expand, turned = [0, 0, 1, 1, 2, 2], [1, 1, 2, 3, 5, 4]
    moves = [(expand, turned), (turned, [1, 0, 3, 2, 4, 4], [4, 5, 0, 1]), ([3, 2, 0, 0], [1, 0, 2, 3]), ()]
    assert_same_steps(dates.trt(), dates, moves, 3)
    assert_same_steps(dates.trt("concat"), dates, moves, 3)


@pytest.mark.parametrize("form", FORMS)
def test_sources_may_leave_before_the_encoder_has_read_its_mask(dates: Model, form: Form) -> None:
    found = []
    for session in (dates.trt(form), dates.ort(form)):
        state = session.encode(*pad_right([[4] * 9, [5, 6], [7] * 8, [8]], dates.spec.tokens.pad))
        session.reorder(state, np.array([1, 2]))
        found.append(session.step(state, np.full((2, 1), dates.spec.tokens.start), 3))
    np.testing.assert_allclose(found[0].logits, found[1].logits, atol=1e-4)


def test_a_lane_without_a_source_still_attends_to_something(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:3], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    session.step(state, np.full((3, 1), dates.spec.tokens.start), 1)
    lanes, source_len = state.unit.key
    assert (lanes, source_len) == (4, 1 << (ids.shape[1] - 1).bit_length())
    address = state.unit._work.memory["source_mask"]
    on_device = cuda.view(address, lanes * source_len, on_device=True).view(bool).reshape(lanes, source_len)
    np.testing.assert_array_equal(on_device[:3], np.pad(mask, ((0, 0), (0, source_len - ids.shape[1]))))
    assert on_device[3].tolist() == [True] + [False] * (source_len - 1)


def test_beams_are_reordered_by_a_graph(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:2], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    session.step(state, np.full((2, 1), dates.spec.tokens.start), 8)
    session.reorder(state, np.arange(2).repeat(4))
    new = np.full((8, 1), 4)
    enqueued = []
    for _ in range(5):
        session.step(state, new, 8)
        session.reorder(state, np.array([1, 0, 2, 2, 5, 4, 7, 7]))
        enqueued.append(cuda.counts["enqueue reorder"])
    tensors = 2 * dates.spec.layers
    assert np.diff(enqueued).tolist() == [tensors, 0, 0, 0], "directly, then captured, then replayed"
    session.reorder(state, np.arange(8))
    assert cuda.counts["enqueue reorder"] == enqueued[-1], "nothing moves where all stay"


def test_contexts_go_with_their_graphs_and_not_when_garbage_is_collected(dates: Model) -> None:
    """Garbage may be collected in the middle of a capture, where no context must be freed."""
    session = dates.trt()
    ids, mask = pad_right(dates.sources[:1], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    session.reorder(state, np.array([0, 0]))
    for _ in range(3):
        session.step(state, np.full((2, 1), dates.spec.tokens.start), 8)
        session.reorder(state, np.array([1, 0]))
    decoder = state.unit._decoder
    assert decoder
    owners = [*decoder._steps._items.values(), *decoder._reorder._recorded._items.values()]
    seen = [weakref.ref(owner) for owner in owners]
    assert len(seen) == 3, "a step, the move to two rows, the move of two rows"
    gc.disable()
    try:
        owners.clear()
        decoder.close()
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()


def test_batches_in_turn_share_a_unit_and_batches_at_once_do_not(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:4], dates.spec.tokens.pad)
    for _ in range(5):
        session.encode(ids, mask)
        gc.collect()
    one = session.memory_bytes()
    assert one == cuda.device_bytes
    states = [session.encode(ids, mask) for _ in range(9)]
    assert len({id(state.unit) for state in states}) == 9
    assert session.memory_bytes() == 9 * one
    del states
    gc.collect()
    session.encode(ids, mask)
    assert session.memory_bytes() == cuda.device_bytes == (1 + MAX_FREE_UNITS) * one


def test_memory_is_what_the_documentation_says(dates: Model) -> None:
    session, spec = dates.trt(max_batch=16), dates.spec
    ids, mask = pad_right([[5] * 16] * 4, spec.tokens.pad)
    state = session.encode(ids, mask)
    session.step(state, np.full((4, 1), spec.tokens.start), 1)
    session.reorder(state, np.arange(4).repeat(2))
    wide = spec.heads * (spec.head_dim + spec.value_dim) * 4
    cross, caches = spec.layers * 4 * 16 * wide, spec.layers * 8 * spec.max_target_length * wide
    scratch = 8 * spec.max_target_length * spec.heads * spec.head_dim * 4
    documented = FakeEngine.device_memory_size_v2 + 16 * spec.vocab * 4 + cross + caches + scratch
    small = 16 * (8 * (2 * spec.max_target_length + 2) + 12 * spec.vocab + 4) + 9 * 4 * 16  # ids, lengths, candidates
    assert documented < session.memory_bytes() < documented + small


def test_threads_decode_at_once_over_the_same_engines(dates: Model) -> None:
    cuda, log = CudaDouble(), []  # type: ignore[var-annotated]
    engines, limits = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=8), cuda, log)
    sessions = [TrtSession(engines, dates.spec, "static", limits, LIBRARY, cuda) for _ in range(2)]  # type: ignore[arg-type]
    config, expected = DecodeConfig(num_beams=2), decode(dates.ort(), dates.sources, DecodeConfig(num_beams=2))

    def run(number: int) -> list[Any]:
        return decode(sessions[number % 2], dates.sources, config, batch_size=1 + number % 4)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(8)):
            assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]
    for session in sessions:
        session.close()
    assert cuda.is_empty


@pytest.mark.parametrize("form", FORMS)
def test_close_frees_everything_also_under_a_state(dates: Model, form: Form) -> None:
    cuda = CudaDouble()
    session = dates.trt(form, cuda=cuda)
    decode(session, dates.sources, DecodeConfig(num_beams=2))
    state = session.encode(*pad_right(dates.sources[:1], dates.spec.tokens.pad))
    session.step(state, np.array([[dates.spec.tokens.start]]), 1)
    session.close()
    assert cuda.is_empty
    for call in (
        lambda: session.step(state, np.array([[4]]), 1),
        lambda: session.reorder(state, np.array([0])),
        session.memory_bytes,
    ):
        with pytest.raises(BackendError, match="this session is closed"):
            call()
    session.close()


LIMITS: dict[str, tuple[Callable[[TrtSession, Model], object], str]] = {
    "batch": (lambda s, m: s.encode(*pad_right([[4]] * 5, 0)), r"5 sources, the limit is 4 .*--max-batch 5 --force"),
    "source": (
        lambda s, m: s.encode(*pad_right([[4] * 9], 0)),
        r"9 source tokens, the limit is 8 .*--max-source-length 9 --force",
    ),
    "target": (
        lambda s, m: s.step(s.encode(*pad_right([[4]], 0)), np.full((1, 7), 4), 1),
        r"7 target tokens, the limit is 6 .*--max-target-length 7 --force",
    ),
    "candidates": (
        lambda s, m: s.step(s.encode(*pad_right([[4]], 0)), np.array([[4]]), 6),
        r"6 candidates, the limit is 5 .*--maxShapes num_candidates:6 --force",
    ),
    "rows": (
        lambda s, m: s.reorder(s.encode(*pad_right([[4]], 0)), np.zeros(5, np.int64)),
        r"5 rows, the limit is 4 .*--max-batch 5 --force",
    ),
}


@pytest.mark.parametrize(("ask", "message"), LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("form", FORMS)
def test_a_request_above_the_engines_names_limit_and_command(
    dates: Model, form: Form, ask: Callable[[TrtSession, Model], object], message: str
) -> None:
    narrow = {"max_batch": 4, "max_source_length": 8, "max_target_length": 6, "max_shapes": "num_candidates:5"}
    session = dates.trt(form, **narrow)
    assert (session.spec.max_source_length, session.spec.max_target_length) == (8, 6)
    assert (session.max_rows, session.max_candidates) == (4, 5)
    with pytest.raises(InputError, match=message) as caught:
        ask(session, dates)
    assert re.search(r"tfexport trt BUNDLE --\S+ \S+ --force$", str(caught.value))


def test_a_prefix_above_its_own_profile_names_shape_and_command(dates: Model) -> None:
    session = dates.trt(max_shapes=f"target_ids:8x4,num_candidates:{dates.spec.vocab}")
    ids, mask = pad_right(dates.sources[:1], dates.spec.tokens.pad)
    session.step(session.encode(ids, mask), np.full((1, 4), dates.spec.tokens.start), 1)
    with pytest.raises(
        BackendError, match=r"refuses the shape 1x5 of target_ids: .*--maxShapes target_ids:1x5 --force"
    ):
        session.step(session.encode(ids, mask), np.full((1, 5), dates.spec.tokens.start), 1)


def test_no_step_is_begun_beyond_the_last_position(dates: Model) -> None:
    cuda = CudaDouble(prompt=True)
    session = dates.trt(cuda=cuda, max_target_length=3)
    greedy_steps(session, dates, 3)
    assert cuda.counts["launch"] == 2, "three steps, the first directly"


class Failing(FakeContext):
    def execute_async_v3(self, stream_handle: int) -> bool:
        return self._refuse("an illegal instruction")


def test_a_failed_step_says_why_and_its_unit_serves_nobody_else(dates: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:2], dates.spec.tokens.pad)
    state, start = session.encode(ids, mask), np.full((2, 1), dates.spec.tokens.start)
    broken = state.unit
    with monkeypatch.context() as patch:
        patch.setattr(FakeContext, "execute_async_v3", Failing.execute_async_v3)
        with pytest.raises(BackendError, match="decoder_static failed: decoder_static: an illegal instruction"):
            session.step(state, start, 1)
    assert state.past_len == 0
    del state
    gc.collect()
    again = session.encode(ids, mask)
    assert again.unit is not broken
    expected = dates.ort()
    np.testing.assert_array_equal(
        session.step(again, start, 3).token_ids, expected.step(expected.encode(ids, mask), start, 3).token_ids
    )
    del again
    gc.collect()
    session.close()
    assert cuda.is_empty


def test_too_little_memory_is_an_error_and_leaves_nothing_behind(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    ids, mask = pad_right(dates.sources[:2], dates.spec.tokens.pad)
    needed = []
    for limit in (0, 10_000, 100_000):
        cuda.limit = limit
        with pytest.raises(BackendError, match="cudaErrorMemoryAllocation"):
            session.encode(ids, mask)
        gc.collect()
        needed.append(cuda.device_bytes)
        assert cuda.device_bytes <= limit
    cuda.limit = 1 << 40
    start = np.full((2, 1), dates.spec.tokens.start)
    assert session.step(session.encode(ids, mask), start, 1).token_ids.shape == (2, 1)
    gc.collect()
    session.close()
    assert cuda.is_empty


def test_a_former_batch_leaves_no_trace(dates: Model) -> None:
    """Caches that hold NaN, as device memory does before it is written, reach no later batch."""
    session = dates.trt()
    ids, mask = pad_right(dates.sources[:2], dates.spec.tokens.pad)
    state = session.encode(ids, mask)
    memory = state.unit._work.memory
    cuda: Any = state.unit._work.cuda
    for name in ("past_key.0", "past_value.0", "cross_key.0", "candidate_ids"):
        cuda.view(memory[name], 64, on_device=True)[:] = 0xFF
    del state
    gc.collect()
    again = session.encode(ids, mask)
    found = session.step(again, np.full((2, 1), dates.spec.tokens.start), 4)
    assert np.isfinite(found.logits).all()
    assert np.isfinite(found.log_normalizer).all()


def test_rtx_is_captured_by_us_where_it_can_be(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda, kind=RtxEngine)
    greedy_steps(session, dates, 4)
    assert cuda.counts["capture"] == 2
    configs = [config for engine in session.engines.values() for config in engine.configs]
    assert {config.cuda_graph_strategy.name for config in configs} == {"DISABLED"}
    compiled = {
        name: {config.dynamic_shapes_kernel_specialization_strategy.name for config in engine.configs}
        for name, engine in session.engines.items()
    }
    # A graph would keep kernels that wait for better ones; nobody waits where each run has other shapes.
    assert compiled == {"encoder": {"LAZY"}, "decoder_static": {"EAGER"}, "reorder": {"LAZY"}}
    for engine in session.engines.values():
        caches = {id(config.cache) for config in engine.configs}
        assert len(caches) == 1, "what was compiled for one context serves the others"
        assert all(config.cache is not None for config in engine.configs)


def test_rtx_captures_by_itself_where_we_cannot(dates: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RtxEngine, "is_capturable", False)
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda, kind=RtxEngine)
    found = decode(session, dates.sources, DecodeConfig(num_beams=2))
    expected = decode(dates.ort(), dates.sources, DecodeConfig(num_beams=2))
    assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]
    greedy_steps(session, dates, 4)
    assert cuda.counts["capture"] == 0
    strategies = [config.cuda_graph_strategy.name for config in session.engines["decoder_static"].configs]
    assert "WHOLE_GRAPH_CAPTURE" in strategies
    assert {c.cuda_graph_strategy.name for c in session.engines[ENCODER].configs} == {"DISABLED"}


@pytest.fixture
def on_doubles(dates: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tfexport.Model]]:
    """Return `tfexport.load` on a bundle with an engine `fast`, up to the library and the device."""
    bundle, cuda = dates.path, CudaDouble()

    def load_engine(opened: Bundle, name: str | None) -> Any:
        if name not in (None, "fast"):
            raise EngineError(f"{opened.path}: has no engine {name}")
        log: list[str] = []
        engines, limits = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=4), cuda, log)
        manifest = SimpleNamespace(config=EngineConfig(form="static", precision="fp32"), limits=limits)
        reasons = SimpleNamespace(reason=lambda: log[-1])
        return SimpleNamespace(
            manifest=manifest, plans=engines, library=LIBRARY, path=opened.path / "engines" / "fast", log=reasons
        )

    monkeypatch.setattr("tfexport.trt.artifact.load.load_engine", load_engine)
    monkeypatch.setattr("tfexport.trt.cuda.Cuda", lambda: cuda)
    with registered(dataclasses.replace(get("trt"), requirements=())):
        yield lambda **options: tfexport.load(bundle, **options)


def test_a_bundle_generates_with_its_engine(dates: Model, on_doubles: Callable[..., tfexport.Model]) -> None:
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989", "2026年3月3日", "May 4, 1977"]
    with tfexport.load(dates.path, backend="ort") as model:
        expected = model.generate(texts, num_beams=2)
    for engine in (None, "fast"):
        with on_doubles(backend="trt", engine=engine) as model:
            assert model.session.backend == "trt"
            assert [result.text for result in model.generate(texts, num_beams=2)] == [r.text for r in expected]


def test_an_engine_goes_with_its_backend_and_its_form(on_doubles: Callable[..., tfexport.Model]) -> None:
    with pytest.raises(BackendError, match="ort: engine fast is for TensorRT; use it with --backend trt"):
        on_doubles(backend="ort", engine="fast")
    with pytest.raises(BackendError, match="trt: engine fast has the form static; leave the form out"):
        on_doubles(backend="trt", form="concat")
    with pytest.raises(BackendError, match="trt: device cuda is for ONNX Runtime; use it with --backend ort"):
        on_doubles(backend="trt", device="cuda")
    with pytest.raises(EngineError, match="has no engine slow"):
        on_doubles(backend="trt", engine="slow")


def test_a_bundle_without_engines_says_so_on_the_command_line(dates: Model) -> None:
    result = CliRunner().invoke(main, ["generate", str(dates.path), "--backend", "trt", "1 May 2020"])
    assert result.exit_code == 1
    assert re.fullmatch(r"error: .*tfexport trt .*\n", result.stderr), result.stderr


class OldContext(FakeContext):
    """An `IExecutionContext` of TensorRT 10.0 to 10.2: memory for activations is a property."""

    @property
    def set_device_memory(self) -> Any:
        raise AttributeError("set_device_memory")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "device_memory":
            FakeContext.set_device_memory(self, value, FakeEngine.device_memory_size_v2)
        else:
            super().__setattr__(name, value)


class OldEngine(FakeEngine):
    """An `ICudaEngine` of TensorRT 10.0 to 10.2, which knows no aliases either."""

    device_memory_size = FakeEngine.device_memory_size_v2
    get_aliased_input_tensor = property()  # type: ignore[assignment]

    def create_execution_context(self, strategy: Any) -> OldContext | None:
        made = super().create_execution_context(strategy)
        return made and OldContext(self, replays_itself=False)


def test_the_oldest_library_runs_the_concat_form(dates: Model) -> None:
    session = dates.trt("concat", kind=OldEngine)
    found, expected = (decode(one, dates.sources[:5], DecodeConfig(num_beams=2)) for one in (session, dates.ort()))
    assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]


def test_engines_that_are_not_what_they_should_be_are_refused(dates: Model) -> None:
    cuda, log = CudaDouble(), []  # type: ignore[var-annotated]
    engines, limits = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=4), cuda, log)

    def refusal(**changes: Any) -> str:
        with pytest.raises(BackendError) as caught:
            TrtSession({**engines, **changes}, dates.spec, "static", limits, LIBRARY, cuda)  # type: ignore[arg-type]
        return str(caught.value)

    assert "has source_ids" in refusal(**{DECODER["static"]: engines[ENCODER]})
    assert "has cross_key.0" in refusal(reorder=engines[ENCODER])
    one_profile = make_engines(dates.graphs, dates.spec, "static", EngineConfig(), cuda, log)[0][DECODER["static"]]
    one_profile.profiles = one_profile.profiles[:1]
    assert "has 1 profiles, expected 2" in refusal(**{DECODER["static"]: one_profile})
    one_profile.profiles, one_profile.aliases = one_profile.profiles * 2, {}
    assert "does not write present_key.0 into the memory of past_key.0" in refusal(**{DECODER["static"]: one_profile})
    del engines["reorder"]
    assert "there is no engine reorder" in refusal()
