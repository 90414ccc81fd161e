"""The promises of the layout: imports run one way, heavy libraries stay in their rooms, public names are documented."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tfexport

ROOT = Path(__file__).resolve().parent.parent

# Each room, a folder or a file at the top, and what it may import besides itself.
CONTRACT = {"cores", "errors", "fields", "given", "spec", "text.config", "install", "generation"}
STORE = {*CONTRACT, "files", "bundle"}
ALLOWED: dict[str, set[str]] = {
    "cores": set(),
    "errors": set(),
    "fields": {"errors"},
    "given": {"errors"},
    "install": set(),
    "spec": {"errors", "fields"},
    "generation": {"errors", "fields"},
    "files": {"errors", "install"},
    "text": CONTRACT,
    "models": {*CONTRACT, "files"},
    "bundle": {*CONTRACT, "files", "models.config"},
    "checkpoint": {*CONTRACT, "files", "text", "models"},
    "graph": {*STORE, "models"},
    # Building and driving engines share the bridge to the libraries and what is known of an engine.
    "trt": {*STORE, "graph"},
    "runtime": {*STORE, "models", "trt"},
    "decode": {*CONTRACT, "runtime.session"},
    "model": {*STORE, "runtime", "decode", "text"},
    "bulk": {*STORE, "decode.request", "model", "text"},
    "own_module": {*STORE, "models", "text", "checkpoint"},
    "verify": {*STORE, "models", "runtime", "decode", "text", "model", "own_module"},
    "source": {*STORE, "models", "text", "checkpoint", "graph.config", "own_module"},
    "bench": {
        *STORE,
        "runtime.session",
        "runtime.registry",
        "decode",
        "model",
        "verify",
        "serve.config",
        "serve.engine",
        "serve.generation",
        "serve.observer",
    },
    "serve": {*STORE, "runtime.session", "decode", "text", "model"},
    "triton": {
        *STORE,
        "model",
        "serve.config",
        "serve.engine",
        "serve.protocol",
    },
    "export": {*STORE, "runtime.registry", "graph", "verify", "own_module", "source"},
    "build": {*STORE, "trt"},
    "retokenize": {*STORE, "text", "checkpoint.formats"},
    "inspect": {*STORE, "models.config", "graph.describe", "trt"},
    "boxed": {"errors", "files", "inspect"},
    "diff": {*STORE, "model"},
    "probes": {"runtime.registry"},
    "doctor": {"errors", "install", "probes", "runtime.registry"},
    "cli": {
        *CONTRACT,
        "files.text",
        "bundle.identity",
        "bundle.manifest",
        "checkpoint",
        "models.config",
        "graph.config",
        "trt.config",
        "runtime.registry",
        "export",
        "build",
        "retokenize",
        "model",
        "verify",
        "bench",
        "bulk",
        "serve",
        "triton",
        "boxed",
        "inspect",
        "diff",
        "doctor",
    },
    "": {"errors", "generation", "model"},
}
# The way through the house, from the top down: no room imports one beside it or above it.
ORDER: tuple[set[str], ...] = (
    {"cli"},
    {"bench", "triton"},
    {"export", "build", "retokenize", "serve", "bulk"},
    {"source", "verify"},
    {"model"},
    {"decode"},
    {"runtime"},
    {"trt", "own_module"},
    {"graph", "checkpoint"},
    {"bundle"},
    {"models"},
    {"spec"},
    {"errors"},
)
# Each library that is not the standard one and where it may be imported, late or not.
FENCES: dict[str, set[str]] = {
    "numpy": {
        "bench",
        "checkpoint",
        "decode",
        "graph",
        "model",
        "models",
        "runtime",
        "triton",
        "trt",
        "verify",
    },
    "torch": {"models", "graph", "checkpoint", "own_module", "runtime.eager"},
    "onnx": {"graph"},
    "onnx_ir": {"graph"},
    "onnxscript": {"graph"},
    "onnxruntime": {"runtime.ort"},
    "tensorrt": {"trt.library"},
    "tensorrt_rtx": {"trt.library"},
    "cuda": {"trt.cuda"},
    "click": {"cli"},
    "tokenizers": {"text.vocabulary", "checkpoint.formats"},
    "sentencepiece": {"checkpoint.formats.spm"},
    "safetensors": {"models", "graph", "checkpoint"},
    "yaml": {"checkpoint.layout.layout"},
    "starlette": {"serve.http", "serve.ray", "serve.server"},
    "uvicorn": {"serve.server"},
    "h11": {"serve.server.connection"},
    "ray": {"bulk.ray", "serve.ray"},
    "prometheus_client": {"serve.metrics"},
    "triton_python_backend_utils": {"triton.backend"},
    "cryptography": {"files.signature"},
    "pyarrow": {"bulk.formats", "bulk.places.remote"},
}
HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "numpy",
    "click",
    "tokenizers",
    "safetensors",
    "cryptography",
    "tensorrt",
)


@cache
def modules() -> dict[str, ast.Module]:
    """Parse every module, by its name after `tfexport.`."""
    found = {}
    for folder, prefix in ((ROOT / "tfexport", ""), (ROOT / "models", "models.")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = (prefix + ".".join(parts)).removesuffix("__init__").removesuffix(".")
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str) -> Iterator[tuple[str, int]]:
    """List what a module imports anywhere in it, with the line; `from a import b` is a.b where that is a module."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("tfexport.") in modules()
                yield (full if is_module else str(node.module)), node.lineno


def inside(name: str, rooms: set[str]) -> bool:
    """Say whether a module is one of `rooms` or lies in one; "" is the package's own file alone."""
    return any(name == room or (room and name.startswith(room + ".")) for room in rooms)


def own_imports(name: str) -> Iterator[tuple[str, int]]:
    for target, line in imports(name):
        if target.partition(".")[0] == "tfexport":
            yield target.removeprefix("tfexport").removeprefix("."), line


def test_every_module_has_a_room() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(ALLOWED)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_run_one_way(name: str) -> None:
    room = name.partition(".")[0]
    wrong = [
        f"tfexport.{name}:{line} imports tfexport.{target}"
        for target, line in own_imports(name)
        if not inside(target, {*ALLOWED[room], room})
    ]
    assert not wrong


def test_there_is_no_cycle() -> None:
    graph = {name: {target for target, _ in own_imports(name)} - {name} for name in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError and names the cycle


def siblings(folder: str) -> dict[str, set[str]]:
    """Return which of a folder's files and folders imports which other; "" is the package itself."""
    prefix = folder and f"{folder}."
    graph: dict[str, set[str]] = {}
    for name in modules():
        if name.startswith(prefix):
            child = name.removeprefix(prefix).partition(".")[0]
            targets = {target for target, _ in own_imports(name) if target.startswith(prefix)}
            found = {target.removeprefix(prefix).partition(".")[0] for target in targets}
            graph[child] = graph.get(child, set()) | (found - {child})
    return graph


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in modules()}))
def test_there_is_no_cycle_of_folders(folder: str) -> None:
    graphlib.TopologicalSorter(siblings(folder)).prepare()


def folder_of(name: str) -> str:
    """Return the folder whose own file a module is; a file at the top is a folder of its own."""
    is_package = any(other.startswith(f"{name}.") for other in modules())
    return name if is_package else name.rpartition(".")[0] or name


def test_a_folder_s_own_files_and_its_folders_make_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for name in modules():
        graph.setdefault(folder_of(name), set()).update(folder_of(target) for target, _ in own_imports(name))
    assert {"runtime", "runtime.ort", "cli", "export", "models"} <= set(graph)
    graphlib.TopologicalSorter({folder: found - {folder} for folder, found in graph.items()}).prepare()


def test_rooms_import_downwards() -> None:
    place = {room: index for index, rooms in enumerate(ORDER) for room in rooms}
    wrong = []
    for name in modules():
        room = name.partition(".")[0]
        for target, line in own_imports(name):
            other = target.partition(".")[0]
            if room in place and other in place and other != room and place[other] <= place[room]:
                wrong.append(f"tfexport.{name}:{line} imports tfexport.{target}")
    assert not wrong


@pytest.mark.parametrize("name", sorted(modules()))
def test_libraries_stay_in_their_rooms(name: str) -> None:
    for target, line in imports(name):
        library = target.partition(".")[0]
        if library != "tfexport" and library not in sys.stdlib_module_names:
            assert library in FENCES, f"tfexport.{name}:{line} imports {library}, which no room may"
            assert inside(name, FENCES[library]), f"tfexport.{name}:{line} imports {library}"


def test_the_tables_can_fail() -> None:
    """The checks see late imports, and know a room from one whose name it begins with."""
    assert ("export", True) in {(target, line > 30) for target, line in own_imports("cli.export")}
    assert inside("runtime.ort.cache", {"runtime.ort"})
    assert not inside("runtime.ort_cache", {"runtime.ort"})
    assert not inside("models.layers", {"model", ""})


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps([name for name in sys.modules if '.' not in name]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import tfexport") & set(HEAVY)


def test_importing_the_command_line_loads_click_alone() -> None:
    assert loaded_by("import tfexport.cli") & set(HEAVY) == {"click"}


def test_a_deployment_machine_needs_neither_torch_nor_onnx() -> None:
    loaded = loaded_by("import tfexport; tfexport.load; import tfexport.inspect, tfexport.runtime.ort.session")
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "onnx", "onnx_ir", "onnxscript", "safetensors"}


def test_public_names_can_be_had_and_are_listed() -> None:
    assert len(tfexport.__all__) > 5
    values = {name: getattr(tfexport, name) for name in tfexport.__all__ if name != "__version__"}
    assert all(value.__name__ == name for name, value in values.items())
    assert tfexport.__version__ == importlib.metadata.version("tfexport")
    assert {"load", "Model", "TfexportError"} <= set(tfexport.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = tfexport.laod


@pytest.mark.parametrize("name", sorted(modules()))
def test_everything_public_has_a_docstring(name: str) -> None:
    def missing(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                if not ast.get_docstring(node) and "override" not in decorators:
                    yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from missing(node.body, f"{node.name}.")

    tree = modules()[name]
    assert ast.get_docstring(tree), f"tfexport.{name} has none"
    assert not list(missing(tree.body, ""))
