"""The memory of devices in ONNX Runtime, tested on the CPU, and errors without a GPU."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper

from tests import tiny
from tests.conftest import ROOT
from tests.runtime.exported import LONG, Once, ort_session, sources
from tfexport.cli import main
from tfexport.contract import CacheKind, Device, Variant
from tfexport.errors import BackendError
from tfexport.export.reorder import reorder_graph
from tfexport.model.load import load
from tfexport.nn.config import model_spec
from tfexport.precision import FLOAT, ITEM_BYTES, Precision
from tfexport.runtime.ort import _providers
from tfexport.runtime.ort._cache import FIRST_CAPACITY, _DeviceBuffers, _HostBuffers
from tfexport.runtime.ort._device import ELEMENT_TYPE, OrtDevice, RowGather
from tfexport.runtime.ort._providers import (
    CUDA,
    PROVIDERS,
    PlacementError,
    driver_problem,
    gpu_memory,
    misplaced,
    prepare_cuda,
)
from tfexport.runtime.ort._static import StaticBatch

SPEC = model_spec(tiny.VARIANTS["post"], "fp32")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
NO_GPU = driver_problem()


@pytest.fixture(scope="module")
def gather(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], RowGather]:
    def opened(precision: Precision) -> RowGather:
        path = tmp_path_factory.mktemp(precision) / "reorder.onnx"
        path.write_bytes(reorder_graph(precision))
        return RowGather(OrtDevice("cpu"), path, FLOAT[precision])

    return opened


def test_element_types_are_those_of_onnx() -> None:
    names = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "bool": "BOOL"}
    names |= {"int32": "INT32", "int64": "INT64"}
    assert {dtype: TensorProto.DataType.Value(name) for dtype, name in names.items()} == ELEMENT_TYPE
    assert {dtype: helper.tensor_dtype_to_np_dtype(ELEMENT_TYPE[dtype]).itemsize for dtype in ITEM_BYTES} == ITEM_BYTES


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_copied_exactly_to_their_destination(
    precision: Precision, gather: Callable[[Precision], RowGather]
) -> None:
    opened = gather(precision)
    item = ITEM_BYTES[opened.dtype]
    bits = np.random.default_rng(0).integers(0, 256, (3, 4 * item), np.uint8)  # NaN among them
    memory, to = ort.OrtValue.ortvalue_from_numpy(bits), np.zeros((6, 4 * item), np.uint8)
    order = np.array([[2, 0], [0, 1]])
    opened.copy(memory, 4, order, to[1:].ctypes.data)
    np.testing.assert_array_equal(to, np.concatenate((0 * to[:1], bits[order.ravel()], 0 * to[:1])))


def test_more_than_a_gpu_can_count_is_refused(gather: Callable[[Precision], RowGather]) -> None:
    memory = ort.OrtValue.ortvalue_from_numpy(np.zeros(16, np.uint8))
    with pytest.raises(BackendError, match=r"caches of 2,147,483,648 numbers .*, at most 2,147,483,647; lower batch_s"):
        gather("fp32").copy(memory, 2**30, np.array([0, 0]), memory.data_ptr())


def test_states_are_moved_in_any_precision(gather: Callable[[Precision], RowGather]) -> None:
    """They are float32 next to keys and values in half precision, and have no length."""
    kind = replace(SPEC, state_width=5).cache
    for precision in PRECISIONS:
        assert_moved_alike(kind, (1, 1), gather(precision))


@pytest.mark.parametrize("widths", [(5, 5), (6, 10), (3, 4)])
@pytest.mark.parametrize("lengths", [(4, 8), (8, 4), (6, 9), (7, 5), (5, 5)])
def test_buffers_are_moved_as_numpy_moves_them(
    lengths: tuple[int, int], widths: tuple[int, int], gather: Callable[[Precision], RowGather]
) -> None:
    """Keys and values of unequal widths, buffers that grow and shrink by any number of places."""
    assert_moved_alike(replace(SPEC, head_dim=widths[0], value_dim=widths[1]).cache, lengths, gather("fp32"))


def assert_moved_alike(kind: CacheKind, lengths: tuple[int, int], opened: RowGather) -> None:
    rng, first, second = np.random.default_rng(0), lengths[0], lengths[1]
    host: list[_HostBuffers] = []
    device: list[_DeviceBuffers] = []
    for rows, length in ((3, first), (2, min(lengths))):
        host.append(_HostBuffers(kind, rows, length))
        device.append(_DeviceBuffers(opened, kind, rows, length))
        assert not any(array.any() for array in (*host[-1]._arrays, *arrays(device[-1])))
        for array, same in zip(host[-1]._arrays, arrays(device[-1]), strict=True):
            same[:] = array[:] = rng.standard_normal(array.shape)
    every: tuple[list[_HostBuffers], list[_DeviceBuffers]] = (host, device)
    for whole, part in every:
        whole.resize(7, second, 2)
        assert (whole.rows, whole.length) == (7, second)
        whole.write(np.array([2, 5, 4]), part, np.array([1, 0, 1]))  # type: ignore[arg-type]
        whole.write(np.array([0]), whole, np.array([5]))  # type: ignore[arg-type]
        whole.clear(np.array([1, 4]))
    for array, same in zip(host[0]._arrays, arrays(device[0]), strict=True):
        np.testing.assert_array_equal(array, same)
        assert not array[[1, 3, 4, 6]].any()
        np.testing.assert_array_equal(array[0], array[5])
    order = np.array([2, 0, 0, 5, 4])
    before = [array.copy() for array in host[0]._arrays]
    assert not host[0].reorder(order, second)
    assert device[0].reorder(order, second)
    for array, old, same in zip(host[0]._arrays, before, arrays(device[0]), strict=True):
        np.testing.assert_array_equal(array[:5], old[order])
        np.testing.assert_array_equal(array[:5], same)


def arrays(buffers: _DeviceBuffers) -> list[np.ndarray]:
    """Look into the memory, which on the CPU numpy may."""
    memory, found = buffers._memory.numpy().view(np.float32), []
    for rows, heads, units in buffers._shapes(buffers.rows, buffers.length, buffers.length):
        size = rows * heads * units * buffers.length * buffers._divisor * buffers._item // memory.itemsize
        found.append(memory[:size].reshape(rows, heads, buffers.length, -1))
        memory = memory[size:]
    assert not memory.any(), "a unit of zeros lies behind"
    return found


@pytest.mark.parametrize("host_caches", [True, False])
def test_a_step_writes_in_place_and_reserves_nothing(once: Once, host_caches: bool) -> None:
    model = tiny.model(LONG, dtype=torch.float32)
    batch = ort_session(model, "static", once, host_caches=host_caches).batch()
    assert isinstance(batch, StaticBatch)
    batch.add(tiny.sources(*sources(model.config)), [[1]] * 4)
    buffers = batch._caches

    def look() -> list[np.ndarray]:
        return buffers._arrays if isinstance(buffers, _HostBuffers) else arrays(cast(_DeviceBuffers, buffers))

    assert [array.shape[2] for array in look()] == [FIRST_CAPACITY] * 4
    addresses = [array.ctypes.data for array in look()]
    batch.step(np.ones(4, np.int64), 1)
    (bound,) = batch._steps.values()
    first = [array.copy() for array in look()]
    batch.step(np.ones(4, np.int64), 1)
    assert batch._caches is buffers
    assert list(batch._steps.values()) == [bound]
    assert [array.ctypes.data for array in look()] == addresses
    for before, after in zip(first, look(), strict=True):
        np.testing.assert_array_equal(before[:, :, :1], after[:, :, :1])
        assert not before[:, :, 1:].any()
        assert after[:, :, 1].any()
        assert not after[:, :, 2:].any()


@pytest.mark.parametrize("variant", ["concat", "static"])
def test_operators_that_run_elsewhere_are_found(variant: Variant, dates_bundle: Path) -> None:
    name = {"concat": "decoder.onnx", "static": "decoder_static.onnx"}[variant]
    session = OrtDevice("cpu").load(dates_bundle / name, name, 1)
    assert misplaced(session, "CPUExecutionProvider") == []
    heavy = {"Gemm", "TopK", "Softmax", "TensorScatter" if variant == "static" else "MatMul"}
    found = set(misplaced(session, "CUDAExecutionProvider"))
    assert found >= heavy
    assert not found & {"Shape", "Range", "Unsqueeze"}


def test_a_session_that_fell_back_is_refused(dates_bundle: Path) -> None:
    session = OrtDevice("cpu").load(dates_bundle / "reorder.onnx", "reorder", 1)
    with pytest.raises(BackendError, match=r"could not start CUDAExecutionProvider and took CPUExecutionProvider"):
        CUDA.check_placement(session, "decoder.onnx")


class Assigned:
    """A session with the operators that each provider was given, as ONNX Runtime tells of them."""

    def __init__(self, **operators: str) -> None:
        self._operators = operators

    def get_providers(self) -> list[str]:
        return [f"{name}ExecutionProvider" for name in self._operators]

    def get_provider_graph_assignment_info(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                ep_name=f"{name}ExecutionProvider",
                get_nodes=lambda types=types: [SimpleNamespace(op_type=each) for each in types.split()],
            )
            for name, types in self._operators.items()
        ]


@pytest.mark.parametrize(
    ("on_cuda", "on_cpu", "expected"),
    [
        # What onnxruntime-gpu 1.26.0 does with the static variant in fp16: it has neither operator in opset 24.
        ("Gemm Attention", "Cast Cast Reshape Reshape Mul Div Concat", ["Cast", "Reshape"]),
        # And 1.31.1, where the one shape that is reshaped stays where it is.
        ("Gemm Attention Cast Reshape", "Reshape Mul Div Concat", []),
        ("Gemm Cast", "Shape Concat", []),
        ("Gemm Cast Reshape", "Cast Transpose", ["Transpose"]),
    ],
)
def test_cast_and_reshape_may_run_on_the_cpu_only_for_shapes(on_cuda: str, on_cpu: str, expected: list[str]) -> None:
    session = Assigned(CUDA=on_cuda, CPU=on_cpu)
    assert misplaced(cast(Any, session), "CUDAExecutionProvider") == expected
    if expected:
        with pytest.raises(
            PlacementError, match=rf"no CUDAExecutionProvider kernel for {', '.join(expected)} and would"
        ):
            CUDA.check_placement(cast(Any, session), "decoder_static.onnx")


@pytest.mark.parametrize(("device", "extra"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_oldest_version_is_that_of_the_extra(device: Device, extra: str) -> None:
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert requirement.rpartition(">=")[2] == PROVIDERS[device].minimum


def test_a_graph_that_does_not_load_names_the_oldest_version(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(BackendError, match=f"which must be {PROVIDERS['cpu'].minimum} or newer on cpu: "):
        OrtDevice("cpu").load(tmp_path / "broken.onnx", "broken.onnx", 1)


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="onnxruntime-gpu is installed")
@pytest.mark.parametrize("command", ["generate", "embed"])
def test_without_cuda_in_the_build_the_command_line_names_the_package(command: str, dates_bundle: Path) -> None:
    result = CliRunner().invoke(main, [command, str(dates_bundle), "1.2.2003", "--device", "cuda"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: ort: the installed onnxruntime {ort.__version__} has no CUDA; ")
    assert "pip uninstall -y onnxruntime && pip install 'tfexport[gpu]', or use device cpu" in result.stderr


def test_a_missing_driver_is_reported() -> None:
    assert driver_problem("libcuda-that-is-not-there.so.1") == (
        "no NVIDIA driver is installed (libcuda-that-is-not-there.so.1 is not found); install the NVIDIA driver"
    )


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU")
def test_a_cuda_build_without_a_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(BackendError, match=r"(no NVIDIA driver|the NVIDIA driver finds no GPU).*or use device cpu"):
        prepare_cuda()


class Driver:
    """The functions of the CUDA driver that report memory; `fails` names one that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.called = fails, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == self.fails:
                return 1
            if name == "cuMemGetInfo_v2":
                for argument, value in zip(arguments, (30, 80), strict=True):
                    argument._obj.value = value
            return 0

        return call


def test_free_memory_of_a_gpu_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(_providers.ctypes, "CDLL", lambda name: driver)
    assert gpu_memory(1) == (30, 80)
    assert driver.called[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"], "as it was before"
    for fails in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"):
        monkeypatch.setattr(_providers.ctypes, "CDLL", lambda name, fails=fails: Driver(fails))
        assert gpu_memory(0) is None
    monkeypatch.undo()
    assert gpu_memory(0, "libcuda-that-is-not-there.so.1") is None


def test_weights_that_do_not_fit_are_not_loaded(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (dates_bundle / "weights.safetensors").stat().st_size
    monkeypatch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], memory=lambda number: (size - 1, size)))
    with pytest.raises(BackendError, match=r"needs at least .* MB for its weights, and cpu has"):
        load(dates_bundle, backend="ort")
    monkeypatch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], memory=lambda number: (size, size)))
    load(dates_bundle, backend="ort").close()


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.parametrize("variant", ["concat", "static"])
def test_gpu_and_cpu_give_the_same_output(variant: Variant, dates_bundle: Path) -> None:
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989"]
    with load(dates_bundle, variant=variant) as cpu, load(dates_bundle, variant=variant, device="cuda") as cuda:
        for beams in (1, 4):
            expected, found = (m.generate(texts, num_beams=beams) for m in (cpu, cuda))
            assert [result.token_ids for result in found] == [result.token_ids for result in expected]
