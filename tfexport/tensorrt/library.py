"""The bridge: TensorRT 10, TensorRT 11 and TensorRT-RTX behind one face, told apart by what they can do.

The three differ in methods, flags and enums. Here each is asked for by name, so
that a number which means something else in another version never travels.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from dataclasses import dataclass
from typing import Any

from tfexport._io.extras import install_command
from tfexport.contract import DType
from tfexport.errors import BackendError, EngineError, first_line
from tfexport.tensorrt.config import Target
from tfexport.tensorrt.cuda import find_gpus, need_gpu
from tfexport.tensorrt.log import Log, Logger

MODULES: dict[Target, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL: dict[Target, str] = {target: install_command(module) for target, module in MODULES.items()}
# What TensorRT-RTX builds for when nothing is said, and what its enum names (measured with 1.7.1).
PORTABLE = ("8.0", "8.6", "8.9", "12.0", "12.1")
NAMED = ("7.5", *PORTABLE)

_DTYPES: dict[DType, str] = {
    "int64": "INT64",
    "bool": "BOOL",
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
}
_lock = threading.Lock()
_loaded: list[Library] = []


@dataclass(frozen=True)
class Library:
    """One of the libraries, imported.

    Attributes:
        target: which one.
        trt: the module.
        version: its full version, such as "1.7.1.116".
        logger: the one logger that everything of this library gets, an `ILogger`.
    """

    target: Target
    trt: Any
    version: str
    logger: Logger

    @property
    def builds_without_gpu(self) -> bool:
        """Whether engines are built for named compute capabilities rather than for the GPU at hand."""
        return hasattr(self.trt.IBuilderConfig, "num_compute_capabilities")

    @property
    def updates_caches_in_place(self) -> bool:
        """Whether there is a layer for `TensorScatter`, which the static form needs."""
        return hasattr(self.trt.LayerType, "KV_CACHE_UPDATE")

    def listen(self) -> Log:
        """Begin to listen to what the library says, to know the reason when something fails."""
        return self.logger.listen()

    def builder(self, log: Log) -> Any:
        """Make an `IBuilder`.

        Args:
            log: has the reason when it fails.

        Raises:
            BackendError: this library builds on a GPU, and there is none.
            EngineError: the library refuses.
        """
        if not self.builds_without_gpu:
            need_gpu()
        return self._make(self.trt.Builder, log)

    def runtime(self, log: Log) -> Any:
        """Make an `IRuntime`.

        Args:
            log: has the reason when it fails.

        Raises:
            BackendError: there is no GPU; without one the library takes the process down.
            EngineError: the library refuses.
        """
        need_gpu()
        return self._make(self.trt.Runtime, log)

    def _make(self, cls: Any, log: Log) -> Any:
        try:
            made = cls(self.logger)
        except TypeError as error:  # what the bindings make of a null pointer
            raise EngineError(f"{self.target} {self.version}: {cls.__name__} cannot be made: {log.reason()}") from error
        if made is None:
            raise EngineError(f"{self.target} {self.version}: {cls.__name__} cannot be made: {log.reason()}")
        return made

    def strongly_typed(self) -> int:
        """Return the flags for `create_network`: types come from the graph alone."""
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def dtype_name(self, dtype: Any) -> str:
        """Spell a `DataType` as the graph contract does; one that it does not have in the library's spelling."""
        return {library: ours for ours, library in _DTYPES.items()}.get(dtype.name, str(dtype.name))

    def compute_capabilities(self) -> dict[str, Any]:
        """Return what engines can be built for anywhere, such as {"8.6": SM86}; empty where the GPU at hand decides."""
        names = getattr(getattr(self.trt, "ComputeCapability", None), "__members__", {})
        numbers = {name: match for name in names if (match := re.fullmatch(r"SM(\d+)(\d)", name))}
        return {f"{match[1]}.{match[2]}": names[name] for name, match in numbers.items()}


def installed_targets() -> tuple[Target, ...]:
    """List the libraries that are installed, without importing them."""
    return tuple(target for target, module in MODULES.items() if importlib.util.find_spec(module) is not None)


def load_library(target: Target | None = None) -> Library:
    """Import one of the libraries, once and for the whole process.

    Args:
        target: None takes what was loaded before, else TensorRT where it is installed and a GPU is there, else
            TensorRT-RTX.

    Raises:
        BackendError: it is not installed, not usable, or the other one is loaded already.
    """
    with _lock:
        if not _loaded:
            chosen = target or _choose(installed_targets(), has_gpu=bool(find_gpus()))
            _loaded.append(_import(chosen))
        library = _loaded[0]
    if target not in (None, library.target):
        raise BackendError(
            f"{target}: {library.target} is loaded in this process already, and the two do not go together; "
            "use another process"
        )
    return library


def _choose(installed: tuple[Target, ...], *, has_gpu: bool) -> Target:
    if "tensorrt" in installed and has_gpu:
        return "tensorrt"
    if "tensorrt-rtx" in installed:
        return "tensorrt-rtx"
    if installed:
        raise BackendError(
            "tensorrt: it is installed but builds and runs on a GPU only, and there is none here; "
            f"to build without one: {INSTALL['tensorrt-rtx']}"
        )
    raise BackendError(
        f"tensorrt: no library is installed; {INSTALL['tensorrt']} (TensorRT), "
        f"or {INSTALL['tensorrt-rtx']} (TensorRT-RTX, which builds without a GPU too)"
    )


def _import(target: Target) -> Library:
    name = MODULES[target]
    if importlib.util.find_spec(name) is None:
        raise BackendError(f"{target}: it is not installed; {INSTALL[target]}")
    repair = f"{INSTALL[target]} --force-reinstall"
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise BackendError(f"{target}: its library cannot be loaded ({first_line(error)}); {repair}") from error
    parts = ("Builder", "Runtime", "OnnxParser", "ILogger", "__version__")
    missing = [part for part in parts if not hasattr(module, part)]
    if missing:
        raise BackendError(f"{target}: the module {name} is hollow, it has no {', '.join(missing)}; {repair}")
    logger = type("TensorRTLogger", (Logger, module.ILogger), {})()
    return Library(target, module, module.__version__, logger)
