"""The graphs that become plans: the bundle's own, or made of its weights in another precision or narrower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfexport.engine.recipe import Recipe
from tfexport.graph.reorder import reorder_graph
from tfexport.graph.static import fix_capacity
from tfexport.spec import DECODER, REORDER


@dataclass(frozen=True)
class Graph:
    """One graph to build.

    Attributes:
        name: of the plan.
        data: a serialised ONNX model.
        path: beside which its weights lie.
    """

    name: str
    data: bytes
    path: Path


def prepare_graphs(recipe: Recipe, directory: Path, report: Callable[[str], None]) -> list[Graph]:
    """Make every graph that the recipe builds.

    Args:
        recipe: says which.
        directory: empty; takes graphs and weights that the bundle does not have. The others stay where they are.
        report: told what happens, a line at a time.

    Raises:
        GraphError: a graph cannot be made.
        ModuleNotFoundError: onnx, or for another precision PyTorch, is not installed.
    """
    paths = _paths(recipe, directory, report)
    graphs = [Graph(name, _read(recipe, name, path), path) for name, path in paths.items()]
    if recipe.form is not None:
        graphs.append(Graph(REORDER, reorder_graph(recipe.spec.precision), directory / f"{REORDER}.onnx"))
    return graphs


def _paths(recipe: Recipe, directory: Path, report: Callable[[str], None]) -> Mapping[str, Path]:
    manifest = recipe.bundle.manifest
    return {name: recipe.bundle.file(manifest.graphs[name].file) for name in recipe.graphs}


def _read(recipe: Recipe, name: str, path: Path) -> bytes:
    if name == DECODER["static"]:
        return fix_capacity(path, recipe.profiles.limits.max_target_length)
    return path.read_bytes()
