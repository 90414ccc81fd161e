"""Bundles with correct hashes whose graphs differ from the manifest or the contract.

ONNX Runtime refuses weights outside of the bundle, and the inputs and outputs that it reports are compared with the
contract.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import tfexport
from tests.bundle.made import reseal
from tfexport.errors import BackendError, BundleError, TfexportError
from tfexport.model.model import Model


def load_changed(bundle: Path, folder: Path, graph: str, change: Callable[[onnx.ModelProto], object]) -> Model:
    """Load a copy of a bundle with another graph, resealed as an attacker would."""
    copy = Path(shutil.copytree(bundle, folder / "bundle"))
    model = onnx.load(str(copy / graph), load_external_data=False)
    change(model)
    (copy / graph).write_bytes(model.SerializeToString())
    reseal(copy)
    return tfexport.load(copy, backend="ort")


def points_to(location: str, **entries: int) -> Callable[[onnx.ModelProto], None]:
    """Change the location of the first external weight."""

    def change(model: onnx.ModelProto) -> None:
        weight = next(one for one in model.graph.initializer if one.external_data)
        found = {entry.key: entry.value for entry in weight.external_data} | {"location": location}
        del weight.external_data[:]
        for key, value in (found | {key: str(value) for key, value in entries.items()}).items():
            weight.external_data.add(key=key, value=value)

    return change


@pytest.mark.parametrize("graph", ["encoder_contrib.onnx", "decoder_contrib.onnx"])
@pytest.mark.parametrize("place", ["../secret", "x/../../secret", "{}/secret"])
def test_weights_outside_of_the_bundle_are_refused(place: str, graph: str, dates_bundle: Path, tmp_path: Path) -> None:
    shutil.copy(dates_bundle / "weights.safetensors", tmp_path / "secret")
    with pytest.raises(BackendError, match=r"does not load in onnxruntime .*(escapes|Absolute path)"):
        load_changed(dates_bundle, tmp_path, graph, points_to(place.format(tmp_path)))


@pytest.mark.parametrize("place", [{"offset": 2**40}, {"offset": -8}, {"length": 3}])
def test_weights_that_are_not_in_their_file_are_refused(
    place: dict[str, int], dates_bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match="does not load"):
        load_changed(dates_bundle, tmp_path, "encoder_contrib.onnx", points_to("weights.safetensors", **place))


def rename_input(model: onnx.ModelProto) -> None:
    name = model.graph.input[0].name
    model.graph.input[0].name = "other"
    for node in model.graph.node:
        for place, one in enumerate(node.input):
            if one == name:
                node.input[place] = "other"


def add_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("other", onnx.TensorProto.INT64, ["batch", "source_len"])
    )
    model.graph.node.append(onnx.helper.make_node("Identity", [model.graph.input[0].name], ["other"]))


def fix_batch(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3


@pytest.mark.parametrize("change", [rename_input, add_output, fix_batch], ids=lambda change: change.__name__)
def test_inputs_and_outputs_are_those_of_the_contract(
    change: Callable[[onnx.ModelProto], None], dates_bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="is not in the contract") as caught:
        load_changed(dates_bundle, tmp_path, "encoder_contrib.onnx", change)
    assert caught.value.subject == "graph encoder_contrib"


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"{}"])
def test_an_invalid_graph_is_refused(content: bytes, dates_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dates_bundle, tmp_path / "bundle"))
    (copy / "decoder_contrib.onnx").write_bytes(content)
    reseal(copy)
    with pytest.raises(TfexportError):
        tfexport.load(copy, backend="ort")
