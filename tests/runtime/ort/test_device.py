"""ONNX Runtime's device memory: what a GPU runs, run on the CPU; and what is said where there is no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper

from tests import tiny
from tests.runtime.test_contract import ort_session, sources
from tfexport.cli import main
from tfexport.errors import BackendError
from tfexport.model import load
from tfexport.runtime.ort import device as ort_device
from tfexport.runtime.ort.cache import FIRST_CAPACITY
from tfexport.runtime.ort.device import OrtDevice, driver_problem, host_value, misplaced, prepare_cuda
from tfexport.runtime.ort.move import ELEMENT_TYPE, extend_model, reorder_model
from tfexport.runtime.ort.session import OrtSession
from tfexport.runtime.session import Ids
from tfexport.spec import DType, Form

Once = Callable[[str, Callable[[Path], object]], Path]
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
NO_GPU = driver_problem()


def caches(prefix: str, dtype: DType, count: int, dims: list[str]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(f"{prefix}.{i}", ELEMENT_TYPE[dtype], [*dims, f"width.{i}"]) for i in range(count)
    ]


def model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> bytes:
    graph = helper.make_graph(nodes, "move", inputs, outputs)
    made = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 20)])
    onnx.checker.check_model(made, full_check=True)
    written: bytes = made.SerializeToString()
    return written


def test_element_types_are_those_of_onnx() -> None:
    names = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "bool": "BOOL"}
    names |= {"int32": "INT32", "int64": "INT64"}
    assert {dtype: TensorProto.DataType.Value(name) for dtype, name in names.items()} == ELEMENT_TYPE


@pytest.mark.parametrize("count", [1, 2, 200])  # 200 caches need two bytes for a length and a number
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_graphs_are_those_that_onnx_writes(dtype: DType, count: int) -> None:
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["new_rows"])
    nodes = [helper.make_node("Gather", [f"cache.{i}", "rows"], [f"moved.{i}"]) for i in range(count)]
    inputs = [rows, *caches("cache", dtype, count, ["rows", "heads", "length"])]
    outputs = caches("moved", dtype, count, ["new_rows", "heads", "length"])
    assert reorder_model(dtype, count) == model(nodes, inputs, outputs)

    nodes = []
    for i in range(count):
        zero = TensorProto(dims=[1], data_type=ELEMENT_TYPE[dtype], raw_data=bytes(4 if dtype == "float32" else 2))
        nodes.append(helper.make_node("ConstantOfShape", [f"tail.{i}"], [f"zeros_tail.{i}"], value=zero))
        nodes.append(helper.make_node("Concat", [f"cache.{i}", f"zeros_tail.{i}"], [f"longer.{i}"], axis=2))
    inputs = [
        *caches("cache", dtype, count, ["rows", "heads", "length"]),
        *(helper.make_tensor_value_info(f"tail.{i}", TensorProto.INT64, [4]) for i in range(count)),
    ]
    outputs = caches("longer", dtype, count, ["rows", "heads", "longer"])
    assert extend_model(dtype, count) == model(nodes, inputs, outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_caches_are_moved_as_numpy_moves_them(dtype: DType) -> None:
    device = OrtDevice("cpu", dtype, 2)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 2, 4, width)).astype(dtype) for width in (5, 6)]
    values = [host_value(array) for array in arrays]
    rows = np.array([2, 0, 0, 1, 2])
    for value, array in zip(device.take(values, rows), arrays, strict=True):
        np.testing.assert_array_equal(value.numpy(), array[rows])
    for value, array in zip(device.extend(values, 9), arrays, strict=True):
        np.testing.assert_array_equal(value.numpy(), np.pad(array, ((0, 0), (0, 0), (0, 5), (0, 0))))
    for value, array in zip(values, arrays, strict=True):
        np.testing.assert_array_equal(value.numpy(), array)


def test_bfloat16_is_moved_bit_by_bit() -> None:
    device = OrtDevice("cpu", "bfloat16", 1)
    bits = np.arange(1, 25, dtype=np.uint16).reshape(3, 2, 2, 2)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENT_TYPE["bfloat16"])
    rows = np.array([1, 1, 0])
    (moved,) = device.take(device.extend([value], 3), rows)
    assert (moved.data_type(), moved.shape()) == ("tensor(bfloat16)", [3, 2, 3, 2])
    found = np.frombuffer(ctypes.string_at(moved.data_ptr(), moved.tensor_size_in_bytes()), np.uint16).reshape(
        3, 2, 3, 2
    )
    np.testing.assert_array_equal(found, np.pad(bits, ((0, 0), (0, 0), (0, 1), (0, 0)))[rows])


def test_an_upload_is_a_copy() -> None:
    device = OrtDevice("cpu", "float32", 0)
    for array in (np.array([[1, 2], [3, 4]]), np.array([True, False])):
        value = device.upload(array)
        before = array.copy()
        array[:] = 0
        np.testing.assert_array_equal(value.numpy(), before)


def long_session(once: Once, *, host_caches: bool) -> OrtSession:
    made = tiny.model(tiny.config(max_target_length=3 * FIRST_CAPACITY), dtype=torch.float32)
    session = ort_session(made, "static", once, host_caches=host_caches)
    assert isinstance(session, OrtSession)
    return session


def test_device_buffers_grow_and_say_what_host_buffers_say(once: Once) -> None:
    """Two doublings, the second up to the limit, with rows that come, change places and leave on the way."""
    orders = {1: [0, 0, 1, 1, 2, 2, 3, 3], 40: [1, 0, 2, 3, 5, 5, 7, 6], 70: [4, 5, 1, 0], 130: [2, 2, 1, 0]}
    found = []
    for host_caches in (True, False):
        session = long_session(once, host_caches=host_caches)
        state = session.encode(*sources(tiny.config()))
        tokens, steps = np.arange(4), []
        for position in range(session.spec.max_target_length):
            if position in orders:
                session.reorder(state, np.array(orders[position]))
            new: Ids = np.resize(tokens + position, state.rows)[:, None] % tiny.VOCAB
            steps.append(session.step(state, new, 2))
        found.append(steps)
    for host, device in zip(*found, strict=True):
        np.testing.assert_array_equal(host.token_ids, device.token_ids)
        np.testing.assert_allclose(host.logits, device.logits, atol=1e-5)


def test_a_step_on_the_device_writes_in_place_and_reserves_nothing(once: Once) -> None:
    session = long_session(once, host_caches=False)
    state = session.encode(*sources(tiny.config()))
    buffers = state.cache._buffers  # type: ignore[attr-defined]
    assert [buffer.shape()[2] for buffer in buffers] == [FIRST_CAPACITY] * 4
    addresses = [buffer.data_ptr() for buffer in buffers]
    session.step(state, np.ones((4, 1), np.int64), 1)
    bound = state.binding
    first = [buffer.numpy().copy() for buffer in buffers]
    session.step(state, np.ones((4, 1), np.int64), 1)
    assert state.binding is bound
    assert [buffer.data_ptr() for buffer in buffers] == addresses
    for before, after in zip(first, buffers, strict=True):
        np.testing.assert_array_equal(before[:, :, :1], after.numpy()[:, :, :1])
        assert not before[:, :, 1:].any()
        assert after.numpy()[:, :, 1].any()
        assert not after.numpy()[:, :, 2:].any()


@pytest.mark.parametrize("form", ["concat", "static"])
def test_operators_that_run_elsewhere_are_found(form: Form, dates_bundle: Path) -> None:
    name = {"concat": "decoder.onnx", "static": "decoder_static.onnx"}[form]
    session = OrtDevice("cpu", "float32", 0).load(dates_bundle / name, name, 1)
    assert misplaced(session, "CPUExecutionProvider") == []
    heavy = {"Gemm", "TopK", "Softmax", "TensorScatter" if form == "static" else "MatMul"}
    found = set(misplaced(session, "CUDAExecutionProvider"))
    assert found >= heavy
    assert not found & {"Shape", "Range", "Unsqueeze"}


def test_a_session_that_fell_back_is_refused() -> None:
    session = OrtDevice("cpu", "float32", 0).load(reorder_model("float32", 1), "reorder", 1)
    with pytest.raises(BackendError, match=r"could not start CUDAExecutionProvider and took CPUExecutionProvider"):
        ort_device._check_placement(session, "decoder.onnx", "CUDAExecutionProvider")


def test_a_session_that_would_compute_in_part_elsewhere_is_refused(dates_bundle: Path) -> None:
    session = OrtDevice("cpu", "float32", 0).load(dates_bundle / "decoder.onnx", "decoder.onnx", 1)

    class Elsewhere:
        """The same session as CUDA would tell of it, had it no kernel for anything."""

        get_providers = staticmethod(lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
        get_provider_graph_assignment_info = staticmethod(session.get_provider_graph_assignment_info)

    with pytest.raises(BackendError, match=r"no CUDAExecutionProvider kernel for .*Softmax.*TopK"):
        ort_device._check_placement(Elsewhere(), "decoder.onnx", "CUDAExecutionProvider")


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="onnxruntime-gpu is installed")
@pytest.mark.parametrize("command", ["generate", "embed"])
def test_without_cuda_in_the_build_the_command_line_says_what_to_install(command: str, dates_bundle: Path) -> None:
    result = CliRunner().invoke(main, [command, str(dates_bundle), "1.2.2003", "--device", "cuda"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: ort: the installed onnxruntime {ort.__version__} has no CUDA; ")
    assert "pip uninstall -y onnxruntime && pip install 'tfexport[gpu]', or use device cpu" in result.stderr


def test_the_reference_backend_runs_on_the_cpu_alone(dates_bundle: Path) -> None:
    with pytest.raises(BackendError, match="eager: device cuda is for ONNX Runtime; use it with --backend ort"):
        load(dates_bundle, backend="eager", device="cuda")


def test_a_machine_without_a_driver_is_told_so() -> None:
    assert driver_problem("libcuda-that-is-not-there.so.1") == (
        "no NVIDIA driver is installed (libcuda-that-is-not-there.so.1 is not found); install the NVIDIA driver"
    )


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU")
def test_a_build_with_cuda_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(BackendError, match=r"(no NVIDIA driver|the NVIDIA driver finds no GPU).*or use device cpu"):
        prepare_cuda()


def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries of a CUDA that does not exist yet are missing everywhere."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort_device, "driver_problem", lambda: None)
    monkeypatch.setattr(ort, "cuda_version", "99.0")
    with pytest.raises(BackendError) as error:
        prepare_cuda()
    assert "was built for CUDA 99.0 and cannot load " in str(error.value)
    assert "libcublas" in str(error.value)
    assert str(error.value).endswith("; pip install 'tfexport[gpu]', or use device cpu")
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.parametrize("form", ["concat", "static"])
def test_a_gpu_says_what_the_cpu_says(form: Form, dates_bundle: Path) -> None:
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989"]
    with load(dates_bundle, form=form) as cpu, load(dates_bundle, form=form, device="cuda") as cuda:
        for beams in (1, 4):
            expected, found = (m.generate(texts, num_beams=beams) for m in (cpu, cuda))
            assert [result.token_ids for result in found] == [result.token_ids for result in expected]
