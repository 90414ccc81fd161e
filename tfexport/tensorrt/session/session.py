"""TensorRT engines as a backend: the cache, the choice of tokens and the moves of beams stay on the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfexport.contract import (
    ENCODER,
    REORDER,
    Accuracy,
    Form,
    ModelSpec,
    WeightType,
    decoder_graph,
    encoder_graph,
    key_value_names,
    reorder_spec,
)
from tfexport.errors import BackendError, InputError
from tfexport.runtime.checked import check_source
from tfexport.runtime.session import LONGER, Floats, Ids, Limit, Limits, Mask
from tfexport.tensorrt.config import EngineLimits, decoder_plans
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.library import Library
from tfexport.tensorrt.session.batch import TrtBatch, check_limit
from tfexport.tensorrt.session.engine import Engine, KeptKernels
from tfexport.tensorrt.session.replica import ReplicaPool
from tfexport.tensorrt.session.resources import EngineSet


class TrtSession:
    """Engines of TensorRT 10, 11 or TensorRT-RTX on the first GPU.

    Attributes:
        spec: sizes, limits and token ids; the lengths are those that the engines take.
        backend: "trt".
        accuracy: type of the weights where it is narrower than that of the graphs.
        limits: what the engines take.
        form: of the decoder; None for an encoder alone.
    """

    backend = "trt"

    def __init__(
        self,
        engines: Mapping[str, Any],
        spec: ModelSpec,
        form: Form | None,
        limits: EngineLimits,
        library: Library,
        cuda: Cuda,
        *,
        weights: WeightType | None = None,
        reason: Callable[[], str] = lambda: "see the log of the library",
        kernels: KeptKernels | None = None,
    ) -> None:
        """Take deserialised engines, which the session shares with whoever else drives them.

        Args:
            engines: `ICudaEngine` by name of its graph, `reorder` included where there is a decoder.
            spec: of the model, in the precision of the engines.
            form: of the decoder; None for an encoder alone.
            limits: the largest shapes of the engines.
            library: the library that they come from.
            cuda: the device that they were loaded on.
            weights: type of the matrices where it is narrower than `spec` says.
            reason: says what the library's log holds of the newest failure.
            kernels: keeps what the library compiles, from `close` to the next session.

        Raises:
            BackendError: an engine is missing or is not what its name says.
        """
        contracts = {ENCODER: (encoder_graph(spec), 1)}
        decoders = decoder_plans(form, limits) if form else {}
        self._capacities = tuple(decoders.values())
        if form:
            contracts |= dict.fromkeys(decoders, (decoder_graph(spec, form), 2))
            contracts[REORDER] = (reorder_spec(spec.precision), 1)
        made = {}
        for name, (contract, num_profiles) in contracts.items():
            if name not in engines:
                raise BackendError(f"trt: there is no engine {name}; build it with tfexport trt BUNDLE --force")
            made[name] = Engine(name, engines[name], library.trt, reason, kernels)
            made[name].check(contract, num_profiles, _aliases(spec) if name in decoders and form == "static" else {})
        self._engines, self._kernels = made, kernels
        self.form = form
        self.accuracy: Accuracy = weights or spec.precision
        self.limits = _limits(spec, limits)
        self._model = spec
        self.spec = dataclasses.replace(
            spec,
            max_source_length=min(spec.max_source_length, limits.max_source_length),
            max_target_length=min(spec.max_target_length, limits.max_target_length),
        )
        self._pool: ReplicaPool | None = ReplicaPool(EngineSet(made, spec, form, limits, cuda))

    def batch(self, width: int = 1) -> TrtBatch:
        """Return an empty batch; see `Session.batch`. In the static form sources may join it at any time.

        In the concat form all begin together, with equally long prompts: engines of that form have one length of cache
        for all rows.
        """
        self._open()
        if self.form is None:
            raise BackendError("trt: this bundle is an encoder alone and cannot generate; use embed")
        if width < 1:
            raise InputError(f"width is {width}, expected 1 or more")
        return TrtBatch(width, self._model, self.form, self.limits, self._capacities, self._open)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone; see `Session.hidden_states`."""
        pool = self._open()
        if self.form is not None:
            raise BackendError("trt: this bundle has a decoder and gives no hidden states; use generate")
        check_source(self._model, source_ids, source_mask)
        check_limit("sources", source_ids.shape[0], self.limits.rows)
        check_limit("source tokens", source_ids.shape[1], self.limits.source_length)
        replica = pool.take((len(source_ids), 1, source_ids.shape[1]))
        try:
            with replica.watched():
                return replica.hidden_states(source_ids, source_mask)
        finally:
            pool.give_back(replica)

    def memory_bytes(self) -> int:
        """Return the device memory that batches hold or have left for the next; weights are not counted."""
        return self._open().num_bytes

    def close(self) -> None:
        """Keep what was compiled and free everything, also under batches that are there; no other call may run."""
        pool, self._pool = self._pool, None
        if pool:
            self._keep_kernels()
            pool.close()

    def _keep_kernels(self) -> None:
        if self._kernels:
            compiled = {name: engine.kernels() for name, engine in self._engines.items()}
            self._kernels.write({name: kernels for name, kernels in compiled.items() if kernels is not None})

    def _open(self) -> ReplicaPool:
        if self._pool is None:
            raise BackendError("trt: this session is closed; load the bundle again")
        return self._pool


def _limits(spec: ModelSpec, limits: EngineLimits) -> Limits:
    """Say what engines take; lengths that are those of the bundle need another bundle, all else other engines."""

    def build(option: str) -> str:
        return f"build engines for more: tfexport trt BUNDLE {option}{{number}} --force"

    def length(side: str, engines: int, bundle: int) -> Limit:
        return (
            Limit(engines, build(f"--max-{side}-length ")) if engines < bundle else Limit(bundle, LONGER.format(side))
        )

    return Limits(
        rows=Limit(limits.max_batch, build("--max-batch ")),
        source_length=length("source", limits.max_source_length, spec.max_source_length),
        target_length=length("target", limits.max_target_length, spec.max_target_length),
        candidates=Limit(limits.max_candidates, build("--maxShapes num_candidates:")),
    )


def _aliases(spec: ModelSpec) -> dict[str, str]:
    names = (key_value_names(prefix, spec.layers) for prefix in ("present", "past"))
    return dict(zip(*names, strict=True))
