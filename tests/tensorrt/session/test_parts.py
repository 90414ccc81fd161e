"""The parts of the session on engines by themselves, and that the doubles refuse what the library refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tensorrt.cuda_double import CudaDouble, MisuseError
from tests.tensorrt.session import trt_double
from tests.tensorrt.session.trt_double import MODULE, FakeContext, FakeEngine, RtxContext, RtxEngine, make_engines
from tfexport.contract import CACHE, ORDER, REORDER, REORDERED, TensorSpec
from tfexport.errors import BackendError
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session.cache import BatchLayout, bucket
from tfexport.tensorrt.session.graphs import CaptureSwitch, CudaGraphRunner, LruCache
from tfexport.tensorrt.session.resources import Memory, Packing, Pinned


@pytest.mark.parametrize(("number", "most", "expected"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (5, 6, 6)])
def test_buckets(number: int, most: int, expected: int) -> None:
    assert bucket(number, most) == expected


@given(data=st.data(), width=st.integers(1, 3), size=st.integers(1, 12))
def test_copies_of_slots_keep_what_every_row_is(data: st.DataObject, width: int, size: int) -> None:
    """Every source is found where the layout says, whatever is left out; no copy overwrites what is still needed."""
    slots = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True)), np.int64)
    layout = BatchLayout(size, width, 8, 16, slots)
    device = np.full((24, width), -1)
    device[slots] = np.arange(slots.size * width).reshape(-1, width)
    first = data.draw(st.integers(0, 4))
    after, copies = layout.fit(first, data.draw(st.integers(first + slots.size, 20)))
    for source, target in data.draw(st.permutations(copies)):
        device[target] = device[source]
    assert device.ravel()[after.rows].tolist() == list(range(slots.size * width))
    assert after.slots.size == np.unique(after.slots).size == slots.size
    assert ((after.slots >= first) & (after.slots < after.size)).all()
    stayed = (slots >= first) & (slots < after.size)
    assert (after.slots[stayed] == slots[stayed]).all(), "who is in place stays"
    assert len(copies) == np.count_nonzero(~stayed)


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def cuda(request: pytest.FixtureRequest) -> CudaDouble:
    return CudaDouble(prompt=request.param)


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_cuda_graph_runner_runs_directly_once_then_from_one_graph_a_name(cuda: CudaDouble, can_capture: bool) -> None:
    stream, done, asked = cuda.stream(), [], []
    runner = CudaGraphRunner(cuda, stream, CaptureSwitch())

    def ask() -> bool:
        asked.append(len(done))
        return can_capture

    for name in "aabab":
        runner.run(name, lambda name=name: cuda.enqueue(stream, lambda: done.append(name)), ask)  # type: ignore[misc]
    cuda.synchronize(stream)
    assert "".join(done) == "aabab"
    assert (cuda.counts["capture"], cuda.counts["launch"]) == ((2, 4) if can_capture else (0, 0))
    assert len(asked) == 1
    runner.close()
    cuda.destroy_stream(stream)
    assert cuda.is_empty


def test_the_lru_cache_gives_up_what_was_not_used_longest() -> None:
    said: list[str] = []

    class Item:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            said.append(f"close {self.name}")

    cache: LruCache[Item] = LruCache(2, lambda: said.append("before"))
    for name in "abaca":
        assert cache.get(name, lambda name=name: Item(name)).name == name  # type: ignore[misc]
    assert said == ["before", "close b"]
    cache.clear()
    assert sorted(said[3:]) == ["close a", "close c"]


def test_memory_grows_with_its_contents_and_zeros_and_says_when_it_is_reallocated(cuda: CudaDouble) -> None:
    stream = cuda.stream()
    memory, pinned = Memory(cuda, stream), Pinned(cuda)  # type: ignore[arg-type]
    assert not memory.reserve({"a": 8, "b": 8})
    given, back = pinned.array(1, np.int64), pinned.array(2, np.int64)
    given[:] = 7
    cuda.upload(memory["a"], given, stream)
    assert not memory.reserve({"a": 4})
    assert memory.reserve({"a": 800, "b": 8})
    cuda.download(back, memory["a"], stream)
    cuda.synchronize(stream)
    assert back.tolist() == [7, 0]
    assert memory.num_bytes == cuda.device_bytes == 808
    memory.close()
    assert cuda.device_bytes == memory.num_bytes == 0


@given(data=st.data())
def test_packed_tensors_begin_where_a_tensor_may_and_none_lies_over_another(data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(["int64", "float32", "bool", "float16"]), min_size=1, max_size=5))
    rows = data.draw(st.integers(1, 70))
    packed = Packing((TensorSpec(str(n), dtype, ("rows", n + 1)) for n, dtype in enumerate(dtypes)), {"rows": rows})
    buffer = np.zeros(packed.num_bytes, np.uint8)
    expected = [np.full((rows, n + 1), n + 1, dtype) for n, dtype in enumerate(dtypes)]
    for n, values in enumerate(expected):
        packed.view(str(n), buffer)[:] = values
    for n, values in enumerate(expected):
        found = packed.view(str(n), buffer)
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        assert (found == values).all()
    assert all(address % 256 == 0 for address in packed.addresses(1 << 20).values())
    last = packed.pieces[str(len(dtypes) - 1)]
    assert packed.num_bytes == last.start + last.num_bytes


# The doubles


def test_the_double_copies_rows_of_other_lengths_and_nothing_onto_itself(cuda: CudaDouble) -> None:
    stream, here, there = cuda.stream(), cuda.allocate(24), cuda.allocate(24)
    cuda.view(here, 24, on_device=True)[:] = np.arange(24)
    cuda.clear(there, 24, stream)
    cuda.copy_2d(there, 6, here, 4, 3, stream)
    cuda.synchronize(stream)
    assert cuda.view(there, 18, on_device=True).reshape(3, 6)[:, [0, 3, 4]].tolist() == [
        [0, 3, 0],
        [4, 7, 0],
        [8, 11, 0],
    ]
    for forbidden in (
        lambda: cuda.copy(here + 4, here, 8, stream),
        lambda: cuda.copy_2d(here, 4, here + 2, 6, 3, stream),
        lambda: cuda.copy_2d(there, 9, here, 6, 3, stream),
    ):
        with pytest.raises(MisuseError, match=r"overlaps itself|no live device memory"):
            forbidden()
            cuda.synchronize(stream)


@pytest.fixture
def engine(cuda: CudaDouble) -> FakeEngine:
    from tfexport.contract import reorder_spec
    from tfexport.export.reorder import reorder_graph
    from tfexport.tensorrt.profile import ShapeRange

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
    if bench.cuda._streams[bench.stream].waiting:
        with pytest.raises(MisuseError, match="may still be settling"), bench.cuda.capture(bench.stream):
            pass
    bench.cuda.synchronize(bench.stream)
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
    own = {"needs", "array", "itemsize", "load", "run", "is_capturable", "activation_bytes"}
    pairs = (
        (FakeContext, trt.IExecutionContext),
        (RtxContext, trt.IExecutionContext),
        (FakeEngine, trt.ICudaEngine),
        (RtxEngine, trt.ICudaEngine),
        (trt_double.FakeRuntimeConfig, trt.IRuntimeConfig),
        (trt_double.FakeRuntimeCache, trt.IRuntimeCache),
    )
    for double, real in pairs:
        public = {name for name in dir(double) if not name.startswith("_")} - own
        assert public
        assert not {name for name in public if not hasattr(real, name)}, double
    for enum in vars(MODULE).values():
        assert {m.name for m in enum} == set(getattr(trt, enum.__name__).__members__)


def test_engines_of_the_concat_form_refuse_a_cache_over_the_last_one(dates_bundle: Any) -> None:
    from tfexport.bundle.bundle import open_bundle
    from tfexport.contract import DECODER

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
