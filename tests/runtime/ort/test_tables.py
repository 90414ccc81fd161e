"""Tables that encoder and decoder share are mapped once, and outlive a session that is closed under a batch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import tfexport
from tfexport.bundle.tables import read_tables
from tfexport.errors import BackendError
from tfexport.export.external_data import external_weights, span
from tfexport.runtime.ort.tables import shared_tables

GRAPHS = ("encoder_contrib", "decoder_contrib")


def looked_up(graph: Path) -> dict[str, set[str]]:
    """Name the operators that read each weight that a graph looks rows up in, by the onnx package."""
    proto = onnx.load(str(graph), load_external_data=False).graph
    readers: dict[str, set[str]] = {}
    for node in proto.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    return {name: readers[name] for name in external_weights(proto) if readers[name] == {"Gather"}}


@pytest.mark.parametrize("name", GRAPHS)
def test_tables_are_what_is_looked_up_in_alone(random_bundle: Path, name: str) -> None:
    path = random_bundle / f"{name}.onnx"
    weights = external_weights(onnx.load(str(path), load_external_data=False).graph)
    tables = read_tables(path.read_bytes())
    assert set(tables.values()) == set(looked_up(path))
    for table, weight in tables.items():
        assert (table.location, table.offset) == span(weights[weight])[:2]
        assert list(table.shape) == list(weights[weight].dims)


def test_both_graphs_get_the_numbers_of_the_file(random_bundle: Path) -> None:
    encoder, decoder = (random_bundle / f"{name}.onnx" for name in GRAPHS)
    first, second = shared_tables(encoder, decoder)
    assert len(first) == len(second) > 0
    proto = onnx.load(str(encoder))
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in proto.graph.initializer}
    for name, value in first.items():
        assert np.array_equal(value.numpy(), weights[name])
        assert any(other is value for other in second.values())


def mappings(file: Path, place: int) -> int:
    """Count the mappings of a byte of a file in this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in addresses.split("-"))
        found += path == [str(file)] and 0 <= place - int(offset, 16) < end - begin
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_is_mapped_once_while_a_model_is_loaded(random_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(random_bundle, tmp_path / "bundle")).resolve()
    (table, *_) = sorted(
        read_tables((bundle / "encoder_contrib.onnx").read_bytes()), key=lambda one: -one.shape[0] * one.shape[1]
    )
    file, middle = bundle / table.location, table.offset + 4 * table.shape[0] * table.shape[1] // 2
    model = tfexport.load(bundle, backend="ort", threads=1)
    assert mappings(file, middle) == 1
    model.generate_ids([[4, 5, 6]], max_new_tokens=2)
    model.close()
    del model
    assert mappings(file, middle) == 0


def test_a_file_that_is_gone_is_an_error_in_one_line(random_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(random_bundle, tmp_path / "bundle"))
    encoder, decoder = (bundle / f"{name}.onnx" for name in GRAPHS)
    (bundle / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(BackendError, match=r"encoder_contrib\.onnx and decoder_contrib\.onnx do not load"):
        shared_tables(encoder, decoder)
    encoder.unlink()
    with pytest.raises(BackendError, match=r"do not load: .*No such file"):
        shared_tables(encoder, decoder)
