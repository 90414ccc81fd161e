"""Bundles whose sums are all right and whose graphs are not: refused in one line, before a session is made.

Each begins as a good bundle, is changed in one thing by the onnx package, and is sealed again as an attacker would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tfexport
from tests.bundle.made import CONTENT, GRAPHS, edit, make, refused, reseal
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.graph_file import read_graph
from tfexport.contract import WEIGHTS
from tfexport.errors import BundleError

Change = Callable[[onnx.ModelProto], object]
FILE = "decoder.onnx"


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session would be made of what was refused."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)


def changed(path: Path, change: Change, file: str = FILE) -> Path:
    """Change a graph and make every sum right again."""
    model = onnx.load(path / file, load_external_data=False)
    change(model)
    (path / file).write_bytes(model.SerializeToString())
    reseal(path)
    return path


def refuses(path: Path, *messages: str) -> str:
    """Expect one line of `load` and of `open_bundle`."""
    with pytest.raises(BundleError) as caught:
        tfexport.load(path)
    assert str(caught.value) == refused(path, *messages)
    assert len(str(caught.value)) < 6000
    return str(caught.value)


def value(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    return next(one for one in (*model.graph.input, *model.graph.output) if one.name == name)


def test_a_change_that_changes_nothing_is_none(bundle: Path) -> None:
    changed(bundle, lambda model: None)
    before = open_bundle(bundle).manifest.files[FILE]
    changed(bundle, lambda model: setattr(model, "producer_name", "somebody"))
    assert open_bundle(bundle).manifest.files[FILE] != before


# ---- inputs and outputs


def rename(model: onnx.ModelProto) -> None:
    value(model, "logits").name = "scores"


def move(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output.pop(0))


def add_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("path", TensorProto.STRING, ["n"]))


def add_rank(model: onnx.ModelProto) -> None:
    value(model, "logits").type.tensor_type.shape.dim.add().dim_value = 1


def sequence(model: onnx.ModelProto) -> None:
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT, ["rows"])
    value(model, "logits").type.CopyFrom(helper.make_sequence_type_proto(inner))


def dim(name: str, axis: int, **to: Any) -> Change:
    def apply(model: onnx.ModelProto) -> None:
        ((key, given),) = to.items()
        setattr(value(model, name).type.tensor_type.shape.dim[axis], key, given)

    return apply


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (rename, ["output scores float32 [rows, 10] is not in the contract", "output logits float32 [rows, 10] is"]),
        (lambda model: model.graph.output.pop(), ["output present_value.1 float32 [rows, 2, past_len + target_len"]),
        (lambda model: model.graph.output.append(value(model, "logits")), ["outputs are out of order, or there twice"]),
        (move, ["outputs are out of order"]),
        (add_input, ["input path type 8 [n] is not in the contract"]),
        (
            lambda model: model.graph.output.append(helper.make_tensor_value_info("leak", TensorProto.FLOAT, None)),
            ["output leak float32 [] is not in the contract"],
        ),
        (
            lambda model: setattr(value(model, "source_mask").type.tensor_type, "elem_type", TensorProto.INT64),
            ["input source_mask int64 [batch, source_len] is not", "input source_mask bool [batch, source_len] is mis"],
        ),
        (add_rank, ["output logits float32 [rows, 10, 1] is not in the contract"]),
        (dim("past_key.0", 1, dim_value=3), ["input past_key.0 float32 [rows, 3, past_len, 4] is not in the contract"]),
        (dim("past_key.0", 1, dim_param="heads"), ["input past_key.0 float32 [rows, heads, past_len, 4] is not in"]),
        (dim("target_ids", 0, dim_value=1), ["input target_ids int64 [1, target_len] is not in the contract"]),
        (dim("logits", 1, dim_value=-1), ["output logits float32 [rows, -1] is not in the contract"]),
        (sequence, ["a type has another type than a tensor's"]),
    ],
)
def test_inputs_and_outputs_are_those_of_the_manifest(bundle: Path, change: Change, messages: list[str]) -> None:
    refuses(changed(bundle, change), *(f"{FILE}: " if "contract" in messages[0] else "", *messages))


def test_the_contract_of_the_manifest_is_that_of_the_model(bundle: Path) -> None:
    """The manifest follows the graph, which is no graph of such a model."""

    def follow(data: dict[str, Any]) -> None:
        outputs = data["graphs"]["decoder"]["outputs"]
        outputs.append({"name": "leak", "dtype": "float32", "shape": ["rows"]})

    model = onnx.load(bundle / FILE)
    model.graph.output.append(helper.make_tensor_value_info("leak", TensorProto.FLOAT, ["rows"]))
    (bundle / FILE).write_bytes(model.SerializeToString())
    edit(bundle, follow)
    reseal(bundle)
    refuses(bundle, "graphs.decoder: output leak float32 [rows] is not in the contract")


def test_graphs_of_another_export_are_refused(bundle: Path) -> None:
    (bundle / FILE).write_bytes(CONTENT["decoder_static.onnx"])
    reseal(bundle)
    refuses(bundle, f"{FILE}: input cache_lengths int64 [rows] is not in the contract")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("decoder.ort", "graphs.decoder is 'decoder.ort', expected a file NAME.onnx beside the weights"),
        ("deep/decoder.onnx", "graphs.decoder is 'deep/decoder.onnx', expected a file NAME.onnx beside the weights"),
    ],
)
def test_graphs_lie_beside_the_weights_under_their_kind_of_name(bundle: Path, file: str, message: str) -> None:
    (bundle / FILE).rename(bundle / file)
    edit(bundle, lambda data: data["graphs"]["decoder"].update(file=file))
    reseal(bundle)
    refuses(bundle, message)


# ---- operators


def node(*arguments: Any, **more: Any) -> Change:
    return lambda model: model.graph.node.append(helper.make_node(*arguments, **more))


def body() -> onnx.GraphProto:
    return helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "body", [], [])


def function(model: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [], opsets))


def foreign(domain: str, name: str) -> Change:
    def apply(model: onnx.ModelProto) -> None:
        model.opset_import.append(helper.make_opsetid(domain, 1))
        node(name, ["logits"], ["y"], domain=domain)(model)

    return apply


def stored_value(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=external("c", [4])))


def reference(model: onnx.ModelProto) -> None:
    node("Identity", ["logits"], ["y"])(model)
    model.graph.node[-1].attribute.add(name="a", ref_attr_name="b", type=onnx.AttributeProto.INT)


def sparse() -> onnx.SparseTensorProto:
    values, indices = (helper.make_tensor(name, kind, [1], [1]) for name, kind in (("v", 1), ("i", 7)))
    return helper.make_sparse_tensor(values, indices, [2**40])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (node("Loop", ["n", "c"], ["y"], body=body()), "an attribute has a graph inside, as Loop, If and Scan have"),
        (node("If", ["c"], ["y"], then_branch=body(), else_branch=body()), "a graph inside"),
        (node("Scan", ["x"], ["y"], body=body(), num_scan_inputs=1), "a graph inside"),
        (node("SequenceMap", ["x"], ["y"], body=body()), "a graph inside"),
        (node("Foo", ["x"], ["y"], bodies=[body(), body()]), "a graph inside"),
        (function, "the model has functions of its own, which no graph of tfexport has"),
        (lambda model: model.training_info.add(), "the model has training steps"),
        (lambda model: model.graph.sparse_initializer.append(sparse()), "the graph has sparse weights"),
        (node("Constant", [], ["c"], sparse_value=sparse()), "an attribute has a sparse tensor"),
        (reference, "an attribute has a reference into a function"),
        (foreign("evil", "Run"), "has operators of the domain 'evil', which no graph of tfexport has"),
        (foreign("ai.onnx.ml", "TreeEnsemble"), "has operators of the domain 'ai.onnx.ml'"),
        (foreign("com.microsoft", "EPContext"), "has the operators 'com.microsoft.EPContext', which no graph of tfexp"),
        (foreign("com.microsoft", "BeamSearch"), "has the operators 'com.microsoft.BeamSearch'"),
        (node("Run", [], [], domain="undeclared"), "has the operators 'undeclared.Run'"),
        (lambda model: setattr(model.opset_import[0], "version", 26), f"{FILE}: has opset 26 of ONNX, expected 18"),
        (lambda model: model.opset_import.append(helper.make_opsetid("ai.onnx", 9)), "a domain has two opsets"),
        (lambda model: model.opset_import.pop(), "names no opset of ONNX"),
        (stored_value, "a value of an operator lies in another file"),
    ],
)
def test_what_no_graph_of_ours_has_is_refused(bundle: Path, change: Change, message: str) -> None:
    refuses(changed(bundle, change), FILE, message)


def test_a_graph_that_nodes_are_hidden_behind_is_refused(bundle: Path) -> None:
    """Protobuf joins what stands twice; a reader that takes one of them sees half."""
    second = onnx.ModelProto()
    node("Loop", ["n", "c"], ["y"], body=body())(second)
    (bundle / FILE).write_bytes(CONTENT[FILE] + second.SerializeToString())
    reseal(bundle)
    refuses(bundle, "the model has its field 7 twice")


# ---- weights


def external(name: str, dims: list[int], kind: int = TensorProto.FLOAT, **facts: object) -> onnx.TensorProto:
    """Make a tensor whose bytes lie in the weight file, or in another."""
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, said in {"location": WEIGHTS, "offset": 16, "length": 4 * math.prod(dims), **facts}.items():
        if said is not None:
            tensor.external_data.add(key=key, value=str(said))
    return tensor


def weight(name: str = "w", dims: list[int] | None = None, **facts: object) -> Change:
    return lambda model: model.graph.initializer.append(external(name, dims or [4, 4], **facts))


@pytest.mark.parametrize("facts", [{}, {"offset": None}, {"offset": 192}, {"offset": "00"}])
def test_weights_inside_of_the_weight_file_are_taken(bundle: Path, facts: dict[str, object]) -> None:
    open_bundle(changed(bundle, weight(**facts)))


def twice(model: onnx.ModelProto) -> None:
    tensor = external("w", [4])
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.initializer.append(tensor)


def inside_too(model: onnx.ModelProto) -> None:
    tensor = external("w", [4])
    tensor.raw_data = bytes(16)
    model.graph.initializer.append(tensor)


def says_inside(model: onnx.ModelProto) -> None:
    tensor = external("w", [4])
    tensor.data_location, tensor.raw_data = TensorProto.DEFAULT, bytes(16)
    model.graph.initializer.append(tensor)


def bomb(dims: list[int]) -> Change:
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=bytes(4))
    return lambda model: model.graph.initializer.append(tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (weight(location="other.bin"), f"'w' lies in 'other.bin', expected {WEIGHTS}"),
        (weight(location="parity.json"), "'w' lies in 'parity.json'"),
        (weight(location=f"../bundle/{WEIGHTS}"), "'w' lies in '../bundle/"),
        (weight(location=f"./{WEIGHTS}"), "'w' lies in './"),
        (weight(location="/etc/passwd"), "'w' lies in '/etc/passwd'"),
        (weight(location="/dev/zero"), "'w' lies in '/dev/zero'"),
        (weight(location="*/_ORT_MEM_ADDR_/*"), "'w' lies in '*/_ORT_MEM_ADDR_/*'"),
        (weight(location=""), "'w' lies in ''"),
        (weight(location=None), "expected location, offset and length"),
        (weight(length=None), "expected location, offset and length"),
        (weight(checksum="x"), "expected location, offset and length"),
        (weight(prepacked_0="x"), "expected location, offset and length"),
        (twice, "expected location, offset and length"),
        (weight(offset=200), f"'w' ends at byte 264 of {WEIGHTS}, behind its end"),
        (weight(offset=10**17), f"'w' ends at byte {10**17 + 64}"),
        (weight(offset=10**18), "'w' has the offset '1000000000000000000', expected bytes"),
        (weight(offset=-16), "'w' has the offset '-16'"),
        (weight(offset="1e3"), "'w' has the offset '1e3'"),
        (weight(offset=" 1"), "'w' has the offset ' 1'"),
        (weight(offset="²"), "'w' has the offset '²'"),
        (weight(length=-64), "'w' has the length '-64'"),
        (weight(length=60), "'w' takes 60 bytes, expected 64 by its type and shape"),
        (weight(length=68), "'w' takes 68 bytes, expected 64"),
        (weight(dims=[2**40, 2**40], length=64), "'w' takes 64 bytes, expected 4835703278458516698824704"),
        (weight(dims=[-4, -4], length=64), "'w' has the shape [-4, -4]"),
        (weight(dims=[1] * 33, length=4), "'w' has the shape [1, 1, 1"),
        (weight(kind=TensorProto.STRING), "'w' has the type 8"),
        (inside_too, "'w' has its values inside and in a file"),
        (says_inside, "'w' of shape [4] has no room for its values"),
        (bomb([2**40]), "'w' of shape [1099511627776] has no room for its values"),
        (bomb([2**62, 4]), "has no room for its values"),
        (bomb([-1]), "'w' has the shape [-1]"),
        (node("Constant", [], ["c"], value=TensorProto(dims=[2**40], data_type=1)), "has no room for its values"),
    ],
)
def test_weights_lie_inside_of_the_one_weight_file(bundle: Path, change: Change, message: str) -> None:
    refuses(changed(bundle, change), FILE, message)


def test_a_thousand_wrong_weights_make_one_line(bundle: Path) -> None:
    def many(model: onnx.ModelProto) -> None:
        for index in range(1000):
            weight(f"{'w' * 500}{index}", location="x" * 500)(model)

    refuses(changed(bundle, many), "and 980 more")


# ---- bytes


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "input target_ids int64 [rows, target_len] is missing"),
        (b"\0", "it has the field 0, which no message can have"),
        (b"ORTM" * 9, "decoder.onnx is no graph of tfexport"),
        (b"{}", "decoder.onnx is no graph of tfexport"),
        (CONTENT[FILE] + b"\xfa\x3f\x01x", "the model has the field 1023"),
        (CONTENT[FILE] + b"\x0b\x0c", "its field 1 is written in a way that there is none of"),
        (CONTENT[FILE] + b"\x10" + b"\x80" * 10 + b"\x01", "a number in it has more than ten bytes"),
        (CONTENT[FILE] + b"\x32\xff\xff\xff\xff\x0f", "it is cut off"),
        (CONTENT[FILE] + b"\x3d\0\0\0\0", "field 7 of the model is not what it must be"),
    ],
    ids=["empty", "zero", "ort", "json", "later", "group", "long", "short", "fixed"],
)
def test_bytes_that_are_no_graph_are_refused(bundle: Path, raw: bytes, message: str) -> None:
    (bundle / FILE).write_bytes(raw)
    reseal(bundle)
    refuses(bundle, message)


def test_a_graph_that_ends_early_is_refused_wherever_it_does(bundle: Path) -> None:
    whole = CONTENT[FILE]
    for length in range(0, len(whole), 41):
        (bundle / FILE).write_bytes(whole[:length])
        reseal(bundle)
        refuses(bundle, FILE)


# ---- the reader against the onnx package


def test_the_reader_sees_what_the_onnx_package_sees(dates_bundle: Path, dates_fp16: Path, dates_aligned: Path) -> None:
    seen = set()
    for folder in (dates_bundle, dates_fp16, dates_aligned):
        for path in folder.glob("*.onnx"):
            model, found = onnx.load(path, load_external_data=False), read_graph(path.read_bytes())
            assert found.opsets == {entry.domain: entry.version for entry in model.opset_import}
            assert found.operators == {f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in model.graph.node}
            outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
            assert len(outside) == len(found.weights)
            for tensor, weight in zip(outside, found.weights, strict=True):
                facts = {entry.key: entry.value for entry in tensor.external_data}
                assert (weight.name, weight.location) == (tensor.name, facts["location"])
                assert (weight.offset, weight.length) == (int(facts["offset"]), int(facts["length"]))
                loaded = onnx.TensorProto()
                loaded.CopyFrom(tensor)
                onnx.external_data_helper.load_external_data_for_tensor(loaded, str(folder))
                assert weight.num_bytes == numpy_helper.to_array(loaded).nbytes
                seen.add(tensor.data_type)
            for side, said in ((found.spec.inputs, model.graph.input), (found.spec.outputs, model.graph.output)):
                assert [tensor.name for tensor in side] == [one.name for one in said]
                dims = [[d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in said]
                assert [list(tensor.shape) for tensor in side] == dims
    assert {TensorProto.FLOAT, TensorProto.FLOAT16} <= seen


def test_dims_may_be_written_one_by_one_or_side_by_side(bundle: Path) -> None:
    """Both are read by protobuf, whatever the writer chose."""
    changed(bundle, weight(dims=[4, 4]))
    raw = (bundle / FILE).read_bytes()
    assert raw.count(b"\x08\x04\x08\x04\x10\x01") == 1  # dims 4 and 4, then the type
    (bundle / FILE).write_bytes(raw.replace(b"\x08\x04\x08\x04\x10\x01", b"\x0a\x02\x04\x04\x10\x01"))
    reseal(bundle)
    open_bundle(bundle)


# ---- ids


def ids(data: dict[str, Any], **tokens: int) -> None:
    data["config"]["tokens"].update(tokens)
    data["spec"]["tokens"].update(tokens)


def foreign_module(data: dict[str, Any], **tokens: int) -> None:
    data["config"] = None
    data["spec"]["tokens"].update(tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: ids(data, eos=10), "tokens.eos is 10, expected below target_vocab 10"),
        (lambda data: foreign_module(data, eos=10), "spec: tokens.eos is 10, expected below vocab 10"),
        (lambda data: foreign_module(data, start=10**30), "tokens.start is 1000000000"),
        (lambda data: foreign_module(data, pad=11), "spec: tokens.pad is 11, expected below source_vocab 10"),
        (lambda data: foreign_module(data, unk=11), "spec: tokens.unk is 11, expected below source_vocab 10"),
        (lambda data: data["text"].update(source_prefix=[3, 10]), "text.source_prefix has 10, expected below the voc"),
        (lambda data: data["text"].update(source_suffix=[2**63]), "text.source_suffix has 92233"),
        (lambda data: data["text"].update(target_prefix=[10]), "text.target_prefix has 10, expected below the vocab"),
        (
            lambda data: data["text"].update(
                samples=[{"text": "a", "source_ids": [9, 12], "target_ids": [11], "output": "b"}]
            ),
            "text.samples[0].source_ids has 12, expected below the vocabulary of 10; text.samples[0].target_ids has 11",
        ),
    ],
)
def test_ids_are_of_the_vocabulary(bundle: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(bundle, change)
    refuses(bundle, message)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"suppress_tokens": [3, 10]}', "suppress_tokens has 10, expected below the vocabulary of 10"),
        (b'{"forced_bos_token_id": 10}', "forced_bos_token_id has 10"),
        (b'{"forced_eos_token_id": [2, 10]}', "forced_eos_token_id has 10"),
        (b'{"eos_token_id": 77}', "eos_token_id has 77"),
        (b'{"decoder_start_token_id": 10}', "decoder_start_token_id has 10"),
        (b'{"bad_words_ids": [[1, 10]]}', "bad_words_ids has 10"),
        (b'{"length_penalty": 1e999}', "generation.json is not JSON ('1e999' is too large for a number)"),
        (b'{"stop_strings": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "generation.json is not JSON"),
        (b'{"stop_strings": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 100 deep"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": 1, "seed": 2}', "key seed is given twice"),
        (b"\xff", "generation.json is not JSON"),
        (b" " * 2**21, "generation.json has 2097152 bytes, the limit is 1048576"),
    ],
)
def test_defaults_of_generation_are_the_models(tmp_path: Path, raw: bytes, message: str) -> None:
    content = {**CONTENT, "generation.json": raw}
    del content["tokenizer.json"]
    make(tmp_path / "bundle", content)
    with pytest.raises(BundleError) as caught:
        tfexport.load(tmp_path / "bundle")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_contract_is_that_of_each_graph() -> None:
    """What the tests above change is what `make` makes."""
    for entry in GRAPHS.values():
        assert read_graph(CONTENT[entry.file]).spec == entry.spec
