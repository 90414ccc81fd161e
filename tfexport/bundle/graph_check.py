"""Check the graphs of a bundle before anything runs them: they are what the manifest says, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tfexport.bundle.graph_file import ExternalWeight, GraphFile, Known, read_graph
from tfexport.bundle.manifest import Manifest
from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS, GraphEntry, contract_problems
from tfexport.errors import shortened

WEIGHT_FILES = (WEIGHTS, QUANTIZED_WEIGHTS)
# ONNX Runtime's own domain, and the operators of it that the contrib form and quantised graphs are written with. It has
# others that load files and run graphs of their own.
_DOMAIN, _DOMAIN_VERSION = "com.microsoft", 1
_OPERATORS = frozenset(
    f"{_DOMAIN}.{name}"
    for name in (
        "DynamicQuantizeMatMul",  # in bundles from before tokens had scales of their own
        "GatherBlockQuantized",
        "GroupQueryAttention",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "MultiHeadAttention",
    )
)


def graph_problems(root: Path, manifest: Manifest) -> list[str]:
    """Say what is in the graphs of a bundle that its manifest does not say, or that no graph of tfexport has.

    Args:
        root: of the bundle, whose files have the sizes of the manifest.
        manifest: whose own contract is checked.

    Raises:
        OSError: a graph cannot be read.
    """
    sizes = {name: manifest.files[name].bytes for name in WEIGHT_FILES if name in manifest.files}
    problems, known = [], Known()
    for entry in manifest.graphs.values():
        try:
            graph = read_graph((root / entry.file).read_bytes(), known=known)
        except ValueError as error:
            problems.append(f"{entry.file} is no graph of tfexport ({error})")
        else:
            problems += [f"{entry.file}: {problem}" for problem in _problems(graph, entry, sizes)]
    return problems


def _problems(graph: GraphFile, entry: GraphEntry, sizes: Mapping[str, int]) -> Iterator[str]:
    yield from contract_problems(graph.spec, entry.spec)
    for domain, version in graph.opsets.items():
        expected = {"": entry.opset, _DOMAIN: _DOMAIN_VERSION}.get(domain)
        if expected is None:
            yield f"has operators of the domain {shortened(domain)}, which no graph of tfexport has"
        elif version != expected:
            yield f"has opset {version} of {domain or 'ONNX'}, expected {shortened(expected)}"
    if "" not in graph.opsets:
        yield "names no opset of ONNX"
    foreign = sorted(name for name in graph.operators if "." in name and name not in _OPERATORS)
    if foreign:
        yield f"has the operators {shortened(', '.join(foreign))}, which no graph of tfexport has"
    for weight in graph.weights:
        yield from _weight_problems(weight, sizes)


def _weight_problems(weight: ExternalWeight, sizes: Mapping[str, int]) -> Iterator[str]:
    name = shortened(weight.name)
    if weight.location not in sizes:
        yield f"{name} lies in {shortened(weight.location)}, expected {' or '.join(sizes) or WEIGHTS}"
    elif weight.length != weight.num_bytes:
        yield f"{name} takes {weight.length} bytes, expected {weight.num_bytes} by its type and shape"
    elif weight.offset + weight.length > sizes[weight.location]:
        yield f"{name} ends at byte {weight.offset + weight.length} of {weight.location}, behind its end"
