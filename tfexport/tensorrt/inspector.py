"""List the kernels of a plan, and tell whether attention is fused.

A plan is inspected after its build if there is a GPU. The inspector returns JSON:

    {"Layers": [{"Name": "_gemm_mha_v2_myl0_4", "LayerType": "kgen", "TacticName": "_gemm_mha_v2_0x…",
                 "Inputs": […], "Outputs": […], "Metadata": "[ONNX Layer: softmax] [ONNX Layer: matmul]"}, …],
     "Bindings": ["source_ids", …]}

Layers are names only if the plan has no details. Plans of TensorRT-RTX also name their kernels in the clear.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tfexport.tensorrt._library import Library

_IN_PLAN = re.compile(rb"function=\{ name=([\w.]+)")
# The graph and position that Myelin appends to a name, and the shape or hash of a tactic.
_POSITION = re.compile(r"_myl\d+_\d+$|_0x[0-9a-f]+$|_tactic$")
_FUSED_ATTENTION = ("mha", "fused_attention", "flash")


def inspect_plan(library: Library, plan: bytes, *, has_host_code: bool) -> str:
    """Load a plan onto the GPU and return what the inspector reports, as JSON.

    The result is empty if the plan cannot be loaded.
    """
    runtime = library.runtime(library.listen())
    if has_host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return ""
    return str(engine.create_engine_inspector().get_engine_information(library.trt.LayerInformationFormat.JSON))


def kernels_of(plan: bytes, inspected: str) -> dict[str, int]:
    """Count the kernels of all profiles by name; empty if they are unknown."""
    names: list[str] = [match.decode() for match in _IN_PLAN.findall(plan)]
    if inspected:
        names = [_POSITION.sub("", _kernel(layer)) for layer in json.loads(inspected)["Layers"]]
    return dict(sorted(Counter(names).items()))


def num_fused(kernels: Mapping[str, int]) -> int:
    """Count kernels that compute a whole attention."""
    return sum(count for name, count in kernels.items() if any(part in name.lower() for part in _FUSED_ATTENTION))


def num_attentions(layers: Mapping[str, int], *, selects: bool) -> int:
    """Count the attentions of a network; `selects` if one softmax selects tokens."""
    return max(0, layers.get("ATTENTION_INPUT", 0) + layers.get("SOFTMAX", 0) - selects)


def _kernel(layer: Any) -> str:
    if isinstance(layer, str):
        return layer
    name, kind = layer["Name"], layer.get("LayerType", "")
    # Layers that Myelin compiles are named after their kernel, others after the nodes of the graph.
    return str(layer.get("TacticName") or (name if "_myl" in name else kind))
