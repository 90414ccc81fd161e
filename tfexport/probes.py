"""Small programs that try a library each, in a process of its own.

A broken native library may take its process down, and tfexport itself stays
free of it. Each prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_EAGER = """
import json, torch

product = torch.ones(2, 3) @ torch.ones(3, 2)
found = {"cpu": "" if (product == 3).all() else f"computes wrongly: {product.tolist()}"}
cuda = "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"
print(json.dumps({"devices": found, "torch-cuda": cuda}))
"""
_ORT = """
import json, sys
import numpy, onnxruntime

if not hasattr(onnxruntime, "InferenceSession"):
    sys.exit("hollow: the module is there, its library is not")
onnxruntime.set_default_logger_severity(4)
found = {}
providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
for device, provider in providers.items():
    if provider in onnxruntime.get_available_providers():
        try:
            if device == "cuda":
                from tfexport.runtime.ort.device import prepare_cuda
                prepare_cuda()
            session = onnxruntime.InferenceSession(bytes.fromhex(sys.argv[1]), providers=[provider])
            (result,) = session.run(None, {"x": numpy.array([1, 2], numpy.float32)})
            got = session.get_providers()
            right = provider in got and result.tolist() == [2, 4]
            found[device] = "" if right else f"asked for {provider}, got {got} and {result.tolist()}"
        except Exception as error:
            found[device] = str(error)
print(json.dumps({"devices": found}))
"""
# An engine for what the GPU is: built and loaded, which is what tells whether the library takes this GPU.
_TRT = """
import json, pathlib, sys
from tfexport.trt.config import EngineConfig
from tfexport.trt.library import load_library
from tfexport.trt.build.builder import build_engine
from tfexport.trt.build.network import Graph, parse_graph
from tfexport.trt.build.options import resolve_options
from tfexport.errors import TfexportError

found = {"gpu": ""}
try:
    library = load_library(sys.argv[2])
    log = library.listen()
    runtime = library.runtime(log)
    graph = Graph("probe", bytes.fromhex(sys.argv[1]), pathlib.Path("probe.onnx"))
    engine = build_engine(parse_graph(library, graph), (), resolve_options(library, EngineConfig(), None))
    if runtime.deserialize_cuda_engine(engine.data) is None:
        found["gpu"] = f"{library.target} {library.version} refuses an engine on this GPU: {log.reason()}"
except TfexportError as error:
    found["gpu"] = str(error)
print(json.dumps({"devices": found}))
"""
_GPUS = """
import dataclasses, json
from tfexport.trt.cuda import find_gpus, need_gpu
from tfexport.errors import BackendError

try:
    need_gpu()
    reason = ""
except BackendError as error:
    reason = str(error)
print(json.dumps({"problem": reason, "gpus": [dataclasses.asdict(gpu) for gpu in find_gpus()]}))
"""
# y = x + x on float32 [2], ONNX IR 8, opset 18: written out so that the probe does not need the onnx package.
ADD_MODEL = bytes.fromhex(
    "08083a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020802620f0a0179120a0a08080112040a02080242040a001012"
)
TIMEOUT_S = 120


@dataclass(frozen=True)
class Probe:
    """How a library is tried as a backend.

    Attributes:
        backend: that it is.
        library: its name for the user.
        module: that is imported.
        extra: of tfexport that brings it.
        device: that a program counts against which dies.
        command: the program and its arguments; it prints {"devices": {device: "" when it works, else the reason}}.
    """

    backend: str
    library: str
    module: str
    extra: str
    device: str
    command: tuple[str, ...]


PROBES = (
    Probe("eager", "torch", "torch", "export", "cpu", (_EAGER,)),
    Probe("ort", "onnxruntime", "onnxruntime", "cpu", "cpu", (_ORT, ADD_MODEL.hex())),
    Probe("trt", "tensorrt", "tensorrt", "trt", "gpu", (_TRT, ADD_MODEL.hex(), "tensorrt")),
    Probe("trt", "tensorrt-rtx", "tensorrt_rtx", "rtx", "gpu", (_TRT, ADD_MODEL.hex(), "tensorrt-rtx")),
)


def run_probe(probe: Probe) -> dict[str, Any]:
    """Try a library.

    Returns:
        What the program printed; of one that died, the reason under its device.
    """
    found = _run(probe.command)
    if isinstance(found, str):
        return {"devices": {probe.device: found}}
    return {**found, "devices": {device: " ".join(problem.split()) for device, problem in found["devices"].items()}}


def find_gpus() -> tuple[list[dict[str, Any]], str]:
    """Ask the driver for its GPUs.

    Returns:
        The fields of each GPU, and the reason when there is none.
    """
    found = _run((_GPUS,))
    return ([], found) if isinstance(found, str) else (found["gpus"], found["problem"])


def _run(command: tuple[str, ...]) -> Any:
    """Run a program and return the object that it prints, or in words how it died."""
    try:
        done = subprocess.run(  # noqa: S603 - our own constant, our own interpreter
            [sys.executable, "-P", "-c", *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    if done.returncode < 0:
        return f"crashed with signal {-done.returncode}"
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return json.loads(done.stdout.strip().rpartition("\n")[2])
