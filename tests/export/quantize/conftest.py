"""The accuracy of models/dates with narrow weights, and graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from tests.conftest import DATES
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import WEIGHTS, GraphEntry, GraphSpec, TensorSpec, Variant
from tfexport.model.model import Model
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.text.tokenizer import Tokenizer

Loss = Callable[[Path, Variant, str | None], float]


@pytest.fixture(scope="session")
def lost_points(dates_bundle: Path) -> Loss:
    """Return a function of graphs, variant and weights: how many percent fewer held-out dates they read than fp32."""
    manifest = open_bundle(dates_bundle).manifest
    tokenizer = Tokenizer.load(dates_bundle / "tokenizer.json", manifest.spec)
    rows = [line.split("\t") for line in (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()]

    def share(folder: Path, variant: Variant, weights: str | None) -> float:
        graphs = Graphs({path.stem: path for path in folder.glob("*.onnx")}, manifest.spec, weights)
        model = Model(OrtSession(graphs, variant, threads=1), tokenizer)
        results = model.generate([text for text, *_ in rows], batch_size=64)
        return 100 * sum(result.text == iso for result, (_, iso, *_) in zip(results, rows, strict=True)) / len(rows)

    exact = share(dates_bundle, "contrib", None)
    return lambda folder, variant, weights: exact - share(folder, variant, weights)


def write_graph(
    folder: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, NDArray[np.float32]],
    source: TensorSpec,
    target: TensorSpec,
    constants: Sequence[onnx.TensorProto] = (),
) -> dict[str, GraphEntry]:
    """Write a graph with its weights in a safetensors file, and an empty directory `out` next to it."""
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS)
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    x, y = (helper.make_tensor_value_info(t.name, types[t.dtype], t.shape) for t in (source, target))
    raw, outside = (folder / WEIGHTS).read_bytes(), []
    for name, array in weights.items():
        tensor = numpy_helper.from_array(array, name)
        onnx.external_data_helper.set_external_data(tensor, WEIGHTS, raw.index(array.tobytes()), array.nbytes)
        tensor.ClearField("raw_data")
        outside.append(tensor)
    graph = helper.make_graph(nodes, "g", [x], [y], [*outside, *constants])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(folder / "g.onnx"))
    folder.with_name("out").mkdir()
    return {"g": GraphEntry.of("g.onnx", 18, GraphSpec((source,), (target,)))}


def weight_spans(paths: Iterable[Path], file: str) -> dict[str, set[tuple[str, str]]]:
    """Return offset and length of the external weights of graphs, all in one file, by name."""
    spans: dict[str, set[tuple[str, str]]] = {}
    for path in paths:
        for weight in onnx.load(str(path), load_external_data=False).graph.initializer:
            if weight.data_location == TensorProto.EXTERNAL:
                found = {item.key: item.value for item in weight.external_data}
                assert found["location"] == file
                spans.setdefault(weight.name, set()).add((found["offset"], found["length"]))
    return spans
