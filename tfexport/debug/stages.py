"""Record inputs of every stage of a decode: encoder, step, prefill and reorder.

A stage is a graph with one of its profiles. Its inputs come from a greedy decode in float32 on the CPU, rounded to the
types of the graph, so that an error of one stage does not reach the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tfexport.bundle.bundle import Bundle
from tfexport.contract import (
    CACHE,
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    ENCODER,
    NUM_CANDIDATES,
    ORDER,
    REORDER,
    SOURCE_MASK,
    TARGET_IDS,
    Dim,
    GraphSpec,
    TensorSpec,
)
from tfexport.errors import InputError
from tfexport.export.mixed import all_fp32
from tfexport.model.load import load_tokenizer
from tfexport.runtime.ort.host_graph import HostGraph
from tfexport.runtime.sources import Sources, pad_sources, random_source
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.build.resolve import ResolvedBuild
from tfexport.tensorrt.config import PREFILL, Profile, decoder_plans, plan_contract

Arrays = Mapping[str, NDArray[Any]]

ROWS, STEPS, LONGEST_SOURCE = 4, 8, 48
_KINDS = ("step", "prefill")


@dataclass(frozen=True)
class Stage:
    """A graph, a profile of its engine, and inputs within that profile."""

    name: str  # also of files: "encoder", "decoder_static.step"
    graph: Graph
    contract: GraphSpec
    profile: Profile
    inputs: Arrays

    @cached_property
    def reference(self) -> Arrays:
        """Outputs of the graph in float32."""
        return HostGraph(self.name, all_fp32(self.graph.data), self.graph.path.parent).run(widened(self.inputs))


def read_sources(bundle: Bundle, resolved: ResolvedBuild, texts: Sequence[str]) -> tuple[Sources, str]:
    """Return sources and their origin: texts, recorded texts or random."""
    spec, limits = resolved.spec, resolved.profiles.limits
    count, longest = min(ROWS, limits.max_batch), min(LONGEST_SOURCE, limits.max_source_length)
    found: list[Any]
    if texts:
        tokenizer = load_tokenizer(bundle)
        if tokenizer is None:
            raise InputError("this bundle has no tokenizer for the texts of --input; leave it out")
        found, kind = tokenizer.encode(texts)[: limits.max_batch], "texts"
        if beyond := [number for number, ids in enumerate(found, 1) if len(ids) > limits.max_source_length]:
            raise InputError(
                f"text {beyond[0]} has {len(found[beyond[0] - 1])} tokens, the limit of this build is "
                f"{limits.max_source_length}; shorten it or raise --max-source-length"
            )
    else:
        recorded = [list(sample.source_ids) for sample in bundle.manifest.text.samples]
        found, kind = [ids for ids in recorded if 0 < len(ids) <= longest][:count], "recorded texts"
    if not found:
        rng = np.random.default_rng(0)
        found, kind = [random_source(spec.source, rng, longest) for _ in range(count)], "random sources"
    return pad_sources(spec.source, found), f"{len(found)} {kind}"


def record_stages(
    resolved: ResolvedBuild, graphs: Sequence[Graph], sources: Sources, report: Callable[[str], None]
) -> list[Stage]:
    """Decode greedily and return every stage of every plan with its inputs."""
    profiles, variant = resolved.profiles.engines, resolved.config.variant
    contracts = {graph.name: plan_contract(graph.name, resolved.spec, variant) for graph in graphs}
    by_name = {graph.name: graph for graph in graphs}
    sources = sources.resized(sources.source_len)
    report("recording inputs of the encoder")
    stages = [Stage(ENCODER, by_name[ENCODER], contracts[ENCODER], profiles[ENCODER][0], dict(sources.inputs))]
    outputs, cache = stages[0].reference, None
    for plan, capacity in decoder_plans(variant, resolved.profiles.limits).items():
        report(f"recording inputs of {plan}")
        cross = {name: outputs[name] for name in resolved.spec.cross.names("cross")}
        decode = _Decode(by_name[plan], contracts[plan], {**cross, SOURCE_MASK: sources.mask}, capacity)
        step = decode.run(resolved.spec.tokens.start, min(STEPS, capacity))
        inputs = [step]
        if len(profiles[plan]) > PREFILL:
            longest = profiles[plan][PREFILL][TARGET_IDS].max[1]
            inputs.append(decode.prefill(min(longest, len(decode.target_ids))))
        for kind, profile, arrays in zip(_KINDS, profiles[plan], inputs, strict=False):
            stages.append(Stage(f"{plan}.{kind}", by_name[plan], contracts[plan], profile, arrays))
        cache = step[resolved.spec.cache.names("past")[0]]
    if cache is not None:
        flat = cache.reshape(len(cache), -1)
        inputs_of_reorder = {CACHE: flat, ORDER: np.arange(len(flat))[::-1].copy()}
        stages.append(Stage(REORDER, by_name[REORDER], contracts[REORDER], profiles[REORDER][0], inputs_of_reorder))
    return stages


class _Decode:
    """A greedy decode of one decoder graph in float32, token by token."""

    def __init__(self, graph: Graph, contract: GraphSpec, fixed: Arrays, capacity: int) -> None:
        self._graph = HostGraph(graph.name, all_fp32(graph.data), graph.path.parent)
        self._contract, self._capacity = contract, capacity
        self._fixed = rounded(fixed, contract) | {NUM_CANDIDATES: np.array([1])}
        self._rows = len(fixed[SOURCE_MASK])
        self.target_ids: list[NDArray[Any]] = []  # of every step, [rows]

    def run(self, start: int, count: int) -> Arrays:
        """Decode `count` tokens; return the inputs of the last step."""
        ids, past = np.full(self._rows, start), self._empty()
        inputs: dict[str, NDArray[Any]] = {}
        for position in range(count):
            self.target_ids.append(ids)
            inputs = self._inputs(ids[:, None], past, position)
            outputs = self._graph.run(widened(inputs))
            ids = outputs[CANDIDATE_IDS][:, 0]
            present = {
                name.replace("present_", "past_"): x for name, x in outputs.items() if name.startswith("present_")
            }
            past = rounded(present, self._contract)
        return inputs

    def prefill(self, length: int) -> Arrays:
        """Return the inputs of a prefill of the first tokens."""
        return self._inputs(np.stack(self.target_ids[:length], 1), self._empty(), 0)

    def _inputs(self, target_ids: NDArray[Any], past: Arrays, position: int) -> dict[str, NDArray[Any]]:
        given = {**self._fixed, **past, TARGET_IDS: target_ids, CACHE_LENGTHS: np.full(self._rows, position)}
        return {tensor.name: given[tensor.name] for tensor in self._contract.inputs}

    def _empty(self) -> dict[str, NDArray[Any]]:
        sizes: dict[Dim, int] = {"rows": self._rows, "past_len": 0, "capacity": self._capacity}
        past = [tensor for tensor in self._contract.inputs if tensor.name.startswith("past_")]
        return {
            tensor.name: np.zeros(
                [dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape], dtype_of(tensor)
            )
            for tensor in past
        }


def dtype_of(tensor: TensorSpec) -> np.dtype[Any]:
    """Return NumPy's type of a tensor."""
    return np.dtype(ml_dtypes.bfloat16 if tensor.dtype == "bfloat16" else tensor.dtype)


def rounded(arrays: Arrays, contract: GraphSpec) -> dict[str, NDArray[Any]]:
    """Cast arrays to the types of a graph's inputs."""
    types = {tensor.name: dtype_of(tensor) for tensor in contract.inputs}
    with np.errstate(over="ignore"):  # a value beyond the type becomes infinite, as on a GPU
        return {name: array.astype(types[name]) for name, array in arrays.items()}


def widened(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return arrays of half precision in float32, and others as they are."""
    halves = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return {name: array.astype(np.float32) if array.dtype in halves else array for name, array in arrays.items()}
