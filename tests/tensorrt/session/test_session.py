"""Test the session on doubles of engines and CUDA, beyond the contract of all backends."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.conftest import Model
from tests.tensorrt.session.test_batch import assert_as_alone
from tests.tensorrt.session.trt_double import LIBRARY, FakeContext, FakeEngine, RtxEngine, make_engines
from tfexport._io.names import PROFILE_START
from tfexport.contract import CANDIDATE_IDS, CANDIDATE_LOGITS, DECODER, ENCODER, REORDER, Variant
from tfexport.decode.offline import decode
from tfexport.errors import BackendError, InputError
from tfexport.generation import DecodeConfig
from tfexport.tensorrt._kernels import RuntimeCacheStore
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Gpu
from tfexport.tensorrt.session._replica import MAX_FREE_REPLICAS
from tfexport.tensorrt.session._step import SURE_AFTER, Step
from tfexport.tensorrt.session.session import TrtSession

VARIANTS: tuple[Variant, ...] = ("static", "concat")


def greedy_steps(session: Any, model: Model, num_steps: int, num_sources: int = 3) -> None:
    batch, new = model.started(session, num_sources)
    for _ in range(num_steps):
        new = batch.step(new, 1).token_ids[:, 0]


@pytest.mark.parametrize("kind", [FakeEngine, RtxEngine])
def test_layers_of_every_run_are_timed(dates: Model, tmp_path: Path, kind: type[FakeEngine]) -> None:
    sources, config = dates.sources[:2], DecodeConfig(max_new_tokens=4, num_beams=2)
    cuda = CudaDouble()
    with closing(dates.trt(cuda=cuda, kind=kind, profile=tmp_path)) as session:
        found = decode(session, sources, config)
    with closing(dates.trt()) as session:
        assert found == decode(session, sources, config), "a profiler changes nothing"
    assert cuda.counts["capture"] == 0
    folders = {path.name.partition(" ")[2]: path for path in tmp_path.iterdir()}
    assert folders.keys() == {ENCODER, DECODER["static"], REORDER}
    for plan, folder in folders.items():
        events = json.loads((folder / "events.json").read_text())
        assert len(events) == 2 * cuda.counts[f"enqueue {plan}"]
        assert [event["name"] for event in events[:2]] == [f"{plan} attention", f"{plan} fc1"]
        assert all(b["ts"] >= a["ts"] + a["dur"] - 1 for a, b in pairwise(events)) or plan != ENCODER
        assert int((folder / PROFILE_START).read_text()) > 0


def test_greedy_steps_are_replayed_and_overlap_the_host(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    greedy_steps(session, dates, 6)
    # Six steps and one started early: the first directly, the others from the graphs of two step I/Os.
    assert cuda.counts["launch"] == 6
    assert cuda.counts["capture"] == 2
    # Once directly, and once for each capture; never for a replay.
    assert cuda.counts["enqueue decoder_static"] == 1 + 2
    before = cuda.counts.copy()
    gc.collect()
    greedy_steps(session, dates, 6)
    # The next batch needs one more graph, for a first step from the host.
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
    batch, new = dates.started(dates.trt(cuda=cuda), 3)
    for _ in range(2):  # which capture, and wait for that alone
        new = batch.step(new, 1).token_ids[:, 0]
    before = cuda.counts["synchronize"]
    for _ in range(4):
        new = batch.step(new, 1).token_ids[:, 0]
        assert any(stream.waiting for stream in cuda._streams.values()), "the next step is under way"
    assert cuda.counts["synchronize"] == before


@pytest.mark.parametrize("prompt", [False, True], ids=["late", "at once"])
def test_steps_overlap_as_long_as_the_best_tokens_are_used(
    dates: Model, prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asks for several candidates has to use the best ones for a while before."""
    calls: list[str] = []

    def watch(name: str) -> None:
        call = getattr(Step, name)
        monkeypatch.setattr(Step, name, lambda *arguments: (calls.append(name), call(*arguments))[1])

    watch("feed")
    watch("follow")
    batch, _ = dates.started(dates.trt(cuda=CudaDouble(prompt=prompt)), 2)
    histories = [[dates.start], [dates.start]]

    def steps(count: int, num_candidates: int) -> list[str]:
        calls.clear()
        for _ in range(count):
            found = batch.step(np.array([history[-1] for history in histories]), num_candidates)
            assert_as_alone(dates, found, dates.sources[:2], histories)
            for history, token in zip(histories, found.token_ids[:, 0].tolist(), strict=True):
                history.append(token)
        return [*calls]

    assert steps(SURE_AFTER, 4) == ["feed"] * SURE_AFTER, "not sure yet"
    assert steps(2, 4) == ["feed", "follow", "follow"]
    histories[1][-1] = 5
    assert steps(1, 4) == ["feed"], "one row has another token, and the next step is not begun"
    last = dates.spec.max_target_length - SURE_AFTER - 3
    assert steps(last, 1) == ["feed"] + ["follow"] * (last - 1), "there is no step after the last position"


class UncapturableEngine(FakeEngine):
    """An engine of TensorRT, which cannot report beforehand whether a graph can be captured."""

    is_capturable = False


@pytest.mark.parametrize("beams", [1, 3])
def test_after_a_failed_capture_decoding_continues_without_graphs_with_one_warning(
    dates: Model, beams: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, sources, config = CudaDouble(), dates.sources[:8], DecodeConfig(num_beams=beams)
    session = dates.trt(cuda=cuda, kind=UncapturableEngine)
    for size in (1, 8):
        expected = decode(dates.trt(), sources, config, batch_size=size)
        assert decode(session, sources, config, batch_size=size) == expected
    assert cuda.counts["launch"] == 0
    session.close()
    assert cuda.is_empty
    (warned,) = [record.getMessage() for record in caplog.records if record.name.startswith("tfexport")]
    assert "without CUDA graphs" in warned
    assert "cannot be captured" in warned, "the library's reason"


class TiedEngine(FakeEngine):
    """An engine whose two best logits are equal, the higher id first."""

    def run(self, arrays: Any) -> None:
        super().run(arrays)
        if CANDIDATE_IDS in arrays and arrays[CANDIDATE_IDS].shape[1] > 1:
            arrays[CANDIDATE_LOGITS][:, 1] = arrays[CANDIDATE_LOGITS][:, 0]
            arrays[CANDIDATE_IDS][:, :2] = -np.sort(-arrays[CANDIDATE_IDS][:, :2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits_come_in_order_of_id(dates: Model, variant: Variant) -> None:
    batch, new = dates.started(dates.trt(variant, kind=TiedEngine), 3)
    plain, _ = dates.started(dates.trt(variant), 3)
    for _ in range(3):
        found, expected = batch.step(new, 4), plain.step(new, 4)
        assert (found.logits[:, 0] == found.logits[:, 1]).all()
        np.testing.assert_array_equal(found.token_ids[:, :2], np.sort(expected.token_ids[:, :2]))
        np.testing.assert_array_equal(found.token_ids[:, 2:], expected.token_ids[:, 2:])
        new = expected.token_ids[:, 0]


def test_a_graph_has_one_copy_in_each_direction(dates: Model) -> None:
    cuda = CudaDouble()
    greedy_steps(dates.trt(cuda=cuda), dates, 3)
    greedy_steps(dates.trt(cuda=cuda), dates, 3)
    sizes = sorted(len(graph.work) for graph in cuda._graphs.values())
    # Lengths and the best tokens in, the engine, candidates out.
    assert set(sizes) == {4}
    batch, new = dates.started(dates.trt(cuda=cuda), 3)
    for _ in range(3):
        batch.step(new, 4)
    assert sorted(len(graph.work) for graph in cuda._graphs.values()) == [3, *sizes], "fed by the host"


@pytest.mark.parametrize("width", [1, 2])
def test_an_overlapped_step_is_dropped_when_the_host_decides_otherwise(dates: Model, width: int) -> None:
    """Other tokens, rows that changed places, a source that joined: whatever was begun is not used."""
    rng = np.random.default_rng(3)
    batch, _ = dates.started(dates.trt(), 3, width)
    sources = dates.sources[:3]
    histories = [[dates.start] for _ in range(3 * width)]
    for position in range(9):
        found = batch.step(np.array([history[-1] for history in histories]), 1)
        assert_as_alone(dates, found, [source for source in sources for _ in range(width)], histories)
        for history, token in zip(histories, found.token_ids[:, 0].tolist(), strict=True):
            history.append(token)
        if position == 0:
            for history in histories[1::2]:  # rows of one source part
                history[-1] = 5
        if position % 3 == 1:
            histories[rng.integers(len(histories))][-1] = int(rng.integers(3, dates.spec.vocab))
        if position % 3 == 2:
            rows = np.arange(len(histories)).reshape(-1, width)[:, ::-1].ravel()
            for _ in range(position // 3 + 1):  # moves may follow one another
                batch.reorder(rows)
                histories = [list(histories[row]) for row in rows]
            for history, token in zip(histories, found.token_ids[:, 0].tolist(), strict=True):
                history[-1] = token  # what was best in this place, whatever was moved there
        if position == 5:
            dates.add(batch, dates.sources[7:8])
            sources, histories = [*sources, dates.sources[7]], histories + [[dates.start] for _ in range(width)]


def test_a_source_that_joins_does_not_get_the_step_of_its_slot(dates: Model) -> None:
    """Its length is 0, that of a free slot, and its first token equals that of the early step."""
    batch, new = dates.started(dates.trt(), 4)
    batch.remove(np.array([0]))
    for _ in range(2):
        new = batch.step(new[:3], 1).token_ids[:, 0]
    assert batch._replica is not None
    assert batch._replica._decoder
    begun = int(batch._replica._decoder.overlapped._chosen[0])
    dates.add(batch, dates.sources[4:5], [[begun]])
    assert batch._layout.slots[-1] == 0
    found = batch.step(np.array([*new, begun]), 1)
    logits = dates.logits(tuple(dates.sources[4]), (begun,))
    np.testing.assert_allclose(found.logits[-1, 0], logits.max(), atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sources_may_leave_before_the_encoder_has_read_its_mask(dates: Model, variant: Variant) -> None:
    batch, sources = dates.trt(variant).batch(), [[4] * 9, [5, 6], [7] * 8, [8]]
    dates.add(batch, sources)
    batch.remove(np.array([0, 3]))
    found = batch.step(np.full(2, dates.start), 3)
    assert_as_alone(dates, found, [sources[2], sources[1]], [[dates.start]] * 2)


def test_beams_are_reordered_by_a_graph(dates: Model) -> None:
    cuda = CudaDouble()
    batch, new = dates.started(dates.trt(cuda=cuda), 2, 4)
    enqueued = []
    for _ in range(6):
        batch.step(new, 8)
        batch.reorder(np.array([1, 0, 2, 2, 5, 4, 7, 7]))
        enqueued.append(cuda.counts["enqueue reorder"] // (2 * dates.spec.layers))
    assert enqueued == [1, 2, 3, 4, 4, 4], "directly, then captured, then replayed; there and back"
    batch.reorder(np.arange(8))
    assert cuda.counts["enqueue reorder"] // (2 * dates.spec.layers) == 4, "nothing moves where all stay"


def test_memory_for_a_second_set_of_caches_comes_with_the_first_reorder(dates: Model) -> None:
    session = dates.trt()
    batch, new = dates.started(session, 2, 4)
    batch.step(new, 8)
    before = session.memory_bytes()
    batch.reorder(np.array([1, 0, 2, 2, 5, 4, 7, 7]))
    spec = dates.spec
    caches = spec.layers * 8 * spec.max_target_length * spec.heads * (spec.head_dim + spec.value_dim) * 4
    assert session.memory_bytes() - before == caches


def test_a_batch_that_shrinks_needs_few_graphs(dates: Model) -> None:
    """From 24 sources to one: three sizes, not six."""
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    batch, new = dates.started(session, 24)
    before = cuda.counts["context"]
    while new.size > 2:
        new = batch.step(new, 1).token_ids[:-2, 0]
        batch.remove(np.array([new.size, new.size + 1]))
    batch.step(new, 1)
    assert cuda.counts["context"] - before == 3, "of 32, 8 and 2 slots"


def test_caches_are_as_long_as_the_longest_row_needs(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda, capacities=(2, 5))
    batch, new = dates.started(session, 3)
    seen = []
    for _ in range(8):
        new = batch.step(new, 1).token_ids[:, 0]
        seen.append(batch._layout.capacity)
    assert seen == [2] * 2 + [5] * 3 + [dates.spec.max_target_length] * 3
    names = [name.removeprefix("enqueue ") for name in cuda.counts if "enqueue decoder" in name]
    assert names == ["decoder_static_2", "decoder_static_5", "decoder_static"]
    dates.add(batch, dates.sources[3:4])
    assert batch._layout.capacity == dates.spec.max_target_length
    batch.remove(np.arange(3))
    dates.add(batch, dates.sources[4:5])
    assert batch._layout.capacity == 2, "the long rows have left"
    dates.add(batch, dates.sources[5:6], [[dates.start, 5, 6, 7]])
    assert batch._layout.capacity == 5, "for a long prompt"


def test_a_prompt_is_read_at_once_and_only_by_new_rows(dates: Model) -> None:
    cuda = CudaDouble()
    batch, new = dates.started(dates.trt(cuda=cuda, max_batch=8), 4)
    new = batch.step(new, 1).token_ids[:, 0]
    before = cuda.counts["enqueue decoder_static"]
    dates.add(batch, dates.sources[4:6], [[dates.start, 5, 6, 7], [dates.start, 8]])
    assert cuda.counts["enqueue decoder_static"] - before == 1
    assert batch.lengths.tolist() == [1, 1, 1, 1, 3, 1]
    assert cuda.counts["enqueue encoder"] == 2
    histories = [[dates.start, int(token)] for token in new] + [[dates.start, 5, 6, 7], [dates.start, 8]]
    found = batch.step(np.array([history[-1] for history in histories]), 3)
    assert_as_alone(dates, found, dates.sources[:6], histories)


def test_contexts_are_freed_with_their_graphs(dates: Model) -> None:
    """Garbage may be collected in the middle of a capture, where no context must be freed."""
    batch, new = dates.started(dates.trt(), 1, 2)
    for _ in range(3):
        batch.step(new, 8)
        batch.reorder(np.array([1, 0]))
    assert batch._replica is not None
    decoder = batch._replica._decoder
    assert decoder
    owners: list[Any] = [*decoder._steps._items.values(), *decoder.caches._recorded._items.values()]
    seen = [weakref.ref(owner) for owner in owners]
    assert len(seen) == 4, "a step and the reorder of two rows, on each side"
    gc.disable()
    try:
        owners.clear()
        decoder.forget()
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


def test_only_successive_batches_share_a_replica(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    for _ in range(5):
        dates.started(session, 4)
        gc.collect()
    one = session.memory_bytes()
    assert one == cuda.device_bytes
    batches = [dates.started(session, 4)[0] for _ in range(9)]
    assert len({id(batch._replica) for batch in batches}) == 9
    assert session.memory_bytes() == 9 * one
    del batches
    gc.collect()
    dates.started(session, 4)
    assert session.memory_bytes() == cuda.device_bytes == (1 + MAX_FREE_REPLICAS) * one


def test_memory_equals_the_documented_amount(dates: Model) -> None:
    session, spec = dates.trt(max_batch=16), dates.spec
    batch = session.batch(2)
    dates.add(batch, [[5] * 16] * 4)
    batch.step(np.full(8, spec.tokens.start), 1)
    wide = spec.heads * (spec.head_dim + spec.value_dim) * 4
    cross, caches = spec.layers * 4 * 16 * wide, spec.layers * 8 * spec.max_target_length * wide
    documented = FakeEngine.activation_bytes[0] + 16 * spec.vocab * 4 + cross + caches
    small = 16 * (8 * (2 * spec.max_target_length + 2) + 12 * spec.vocab + 4) + 9 * 4 * 16  # ids, lengths, candidates
    assert documented < session.memory_bytes() < documented + small


@pytest.mark.parametrize("variant", VARIANTS)
def test_close_frees_everything_even_during_a_batch(dates: Model, variant: Variant) -> None:
    cuda = CudaDouble()
    session = dates.trt(variant, cuda=cuda)
    batch, new = dates.started(session, 3, 2)
    for _ in range(4):
        new = batch.step(new, 1).token_ids[:, 0]
        batch.reorder(np.array([1, 0, 3, 2, 5, 4]))
    session.close()
    assert cuda.is_empty
    for call in (
        lambda: batch.step(new, 1),
        lambda: batch.reorder(np.arange(6)),
        lambda: batch.remove(np.array([0])),
        lambda: dates.add(batch, dates.sources[:1]),
        session.batch,
        session.memory_bytes,
    ):
        with pytest.raises(BackendError, match="this session is closed"):
            call()
    session.close()


def steps(dates: Model, session: TrtSession, number: int, num_candidates: int = 1) -> None:
    batch = session.batch()
    dates.add(batch, [[4]])
    for _ in range(number):
        batch.step(np.array([4]), num_candidates)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s, m: m.add(s.batch(), [[4]] * 5), "5 rows, the limit is 4 .*--max-batch 5"),
        (lambda s, m: m.add(s.batch(3), [[4]] * 2), "6 rows, the limit is 4 .*--max-batch 6"),
        (lambda s, m: m.add(s.batch(), [[4] * 9]), "9 source tokens, the limit is 8 .*--max-source-length 9"),
        (lambda s, m: steps(m, s, 7), "7 target tokens, the limit is 6 .*--max-target-length 7"),
        (lambda s, m: m.add(s.batch(), [[4]], [[4] * 7]), "7 target tokens, the limit is 6 .*--max-target-length 7"),
        (lambda s, m: steps(m, s, 1, 6), "6 candidates, the limit is 5 .*--maxShapes num_candidates:6"),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_request_above_the_engines_names_limit_and_command(
    dates: Model, variant: Variant, ask: Callable[[TrtSession, Model], object], message: str
) -> None:
    narrow = {"max_batch": 4, "max_source_length": 8, "max_target_length": 6, "max_shapes": "num_candidates:5"}
    session = dates.trt(variant, **narrow)
    assert (session.spec.max_source_length, session.spec.max_target_length) == (8, 6)
    limits = session.limits
    most = (limits.rows.most, limits.source_length.most, limits.target_length.most, limits.candidates.most)
    assert most == (4, 8, 6, 5)
    with pytest.raises(InputError, match=message) as caught:
        ask(session, dates)
    assert re.search(r"build engines for more: tfexport trt BUNDLE --\S+ \S+ --force$", str(caught.value))


def test_at_the_limits_of_the_bundle_the_remedy_is_another_export(dates: Model) -> None:
    limits = dates.trt().limits
    assert limits.source_length.for_more(99) == ", or export with a larger --max-source-length if the model allows it"
    assert limits.target_length.most == dates.spec.max_target_length
    assert limits.rows.for_more(64) == ", or build engines for more: tfexport trt BUNDLE --max-batch 64 --force"


def test_a_failed_step_gives_the_reason_and_retires_its_replica(dates: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    batch, start = dates.started(session, 2)
    broken = batch._replica
    with monkeypatch.context() as patch:
        patch.setattr(FakeContext, "execute_async_v3", lambda self, stream: self._refuse("an illegal instruction"))
        with pytest.raises(BackendError, match="decoder_static failed: decoder_static: an illegal instruction"):
            batch.step(start, 1)
    assert batch.lengths.tolist() == [0, 0]
    with pytest.raises(BackendError, match="this batch has failed before"):
        batch.step(start, 1)
    del batch
    gc.collect()
    again, _ = dates.started(session, 2)
    assert again._replica is not broken
    assert_as_alone(dates, again.step(start, 3), dates.sources[:2], [[dates.start]] * 2)
    del again
    gc.collect()
    session.close()
    assert cuda.is_empty


def test_too_little_memory_is_an_error_and_leaks_nothing(dates: Model) -> None:
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda)
    for limit in (0, 10_000, 100_000):
        cuda.limit = limit
        with pytest.raises(BackendError, match="cudaErrorMemoryAllocation"):
            dates.started(session, 2)
        gc.collect()
        assert cuda.device_bytes <= limit
    cuda.limit = 1 << 40
    batch, start = dates.started(session, 2)
    assert batch.step(start, 1).token_ids.shape == (2, 1)
    del batch
    gc.collect()
    session.close()
    assert cuda.is_empty


def test_the_session_captures_rtx_if_it_can(dates: Model) -> None:
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
    # A graph would keep the general kernels; with changing shapes, waiting for others takes too long.
    assert compiled == {"encoder": {"LAZY"}, "decoder_static": {"EAGER"}, "reorder": {"LAZY"}}
    for engine in session.engines.values():
        caches = {id(config.cache) for config in engine.configs}
        assert len(caches) == 1, "all contexts share the compiled kernels"
        assert all(config.cache is not None for config in engine.configs)


def test_kernels_of_rtx_are_compiled_once_for_all_processes(dates: Model, tmp_path: Path) -> None:
    gpu = Gpu(index=0, name="NVIDIA L4", compute_capability="8.9", memory_bytes=1 << 34, driver_version="13.0")
    plans = dict.fromkeys((ENCODER, DECODER["static"], REORDER), "0" * 64)
    compiled = []
    for _ in range(3):
        cuda = CudaDouble()
        session = dates.trt(cuda=cuda, kind=RtxEngine, kernels=RuntimeCacheStore(tmp_path, plans, "1.7.1.116", gpu))
        config = DecodeConfig(num_beams=2)
        decode(session, dates.sources[:3], config)
        session.close()
        session.close()
        compiled.append(cuda.counts["compile"])
        assert cuda.is_empty
    assert compiled[0] == 3, "encoder, step and reorder"
    assert compiled[1:] == [0, 0]
    (stored,) = tmp_path.glob("kernels/*/decoder_static.kernels")
    stored.write_bytes(stored.read_bytes()[::-1])
    session = dates.trt(kind=RtxEngine, kernels=RuntimeCacheStore(tmp_path, plans, "1.7.1.116", gpu))
    decode(session, dates.sources[:3], DecodeConfig(num_beams=2))
    assert session.cuda.counts["compile"] > 0, "damaged kernels are compiled again"


def test_engines_that_violate_the_contract_are_refused(dates: Model) -> None:
    cuda, log = CudaDouble(), []  # type: ignore[var-annotated]
    engines, limits = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=4), cuda, log)

    def refusal(**changes: Any) -> str:
        with pytest.raises(BackendError) as caught:
            TrtSession({**engines, **changes}, dates.spec, "static", limits, LIBRARY, cuda)  # type: ignore[arg-type]
        return str(caught.value)

    assert "has source_ids" in refusal(**{DECODER["static"]: engines[ENCODER]})
    assert "has cross_key.0" in refusal(reorder=engines[ENCODER])
    changed = make_engines(dates.graphs, dates.spec, "static", EngineConfig(), cuda, log)[0][DECODER["static"]]
    changed.profiles = changed.profiles * 2
    assert "has 4 profiles, expected at most 2" in refusal(**{DECODER["static"]: changed})
    changed.profiles, changed.aliases = changed.profiles[:2], {}
    assert "does not write present_key.0 into the memory of past_key.0" in refusal(**{DECODER["static"]: changed})
    del engines["reorder"]
    assert "engine reorder is missing" in refusal()
