"""Where ONNX Runtime computes: the CPU or a GPU, its memory, and the proof that nothing quietly runs elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport._io.extras import extra_command, replacing_command
from tfexport.contract import (
    Device,
    DType,
    GraphSpec,
    ModelSpec,
    TensorSpec,
    WeightType,
    contract_problems,
    graph_contract,
    has_speculation,
)
from tfexport.errors import BackendError, BundleError, first_line, raise_all
from tfexport.runtime.ort.int8_products import int8_session_options
from tfexport.runtime.ort.libraries import load_libraries, needed, where_looked

Array = NDArray[Any]

PROVIDER: dict[Device, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# The oldest versions of onnxruntime and onnxruntime-gpu; the extras ask for the same.
MINIMUM: dict[Device, str] = {"cpu": "1.25", "cuda": "1.30"}
# TF32 keeps 10 bits of a float32 product; a bundle in fp32 says what PyTorch says only without it. The device is the
# first by default; where its number is given, 1.31 looks for a plugin for it and warns that there is none.
_OPTIONS: dict[Device, dict[str, str]] = {"cpu": {}, "cuda": {"use_tf32": "0"}}
# TensorProto.DataType
ELEMENT_TYPE: dict[DType, int] = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
# The dtypes of the contract as ONNX Runtime spells the types of inputs and outputs.
_DTYPE: dict[str, DType] = {f"tensor({'float' if dtype == 'float32' else dtype})": dtype for dtype in ELEMENT_TYPE}
# What ONNX Runtime computes on the CPU on purpose beside a GPU: sums on shapes, of a few numbers each.
SHAPE_OPERATORS = frozenset(
    "Add Cast Concat Constant ConstantOfShape Div Equal Expand Gather Identity Less LessOrEqual Max Min Mod Mul Range "
    "Reshape Shape Size Slice Squeeze Sub Unsqueeze Where".split()
)
# Of these, what nearly every graph applies to its own numbers too. A kernel that is missing leaves all of them on the
# CPU, so they are on shapes there only where others of the same operator are on the GPU.
DATA_OPERATORS = frozenset({"Cast", "Reshape"})

# Libraries that ONNX Runtime loads for operators that no graph of ours has.
_OPTIONAL = ("cufft", "nvrtc", "cudnn")

# Threads of a decoder that sleep between two steps are woken for each; longer awake they would take the cores of the
# next encoder, as those of an encoder would take the decoder's.
STEP_SPIN_US = 1000


class PlacementError(BackendError):
    """Part of a graph would be computed elsewhere than on the device that was asked for."""


class OrtDevice:
    """A device and its memory.

    Nothing here lets numpy look into the device's memory: arrays are copied to it and from it. So the code is the same
    for a GPU and for the CPU.

    Attributes:
        type: "cpu" or "cuda"; of several GPUs the first that CUDA_VISIBLE_DEVICES leaves.
    """

    def __init__(self, device: Device, weights: WeightType | None = None) -> None:
        """Open a device.

        Args:
            device: "cpu" or "cuda".
            weights: of the graphs to load, if they are narrower than the graphs' own type.

        Raises:
            BackendError: ONNX Runtime cannot use the device, or multiplies narrow weights wrongly on it.
        """
        if device == "cuda":
            prepare_cuda()
        self.type = device
        self._config_entries = int8_session_options() if weights else {}

    def load(
        self,
        graph: Path,
        name: str,
        threads: int | None,
        *,
        spin_us: int = 0,
    ) -> ort.InferenceSession:
        """Load a graph onto the device.

        Args:
            graph: path.
            name: used in errors.
            threads: of the CPU for one call; None for as many as ONNX Runtime finds cores.
            spin_us: how long its threads wait awake for the next run, in microseconds.

        Raises:
            BackendError: the graph does not load.
            PlacementError: part of it would run elsewhere.
        """
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        if spin_us:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
        else:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for key, entry in self._config_entries.items():
            options.add_session_config_entry(key, entry)
        try:
            session = ort.InferenceSession(
                str(graph), options, providers=[(PROVIDER[self.type], _OPTIONS[self.type])], enable_fallback=0
            )
        except Exception as error:
            raise BackendError(
                f"ort: {name} does not load in onnxruntime {ort.__version__}, which must be {MINIMUM[self.type]} or "
                f"newer on {self.type}: {first_line(error)}"
            ) from error
        if self.type != "cpu":
            _check_placement(session, name, PROVIDER[self.type])
        return session

    def empty(self, shape: Sequence[int], dtype: DType) -> ort.OrtValue:
        """Reserve memory; what is in it is not defined."""
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), ELEMENT_TYPE[dtype], self.type, 0)

    def upload(self, array: Array) -> ort.OrtValue:
        """Copy an int64 or bool array to the device."""
        value = self.empty(array.shape, "bool" if array.dtype == np.bool_ else "int64")
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        """Let ONNX Runtime reserve an output of a run in the device's memory."""
        binding.bind_output(name, self.type, 0)

    def reserve(self, num_bytes: int) -> ort.OrtValue:
        """Reserve bytes that are bound by their address; what is in them is not defined."""
        return ort.OrtValue.ortvalue_from_shape_and_type([num_bytes], np.uint8, self.type, 0)

    def zeros(self, num_bytes: int) -> ort.OrtValue:
        """Copy bytes that are 0 to the device."""
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(num_bytes, np.uint8), self.type, 0)


def check_contract(session: ort.InferenceSession, name: str, spec: ModelSpec) -> None:
    """Compare the inputs and outputs of a loaded graph with the contract of its name.

    Raises:
        BundleError: lists those that differ.
    """
    inputs, outputs = (
        tuple(TensorSpec(one.name, _DTYPE.get(one.type, one.type), tuple(one.shape)) for one in side)
        for side in (session.get_inputs(), session.get_outputs())
    )
    found = GraphSpec(inputs, outputs)
    problems = contract_problems(found, graph_contract(spec, name, speculation=has_speculation(found)))
    raise_all(BundleError, f"graph {name}", problems, remedy="export the bundle again")


def host_value(array: Array) -> ort.OrtValue:
    """Wrap an array in host memory; the value shares it, and a binding alone does not keep it alive."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def run(session: ort.InferenceSession, binding: ort.IOBinding, *, gives_back: bool = False) -> None:
    """Run a graph on what is bound, and wait for it.

    Args:
        session: the graph.
        binding: its inputs and outputs.
        gives_back: return what the run took of the host's memory; else ONNX Runtime keeps it for the next run.

    Raises:
        BackendError: it failed.
    """
    options = None
    if gives_back:
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:
        raise BackendError(f"ort: the graph failed while running: {first_line(error)}") from error


def still_open(session: ort.InferenceSession | None) -> ort.InferenceSession:
    """Return a graph that was not closed.

    Raises:
        BackendError: it was.
    """
    if session is None:
        raise BackendError("ort: this session is closed; load the bundle again")
    return session


def prepare_cuda() -> None:
    """Load the CUDA libraries that ONNX Runtime's provider is linked to, after a look for a GPU.

    ONNX Runtime itself would say in its log that something is missing, and compute on the CPU.

    Raises:
        BackendError: the build, the driver, a GPU or a library is missing; says which.
    """
    if PROVIDER["cuda"] not in ort.get_available_providers():
        raise BackendError(
            f"ort: the installed onnxruntime {ort.__version__} has no CUDA; "
            f"{replacing_command('gpu')}, or use device cpu"
        )
    if problem := driver_problem():
        raise BackendError(f"ort: {problem}, or use device cpu")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # it prints what it cannot load, and raises nothing
        ort.preload_dlls()
    if sys.platform == "linux":
        # What is printed names libraries that the provider does not need, and misses those that PyTorch brings.
        provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        missing = load_libraries(needed(provider)) if provider.exists() else []
    else:
        failed = [line.split()[3].rstrip(":") for line in printed.getvalue().splitlines() if line.startswith("Failed")]
        missing = [name for name in failed if not any(part in name for part in _OPTIONAL)]
    if missing:
        raise BackendError(
            f"ort: onnxruntime {ort.__version__} was built for CUDA {ort.cuda_version} and cannot load "
            f"{', '.join(dict.fromkeys(missing))} ({where_looked()}); {extra_command('gpu')}, or use device cpu"
        )


def driver_problem(library: str = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1") -> str | None:
    """Ask the NVIDIA driver for a GPU; say what is missing and what to do, or None.

    Args:
        library: of the driver's interface, https://docs.nvidia.com/cuda/cuda-driver-api/.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA driver is installed ({library} is not found); install the NVIDIA driver"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return f"the NVIDIA driver finds no GPU (CUDA error {code}); check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def _check_placement(session: ort.InferenceSession, name: str, provider: str) -> None:
    """Refuse a session that would not compute where it was asked to."""
    if provider not in session.get_providers():
        raise BackendError(
            f"ort: {name}: onnxruntime {ort.__version__} could not start {provider} and took "
            f"{', '.join(session.get_providers())}; tfexport doctor says what is missing"
        )
    elsewhere = misplaced(session, provider)
    if elsewhere:
        raise PlacementError(
            f"ort: {name}: onnxruntime {ort.__version__} has no {provider} kernel for {', '.join(elsewhere)} "
            f"and would compute that on the CPU; update onnxruntime-gpu to {MINIMUM['cuda']} or newer, take the concat "
            "form, export in another precision, or use device cpu"
        )


def misplaced(session: ort.InferenceSession, provider: str) -> list[str]:
    """List the operators that a session runs elsewhere than on `provider`, those on shapes left out."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    for part in session.get_provider_graph_assignment_info():
        (here if part.ep_name == provider else elsewhere).update(node.op_type for node in part.get_nodes())
    on_shapes = SHAPE_OPERATORS - (DATA_OPERATORS - here)
    return sorted(elsewhere - on_shapes)
