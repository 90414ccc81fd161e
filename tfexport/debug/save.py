"""Save the graphs of engines with inputs, outputs and commands that run them.

DIR/
    encoder.onnx, decoder_static.onnx, …    one graph per plan, as it is built
    weights.safetensors                     weights of all graphs
    decoder_static.step/                    one folder per stage
        inputs.json, outputs.json           for Polygraphy; the outputs are those of ONNX Runtime
        source_mask.bin, …                  inputs for trtexec
        onnxruntime.sh, polygraphy.sh, trtexec.sh
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport._io.sealed_directory import written
from tfexport.contract import CANDIDATE_IDS, NUM_CANDIDATES, QUANTIZED_WEIGHTS, WEIGHTS, Device
from tfexport.debug.stages import Arrays, Stage, read_sources, record_stages
from tfexport.errors import BundleError
from tfexport.precision import CALIBRATED, FORMATS
from tfexport.runtime.ort.host_graph import HostGraph
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.build.resolve import ResolvedBuild, prepare_graphs
from tfexport.tensorrt.config import EngineConfig, Shape
from tfexport.tensorrt.pipeline import resolve_build

_RUNS = {
    "onnxruntime.sh": "Polygraphy with ONNX Runtime on the CPU; outputs are equal",
    "polygraphy.sh": "Polygraphy with TensorRT on a GPU; outputs within the tolerance of the precision",
    "trtexec.sh": "time of each layer on a GPU",
}


@dataclass(frozen=True, kw_only=True)
class SavedGraphs:
    """A folder of saved graphs."""

    path: Path
    name: str  # of the engine that the graphs become
    sources: str
    stages: dict[str, dict[str, list[int]]]  # shapes of inputs, by stage
    commands: dict[str, list[str]]  # names of the scripts, by stage

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**vars(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        first, *others = self.stages
        lines = [f"{self.path}: graphs of {self.name}, inputs from {self.sources}", "", "Run a stage:"]
        scripts = [(f"sh {shlex.quote(str(self.path / first / name))}", _RUNS[name]) for name in self.commands[first]]
        width = max(len(command) for command, _ in scripts)
        lines += [f"  {command:<{width}}  {what}" for command, what in scripts]
        return [*lines, f"in the same way: {', '.join(others)}"] if others else lines


_REFUSAL = """#!/bin/sh
echo "ONNX Runtime changes quantized graphs unless session.disable_quant_qdq is 1 in its session options." >&2
echo "Polygraphy has no option for that, so its outputs would differ from outputs.json; run polygraphy.sh." >&2
exit 1
"""


def save_graphs(
    path: Path,
    target: Path,
    config: EngineConfig,
    *,
    texts: Sequence[str] = (),
    device: Device | None = None,
    trusted_keys: Sequence[Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> SavedGraphs:
    """Write the graphs that `build_engines` would build from a bundle to a new folder.

    `texts` are the sources of the inputs; by default recorded texts of the bundle, or random sources.
    """
    resolved = resolve_build(path, config, device, trusted_keys, report)
    with written(target, str(target), _refuse) as draft, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        graphs = prepare_graphs(resolved, Path(scratch), report)
        sources, kind = read_sources(resolved.bundle, resolved, texts)
        stages = record_stages(resolved, graphs, sources, report)
        for graph in graphs:
            (draft / f"{graph.name}.onnx").write_bytes(graph.data)
        _copy_weights(graphs, draft)
        if resolved.spec.precision == "bf16":
            report("without files for Polygraphy, because NumPy has no bfloat16")
        commands = {stage.name: list(_write_stage(draft / stage.name, stage, resolved, report)) for stage in stages}
    shapes = {stage.name: {name: list(array.shape) for name, array in stage.inputs.items()} for stage in stages}
    return SavedGraphs(path=target, name=resolved.name, sources=kind, stages=shapes, commands=commands)


def _refuse(folder: Path) -> None:
    raise BundleError(f"{folder} exists; choose a new folder for the graphs")


def _copy_weights(graphs: Sequence[Graph], folder: Path) -> None:
    for source in {graph.path.parent / name for graph in graphs for name in (WEIGHTS, QUANTIZED_WEIGHTS)}:
        if source.exists():
            shutil.copyfile(source, folder / source.name)


def _write_stage(folder: Path, stage: Stage, resolved: ResolvedBuild, report: Callable[[str], None]) -> Iterator[str]:
    """Write the files of a stage; yield the names of its scripts."""
    folder.mkdir()
    report(f"saving {stage.name}")
    for name, array in stage.inputs.items():
        array.tofile(folder / f"{name}.bin")
    commands = {"trtexec.sh": _trtexec(stage, resolved)}
    if resolved.spec.precision != "bf16":
        outputs = HostGraph(stage.name, stage.graph.data, stage.graph.path.parent).run(stage.inputs)
        (folder / "inputs.json").write_text(json.dumps([_by_name(stage.inputs)]))
        (folder / "outputs.json").write_text(json.dumps(_results(outputs)))
        commands = {
            "onnxruntime.sh": _onnxruntime(stage),
            "polygraphy.sh": _polygraphy(stage, resolved, outputs),
            **commands,
        }
    if resolved.accuracy in CALIBRATED:
        del commands["onnxruntime.sh"]
        (folder / "onnxruntime.sh").write_text(_REFUSAL)
    for name, command in commands.items():
        (folder / name).write_text(_script(command))
        yield name


def _script(command: Sequence[str]) -> str:
    """Return a script that runs a command in its folder, one option a line."""
    words = [word if word.startswith("--") else f"\0{word}" for word in map(shlex.quote, command)]
    lines = " ".join(words).replace(" --", " \\\n    --").replace("\0", "")
    return f'#!/bin/sh\ncd "$(dirname "$0")" || exit 1\nexec {lines} "$@"\n'


def _onnxruntime(stage: Stage) -> list[str]:
    files = ["--load-inputs", "inputs.json", "--load-outputs", "outputs.json"]
    return ["polygraphy", "run", f"../{stage.graph.name}.onnx", "--onnxrt", *files]


def _polygraphy(stage: Stage, resolved: ResolvedBuild, outputs: Arrays) -> list[str]:
    library = ["env", "POLYGRAPHY_USE_TENSORRT_RTX=1"] if _is_rtx(resolved) else []
    command = [*library, "polygraphy", "run", f"../{stage.graph.name}.onnx", "--trt", "--strongly-typed"]
    for bound in ("min", "opt", "max"):
        shapes = ((name, getattr(shape, bound)) for name, shape in stage.profile.items())
        command += [f"--trt-{bound}-shapes", *(f"{name}:[{','.join(map(str, sizes))}]" for name, sizes in shapes)]
    share = FORMATS[resolved.accuracy].tolerance  # of the largest value
    if _is_rtx(resolved):  # for which Polygraphy uses TF32
        share = max(share, 1e-3)
    floats = {name: np.abs(x[np.isfinite(x)]).max(initial=0) for name, x in outputs.items() if x.dtype.kind == "f"}
    command += ["--rtol", "0", "--atol", *(f"{name}:{share * float(most):.3g}" for name, most in floats.items())]
    command += [f"{CANDIDATE_IDS}:{resolved.spec.vocab}"] if CANDIDATE_IDS in outputs else []  # near ties may swap
    return [*command, "--load-inputs", "inputs.json", "--load-outputs", "outputs.json"]


def _trtexec(stage: Stage, resolved: ResolvedBuild) -> list[str]:
    tool = "tensorrt_rtx" if _is_rtx(resolved) else "trtexec"
    is_newest = int(resolved.library.version.split(".")[0]) > 10
    is_typed = _is_rtx(resolved) or is_newest  # always; older ones need the flag
    command = [tool, f"--onnx=../{stage.graph.name}.onnx", *([] if is_typed else ["--stronglyTyped"]), "--noTF32"]
    for bound in ("min", "opt", "max"):
        shapes = {name: getattr(shape, bound) for name, shape in stage.profile.items()}
        command += [f"--{bound}Shapes={_shapes(shapes)}"]
    # For a shape input, trtexec reads values as its shape.
    used = {name: tuple(x.tolist()) if name == NUM_CANDIDATES else x.shape for name, x in stage.inputs.items()}
    command.append(f"--shapes={_shapes(used)}")
    command.append(f"--loadInputs={','.join(f'{name}:{name}.bin' for name in stage.inputs)}")
    separate = [] if is_newest else ["--separateProfileRun"]  # always, from TensorRT 11 on
    return [*command, "--profilingVerbosity=detailed", "--dumpProfile", *separate, "--dumpOutput"]


def _shapes(shapes: dict[str, Shape]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in shapes.items())


def _is_rtx(resolved: ResolvedBuild) -> bool:
    return resolved.library.target == "tensorrt-rtx"


# The JSON of Polygraphy 0.53, see polygraphy/json/serde.py and polygraphy/comparator/struct.py.


def _array(array: NDArray[Any]) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array), allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def _by_name(arrays: Arrays) -> dict[str, dict[str, str]]:
    return {name: _array(array) for name, array in arrays.items()}


def _results(outputs: Arrays) -> dict[str, Any]:
    values = {name: {"values": array, "polygraphy_class": "LazyArray"} for name, array in _by_name(outputs).items()}
    iteration = {"outputs": values, "runtime": 0.0, "runner_name": "saved", "polygraphy_class": "IterationResult"}
    return {"lst": [["saved", [iteration]]], "polygraphy_class": "RunResults"}
