"""Wrap an engine, its execution contexts and CUDA graphs.

Every refusal of the library becomes a `BackendError`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

from tfexport.contract import GraphSpec
from tfexport.errors import BackendError, raise_all
from tfexport.tensorrt._kernels import RuntimeCacheStore
from tfexport.tensorrt.config import Shape, most_profiles
from tfexport.tensorrt.cuda import Cuda, CudaGraph
from tfexport.tensorrt.session._profile import LayerProfile, LayerTimer

# Shapes change between runs; shapes stay and `CudaGraphRunner` captures them; shapes stay and the library does.
Use = Literal["any shapes", "be captured", "replay itself"]
# CUDA graphs of one kind per replica. Six batch sizes, three source lengths and two numbers of candidates are 36. With
# too few, a shrinking batch evicts graphs that it needs again, and each takes a context, a run and a capture.
MAX_GRAPHS = 64

_log = logging.getLogger(__name__)


class Engine:
    """A deserialized engine that creates contexts for any number of threads."""

    def __init__(
        self,
        name: str,
        engine: Any,
        trt: Any,
        reason: Callable[[], str],
        kernels: RuntimeCacheStore | None = None,
        profile: LayerProfile | None = None,
    ) -> None:
        """Wrap an `ICudaEngine` of the module `trt`; `reason` returns the newest errors.

        With a `profile`, the layers of every run are timed, and nothing is captured.
        """
        self.name, self._profile = name, profile
        self._engine, self._trt, self._reason, self._store = engine, trt, reason, kernels
        self._kernels: Any = None  # an `IRuntimeCache` that all contexts share, from the first one on
        self._lock = threading.Lock()

    def check(self, contract: GraphSpec, aliases: Mapping[str, str]) -> None:
        """Raise `BackendError` if tensors, profiles or aliases (output: input) differ."""
        engine = self._engine
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        wanted = {tensor.name for tensor in (*contract.inputs, *contract.outputs)}
        problems = [f"has {name}, which the graph does not have" for name in sorted(found - wanted)]
        problems += [f"lacks {name}" for name in sorted(wanted - found)]
        most = most_profiles(self.name, contract.inputs)
        if not 1 <= self.num_profiles <= most:
            problems.append(f"has {self.num_profiles} profiles, expected at most {most}")
        if not problems and hasattr(engine, "get_aliased_input_tensor"):
            problems += [
                f"does not write {output} into the memory of {source}"
                for output, source in aliases.items()
                if engine.get_aliased_input_tensor(output) != source
            ]
        raise_all(BackendError, f"trt: the engine {self.name}, build it again with tfexport trt --force", problems)

    @property
    def num_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def activation_bytes(self, profile: int) -> int:
        """Return the device memory for activations in a profile, for any shapes."""
        for name in ("get_device_memory_size_for_profile_v2", "get_device_memory_size_for_profile"):
            if hasattr(self._engine, name):
                return int(getattr(self._engine, name)(profile))
        # The older property has only 32 bits.
        return int(getattr(self._engine, "device_memory_size_v2", None) or self._engine.device_memory_size)

    def largest_shape(self, name: str, profile: int) -> Shape:
        return tuple(self._engine.get_tensor_profile_shape(name, profile)[2])

    def context(self, profile: int, stream: int, use: Use) -> Context:
        """Create a context; call `use_memory` on it before it runs."""
        with self._lock:
            made = self._make(use)
            if made is None:
                raise BackendError(f"trt: cannot create an execution context for {self.name}: {self._reason()}")
            if not made.set_optimization_profile_async(profile, stream):
                raise BackendError(f"trt: {self.name} refuses its profile {profile}: {self._reason()}")
        if self._profile is None:
            return Context(self.name, made, self._reason)
        made.profiler = timer = type("TensorRTProfiler", (LayerTimer, self._trt.IProfiler), {})()
        return TimedContext(self.name, made, self._reason, self._profile, timer)

    def kernels(self) -> bytes | None:
        """Return the serialized kernels, or None if the library compiles none."""
        with self._lock:
            serialized = None if self._kernels is None else self._kernels.serialize()
        return None if serialized is None else bytes(serialized)

    def _make(self, use: Use) -> Any:
        user_managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._engine, "create_runtime_config"):
            return self._engine.create_execution_context(user_managed)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        if hasattr(config, "cuda_graph_strategy"):
            strategies = self._trt.CudaGraphStrategy
            captures = use == "replay itself" and self._profile is None
            config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if captures else strategies.DISABLED
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # Kernels compiled in the background come too late for a captured graph, which keeps the general ones. If
            # shapes change all the time, waiting for specialized kernels would take longer than they save.
            strategies = self._trt.DynamicShapesKernelSpecializationStrategy
            strategy = strategies.LAZY if use == "any shapes" else strategies.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        if hasattr(config, "create_runtime_cache"):
            if self._kernels is None:
                self._kernels = config.create_runtime_cache()
                stored = self._store.read(self.name) if self._store else None
                if stored is not None:
                    self._kernels.deserialize(stored)  # the library recompiles kernels that it does not accept
            if not config.set_runtime_cache(self._kernels):
                raise BackendError(f"trt: {self.name} refuses a cache for its kernels: {self._reason()}")
        return self._engine.create_execution_context(config)


class Context:
    """An execution context; shapes and addresses stay until they are set again."""

    def __init__(self, name: str, context: Any, reason: Callable[[], str]) -> None:
        self.name, self._context, self._reason = name, context, reason

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set shapes of inputs and addresses, which are on the host for shape inputs."""
        self.place(addresses)  # first, because shapes can depend on a value that is stored at an address
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, shape):
                spelled = "x".join(map(str, shape))
                raise BackendError(
                    f"trt: {self.name} refuses the shape {spelled} of {name}: {self._reason()}; use smaller batches, "
                    f"or build engines for more: tfexport trt BUNDLE --maxShapes {name}:{spelled} --force"
                )
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise BackendError(f"trt: {self.name} cannot infer its shapes: {self._reason()}") from error
        if missing:
            raise BackendError(f"trt: {self.name} still lacks the shape or address of {', '.join(missing)}")

    def use_memory(self, address: int, num_bytes: int) -> None:
        """Set the activation memory; contexts that do not run at once may share it."""
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(address, num_bytes)
        else:
            self._context.device_memory = address

    def place(self, addresses: Mapping[str, int]) -> None:
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise BackendError(f"trt: {self.name} refuses the address of {name}: {self._reason()}")

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, after `bind`."""
        return tuple(self._context.get_tensor_shape(name))

    def run(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise BackendError(f"trt: {self.name} failed: {self._reason()}")

    def can_be_captured(self, stream: int) -> bool:
        """Return whether a run with the current shapes can become a CUDA graph."""
        is_capturable = getattr(self._context, "is_stream_capturable", None)
        return is_capturable is None or bool(is_capturable(stream))


class TimedContext(Context):
    """A context whose layers are timed; replays of CUDA graphs would not be."""

    def __init__(
        self, name: str, context: Any, reason: Callable[[], str], profile: LayerProfile, timer: LayerTimer
    ) -> None:
        super().__init__(name, context, reason)
        self._profile, self._timer = profile, timer

    def run(self, stream: int) -> None:
        super().run(stream)
        self._profile.record(self.name, self._timer)

    def can_be_captured(self, stream: int) -> bool:
        return False


class CudaGraphRunner:
    """Queues repeated calls on one stream, from the second run on as a CUDA graph.

    The first run is not captured, because engines then prepare for their shapes, which a capture does not allow. After
    a failed capture, all runners of the session queue their calls one by one.
    """

    def __init__(self, context: Context, cuda: Cuda, stream: int, has_failed: threading.Event) -> None:
        self.context = context  # that the calls run
        self._cuda, self._stream, self._has_failed = cuda, stream, has_failed
        self._captures: bool | None = None
        self._graphs: dict[str, CudaGraph] = {}

    def run(self, name: str, queue: Callable[[], None], can_capture: Callable[[], bool]) -> None:
        """Call `queue` or launch its graph; equal names mean equal calls.

        `queue` must neither wait nor allocate, and is called again if its capture fails. `can_capture` is called once,
        after the first run. It is not stored, because a reference cycle could free contexts during a capture.
        """
        if self._captures and name not in self._graphs and not self._has_failed.is_set():
            self._capture(name, queue)
        if name in self._graphs:
            self._cuda.launch(self._graphs[name], self._stream)
            return
        queue()
        if self._captures is None:
            self._captures = can_capture()

    def close(self) -> None:
        while self._graphs:
            self._cuda.destroy_graph(self._graphs.popitem()[1])

    def _capture(self, name: str, queue: Callable[[], None]) -> None:
        self._cuda.synchronize(self._stream)  # the first run may still be preparing
        try:
            with self._cuda.capture(self._stream) as graph:
                queue()
            self._graphs[name] = graph
        except BackendError as error:
            if not self._has_failed.is_set():
                self._has_failed.set()
                _log.warning("trt: decoding goes on without CUDA graphs, so steps take longer: %s", error)


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class LruCache(Generic[T]):
    """The `most` recently used items; calls `before_close` before closing one."""

    def __init__(self, most: int, before_close: Callable[[], None]) -> None:
        self._most, self._before_close = most, before_close
        self._items: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._items.pop(key, None)
        if found is None:
            if len(self._items) == self._most:
                self._before_close()
                self._items.pop(next(iter(self._items))).close()
            found = make()
        self._items[key] = found  # dictionaries keep insertion order
        return found

    def clear(self) -> None:
        if self._items:
            self._before_close()
        while self._items:
            self._items.popitem()[1].close()
