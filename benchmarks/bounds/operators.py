"""How long the operators of a decoder's step take, as ONNX Runtime's own profile says."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from bounds.products import PRODUCTS
from tfexport.contract import GraphSpec

_RUNS, _WARM_UP = 12, 4
_CAPACITY, FILLED = 64, 31
_KINDS = {
    **dict.fromkeys(PRODUCTS, "products"),
    **dict.fromkeys(("GroupQueryAttention", "MultiHeadAttention"), "attention"),
    **dict.fromkeys(("TopK", "Softmax", "ArgMax", "Log", "GatherElements"), "selection"),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"), "norms"),
    **dict.fromkeys(("Abs", "ReduceMax", "Max", "QuantizeLinear"), "rounding"),
}


def operator_times(
    decoder: Path, contract: GraphSpec, *, sources: int, beams: int, source_length: int, threads: int
) -> dict[str, float]:
    """Profile steps of the contrib variant with 31 tokens in the cache.

    Returns:
        Milliseconds of a step by kind of operator: products, attention, selection, norms, rounding, other.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/step"
        session = ort.InferenceSession(str(decoder), options, providers=["CPUExecutionProvider"])
        binding, values = _bind(session, contract, sources, beams, source_length)
        for _ in range(_WARM_UP + _RUNS):
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    del values
    return _by_kind(events)


def _bind(
    session: ort.InferenceSession, contract: GraphSpec, sources: int, beams: int, source_length: int
) -> tuple[ort.IOBinding, list[ort.OrtValue]]:
    """Bind inputs of a step in the middle of a text, its caches in place."""
    rows = sources * beams
    sizes = {"rows": rows, "batch": sources, "source_len": source_length, "target_len": 1, "capacity": _CAPACITY}
    filled = {"source_mask": 1, "target_ids": 3, "positions": FILLED, "last_position": FILLED}
    filled |= {"total_length": FILLED + 1, "num_candidates": 2 * beams if beams > 1 else 1}
    binding, values = session.io_binding(), []
    for tensor in contract.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
        value = ort.OrtValue.ortvalue_from_numpy(np.full(shape, filled.get(tensor.name, 0), tensor.dtype))
        values.append(value)
        binding.bind_ortvalue_input(tensor.name, value)
        if tensor.name.startswith("past_"):
            binding.bind_ortvalue_output(tensor.name.replace("past_", "present_"), value)
    for name in ("candidate_ids", "candidate_logits", "log_normalizer"):
        binding.bind_output(name)
    return binding, values


def _by_kind(events: list[dict[str, Any]]) -> dict[str, float]:
    runs: list[dict[str, float]] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] == "model_run":
            runs.append(defaultdict(float))
        elif event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            operator = event["args"]["op_name"]
            runs[-1][_KINDS.get(operator, "other")] += event["dur"] / 1000
    kinds = (*dict.fromkeys(_KINDS.values()), "other")
    return {kind: float(np.median([run.get(kind, 0.0) for run in runs[_WARM_UP:]])) for kind in kinds}
