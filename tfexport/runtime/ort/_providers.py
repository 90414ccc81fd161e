"""Describe ONNX Runtime's execution providers, and find the libraries of CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort

from tfexport._io.extras import extra_command, replacing_command
from tfexport.contract import DeviceKind, Variant
from tfexport.errors import BackendError
from tfexport.precision import Precision

# Folders on Python's path with CUDA libraries: of NVIDIA's wheels, which PyTorch also uses, and of PyTorch's own.
LIBRARY_FOLDERS = ("nvidia/*/lib", "torch/lib")
# Libraries for operators that our graphs do not use.
_OPTIONAL_LIBRARIES = ("cufft", "nvrtc", "cudnn")
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# https://refspecs.linuxfoundation.org/elf/elf.pdf, with the sizes of 64 bits
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB = 1, 5

# Operators on shapes, which ONNX Runtime intentionally runs on the CPU if a graph runs on a GPU.
SHAPE_OPERATORS = frozenset(
    "Add Cast Concat Constant ConstantOfShape Div Equal Expand Gather Identity Less LessOrEqual Max Min Mod Mul Range "
    "Reshape Shape Size Slice Squeeze Sub Unsqueeze Where".split()
)
# Shape operators that almost every graph also applies to its data. If all of them are on the CPU, their kernel is
# missing; otherwise those on the CPU are operators on shapes.
DATA_OPERATORS = frozenset({"Cast", "Reshape"})


class PlacementError(BackendError):
    """Part of a graph would run on another device than the requested one."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An execution provider."""

    device: DeviceKind
    ort_name: str
    minimum: str  # oldest version of the package that works; the extras require the same version
    variants: tuple[Variant, ...]  # decoder variants that it runs, the fastest first
    precisions: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
    is_host: bool = False  # whether it uses host memory, so that NumPy can share arrays with it
    options: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[int], None] = lambda number: None  # raises `BackendError` if the device cannot be used
    memory: Callable[[int], tuple[int, int] | None] = lambda number: None  # free and all bytes; None if unknown

    def check_placement(self, session: ort.InferenceSession, name: str) -> None:
        """Raise an error if the provider did not start or lacks a kernel of the graph."""
        if self.ort_name not in session.get_providers():
            raise BackendError(
                f"ort: {name}: onnxruntime {ort.__version__} could not start {self.ort_name} and took "
                f"{', '.join(session.get_providers())}; find the cause with tfexport doctor"
            )
        if elsewhere := misplaced(session, self.ort_name):
            raise PlacementError(
                f"ort: {name}: onnxruntime {ort.__version__} has no {self.ort_name} kernel for {', '.join(elsewhere)} "
                f"and would compute that on the CPU; update onnxruntime-gpu to {self.minimum} or newer, use the "
                "concat decoder variant, export in another precision, or use device cpu"
            )


def misplaced(session: ort.InferenceSession, ort_name: str) -> list[str]:
    """Return the operators, except those on shapes, that run on another provider."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    for part in session.get_provider_graph_assignment_info():
        (here if part.ep_name == ort_name else elsewhere).update(node.op_type for node in part.get_nodes())
    on_shapes = SHAPE_OPERATORS - (DATA_OPERATORS - here)
    return sorted(elsewhere - on_shapes)


def prepare_cuda(number: int = 0) -> None:
    """Load CUDA's libraries; raise `BackendError` if one or the GPU is missing."""
    # ONNX Runtime itself would only log that something is missing and run on the CPU.
    if CUDA.ort_name not in ort.get_available_providers():
        raise BackendError(
            f"ort: the installed onnxruntime {ort.__version__} has no CUDA; "
            f"{replacing_command('gpu')}, or use device cpu"
        )
    if problem := driver_problem(number=number):
        raise BackendError(f"ort: {problem}, or use device cpu")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # it prints the libraries that it cannot load, but does not raise
        ort.preload_dlls()
    if sys.platform == "linux":
        # The printed names include libraries that the provider does not need, and ignore those of PyTorch's wheels.
        provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        missing = load_libraries(needed(provider)) if provider.exists() else []
    else:
        failed = [line.split()[3].rstrip(":") for line in printed.getvalue().splitlines() if line.startswith("Failed")]
        missing = [name for name in failed if not any(part in name for part in _OPTIONAL_LIBRARIES)]
    if missing:
        raise BackendError(
            f"ort: onnxruntime {ort.__version__} was built for CUDA {ort.cuda_version} and cannot load "
            f"{', '.join(dict.fromkeys(missing))} ({where_looked()}); {extra_command('gpu')}, or use device cpu"
        )


def gpu_memory(number: int, library: str = _DRIVER) -> tuple[int, int] | None:
    """Return the free and all bytes of a GPU; None if the driver does not report them."""
    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    try:
        driver = ctypes.CDLL(library)
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
            return None
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            return None
        try:
            if driver.cuCtxPushCurrent_v2(context):
                return None
            code = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
            return None if code or not total.value else (free.value, total.value)
        finally:
            driver.cuDevicePrimaryCtxRelease_v2(device)
    except (OSError, AttributeError):
        return None


# To add an execution provider, add it here and its device to `tfexport.contract.DEVICE`.
CPU = Provider(
    device="cpu",
    ort_name="CPUExecutionProvider",
    minimum="1.25",
    variants=("contrib", "static", "concat"),
    precisions=("fp32", "fp16"),
    is_host=True,
)
CUDA = Provider(
    device="cuda",
    ort_name="CUDAExecutionProvider",
    minimum="1.30",
    variants=("static", "concat"),
    # TF32 keeps 10 bits of a float32 product, too few for a bundle in fp32. The first GPU is the default; if its number
    # is given, onnxruntime 1.31 looks for a plugin and warns that there is none.
    options={"use_tf32": "0"},
    prepare=prepare_cuda,
    memory=gpu_memory,
)
PROVIDERS: dict[DeviceKind, Provider] = {provider.device: provider for provider in (CPU, CUDA)}


def driver_problem(library: str = _DRIVER, number: int = 0) -> str | None:
    """Find a GPU through CUDA's driver API; return the problem and its fix."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA driver is installed ({library} is not found); install the NVIDIA driver"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return f"the NVIDIA driver finds no GPU (CUDA error {code}); check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if number >= count.value:
        return f"device is cuda:{number}, the last GPU is cuda:{count.value - 1}; check CUDA_VISIBLE_DEVICES"
    return None


def needed(library: Path) -> list[str]:
    """Return the libraries that a 64-bit little-endian ELF library is linked to."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
        ((start, length),) = [(offset, size) for kind, _, offset, _, _, size in segments if kind == _PT_DYNAMIC]
        entries = list(struct.iter_unpack("<qQ", data[start : start + length]))
        address = dict(entries)[_DT_STRTAB]
        (strings,) = [
            offset + address - begin
            for kind, _, offset, begin, _, size in segments
            if kind == _PT_LOAD and begin <= address < begin + size
        ]
        names = [strings + value for tag, value in entries if tag == _DT_NEEDED]
        return [data[name : data.find(b"\0", name)].decode() for name in names]


def load_libraries(names: Sequence[str]) -> list[str]:
    """Load libraries from the system or Python packages; return those that fail."""
    folders, missing = [folder for _, folder in _library_folders()], list(names)
    while left := [name for name in missing if not any(map(_loads, (name, *(str(path / name) for path in folders))))]:
        if left == missing:
            break
        missing = left  # try again, because one library may need another
    return left


def where_looked() -> str:
    """Describe the places that `load_libraries` searches."""
    roots = dict.fromkeys(root for root, _ in _library_folders())
    found = f"{' and '.join(LIBRARY_FOLDERS)} of {', '.join(roots)}"
    none = f"no {' or '.join(LIBRARY_FOLDERS)} on Python's path"
    return f"looked in LD_LIBRARY_PATH, the system's folders and {found if roots else none}"


def _library_folders() -> Iterator[tuple[str, Path]]:
    for root in filter(None, dict.fromkeys(sys.path)):
        for pattern in LIBRARY_FOLDERS:
            yield from ((root, folder) for folder in sorted(Path(root).glob(pattern)))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
