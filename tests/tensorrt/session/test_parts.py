"""Test slots, and that the doubles refuse what the library refuses."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tensorrt.cuda_double import CudaDouble, MisuseError
from tests.tensorrt.session import trt_double
from tests.tensorrt.session.trt_double import MODULE, FakeContext, FakeEngine, RtxContext, RtxEngine
from tfexport.contract import CACHE, ORDER, REORDER, REORDERED, reorder_spec
from tfexport.errors import BackendError
from tfexport.export.reorder import reorder_graph
from tfexport.tensorrt.config import ShapeRange
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session._cache import BatchLayout
from tfexport.tensorrt.session._profile import LayerTimer


@given(data=st.data(), width=st.integers(1, 3), size=st.integers(1, 12))
def test_copies_of_slots_preserve_every_row(data: st.DataObject, width: int, size: int) -> None:
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


@pytest.fixture
def context(cuda: CudaDouble) -> FakeContext:
    """Return a context that is ready to gather [2, 4] → [3, 4], except that its output has no address."""
    profile = {CACHE: ShapeRange((1, 1), (2, 4), (4, 8)), ORDER: ShapeRange((1,), (2,), (4,))}
    engine = FakeEngine(REORDER, reorder_graph("fp32"), reorder_spec("fp32"), (profile,), cuda, [], {})
    made = engine.create_execution_context(MODULE.ExecutionContextAllocationStrategy.USER_MANAGED)
    assert made is not None
    made.set_device_memory(cuda.allocate(engine.device_memory_size_v2), engine.device_memory_size_v2)
    assert made.set_optimization_profile_async(0, 0)
    for name, shape in ((CACHE, (2, 4)), (ORDER, (3,))):
        assert made.set_input_shape(name, shape)
        assert made.set_tensor_address(name, cuda.allocate(128))
    return made


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


def test_the_double_refuses_the_same_calls_as_the_library(cuda: CudaDouble, context: FakeContext) -> None:
    stream, pinned = cuda.stream(), cuda.pinned((32,), np.float32)
    assert not context.execute_async_v3(stream), "an address is missing"
    for name, shape in ((CACHE, (5, 4)), (CACHE, (2, 9)), (CACHE, (2, 4, 1)), (REORDERED, (3, 4)), ("?", (1,))):
        assert context.set_input_shape(name, shape) is False
    for address in (context.get_tensor_address(CACHE), pinned.ctypes.data):  # over an input, and on the host
        context.set_tensor_address(REORDERED, address)
        assert not context.execute_async_v3(stream)
    context.set_tensor_address(REORDERED, cuda.allocate(8))
    assert context.execute_async_v3(stream)
    with pytest.raises(MisuseError, match="no live device memory"):
        cuda.synchronize(stream)


def test_the_double_needs_a_run_before_a_capture_and_equal_shapes_after(cuda: CudaDouble, context: FakeContext) -> None:
    stream = cuda.stream()
    context.set_tensor_address(REORDERED, cuda.allocate(128))
    order = cuda.pinned((3,), np.int64)
    order[:] = 0
    cuda.upload(context.get_tensor_address(ORDER), order, stream)
    with pytest.raises(MisuseError, match="may still be preparing"), cuda.capture(stream):
        pass
    cuda.synchronize(stream)
    with cuda.capture(stream):
        assert not context.execute_async_v3(stream)
    assert context.execute_async_v3(stream)
    cuda.synchronize(stream)
    with cuda.capture(stream) as graph:
        assert context.execute_async_v3(stream)
        for forbidden in (lambda: cuda.synchronize(stream), lambda: cuda.allocate(8)):
            with pytest.raises(BackendError, match="StreamCapture"):
                forbidden()
    context.set_input_shape(ORDER, (2,))
    cuda.launch(graph, stream)
    with pytest.raises(MisuseError, match="shapes have changed"):
        cuda.synchronize(stream)


def test_the_double_of_cuda_has_the_methods_of_the_real_one() -> None:
    for name, method in vars(Cuda).items():
        if not name.startswith("_"):
            double = inspect.signature(getattr(CudaDouble, name))
            assert list(double.parameters) == list(inspect.signature(method).parameters), name


def test_the_doubles_of_engines_have_only_members_of_the_library() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    own = {"needs", "array", "itemsize", "load", "run", "is_capturable", "activation_bytes", "source"}
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
    assert hasattr(trt.IProfiler, LayerTimer.report_layer_time.__name__)
    for enum in vars(MODULE).values():
        if enum is not MODULE.IProfiler:
            assert {m.name for m in enum} == set(getattr(trt, enum.__name__).__members__)
