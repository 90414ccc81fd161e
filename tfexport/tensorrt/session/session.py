"""Provide the backend `trt`; caches and token selection stay on the GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfexport.bundle.bundle import Bundle
from tfexport.contract import ModelSpec, Variant, device_parts
from tfexport.errors import BackendError, InputError, raise_all
from tfexport.precision import Accuracy, Quantized
from tfexport.runtime.checked import CheckedSession
from tfexport.runtime.registry import Graphs, LoadOptions
from tfexport.runtime.session import LONGER, Floats, Limit, Limits, Session
from tfexport.runtime.sources import Sources, batch_problems
from tfexport.tensorrt._kernels import RuntimeCacheStore
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.config import STEP, EngineLimits, cache_aliases, cache_bytes, plan_contract, plan_names
from tfexport.tensorrt.cuda import Cuda, need_gpu
from tfexport.tensorrt.session._batch import TrtBatch, check_limit
from tfexport.tensorrt.session._engine import Engine
from tfexport.tensorrt.session._profile import LayerProfile
from tfexport.tensorrt.session._replica import ReplicaPool
from tfexport.tensorrt.session._resources import EngineSet
from tfexport.tensorrt.store import load_engine

_log = logging.getLogger(__name__)


def open_bundle(bundle: Bundle, options: LoadOptions) -> Session:
    """Open an engine of a bundle as a session on the GPU of the options."""
    _, number = device_parts(options.device)
    if number:  # if the first one is missing, the engine's error has more details
        need_gpu(number)
    engine = load_engine(bundle, options.engine, number)
    built, library = engine.manifest.config, engine.library
    if options.variant not in (None, built.variant):
        raise BackendError(f"trt: engine {engine.path.name} has the variant {built.variant}; leave the variant out")
    spec = dataclasses.replace(bundle.manifest.spec, precision=built.precision or bundle.manifest.spec.precision)

    def reason() -> str:
        # The session holds this function, which keeps `engine` alive, and so the log and the runtime of the plans.
        return engine.log.reason()

    kernels = None
    if not bundle.trusted_keys:  # kernels are unsigned code
        sums = {plan: entry.sha256 for plan, entry in engine.manifest.plans.items()}
        kernels = RuntimeCacheStore(engine.path, sums, library.version, need_gpu(number))
    cuda = Cuda(number)
    session = TrtSession(
        engine.plans,
        spec,
        built.variant if spec.has_decoder else None,
        engine.manifest.limits,
        library,
        cuda,
        weights=bundle.manifest.quantization.precision if bundle.manifest.quantization else built.weights,
        reason=reason,
        kernels=kernels,
        profile=options.profile,
    )
    with cuda.current():
        free, _ = cuda.memory()
    if (largest := session.largest_bytes()) > free:
        _log.warning(
            "engine %s: its largest batch needs about %.0f MB, and cuda:%d has %.0f MB free; use smaller batches or "
            "shorter texts, or build it with a smaller --max-batch or --max-target-length",
            engine.path.name,
            largest / 1e6,
            number,
            free / 1e6,
        )
    return session


def parity_sessions(graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, Session]]:
    """Yield the session of a bundle's engine for verification."""
    if graphs.bundle is None:
        raise BackendError("trt: engines are stored in a bundle, but only graphs were passed; pass a bundle")
    session = open_bundle(graphs.bundle, options)
    yield f"trt {session.accuracy}", session


class TrtSession(CheckedSession):
    """Engines of TensorRT 10, TensorRT 11 or TensorRT-RTX on one GPU."""

    backend = "trt"

    def __init__(
        self,
        engines: Mapping[str, Any],
        spec: ModelSpec,
        variant: Variant | None,
        limits: EngineLimits,
        library: Library,
        cuda: Cuda,
        *,
        weights: Quantized | None = None,
        reason: Callable[[], str] = lambda: "see the log of the library",
        kernels: RuntimeCacheStore | None = None,
        profile: Path | None = None,
    ) -> None:
        """Check deserialized engines, by plan; `reason` returns the newest errors.

        If `profile` is given, `close` writes the times of layers there, and no CUDA graphs are captured.
        """
        self._profile = None if profile is None else LayerProfile(profile)
        made = {}
        for plan in plan_names(variant, limits):
            if plan not in engines:
                raise BackendError(f"trt: engine {plan} is missing; build it with tfexport trt BUNDLE --force")
            made[plan] = Engine(plan, engines[plan], library.trt, reason, kernels, self._profile)
            made[plan].check(plan_contract(plan, spec, variant), cache_aliases(plan, spec, variant))
        self._engines, self._kernels = EngineSet(made, spec, variant, limits, cuda), kernels
        self.variant = variant
        self.accuracy: Accuracy = weights or spec.precision
        self.limits = _limits(spec, limits)
        self.spec = dataclasses.replace(
            spec,
            max_source_length=min(spec.max_source_length, limits.max_source_length),
            max_target_length=min(spec.max_target_length, limits.max_target_length),
        )
        self._pool: ReplicaPool | None = ReplicaPool(self._engines)

    def _checked(self, sources: Sources, output: str) -> Floats:
        raise_all(InputError, "", batch_problems(self.spec.source, sources))
        # The remedy is to rebuild the engines, not the bundle.
        check_limit("sources", len(sources), self.limits.rows)
        check_limit(f"source {self.spec.source.unit}", sources.source_len, self.limits.source_length)
        return super()._checked(sources, output)

    def memory_bytes(self) -> int:
        """Return the device memory of batches and free replicas, without weights."""
        return self._open_pool().num_bytes

    def largest_bytes(self) -> int:
        """Estimate the device memory of the largest batch, without weights and prefills."""
        activations = max(engine.activation_bytes(STEP) for engine in self._engines.engines.values())
        return activations + cache_bytes(self._engines.spec, self._engines.limits)

    def close(self) -> None:
        """Store compiled kernels and free everything; no other call may be running."""
        pool, self._pool = self._pool, None
        if pool:
            with self._engines.cuda.current():
                if self._kernels:
                    compiled = {name: engine.kernels() for name, engine in self._engines.engines.items()}
                    self._kernels.write({name: kernels for name, kernels in compiled.items() if kernels is not None})
                pool.close()
            if self._profile:
                self._profile.write()

    @property
    def _is_open(self) -> bool:
        return self._pool is not None

    def _open_pool(self) -> ReplicaPool:
        self._check_open()
        assert self._pool is not None
        return self._pool

    def _batch(self, width: int) -> TrtBatch:
        return TrtBatch(width, self._engines, self.limits, self._open_pool)

    def _encode(self, sources: Sources, output: str) -> Floats:
        pool = self._open_pool()
        replica = pool.take((len(sources), 1, sources.source_len))
        try:
            with replica.watched():
                return replica.encode(sources, output)
        finally:
            pool.give_back(replica)


def _limits(spec: ModelSpec, limits: EngineLimits) -> Limits:
    # If a length is the limit of the bundle, the remedy is another bundle, not other engines.
    build = "build engines for more: tfexport trt BUNDLE {}{{number}} --force".format

    def length(side: str, engines: int, bundle: int) -> Limit:
        remedy = build(f"--max-{side}-length ") if engines < bundle else LONGER.format(side)
        return Limit(min(engines, bundle), remedy)

    return Limits(
        rows=Limit(limits.max_batch, build("--max-batch ")),
        source_length=length("source", limits.max_source_length, spec.max_source_length),
        target_length=length("target", limits.max_target_length, spec.max_target_length),
        candidates=Limit(limits.max_candidates, build("--maxShapes num_candidates:")),
    )
