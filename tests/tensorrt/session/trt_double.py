"""Replace `ICudaEngine` and `IExecutionContext` by ONNX Runtime and a `CudaDouble`.

They refuse what the library refuses, in the same way: with False or None and a line in the log. The methods do what the
docstrings of the library's bindings describe.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from tests.tensorrt.cuda_double import ALIGNMENT, CudaDouble, MisuseError, read_host
from tfexport.contract import DECODER, ENCODER, NUM_CANDIDATES, REORDER, GraphSpec, ModelSpec, TensorSpec, Variant
from tfexport.export.reorder import reorder_graph
from tfexport.precision import ITEM_BYTES
from tfexport.sources import FRAMES, FeatureSource, SourceKind
from tfexport.tensorrt._kernels import RuntimeCacheStore
from tfexport.tensorrt.build._profiles import make_profiles
from tfexport.tensorrt.config import (
    EngineConfig,
    EngineLimits,
    Profile,
    cache_aliases,
    decoder_plans,
    plan_contract,
    plan_names,
)
from tfexport.tensorrt.session.session import TrtSession

Shape = tuple[int, ...]


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class IProfiler:
    """The base class of profilers."""


MODULE = SimpleNamespace(
    IProfiler=IProfiler,
    ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
    CudaGraphStrategy=CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy=DynamicShapesKernelSpecializationStrategy,
)


class FakeContext:
    """An `IExecutionContext` with user-managed memory."""

    def __init__(self, engine: FakeEngine, *, replays_itself: bool) -> None:
        self._engine, self._replays_itself = engine, replays_itself
        self._profile: int | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)
        self._was_run = False  # with the shapes that are set
        self.profiler: Any = None

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._refuse(f"profile {profile_index} does not exist")
        self._profile = profile_index
        self._shapes.clear()
        self._was_run = False
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        engine, new = self._engine, tuple(shape)
        if name not in engine.inputs or self._profile is None:
            return self._refuse(f"{name} is no input, or there is no profile")
        tensor, profile = engine.inputs[name], engine.profiles[self._profile]
        if len(new) != len(tensor.shape):
            return self._refuse(f"{name} has {len(tensor.shape)} dimensions, not {len(new)}")
        if any(isinstance(dim, int) and dim != size for dim, size in zip(tensor.shape, new, strict=True)):
            return self._refuse(f"{name} has fixed dimensions {tensor.shape}, not {new}")
        low, high = (profile[name].min, profile[name].max) if name != NUM_CANDIDATES else (new, new)
        if any(not a <= size <= b for a, size, b in zip(low, new, high, strict=True)):
            return self._refuse(f"{name} {new} is outside the profile {low} to {high}")
        if self._shapes.get(name) != new:
            self._was_run = False
        self._shapes[name] = new
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine.inputs and name not in self._engine.outputs:
            return self._refuse(f"{name} is no tensor of the engine")
        self._addresses[name] = memory
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def infer_shapes(self) -> list[str]:
        missing = [
            name
            for name, tensor in self._engine.inputs.items()
            if name not in self._shapes and any(isinstance(dim, str) for dim in tensor.shape)
        ]
        if NUM_CANDIDATES in self._engine.inputs and not self._addresses.get(NUM_CANDIDATES):
            missing.append(NUM_CANDIDATES)
        if not missing and self._dims() is None:
            raise RuntimeError("shape inference failed")
        return missing

    def get_tensor_shape(self, name: str) -> Shape:
        dims, tensors = self._dims(), {**self._engine.inputs, **self._engine.outputs}
        assert dims is not None, "infer_shapes comes first"
        return tuple(dim if isinstance(dim, int) else dims[dim] for dim in tensors[name].shape)

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, cuda = self._engine, self._engine.cuda
        cuda.check_current()
        cuda.counts[f"enqueue {engine.name}"] += 1
        if problem := next(self._problems(stream_handle), None):
            return self._refuse(problem)
        dims = self._dims()
        assert dims is not None
        tensors = {**engine.inputs, **engine.outputs}
        shapes = {name: tuple(d if isinstance(d, int) else dims[d] for d in t.shape) for name, t in tensors.items()}
        host = {NUM_CANDIDATES: np.array([dims.get("num_candidates", 1)], np.int64)}  # read now, not when it runs
        addresses, memory, given = dict(self._addresses), self._memory, dict(self._shapes)
        if overlap := self._overlap(tensors, shapes, addresses):
            return self._refuse(overlap)
        is_captured, profile = cuda.is_capturing, self._profile
        assert profile is not None
        activations = engine.get_device_memory_size_for_profile_v2(profile)

        def work() -> None:
            if is_captured and self._shapes != given:
                raise MisuseError(f"{engine.name}: shapes have changed under a captured graph")
            cuda.view(memory[0], activations, on_device=True)[:] = 0xA5
            arrays = {
                name: host[name] if name in host else engine.array(tensor, shapes[name], addresses[name])
                for name, tensor in tensors.items()
            }
            engine.run(arrays)

        cuda.enqueue(stream_handle, work)
        self._was_run = True
        if self.profiler:  # the run waits for the layers
            cuda.synchronize(stream_handle)
            for layer in ("attention", "fc1"):
                self.profiler.report_layer_time(f"{engine.name} {layer}", 0.25)
        return True

    def _problems(self, stream: int) -> Iterator[str]:
        """Yield reasons why the library would not run; only the first counts."""
        engine, cuda = self._engine, self._engine.cuda
        if stream == 0:
            yield "this double needs its own stream"
        if self.infer_shapes():
            yield f"lacks {self.infer_shapes()}"
        tensors = (*engine.inputs, *engine.outputs)
        missing = [name for name in tensors if not self._addresses.get(name)]
        if missing:
            yield f"no address for {', '.join(missing)}"
        address, size = self._memory
        assert self._profile is not None
        needed = engine.get_device_memory_size_for_profile_v2(self._profile)
        if size < needed or address % ALIGNMENT or not cuda.is_device(address):
            yield "no memory for activations"
        for name in tensors:
            if cuda.is_device(self._addresses[name]) == (name == NUM_CANDIDATES):
                yield f"{name} is on the wrong side"
        if cuda.is_capturing and not self._was_run:
            yield "shapes were changed: enqueue once before a capture"
        if cuda.is_capturing and (self._replays_itself or not engine.is_capturable):
            yield "this context cannot be captured"

    def _dims(self) -> dict[str, int] | None:
        """Return the named dimensions; None if two inputs disagree or a value is out of range."""
        engine = self._engine
        assert self._profile is not None
        found: dict[str, int] = {}
        for name, tensor in engine.inputs.items():
            for dim, size in zip(tensor.shape, self._shapes.get(name, tensor.shape), strict=True):
                if isinstance(dim, str) and found.setdefault(dim, int(size)) != size:
                    self._refuse(f"{dim} is {found[dim]} and {size}")
                    return None
        if NUM_CANDIDATES in engine.inputs:
            (count,) = read_host(self._addresses[NUM_CANDIDATES], 1)
            limits = engine.profiles[self._profile][NUM_CANDIDATES]
            if not limits.min[0] <= count <= limits.max[0]:
                self._refuse(f"{NUM_CANDIDATES} is {count}, outside {limits}")
                return None
            found["num_candidates"] = count
        if FRAMES in found and isinstance(engine.source, FeatureSource):
            found["source_len"] = engine.source.positions(found[FRAMES])
        if "past_len" in found:
            found["past_len + target_len"] = found["past_len"] + found["target_len"]
        if {"rows", "batch"} <= found.keys() and found["rows"] % found["batch"]:
            self._refuse("rows are no multiple of the batch")
            return None
        return found

    def _overlap(self, tensors: Mapping[str, TensorSpec], shapes: Mapping[str, Shape], at: Mapping[str, int]) -> str:
        """Refuse outputs that overlap other tensors; aliased ones must be where their input is."""
        engine = self._engine
        spans = {
            name: (at[name], at[name] + math.prod(shapes[name]) * engine.itemsize(tensor))
            for name, tensor in tensors.items()
            if name != NUM_CANDIDATES
        }
        for output in engine.outputs:
            partner = engine.aliases.get(output)
            if partner and at[output] != at[partner]:
                return f"{output} is not where {partner} is"
            for other, (start, end) in spans.items():
                if other not in (output, partner) and start < spans[output][1] and spans[output][0] < end:
                    return f"{output} overlaps {other}"
        return ""

    def _refuse(self, reason: str) -> bool:
        self._engine.log.append(f"{self._engine.name}: {reason}")
        return False


class FakeEngine:
    """An `ICudaEngine` of TensorRT 10 or 11."""

    is_capturable = True
    activation_bytes = (4096, 1 << 20)  # of a step and of a prefill
    device_memory_size_v2 = max(activation_bytes)
    source: SourceKind | None = None  # the library computes shapes of outputs from the graph

    def __init__(
        self,
        name: str,
        graph: Path | bytes,
        contract: GraphSpec,
        profiles: tuple[Profile, ...],
        cuda: CudaDouble,
        log: list[str],
        aliases: Mapping[str, str],
    ) -> None:
        self.name, self.profiles, self.cuda, self.log, self.aliases = name, profiles, cuda, log, aliases
        self.inputs = {tensor.name: tensor for tensor in contract.inputs}
        self.outputs = {tensor.name: tensor for tensor in contract.outputs}
        self._graph = self.load(graph)

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.activation_bytes[profile_index]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        shapes = self.profiles[profile_index][name]
        return [shapes.min, shapes.opt, shapes.max]

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_dtype(self, name: str) -> str:
        return {**self.inputs, **self.outputs}[name].dtype

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self, strategy: Any) -> FakeContext | None:
        if self.cuda.is_capturing or strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.cuda.check_current()
        self.cuda.counts["context"] += 1
        return FakeContext(self, replays_itself=False)

    def itemsize(self, tensor: TensorSpec) -> int:
        return ITEM_BYTES[tensor.dtype]

    def load(self, graph: Path | bytes) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        source = graph if isinstance(graph, bytes) else str(graph)
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def array(self, tensor: TensorSpec, shape: Shape, address: int) -> Any:
        memory = self.cuda.view(address, math.prod(shape) * self.itemsize(tensor), on_device=True)
        return memory.view(tensor.dtype).reshape(shape)

    def run(self, arrays: Mapping[str, Any]) -> None:
        io = self._graph.io_binding()
        for name in self.inputs:
            io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(arrays[name]))
        for name in self.outputs:
            io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(arrays[name]))
        self._graph.run_with_iobinding(io)


class FakeRuntimeCache:
    """An `IRuntimeCache` of TensorRT-RTX; a kernel is the shapes that it was compiled for."""

    def __init__(self) -> None:
        self._compiled: set[str] = set()

    def needs(self, kernel: str) -> bool:
        is_new = kernel not in self._compiled
        self._compiled.add(kernel)
        return is_new

    def serialize(self) -> memoryview:
        return memoryview(json.dumps(sorted(self._compiled)).encode())

    def deserialize(self, blob: bytes) -> bool:
        try:
            self._compiled = set(json.loads(blob))
        except ValueError:
            return False
        return True


class RtxContext(FakeContext):
    """An `IExecutionContext` of TensorRT-RTX, which compiles what its cache does not have: `counts["compile"]`."""

    def __init__(self, engine: FakeEngine, *, replays_itself: bool, cache: FakeRuntimeCache | None = None) -> None:
        super().__init__(engine, replays_itself=replays_itself)
        self._cache = cache or FakeRuntimeCache()

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self._cache.needs(str(sorted(self._shapes.items()))):
            self._engine.cuda.counts["compile"] += 1
        return super().execute_async_v3(stream_handle)

    def is_stream_capturable(self, stream: int) -> bool:
        return self._engine.is_capturable and not self._replays_itself


class RtxEngine(FakeEngine):
    """An `ICudaEngine` of TensorRT-RTX."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.configs: list[FakeRuntimeConfig] = []  # of contexts

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return FakeRuntimeConfig()

    def create_execution_context(self, runtime_config: Any) -> RtxContext | None:
        if self.cuda.is_capturing or runtime_config.strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.configs.append(runtime_config)
        self.cuda.check_current()
        self.cuda.counts["context"] += 1
        replays_itself = runtime_config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return RtxContext(self, replays_itself=replays_itself, cache=runtime_config.cache)


class FakeRuntimeConfig:
    """An `IRuntimeConfig` of TensorRT-RTX."""

    def __init__(self) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.cache: FakeRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> FakeRuntimeCache:
        return FakeRuntimeCache()

    def set_runtime_cache(self, cache: FakeRuntimeCache) -> bool:
        self.cache = cache
        return True


def make_engines(
    graphs: Mapping[str, Path],
    spec: ModelSpec,
    variant: Variant | None,
    config: EngineConfig,
    cuda: CudaDouble,
    log: list[str],
    kind: type[FakeEngine] = FakeEngine,
) -> tuple[dict[str, FakeEngine], EngineLimits]:
    """Make the engines of a model, with the profiles that a build would give them."""
    profiles = make_profiles(spec, variant or "static", config)
    capacities, engines = decoder_plans(variant, profiles.limits), {}
    for name in plan_names(variant, profiles.limits):
        contract, capacity = plan_contract(name, spec, variant), capacities.get(name, 0)
        fixed = GraphSpec(*(tuple(fix(t, capacity) for t in side) for side in (contract.inputs, contract.outputs)))
        graph = graphs[DECODER[variant] if variant and capacity else ENCODER]
        source = reorder_graph(spec.precision) if name == REORDER else graph
        aliases = cache_aliases(name, spec, variant)
        engines[name] = kind(name, source, fixed, profiles.engines[name], cuda, log, aliases)
        engines[name].source = spec.source
    return engines, profiles.limits


def fix(tensor: TensorSpec, capacity: int) -> TensorSpec:
    shape = tuple(capacity if dim == "capacity" else dim for dim in tensor.shape)
    return TensorSpec(tensor.name, tensor.dtype, shape)


def trt_session(
    graphs: Mapping[str, Path],
    spec: ModelSpec,
    variant: Variant | None,
    *,
    cuda: CudaDouble | None = None,
    kind: type[FakeEngine] = FakeEngine,
    kernels: RuntimeCacheStore | None = None,
    profile: Path | None = None,
    **changes: Any,
) -> TrtSession:
    """Open graphs in a session on doubles; `changes` are fields of EngineConfig."""
    cuda, log = cuda or CudaDouble(), []  # type: ignore[var-annotated]
    wide = f"num_candidates:{spec.vocab}" if spec.has_decoder else ""
    config = EngineConfig(**{"max_batch": 32, "max_shapes": wide, **changes})
    engines, limits = make_engines(graphs, spec, variant, config, cuda, log, kind)
    device: Any = cuda
    reason = lambda: log[-1] if log else "nothing"  # noqa: E731
    more: dict[str, Any] = {"weights": config.weights, "reason": reason, "kernels": kernels, "profile": profile}
    return DoubleSession(engines, spec, variant, limits, LIBRARY, device, **more)


LIBRARY: Any = SimpleNamespace(trt=MODULE, target="tensorrt", version="0")


class DoubleSession(TrtSession):
    """A session whose engines and device tests can read."""

    def __init__(self, engines: dict[str, FakeEngine], *args: Any, **kwargs: Any) -> None:
        super().__init__(engines, *args, **kwargs)
        self.engines: Any = engines
        self.cuda: Any = args[-1]
