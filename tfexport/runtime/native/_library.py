"""Call the C interface of the compiled library."""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, byref, c_char, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tfexport.errors import BackendError

MODULE = "tfexport_native"
VERSION = 3
# One library per set of instructions, the fastest first.
KERNELS = ("avx512", "avx2", "baseline")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_PREFIX = "tfexport_native_"
_INVALID = 1


class StackConfig(Structure):
    """Sizes and switches of one side."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "heads", "head_width", "d_ff")),
        *((name, c_int32) for name in ("is_pre", "final_norm", "embedding_norm", "activation", "glu", "mixer")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "norm_eps", "attention_scale")),
    )


class Config(Structure):
    """Sizes and switches of a model."""

    _fields_ = (
        *((name, c_int64) for name in ("d_model", "source_vocab", "target_vocab")),
        *((name, c_int64) for name in ("max_source_length", "max_target_length")),
        *((name, c_int32) for name in ("norm", "has_positions", "is_tied")),
        ("logit_scale", c_float),
        ("encoder", StackConfig),
        ("decoder", StackConfig),
    )


class TensorView(Structure):
    """A tensor, or with null for `values` none; block 0 is float32."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "zeros")),
        *((name, c_int64) for name in ("rows", "columns", "block")),
    )


# Writes the next tensor and returns 0, or another number if there are no more.
NextTensor = CFUNCTYPE(c_int32, POINTER(TensorView))


class BeamArrays(Structure):
    """Beam searches of all sources, and room for texts that finish."""

    _fields_ = (
        *((name, c_int64) for name in ("candidates", "extensions", "early", "room", "num_ends")),
        *((name, c_int64) for name in ("num_divisors", "most_finished", "num_finished")),
        *((name, c_void_p) for name in ("ends", "divisors", "limits", "least", "num_new", "states", "tokens")),
        *((name, c_void_p) for name in ("running", "finished", "sources", "lengths", "ids", "scores", "log_probs")),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "version": (),
    "is_supported": (),
    "model": (POINTER(Config), NextTensor, POINTER(c_void_p)),
    "free_model": (c_void_p,),
    "batch": (c_void_p, c_int64, c_int64, POINTER(c_void_p)),
    "free_batch": (c_void_p,),
    "add": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    "step": (c_void_p, c_void_p, c_int64, c_int64, *(c_void_p,) * 4),
    "steps": (c_void_p, c_void_p, *(c_int64,) * 3, *(c_void_p, c_int64) * 2, *(c_void_p,) * 3, POINTER(c_int64)),
    "beams": (c_void_p, POINTER(BeamArrays), c_int64, c_int64, POINTER(c_int64)),
    "reorder": (c_void_p, c_void_p, c_int64),
    "remove": (c_void_p, c_void_p, c_int64),
}


class Library:
    """The functions of one library; pointers are those of NumPy arrays."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
            self._functions = {name: getattr(loaded, _PREFIX + name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise BackendError(f"native: {path.name} cannot be loaded ({error}); {_reinstall()}") from None
        for name, function in self._functions.items():
            function.argtypes, function.restype = _FUNCTIONS[name], c_int32
        if (version := self._functions["version"]()) != VERSION:
            raise BackendError(f"native: {path.name} has version {version}, expected {VERSION}; {_reinstall()}")
        self.path, self.is_supported = path, bool(self._functions["is_supported"]())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise `BackendError` if it fails."""
        status = self._functions[name](*arguments)
        if status:
            if status == _INVALID:
                raise BackendError(f"native: {name} refused its arguments; begin a new batch, and report a bug")
            raise BackendError(f"native: {name} ran out of memory; close other programs or use smaller batches")

    def make(self, name: str, *arguments: Any) -> int:
        """Call a function that makes an object; return its address."""
        made = c_void_p()
        self.call(name, *arguments, byref(made))
        assert made.value is not None
        return made.value

    def free(self, name: str, address: int) -> None:
        """Free an object."""
        self._functions[f"free_{name}"](address)


def address(array: NDArray[Any]) -> int:
    """Return where an array begins, in a fifth of the time of `array.ctypes.data`."""
    usual = array.size and array.flags.writeable
    return addressof(c_char.from_buffer(array)) if usual else array.ctypes.data  # type: ignore[arg-type]  # a buffer


def _reinstall() -> str:
    return "install it again: pip install --force-reinstall tfexport-native"


@functools.cache
def find_library() -> Library:
    """Open the fastest library that this CPU can run."""
    folder = Path(str(importlib.import_module(MODULE).__file__)).parent
    for kernels in KERNELS:
        path = folder / f"{kernels}{SUFFIX}"
        if path.exists() and (library := Library(path)).is_supported:
            return library
    raise BackendError(f"native: {folder} has no library for this CPU; {_reinstall()}")
