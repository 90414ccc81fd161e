"""Try TensorRT: build a small engine and load it, which is what tells whether the library takes this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tfexport.errors import TfexportError
from tfexport.tensorrt.build.builder import build_engine
from tfexport.tensorrt.build.network import Graph, parse_graph
from tfexport.tensorrt.build.options import resolve_options
from tfexport.tensorrt.config import EngineConfig, Target
from tfexport.tensorrt.cuda import need_gpu
from tfexport.tensorrt.library import load_library


def probe(library: str, model: bytes) -> dict[str, str]:
    """Build an engine and load it.

    Args:
        library: "tensorrt" or "tensorrt-rtx".
        model: a small graph.

    Returns:
        "" under "gpu" where the library takes the engine, else what is wrong.
    """
    try:
        return {"gpu": _try(cast(Target, library), model)}
    except TfexportError as error:
        return {"gpu": str(error)}


def _try(target: Target, model: bytes) -> str:
    library = load_library(target)
    log = library.listen()
    runtime = library.runtime(log)
    graph = parse_graph(library, Graph("probe", model, Path("probe.onnx")))
    engine = build_engine(graph, (), resolve_options(library, EngineConfig(), need_gpu()))
    if runtime.deserialize_cuda_engine(engine.data) is None:
        return f"{target} {library.version} refuses an engine on this GPU: {log.reason()}"
    return ""
