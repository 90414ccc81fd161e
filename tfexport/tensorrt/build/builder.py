"""From a network and its profiles to a plan: one engine, built and serialised."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.errors import EngineError, raise_all
from tfexport.tensorrt.build.network import Network
from tfexport.tensorrt.build.options import BuilderOptions, apply_options
from tfexport.tensorrt.build.progress import OnStep, attach_monitor
from tfexport.tensorrt.build.timing_cache import attach_timing_cache, save_timing_cache
from tfexport.tensorrt.profile import Profile

# How TensorRT-RTX names its kernels inside a plan: seen with 1.7.1, documented nowhere.
_KERNEL = re.compile(rb"function=\{ name=([\w.]+)")


@dataclass(frozen=True, kw_only=True)
class SerializedEngine:
    """A built engine.

    Attributes:
        name: of the plan.
        data: the serialised engine. Two builds of one graph differ in some bytes.
        layers: layers of the network by type; KV_CACHE_UPDATE and ATTENTION_INPUT tell which form it is.
        kernels: what they became, by name, where the plan shows it; else empty.
        log: what the library said from INFO up, a line each.
    """

    name: str
    data: bytes
    layers: Mapping[str, int]
    kernels: Mapping[str, int]
    log: list[str]


def build_engine(
    network: Network,
    profiles: Sequence[Profile],
    options: BuilderOptions,
    on_step: OnStep = lambda phase, step, total: None,
) -> SerializedEngine:
    """Build one engine.

    Args:
        network: from `parse_graph`.
        profiles: from `make_profiles`, in order.
        options: from `resolve_options`.
        on_step: called with the phase, the step reached and the steps of the phase; what it raises cancels the build.

    Raises:
        BackendError: there is a timing cache, and no GPU.
        EngineError: the network cannot be built, an option or profile does not fit; with the library's reasons.
    """
    config = network.builder.create_builder_config()
    if config is None:
        raise EngineError(f"{network.subject}: no configuration can be made: {network.log.reason()}")
    apply_options(network.library, config, options)
    cache = attach_timing_cache(network.library, config, options.timing_cache)
    _add_profiles(network, config, profiles)
    data = _build(network, config, on_step)
    save_timing_cache(config, cache)
    return SerializedEngine(
        name=network.name,
        data=data,
        layers=network.layers,
        kernels=_kernels(data),
        log=network.log.lines(),
    )


def _build(network: Network, config: Any, on_step: OnStep) -> bytes:
    monitor = attach_monitor(network.library, config, on_step)
    memory = network.builder.build_serialized_network(network.definition, config)
    if monitor.error is not None:
        raise monitor.error
    if memory is None or not memory.nbytes:
        raise EngineError(f"{network.subject}: the engine cannot be built: {network.log.reason()}")
    return bytes(memory)


def _add_profiles(network: Network, config: Any, profiles: Sequence[Profile]) -> None:
    """Add each profile after checking it: the library takes unknown names and contradictions without a word."""
    problems = [problem for i, profile in enumerate(profiles) for problem in _misfits(network, i, profile)]
    raise_all(EngineError, network.subject, problems)
    for index, profile in enumerate(profiles):
        made = network.builder.create_optimization_profile()
        if made is None:
            raise EngineError(f"{network.subject}: no profile can be made: {network.log.reason()}")
        for tensor in network.inputs:
            shapes = profile[tensor.name]
            set_range = made.set_shape_input if tensor.is_shape_input else made.set_shape
            set_range(tensor.name, shapes.min, shapes.opt, shapes.max)
        if not made or config.add_optimization_profile(made) != index:
            raise EngineError(f"{network.subject}: profile {index} is refused: {network.log.reason()}")


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
