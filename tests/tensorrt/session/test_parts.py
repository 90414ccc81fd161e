"""The parts of the session on engines by themselves, and that the doubles refuse what the library refuses."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tensorrt.cuda_double import CudaDouble, MisuseError
from tests.tensorrt.session import trt_double
from tests.tensorrt.session.trt_double import MODULE, FakeContext, FakeEngine, RtxContext, RtxEngine
from tfexport.contract import CACHE, ORDER, REORDER, REORDERED
from tfexport.errors import BackendError
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session._cache import BatchLayout


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


# The doubles


@pytest.fixture
def engine(cuda: CudaDouble) -> FakeEngine:
    from tfexport.contract import reorder_spec
    from tfexport.export.reorder import reorder_graph
    from tfexport.tensorrt.config import ShapeRange

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
