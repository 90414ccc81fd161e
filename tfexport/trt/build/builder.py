"""From a graph and its profiles to a plan: one engine, built and serialised."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.errors import EngineError, raise_all
from tfexport.trt.build.network import Network, Tensor, parse_graph
from tfexport.trt.build.options import BuildOptions, apply_options, choose_options
from tfexport.trt.build.progress import Tell, watch
from tfexport.trt.build.timing_cache import attach_timing_cache, save_timing_cache
from tfexport.trt.config import EngineConfig
from tfexport.trt.library import Library
from tfexport.trt.log import Log
from tfexport.trt.profile import Profile

# How TensorRT-RTX names its kernels inside a plan: seen with 1.7.1, documented nowhere.
_KERNEL = re.compile(rb"function=\{ name=([\w.]+)")


@dataclass(frozen=True, kw_only=True)
class SerializedEngine:
    """A built engine.

    Attributes:
        name: of the plan.
        data: the serialised engine. Two builds of one graph differ in some bytes.
        inputs: of the network, in order.
        outputs: of the network, in order.
        layers: layers of the network by type; KV_CACHE_UPDATE and ATTENTION_INPUT tell which form it is.
        kernels: what they became, by name, where the plan shows it; else empty.
        options: what the builder was told.
        log: what the library said from INFO up, a line each.
    """

    name: str
    data: bytes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: Mapping[str, int]
    kernels: Mapping[str, int]
    options: BuildOptions
    log: list[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """The builder's flags by name."""
        return self.options.flags


def build_engine(
    library: Library,
    name: str,
    graph: bytes,
    path: Path,
    profiles: Sequence[Profile],
    settings: EngineConfig,
    compute_capabilities: tuple[str, ...],
    tell: Tell = lambda phase, step, total: None,
) -> SerializedEngine:
    """Build one engine.

    Args:
        library: to build with.
        name: of the plan, for errors.
        graph: a serialised ONNX model, the static form with a number for its capacity.
        path: where the graph lies or would lie; its external data is found beside it.
        profiles: from `make_profiles`, in order.
        settings: what the user wants of the build.
        compute_capabilities: from `Library.choose_compute_capabilities`.
        tell: told the phase, the step reached and the steps of the phase; what it raises cancels the build.

    Raises:
        BackendError: this library builds on a GPU only, and there is none.
        EngineError: the graph cannot be parsed or built, a setting or profile does not fit; with the library's reasons.
    """
    options = choose_options(library, settings, compute_capabilities)
    log = library.listen()
    network = parse_graph(library, log, graph, path)
    subject = f"{library.target} {library.version}: {name}"
    config = network.builder.create_builder_config()
    if config is None:
        raise EngineError(f"{subject}: no configuration can be made: {log.reason()}")
    apply_options(library, config, options)
    cache = attach_timing_cache(library, config, settings.timing_cache)
    _add_profiles(network, config, profiles, subject, log)
    data = _build(library, network, config, subject, log, tell)
    save_timing_cache(config, cache)
    return SerializedEngine(
        name=name,
        data=data,
        inputs=network.inputs,
        outputs=network.outputs,
        layers=network.layers,
        kernels=_kernels(data),
        options=options,
        log=log.lines(),
    )


def _build(library: Library, network: Network, config: Any, subject: str, log: Log, tell: Tell) -> bytes:
    progress = watch(library, config, tell)
    memory = network.builder.build_serialized_network(network.definition, config)
    if progress.error is not None:
        raise progress.error
    if memory is None or not memory.nbytes:
        raise EngineError(f"{subject}: the engine cannot be built: {log.reason()}")
    return bytes(memory)


def _add_profiles(network: Network, config: Any, profiles: Sequence[Profile], subject: str, log: Log) -> None:
    """Add each profile after checking it: the library takes unknown names and contradictions without a word."""
    raise_all(EngineError, subject, [p for i, profile in enumerate(profiles) for p in _misfits(network, i, profile)])
    for index, profile in enumerate(profiles):
        made = network.builder.create_optimization_profile()
        if made is None:
            raise EngineError(f"{subject}: no profile can be made: {log.reason()}")
        for tensor in network.inputs:
            shapes = profile[tensor.name]
            set_range = made.set_shape_input if tensor.is_shape_input else made.set_shape
            set_range(tensor.name, shapes.min, shapes.opt, shapes.max)
        if not made or config.add_optimization_profile(made) != index:
            raise EngineError(f"{subject}: profile {index} is refused: {log.reason()}")


def _misfits(network: Network, index: int, profile: Profile) -> list[str]:
    inputs = {tensor.name: tensor for tensor in network.inputs}
    problems = [f"profile {index} has {name}, which is no input" for name in profile if name not in inputs]
    problems += [f"profile {index} has no shapes for {name}" for name in inputs if name not in profile]
    for name in inputs.keys() & profile.keys():
        tensor, shapes = inputs[name], profile[name]
        if tensor.is_shape_input:
            is_fit = all(len(shape) == math.prod(tensor.shape) for shape in (shapes.min, shapes.opt, shapes.max))
        else:
            is_fit = all(_fits(shape, tensor.shape) for shape in (shapes.min, shapes.opt, shapes.max))
        if not is_fit:
            problems.append(
                f"profile {index} gives {name} the shapes {shapes.min}, {shapes.opt} and {shapes.max}, "
                f"expected such as {tensor.shape}"
            )
        elif not all(a <= b <= c for a, b, c in zip(shapes.min, shapes.opt, shapes.max, strict=True)):
            problems.append(f"profile {index} gives {name} {shapes.min}, {shapes.opt} and {shapes.max} out of order")
    return problems


def _fits(shape: tuple[int, ...], free: tuple[int, ...]) -> bool:
    return len(shape) == len(free) and all(size in (-1, given) for given, size in zip(shape, free, strict=True))


def _kernels(data: bytes) -> dict[str, int]:
    found = Counter(match[1].decode() for match in _KERNEL.finditer(data))
    return dict(sorted(found.items()))
