"""One engine and its execution contexts: every False, None and missing name of the library becomes an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from tfexport.contract import GraphSpec
from tfexport.errors import BackendError, raise_all

Shape = tuple[int, ...]
# Shapes that change from run to run; shapes that stay and are captured by us; the same, captured by the library.
Use = Literal["any shapes", "be captured", "replay itself"]


class KeptKernels(Protocol):
    """Where compiled kernels are kept from process to process; see `tfexport.tensorrt.artifact.kernels.KernelStore`."""

    def read(self, plan: str) -> bytes | None:
        """Return what is kept for an engine, None where nothing fits."""
        ...

    def write(self, kernels: Mapping[str, bytes]) -> None:
        """Keep kernels by the name of their engine."""
        ...


class Engine:
    """A deserialised engine that makes contexts, for any number of threads.

    Where the library compiles kernels when it first needs them (TensorRT-RTX),
    all contexts of a engine share one cache of what was compiled.

    Attributes:
        name: of the graph it was built from.
    """

    def __init__(
        self, name: str, engine: Any, trt: Any, reason: Callable[[], str], kept: KeptKernels | None = None
    ) -> None:
        """Take an engine.

        Args:
            name: of the graph it was built from.
            engine: `ICudaEngine`.
            trt: the module it comes from.
            reason: says what the library's log holds of the newest failure.
            kept: kernels of earlier processes.
        """
        self.name = name
        self._engine, self._trt, self._reason, self._kept = engine, trt, reason, kept
        self._kernels: Any = None  # an `IRuntimeCache`, from the first context on
        self._lock = threading.Lock()

    def check(self, contract: GraphSpec, num_profiles: int, aliases: Mapping[str, str]) -> None:
        """Refuse an engine that is not what the session drives.

        Args:
            contract: the inputs and outputs that it must have.
            num_profiles: how many optimization profiles it must have.
            aliases: input in whose memory each of these outputs must lie.

        Raises:
            BackendError: lists every difference.
        """
        engine = self._engine
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        wanted = {tensor.name for tensor in (*contract.inputs, *contract.outputs)}
        problems = [f"has {name}, which the graph has not" for name in sorted(found - wanted)]
        problems += [f"lacks {name}" for name in sorted(wanted - found)]
        if engine.num_optimization_profiles != num_profiles:
            problems.append(f"has {engine.num_optimization_profiles} profiles, expected {num_profiles}")
        if not problems and hasattr(engine, "get_aliased_input_tensor"):
            problems += [
                f"does not write {output} into the memory of {wanted_input}"
                for output, wanted_input in aliases.items()
                if engine.get_aliased_input_tensor(output) != wanted_input
            ]
        raise_all(BackendError, f"trt: the engine {self.name}, build it again with tfexport trt --force", problems)

    def activation_bytes(self, profile: int) -> int:
        """Return the device memory for the activations of a context in a profile, whatever its shapes."""
        for name in ("get_device_memory_size_for_profile_v2", "get_device_memory_size_for_profile"):
            if hasattr(self._engine, name):
                return int(getattr(self._engine, name)(profile))
        # The older name holds 32 bits where it is all there is.
        whole = "device_memory_size_v2" if hasattr(self._engine, "device_memory_size_v2") else "device_memory_size"
        return int(getattr(self._engine, whole))

    def largest_shape(self, name: str, profile: int) -> Shape:
        """Return the largest shape of an input in a profile."""
        _, _, largest = self._engine.get_tensor_profile_shape(name, profile)
        return tuple(largest)

    def context(self, profile: int, stream: int, use: Use) -> Context:
        """Make a context, which needs memory for its activations before it runs.

        Args:
            profile: index of the optimization profile.
            stream: that it will run on.
            use: what it is for.

        Raises:
            BackendError: the library makes none.
        """
        with self._lock:
            made = self._make(use)
            if made is None:
                raise BackendError(f"trt: no execution context for {self.name}: {self._reason()}")
            if not made.set_optimization_profile_async(profile, stream):
                raise BackendError(f"trt: {self.name} refuses its profile {profile}: {self._reason()}")
        return Context(self.name, made, self._reason)

    def kernels(self) -> bytes | None:
        """Return what the library has compiled and was given, serialised; None where it compiles nothing."""
        with self._lock:
            serialised = None if self._kernels is None else self._kernels.serialize()
        return None if serialised is None else bytes(serialised)

    def _make(self, use: Use) -> Any:
        user_managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._engine, "create_runtime_config"):
            return self._engine.create_execution_context(user_managed)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        if hasattr(config, "cuda_graph_strategy"):
            strategies = self._trt.CudaGraphStrategy
            config.cuda_graph_strategy = (
                strategies.WHOLE_GRAPH_CAPTURE if use == "replay itself" else strategies.DISABLED
            )
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # Kernels that are compiled beside the first runs come too late for a captured graph, which would keep
            # the general ones for good; but where shapes change all the time nobody wants to wait for each.
            strategies = self._trt.DynamicShapesKernelSpecializationStrategy
            strategy = strategies.LAZY if use == "any shapes" else strategies.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        if hasattr(config, "create_runtime_cache"):
            if self._kernels is None:
                self._kernels = config.create_runtime_cache()
                kept = self._kept.read(self.name) if self._kept else None
                if kept is not None:
                    self._kernels.deserialize(kept)  # what the library does not take it compiles again
            if not config.set_runtime_cache(self._kernels):
                raise BackendError(f"trt: {self.name} refuses a cache for its kernels: {self._reason()}")
        return self._engine.create_execution_context(config)


class Context:
    """One execution context: shapes and addresses stay until they are set anew. One thread at a time."""

    def __init__(self, name: str, context: Any, reason: Callable[[], str]) -> None:
        """Take an `IExecutionContext` of the engine `name`."""
        self._name, self._context, self._reason = name, context, reason

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set the shape of every input and where every tensor lies.

        Args:
            shapes: of all inputs, by name.
            addresses: on the device, or on the host for inputs that shapes depend on.

        Raises:
            BackendError: a name or a shape that the engine does not take.
        """
        # Shapes can depend on a value that lies at an address, so the addresses come first.
        self.place(addresses)
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, shape):
                spelled = "x".join(map(str, shape))
                raise BackendError(
                    f"trt: {self._name} refuses the shape {spelled} of {name}: {self._reason()}; "
                    f"ask for less, or build others: tfexport trt BUNDLE --maxShapes {name}:{spelled} --force"
                )
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise BackendError(f"trt: {self._name} cannot infer its shapes: {self._reason()}") from error
        if missing:
            raise BackendError(f"trt: {self._name} still lacks the shape or address of {', '.join(missing)}")

    def use_memory(self, address: int, num_bytes: int) -> None:
        """Set where activations go, which contexts that run one after the other may share.

        Args:
            address: aligned to 256 bytes.
            num_bytes: what the engine asks for in the profile of this context.
        """
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(address, num_bytes)
        else:
            self._context.device_memory = address

    def place(self, addresses: Mapping[str, int]) -> None:
        """Set where tensors lie and leave the shapes as they are.

        Raises:
            BackendError: a name that the engine does not have.
        """
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise BackendError(f"trt: {self._name} refuses the address of {name}: {self._reason()}")

    def run(self, stream: int) -> None:
        """Queue the engine on a stream.

        Raises:
            BackendError: the library refuses.
        """
        if not self._context.execute_async_v3(stream):
            raise BackendError(f"trt: {self._name} failed: {self._reason()}")

    def can_be_captured(self, stream: int) -> bool:
        """Say whether a CUDA graph can hold a run with the shapes that are set; libraries that do not know can."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))
