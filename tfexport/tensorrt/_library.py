"""Import TensorRT 10, TensorRT 11 or TensorRT-RTX and hide their differences.

Flags, enums and types are looked up by name, because their numbers differ between the libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport._io.extras import install_command
from tfexport.errors import BackendError, EngineError, first_line
from tfexport.tensorrt.config import Target
from tfexport.tensorrt.cuda import find_gpus, need_gpu

MODULES: dict[Target, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL: dict[Target, str] = {target: install_command(module) for target, module in MODULES.items()}
# Compute capabilities that TensorRT-RTX builds for by default, and those in its enum (measured with 1.7.1).
PORTABLE = ("8.0", "8.6", "8.9", "12.0", "12.1")
NAMED = ("7.5", *PORTABLE)

# A normal build logs a few dozen lines.
MAX_RECORDS = 2_000
MAX_ERRORS = 50
MAX_MESSAGE = 2_000

_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")
# Without a driver, this follows every other error. It is the reason only if it is the only error.
_NO_DRIVER = "cudaError 35"
# Names of the contract by those of `DataType`.
_DTYPES = {"INT64": "int64", "BOOL": "bool", "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


class Log:
    """Newest messages from INFO up of all calls of the library."""

    def __init__(self) -> None:
        self.records: deque[tuple[str, str]] = deque(maxlen=MAX_RECORDS)  # severity and message

    def lines(self) -> list[str]:
        return [f"{severity} {line}" for severity, message in list(self.records) for line in message.splitlines()]

    def problems(self) -> list[str]:
        """Return each distinct error in one line, without errors about a missing driver."""
        errors = [message for severity, message in list(self.records) if severity.endswith("ERROR")][-MAX_ERRORS:]
        found = filter(None, map(without_noise, errors))
        return list(dict.fromkeys(found) or dict.fromkeys(" ".join(error.split()) for error in errors))

    def reason(self) -> str:
        return "; ".join(self.problems()) or "TensorRT gives no reason"


class Logger:
    """Logger of the whole process, because the library ignores a second one."""

    def __init__(self) -> None:
        super().__init__()
        self._logs: weakref.WeakSet[Log] = weakref.WeakSet()
        self._lock = threading.Lock()

    def listen(self) -> Log:
        log = Log()
        with self._lock:
            self._logs.add(log)
        return log

    def log(self, severity: Any, message: str) -> None:
        # The library calls this from any thread.
        if severity.name in _SEVERITIES:
            with self._lock:
                logs = list(self._logs)
            for log in logs:
                log.records.append((severity.name, message[:MAX_MESSAGE]))


@dataclass(frozen=True)
class Library:
    target: Target
    trt: Any  # the module
    version: str  # in full, such as "1.7.1.116"
    logger: Logger  # also an `ILogger`

    def __str__(self) -> str:
        return f"{self.target} {self.version}"

    @property
    def builds_without_gpu(self) -> bool:
        return hasattr(self.trt.IBuilderConfig, "num_compute_capabilities")

    @property
    def updates_caches_in_place(self) -> bool:
        """Whether the library supports `TensorScatter`, which the static variant needs."""
        return hasattr(self.trt.LayerType, "KV_CACHE_UPDATE")

    def listen(self) -> Log:
        return self.logger.listen()

    def builder(self, log: Log) -> Any:
        """Create an `IBuilder`; raise `BackendError` if it needs a GPU and there is none."""
        if not self.builds_without_gpu:
            need_gpu()
        return self._make(self.trt.Builder, log)

    def runtime(self, log: Log) -> Any:
        need_gpu()  # without a GPU, the library crashes the process
        return self._make(self.trt.Runtime, log)

    def _make(self, cls: Any, log: Log) -> Any:
        try:
            return cls(self.logger)
        except TypeError as error:  # the bindings raise it for a null pointer
            raise EngineError(f"{self}: cannot create a {cls.__name__}: {log.reason()}") from error

    def strongly_typed(self) -> int:
        """Return the flags of `create_network` that take types only from the graph."""
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def dtype_name(self, dtype: Any) -> str:
        """Return the contract's name of a `DataType`, or the library's if it has none."""
        return _DTYPES.get(dtype.name, str(dtype.name))

    def compute_capabilities(self) -> dict[str, Any]:
        """Return capabilities to build for, {"8.6": SM86}; empty if only the local one."""
        names = getattr(getattr(self.trt, "ComputeCapability", None), "__members__", {})
        numbers = {name: match for name in names if (match := re.fullmatch(r"SM(\d+)(\d)", name))}
        return {f"{match[1]}.{match[2]}": names[name] for name, match in numbers.items()}

    def unlisted(self, capabilities: Sequence[str]) -> str:
        """Return the remedy if a compute capability is not listed; empty if all are."""
        known = self.compute_capabilities()
        unknown = ", ".join(capability for capability in capabilities if known and capability not in known)
        return f"{self} {unlisted(unknown, known)}" if unknown else ""


_lock = threading.Lock()
_loaded: list[Library] = []


def installed_targets() -> tuple[Target, ...]:
    return tuple(target for target, module in MODULES.items() if importlib.util.find_spec(module) is not None)


def load_library(target: Target | None = None) -> Library:
    """Import a library, once per process; None is the loaded one, else `_choose`."""
    with _lock:
        if not _loaded:
            chosen = target or _choose(installed_targets(), has_gpu=bool(find_gpus()))
            _loaded.append(_import(chosen))
        library = _loaded[0]
    if target not in (None, library.target):
        raise BackendError(
            f"{target}: {library.target} is already loaded, and a process can use only one of them; use another process"
        )
    return library


def unlisted(capability: str, known: Iterable[str] = NAMED) -> str:
    others = "use --target tensorrt on such a GPU, or ONNX Runtime with --device cuda"
    return f"lists no support for compute capability {capability}, only for {', '.join(known)}; {others}"


def without_noise(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines() if _NO_DRIVER not in line)


def _choose(installed: tuple[Target, ...], *, has_gpu: bool) -> Target:
    if "tensorrt" in installed and has_gpu:
        return "tensorrt"
    if "tensorrt-rtx" in installed:
        return "tensorrt-rtx"
    if installed:
        raise BackendError(
            "tensorrt: it is installed but needs a GPU to build and run, and there is none; "
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
        raise BackendError(f"{target}: the module {name} is incomplete, it has no {', '.join(missing)}; {repair}")
    logger = type("TensorRTLogger", (Logger, module.ILogger), {})()
    return Library(target, module, module.__version__, logger)
