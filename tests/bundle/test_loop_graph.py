"""A loop graph that is not as tfexport writes it is refused before a session is made: it could run for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tfexport
from tests.bundle.made import edit, reseal
from tfexport.contract import LOOP
from tfexport.errors import BundleError

Change = Callable[[onnx.GraphProto], object]


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session would be made of what was refused."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)


@pytest.fixture
def bundle(dates_loop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dates_loop, tmp_path / "bundle"))


def refuses(bundle: Path, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        tfexport.load(bundle)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def changed(bundle: Path, change: Change) -> Path:
    """Change the graph and make every sum right again, as an attacker would."""
    model = onnx.load(bundle / "loop.onnx", load_external_data=False)
    change(model.graph)
    (bundle / "loop.onnx").write_bytes(model.SerializeToString())
    reseal(bundle)
    return bundle


def loop_in(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "Loop")


def body_in(graph: onnx.GraphProto) -> onnx.GraphProto:
    return loop_in(graph).attribute[0].g


def trips_in(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.output[0] == loop_in(graph).input[0])


def limit(value: object, dtype: type[np.generic] = np.int64) -> Change:
    def apply(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), "limit"))
        trips_in(graph).input[1] = "limit"

    return apply


def without_limit(graph: onnx.GraphProto) -> None:
    loop_in(graph).input[0] = trips_in(graph).input[0]


def maximum(graph: onnx.GraphProto) -> None:
    trips_in(graph).op_type = "Max"


def of_the_caller(graph: onnx.GraphProto) -> None:
    """The limit is an input, of which the constant is the default."""
    limit(16)(graph)
    graph.input.append(helper.make_tensor_value_info("limit", TensorProto.INT64, []))


def computed(graph: onnx.GraphProto) -> None:
    limit(16)(graph)
    graph.node.insert(0, helper.make_node("Identity", [loop_in(graph).input[0]], ["limit"]))


def twice(graph: onnx.GraphProto) -> None:
    limit(16)(graph)
    limit(10**9)(graph)


def two_makers(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Identity", ["max_new_tokens"], [loop_in(graph).input[0]]))


def second_loop(graph: onnx.GraphProto) -> None:
    graph.node.add().CopyFrom(loop_in(graph))


def no_loop(graph: onnx.GraphProto) -> None:
    graph.node.remove(loop_in(graph))


def hidden_domain(graph: onnx.GraphProto) -> None:
    loop_in(graph).domain = "com.microsoft"


def nested(graph: onnx.GraphProto) -> None:
    body_in(graph).node.append(helper.make_node("Loop", ["n", "c"], ["y"], body=onnx.GraphProto(name="b")))


def weights_inside(graph: onnx.GraphProto) -> None:
    body_in(graph).initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "w"))


def foreign(graph: onnx.GraphProto) -> None:
    body_in(graph).node.append(helper.make_node("BeamSearch", [], ["x"], domain="com.microsoft"))


def outside_weight(graph: onnx.GraphProto) -> None:
    weight = next(weight for weight in graph.initializer if weight.external_data)
    weight.external_data[0].value = "/etc/passwd"


def value_elsewhere(graph: onnx.GraphProto) -> None:
    tensor = onnx.TensorProto(dims=[1], data_type=1, data_location=TensorProto.EXTERNAL)
    for key, said in (("location", "x"), ("offset", "0"), ("length", "4")):
        tensor.external_data.add(key=key, value=said)
    body_in(graph).node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def scan(graph: onnx.GraphProto) -> None:
    """What comes out of every step is kept."""
    loop_in(graph).output.append("all")
    body_in(graph).output.append(helper.make_tensor_value_info("step/iteration", TensorProto.INT64, []))


def more_attributes(graph: onnx.GraphProto) -> None:
    loop_in(graph).attribute.append(helper.make_attribute("more", 1))


def other_name(graph: onnx.GraphProto) -> None:
    loop_in(graph).attribute[0].name = "then_branch"


def branch(graph: onnx.GraphProto) -> None:
    body = onnx.GraphProto(name="b")
    graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body))


UNBOUNDED = "the steps of its loop are not the minimum with a constant"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (limit(10**9), "loop.onnx: its loop takes 1000000000 steps, expected 16 at most"),
        (limit([16]), UNBOUNDED),
        (limit(16, np.int32), UNBOUNDED),
        (without_limit, UNBOUNDED),
        (maximum, UNBOUNDED),
        (of_the_caller, UNBOUNDED),
        (computed, UNBOUNDED),
        (twice, UNBOUNDED),
        (two_makers, UNBOUNDED),
        (second_loop, "it has 2 loops, expected one"),
        (no_loop, "it has 0 loops, expected one"),
        (hidden_domain, "it has 0 loops, expected one"),
        (nested, "an attribute has a graph inside, as Loop, If and Scan have"),
        (branch, "an attribute has a graph inside, as Loop, If and Scan have"),
        (weights_inside, "the body of the loop has weights of its own"),
        (foreign, "loop.onnx: has the operators 'com.microsoft.BeamSearch'"),
        (outside_weight, "lies in '/etc/passwd'"),
        (value_elsewhere, "a value of an operator lies in another file"),
        (scan, "the loop and its body disagree about what goes from step to step"),
        (more_attributes, "the loop has 2 attributes, expected its body"),
        (other_name, "the attribute of the loop is not its body"),
        (lambda graph: graph.input.pop(), "input max_new_tokens int64 [1] is missing"),
    ],
)
def test_what_tfexport_does_not_write_is_refused(bundle: Path, change: Change, message: str) -> None:
    refuses(changed(bundle, change), message)


def test_no_other_graph_may_have_a_loop(bundle: Path) -> None:
    (bundle / "decoder.onnx").write_bytes((bundle / "loop.onnx").read_bytes())
    reseal(bundle)
    refuses(bundle, "decoder.onnx is no graph of tfexport (an attribute has a graph inside")


def drop_settings(data: dict[str, Any]) -> None:
    data["loop"] = None


def drop_graph(data: dict[str, Any]) -> None:
    del data["graphs"][LOOP]


def unknown_token(data: dict[str, Any]) -> None:
    data["loop"]["ends"] = [10**6]


def no_prompt(data: dict[str, Any]) -> None:
    data["loop"]["prompt"] = []


def too_long(data: dict[str, Any]) -> None:
    data["loop"]["max_new_tokens"] = 17


def other_prefix(data: dict[str, Any]) -> None:
    data["loop"]["prompt"] = [1, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_settings, "of loop and the graph 'loop' there is only one, expected both or none"),
        (drop_graph, "of loop and the graph 'loop' there is only one, expected both or none"),
        (unknown_token, "loop.ends has 1000000, expected below the vocabulary of"),
        (no_prompt, "prompt is empty, expected an id or several"),
        (too_long, "loop.max_new_tokens is 17, but the model has room for 16"),
        (other_prefix, "the loop graph begins with another text.target_prefix"),
    ],
)
def test_the_manifest_says_what_the_graph_generates(
    bundle: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(bundle, change)
    refuses(bundle, message)
