"""The parts of the session on engines by themselves, and that the doubles refuse what the library refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.trt import trt_double
from tests.runtime.trt.trt_double import MODULE, FakeContext, FakeEngine, RtxContext, RtxEngine, make_engines
from tests.trt.cuda_double import CudaDouble, MisuseError
from tfexport.errors import BackendError
from tfexport.runtime.session import check_rows
from tfexport.runtime.trt.graphs import CudaGraphRunner
from tfexport.runtime.trt.layout import BatchLayout, bucket
from tfexport.runtime.trt.lru import LruCache
from tfexport.runtime.trt.overlapped import OverlappedStep
from tfexport.runtime.trt.resources import Memory, Pinned, StepIO
from tfexport.spec import CACHE, ORDER, REORDER, REORDERED
from tfexport.trt.config import EngineConfig, EngineLimits
from tfexport.trt.cuda import Cuda


@pytest.mark.parametrize(("number", "most", "expected"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (5, 6, 6)])
def test_buckets(number: int, most: int, expected: int) -> None:
    assert bucket(number, most) == expected


class Row:
    """Stands for a row of a batch and what its text is."""

    def __init__(self, batch: int, rows: int) -> None:
        self.batch, self.rows, self.past_len = batch, rows, 0


@given(data=st.data(), batch=st.integers(1, 9), max_rows=st.integers(9, 40))
def test_lanes_follow_any_order(data: st.DataObject, batch: int, max_rows: int) -> None:
    """Every row of the batch finds on the device what a plain copy of rows gives it."""
    lanes = BatchLayout.of(batch, bucket(batch, max_rows))
    device_sources, device = np.arange(lanes.width), np.arange(lanes.width) * 1.0
    sources, rows = np.arange(batch), np.arange(batch) * 1.0
    for _ in range(5):
        beams = rows.size // sources.size
        kept = np.array(data.draw(st.lists(st.integers(0, sources.size - 1), min_size=1, unique=True)))
        new_beams = data.draw(st.integers(1, max(1, min(4, max_rows // kept.size))))
        picked = data.draw(st.lists(st.integers(0, beams - 1), min_size=new_beams, max_size=new_beams))
        order = (kept[:, None] * beams + np.array(picked)).ravel()
        assert (check_rows(Row(sources.size, rows.size), order) == kept).all()
        lanes, move = lanes.reorder(kept, order, bucket(kept.size, max_rows // new_beams))
        sources, rows = sources[kept], rows[order]
        if move.sources is not None:
            device_sources = device_sources[move.sources]
        if move.rows is not None:
            device = device[move.rows]
        assert lanes.num_rows <= max_rows
        np.testing.assert_array_equal(device[lanes.rows], rows)
        np.testing.assert_array_equal(device_sources[lanes.lanes], sources)
        device, rows = device + 100, rows + 100
        device[lanes.rows] += np.arange(rows.size)
        rows += np.arange(rows.size)


def test_single_rows_that_leave_or_change_places_move_nothing() -> None:
    lanes = BatchLayout.of(8, 8)
    for order in ([7, 3, 1, 0, 2], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
        rows = np.array(order)
        lanes, move = lanes.reorder(rows, rows, 8)
        assert move.sources is None
        assert move.rows is None
    assert lanes.rows.tolist() == [2, 0, 1, 3, 7]


class Step:
    """A greedy step whose best token is always the last one plus one, row by row."""

    def __init__(self, cuda: CudaDouble, stream: int, capacity: int) -> None:
        self.capacity, self.cuda, self.stream = capacity, cuda, stream
        self.calls: list[tuple[str, int, int]] = []
        self.newest = np.zeros(2, np.int64)

    def feed(self, io: StepIO, target_ids: np.ndarray, past_len: int) -> None:
        io.target_ids[:2] = target_ids[:, 0]
        self._queue("feed", io, past_len, io.target_ids[:2].copy)

    def follow(self, io: StepIO, past_len: int, number: int) -> None:
        self._queue(f"follow {number}", io, past_len, lambda: self.newest)

    def _queue(self, name: str, io: StepIO, past_len: int, read: Any) -> None:
        self.calls.append((name, past_len, id(io)))
        io.cache_lengths[:2] = past_len

        def work() -> None:
            assert (io.cache_lengths[:2] == past_len).all(), "the io was written while it was in use"
            self.newest = read() + 1
            io.token_ids[:2] = self.newest

        self.cuda.enqueue(self.stream, work)
        io.record(self.stream)


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def cuda(request: pytest.FixtureRequest) -> CudaDouble:
    return CudaDouble(prompt=request.param)


@pytest.fixture
def ahead(cuda: CudaDouble) -> tuple[OverlappedStep, Step]:
    pinned, limits = Pinned(cuda), EngineLimits(max_batch=2, max_source_length=1, max_target_length=5, max_candidates=1)  # type: ignore[arg-type]
    ios = [StepIO(cuda, cuda.event(), pinned, limits) for _ in range(2)]  # type: ignore[arg-type]
    return OverlappedStep((ios[0], ios[1])), Step(cuda, cuda.stream(), 5)


READ = np.array([0, 1])


def test_looking_ahead_feeds_once_and_stops_at_the_last_position(ahead: tuple[OverlappedStep, Step]) -> None:
    lookahead, step = ahead
    ids = np.array([[10], [20]])
    for past_len in range(5):
        ids = lookahead.run(step, ids, READ, past_len).token_ids[:2, None].copy()
        assert ids.ravel().tolist() == [11 + past_len, 21 + past_len]
    names = [(name, past_len) for name, past_len, _ in step.calls]
    assert names == [("feed", 0), ("follow 1", 1), ("follow 0", 2), ("follow 1", 3), ("follow 0", 4)]


def test_looking_ahead_drops_what_the_host_does_not_want(ahead: tuple[OverlappedStep, Step]) -> None:
    lookahead, step = ahead
    lookahead.run(step, np.array([[10], [20]]), READ, 0)
    assert lookahead.run(step, np.array([[11], [50]]), READ, 1).token_ids[:2].tolist() == [12, 51]
    assert lookahead.run(step, np.array([[12], [99]]), READ[:1], 2).token_ids[0] == 13, "a row that nobody reads"
    assert [name for name, *_ in step.calls] == ["feed", "follow 1", "feed", "follow 1", "follow 0"]


def test_looking_ahead_drops_another_position_and_another_step(ahead: tuple[OverlappedStep, Step]) -> None:
    lookahead, step = ahead
    lookahead.run(step, np.array([[10], [20]]), READ, 0)
    assert lookahead.run(step, np.array([[11], [21]]), READ, 2).token_ids[:2].tolist() == [12, 22]
    assert [(name, past_len) for name, past_len, _ in step.calls][2:] == [("feed", 2), ("follow 1", 3)]
    other = Step(step.cuda, step.stream, 5)
    assert lookahead.run(other, np.array([[12], [22]]), READ, 3).token_ids[:2].tolist() == [13, 23]
    assert [name for name, *_ in other.calls] == ["feed", "follow 1"]
    lookahead.drop()
    assert lookahead.run(other, np.array([[13], [23]]), READ, 4).token_ids[:2].tolist() == [14, 24]
    assert [name for name, *_ in other.calls][2:] == ["feed"]


@pytest.mark.parametrize("can_capture", [True, False])
def test_replay_runs_directly_once_then_from_one_graph_a_name(cuda: CudaDouble, can_capture: bool) -> None:
    stream, done, asked = cuda.stream(), [], []
    replay = CudaGraphRunner(cuda, stream)

    def ask() -> bool:
        asked.append(len(done))
        return can_capture

    for name in "aabab":
        replay.run(name, lambda name=name: cuda.enqueue(stream, lambda: done.append(name)), ask)  # type: ignore[misc]
    cuda.synchronize(stream)
    assert "".join(done) == "aabab"
    assert (cuda.counts["capture"], cuda.counts["launch"]) == ((2, 4) if can_capture else (0, 0))
    assert len(asked) == 1
    replay.close()
    cuda.destroy_stream(stream)
    assert cuda.is_empty


def test_recent_gives_up_what_was_not_used_longest() -> None:
    said: list[str] = []

    class Item:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            said.append(f"close {self.name}")

    recent: LruCache[Item] = LruCache(2, lambda: said.append("before"))
    for name in "abaca":
        assert recent.get(name, lambda name=name: Item(name)).name == name  # type: ignore[misc]
    assert said == ["before", "close b"]
    recent.clear()
    assert sorted(said[3:]) == ["close a", "close c"]


def test_memory_grows_with_its_contents_and_says_when_it_moves(cuda: CudaDouble) -> None:
    stream = cuda.stream()
    memory, pinned = Memory(cuda, stream), Pinned(cuda)  # type: ignore[arg-type]
    assert not memory.reserve({"a": 8, "b": 8})
    given, back = pinned.array(1, np.int64), pinned.array(1, np.int64)
    given[:] = 7
    cuda.upload(memory["a"], given, stream)
    assert not memory.reserve({"a": 4})
    assert memory.reserve({"a": 800, "b": 8})
    cuda.download(back, memory["a"], stream)
    cuda.synchronize(stream)
    assert back.tolist() == [7]
    assert memory.num_bytes == cuda.device_bytes == 808
    memory.close()
    assert cuda.device_bytes == memory.num_bytes == 0


# The doubles


@pytest.fixture
def engine(cuda: CudaDouble) -> FakeEngine:
    from tfexport.graph.reorder import reorder_graph
    from tfexport.spec import reorder_spec
    from tfexport.trt.build.profiles import ShapeRange

    profile = {CACHE: ShapeRange((1, 1), (2, 4), (4, 8)), ORDER: ShapeRange((1,), (2,), (4,))}
    return FakeEngine(REORDER, reorder_graph("fp32"), reorder_spec("fp32"), (profile,), cuda, [], {})


class Bench:
    """A context that is ready to run [2, 4] → [3, 4]."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.cuda = engine, engine.cuda
        self.stream = self.cuda.stream()
        self.addresses = {name: self.cuda.allocate(128) for name in (CACHE, ORDER, REORDERED)}
        self.memory = self.cuda.allocate(engine.device_memory_size_v2)
        made = engine.create_execution_context(MODULE.ExecutionContextAllocationStrategy.USER_MANAGED)
        assert made is not None
        self.context = made

    def prepare(self, *but: str) -> None:
        context = self.context
        if "memory" not in but:
            context.set_device_memory(self.memory, self.engine.device_memory_size_v2)
        assert context.set_optimization_profile_async(0, self.stream)
        for name, shape in ((CACHE, (2, 4)), (ORDER, (3,))):
            if f"shape {name}" not in but:
                assert context.set_input_shape(name, shape)
        for name, address in self.addresses.items():
            if f"address {name}" not in but:
                assert context.set_tensor_address(name, address)


@pytest.fixture
def bench(engine: FakeEngine) -> Bench:
    return Bench(engine)


def test_the_double_runs_when_everything_is_set(bench: Bench) -> None:
    bench.prepare()
    pinned = bench.cuda.pinned((24,), np.float32)
    pinned[:8] = np.arange(8)
    order = bench.cuda.pinned((3,), np.int64)
    order[:] = [1, 0, 1]
    bench.cuda.upload(bench.addresses[CACHE], pinned[:8], bench.stream)
    bench.cuda.upload(bench.addresses[ORDER], order, bench.stream)
    assert bench.context.infer_shapes() == []
    assert bench.context.execute_async_v3(bench.stream)
    bench.cuda.download(pinned[8:20], bench.addresses[REORDERED], bench.stream)
    bench.cuda.synchronize(bench.stream)
    assert pinned[8:20].tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("but", ["memory", "shape cache", "shape order", "address cache", "address reordered"])
def test_the_double_does_not_run_while_something_is_missing(bench: Bench, but: str) -> None:
    bench.prepare(but)
    assert (but.partition(" ")[2] in bench.context.infer_shapes()) == but.startswith("shape")
    assert not bench.context.execute_async_v3(bench.stream)
    assert bench.engine.log


def test_the_double_refuses_shapes_and_names(bench: Bench) -> None:
    bench.prepare()
    context = bench.context
    for name, shape in (
        (CACHE, (5, 4)),
        (CACHE, (2, 9)),
        (CACHE, (0, 4)),
        (CACHE, (2, 4, 1)),
        (REORDERED, (3, 4)),
        ("?", (1,)),
    ):
        assert context.set_input_shape(name, shape) is False
    assert context.set_tensor_address("?", 1) is False
    assert context.set_optimization_profile_async(1, bench.stream) is False
    assert context.set_optimization_profile_async(0, bench.stream) is True
    assert context.infer_shapes() == [CACHE, ORDER], "a new profile forgets the shapes"
    assert bench.engine.create_execution_context(MODULE.ExecutionContextAllocationStrategy.STATIC) is None


def test_the_double_refuses_outputs_over_inputs_and_host_addresses(bench: Bench) -> None:
    bench.prepare()
    bench.context.set_tensor_address(REORDERED, bench.addresses[CACHE])
    assert not bench.context.execute_async_v3(bench.stream)
    assert "lies over" in bench.engine.log[-1]
    bench.context.set_tensor_address(REORDERED, bench.cuda.pinned((32,), np.float32).ctypes.data)
    assert not bench.context.execute_async_v3(bench.stream)
    assert "wrong side" in bench.engine.log[-1]


def test_the_double_finds_memory_that_is_too_small_or_freed(bench: Bench) -> None:
    bench.prepare()
    bench.context.set_tensor_address(REORDERED, bench.addresses[REORDERED] + 127)
    with pytest.raises(MisuseError, match="no live device memory"):
        bench.context.execute_async_v3(bench.stream)
        bench.cuda.synchronize(bench.stream)
    bench.cuda.free(bench.addresses[CACHE])
    assert not bench.context.execute_async_v3(bench.stream)


def test_the_double_wants_a_run_before_a_capture_and_the_same_shapes_after(bench: Bench) -> None:
    bench.prepare()
    with bench.cuda.capture(bench.stream):
        assert not bench.context.execute_async_v3(bench.stream)
    assert bench.context.execute_async_v3(bench.stream)
    with bench.cuda.capture(bench.stream) as graph:
        assert bench.context.execute_async_v3(bench.stream)
        for forbidden in (
            lambda: bench.cuda.synchronize(bench.stream),
            lambda: bench.cuda.allocate(8),
            lambda: bench.cuda.free(bench.memory),
        ):
            with pytest.raises(BackendError, match="StreamCapture"):
                forbidden()
        strategy = MODULE.ExecutionContextAllocationStrategy.USER_MANAGED
        assert bench.engine.create_execution_context(strategy) is None
    order = bench.cuda.pinned((3,), np.int64)
    order[:] = 0
    bench.cuda.upload(bench.addresses[ORDER], order, bench.stream)
    bench.cuda.launch(graph, bench.stream)
    bench.context.set_input_shape(ORDER, (2,))
    with pytest.raises(MisuseError, match="shapes have changed"):
        bench.cuda.launch(graph, bench.stream)
        bench.cuda.synchronize(bench.stream)


def test_the_double_of_cuda_has_the_methods_of_the_real_one() -> None:
    for name, method in vars(Cuda).items():
        if not name.startswith("_"):
            double = inspect.signature(getattr(CudaDouble, name))
            assert list(double.parameters) == list(inspect.signature(method).parameters), name


def test_the_doubles_of_engines_have_nothing_that_the_library_has_not() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    own = {"array", "itemsize", "run", "is_capturable"}
    pairs = ((FakeContext, trt.IExecutionContext), (RtxContext, trt.IExecutionContext), (RtxEngine, trt.ICudaEngine))
    for double, real in (*pairs, (trt_double.FakeRuntimeConfig, trt.IRuntimeConfig), (FakeEngine, trt.ICudaEngine)):
        public = {name for name in dir(double) if not name.startswith("_")} - own
        assert public
        assert not {name for name in public if not hasattr(real, name)}, double
    for enum in vars(MODULE).values():
        assert {m.name for m in enum} == set(getattr(trt, enum.__name__).__members__)


def test_engines_of_the_concat_form_refuse_a_cache_over_the_last_one(dates_bundle: Any) -> None:
    from tfexport.bundle.bundle import open_bundle
    from tfexport.spec import DECODER

    bundle, cuda = open_bundle(dates_bundle), CudaDouble()
    graphs = {name: bundle.file(graph.file) for name, graph in bundle.manifest.graphs.items()}
    for form, at, message in (("concat", "past", "lies over"), ("static", "elsewhere", "is not where")):
        log: list[str] = []
        engines, _ = make_engines(graphs, bundle.manifest.spec, form, EngineConfig(max_batch=2), cuda, log)  # type: ignore[arg-type]
        context = FakeContext(engines[DECODER[form]], replays_itself=False)  # type: ignore[index]
        where = {name: cuda.allocate(1 << 20) for name in ("past_key.0", "present_key.0")}
        if at == "past":
            where["present_key.0"] = where["past_key.0"]
        names = ("past_key.0", "present_key.0")
        tensors = {**context._engine.inputs, **context._engine.outputs}
        shapes = dict.fromkeys(names, (1, 2, 3, 4))
        chosen = {name: tensors[name] for name in names}
        context._engine.outputs = {"present_key.0": tensors["present_key.0"]}
        assert message in context._overlap(chosen, shapes, where)
