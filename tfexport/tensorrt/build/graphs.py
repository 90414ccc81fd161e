"""The graphs that become plans: the bundle's own, or made of its weights in another precision or narrower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tfexport.contract import DECODER, ENCODER, REORDER, Form
from tfexport.export.passes import fix_capacity
from tfexport.export.quantize.qdq import quantize_graphs
from tfexport.export.reorder import reorder_graph
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.build.resolve import ResolvedBuild
from tfexport.tensorrt.config import EngineLimits, decoder_plans


def prepare_graphs(resolved: ResolvedBuild, directory: Path, report: Callable[[str], None]) -> list[Graph]:
    """Make every graph that is built.

    Args:
        resolved: the build, which says which.
        directory: empty; takes graphs and weights that the bundle does not have. The others stay where they are.
        report: told what happens, a line at a time.

    Raises:
        GraphError: a graph cannot be made.
        ModuleNotFoundError: onnx, or for another precision PyTorch, is not installed.
    """
    config, manifest, folder = resolved.config, resolved.bundle.manifest, resolved.bundle.path
    entries = {name: manifest.graphs[name] for name in resolved.graphs}
    if resolved.is_exported_again:
        from tfexport.export.write import write_precision

        folder = _folder(directory, resolved.spec.precision)
        entries = write_precision(resolved.bundle, resolved.spec.precision, resolved.form, folder, report=report)
    if config.weights is not None:
        source, folder = folder, _folder(directory, config.weights)
        entries = quantize_graphs(source, entries, folder, config.weights, report=report)
    encoder = folder / entries[ENCODER].file
    graphs = [Graph(ENCODER, encoder.read_bytes(), encoder)]
    if resolved.form is not None:
        graphs += _decoders(resolved.form, resolved.profiles.limits, folder / entries[DECODER[resolved.form]].file)
        graphs.append(Graph(REORDER, reorder_graph(resolved.spec.precision), directory / f"{REORDER}.onnx"))
    return graphs


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name
    folder.mkdir()
    return folder


def _decoders(form: Form, limits: EngineLimits, path: Path) -> Iterator[Graph]:
    """Make the graph of each decoder of one file; they share its weights."""
    for plan, capacity in decoder_plans(form, limits).items():
        yield Graph(plan, fix_capacity(path, capacity) if form == "static" else path.read_bytes(), path)
