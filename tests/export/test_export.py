"""Export: the contract of the graphs, one weight file, equal bytes, every variant of the model verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from onnx.external_data_helper import ExternalDataInfo
from safetensors.numpy import load_file, save_file
from torch import nn

import tfexport
from tests import tiny
from tests.conftest import DATES
from tests.tiny import ENCODER_ALONE, VARIANT_NAMES
from tfexport.bundle.bundle import open_bundle
from tfexport.cli import main
from tfexport.contract import DECODER, GraphEntry, ModelSpec, decoder_graph
from tfexport.errors import BackendError, BundleError, ConfigError, GraphError, ParityError
from tfexport.export import _pipeline as pipeline
from tfexport.export import export_bundle
from tfexport.export._trace import trace_encoder
from tfexport.export.config import ExportConfig
from tfexport.export.graph_file import save_graph
from tfexport.export.write import write_precision
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model
from tfexport.nn.stored import read_header
from tfexport.nn.transformer import Transformer
from tfexport.verify import VerifyConfig, verify_bundle


@pytest.fixture(scope="session")
def post(variant: Callable[[str], Path]) -> Path:
    """The bundle of the plainest variant; not to be changed."""
    return variant("post")


def model_of(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}-model")


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_exported_variant_equals_eager(name: str, variant: Callable[[str], Path]) -> None:
    bundle = open_bundle(variant(name))
    parity = bundle.manifest.parity
    assert parity is not None
    assert parity["passed"] is True
    variants = {"t5": 2}.get(name, 3)  # no contrib variant: soft cap, and values of another width
    assert len(set(bundle.manifest.graphs) & set(DECODER.values())) == variants
    assert parity["exact"] == parity["sequences"] == variants * (2 * 16 + 9 + 1)  # of the full length


@pytest.mark.slow
@pytest.mark.parametrize("name", ["umt5", "mixed", "modern"])
def test_every_variant_is_token_exact_over_500_sequences(name: str, variant: Callable[[str], Path]) -> None:
    report = verify_bundle(variant(name), config=VerifyConfig(samples=500))
    assert report.passed
    assert [found.exact for found in report.decodes] == [found.sequences for found in report.decodes]
    assert len(report.decodes) >= 3 * 2


def described(graph: Path) -> dict[str, tuple[str, list[str | int]]]:
    model = onnx.load(str(graph), load_external_data=False)
    return {
        value.name: (
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*model.graph.input, *model.graph.output)
    }


def test_the_graphs_keep_the_contract_of_the_design(post: Path) -> None:
    cross: dict[str, Any] = {
        f"cross_{part}.{i}": ("float32", ["batch", 4, "source_len", 8]) for i in range(2) for part in ("key", "value")
    }
    source = {"source_ids": ("int64", ["batch", "source_len"]), "source_mask": ("bool", ["batch", "source_len"])}
    assert described(post / "encoder.onnx") == described(post / "encoder_contrib.onnx") == source | cross
    shared = cross | {
        "source_mask": source["source_mask"],
        "target_ids": ("int64", ["rows", "target_len"]),
        "num_candidates": ("int64", [1]),
        "logits": ("float32", ["rows", tiny.VOCAB]),
        "candidate_ids": ("int64", ["rows", "num_candidates"]),
        "candidate_logits": ("float32", ["rows", "num_candidates"]),
        "log_normalizer": ("float32", ["rows", 1]),
    }

    def caches(prefix: str, length: str) -> dict[str, Any]:
        return {f"{prefix}_{p}.{i}": ("float32", ["rows", 4, length, 8]) for i in range(2) for p in ("key", "value")}

    concat = caches("past", "past_len") | caches("present", "past_len + target_len")
    assert described(post / "decoder.onnx") == shared | concat
    buffers = caches("past", "capacity") | caches("present", "capacity")
    assert described(post / "decoder_static.onnx") == shared | buffers | {"cache_lengths": ("int64", ["rows"])}
    assert described(post / "decoder_contrib.onnx") == shared | buffers | {
        "positions": ("int64", ["rows", "target_len"]),
        "last_position": ("int32", ["rows"]),
        "total_length": ("int32", [1]),
    }


@pytest.mark.parametrize(
    ("name", "opset", "operators"),
    [
        ("encoder", 18, {}),
        ("decoder", 18, {}),
        ("decoder_static", 24, {"TensorScatter": 4, "Attention": 4}),
        ("encoder_contrib", 18, {"MultiHeadAttention": 2}),
        ("decoder_contrib", 18, {"MultiHeadAttention": 2, "GroupQueryAttention": 2}),
    ],
)
def test_opsets_and_operators_are_supported_by_the_runtimes(
    name: str, opset: int, operators: dict[str, int], post: Path
) -> None:
    model = onnx.load(str(post / f"{name}.onnx"), load_external_data=False)
    domains = {("", opset), ("com.microsoft", 1)} if name.endswith("contrib") else {("", opset)}
    assert {(entry.domain, entry.version) for entry in model.opset_import} == domains
    found = Counter(node.op_type for node in model.graph.node)
    assert not found.keys() & {"If", "Loop", "NonZero", "Multinomial"}
    assert not model.functions
    assert {kind: n for kind, n in found.items() if "Attention" in kind or kind == "TensorScatter"} == operators
    assert all(node.op_type in operators for node in model.graph.node if node.domain)


def test_caches_go_straight_from_input_to_output(post: Path) -> None:
    graph = onnx.load(str(post / "decoder_contrib.onnx"), load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert [(node.input[3:5], node.output[1:3]) for node in nodes] == [
        ([f"past_key.{i}", f"past_value.{i}"], [f"present_key.{i}", f"present_value.{i}"]) for i in range(2)
    ]
    graph = onnx.load(str(post / "decoder_static.onnx"), load_external_data=False).graph
    scatters = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "TensorScatter"}
    assert scatters == {f"present_{p}.{i}": f"past_{p}.{i}" for i in range(2) for p in ("key", "value")}


def test_all_graphs_share_one_weight_file_that_holds_the_model(post: Path) -> None:
    stored = load_file(post / "weights.safetensors")
    model = load_model(model_of(post))
    assert {name: array.shape for name, array in stored.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    raw, used = (post / "weights.safetensors").read_bytes(), set()
    joint = {
        name.replace(".q.", "."): np.concatenate([stored[name.replace(".q.", f".{part}.")] for part in "qkv"])
        for name in stored
        if name.startswith("dec.") and ".self.q." in name
    }
    for name in ("encoder", "decoder", "decoder_static", "encoder_contrib", "decoder_contrib"):
        for tensor in onnx.load(str(post / f"{name}.onnx"), load_external_data=False).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert len(tensor.raw_data) < 1024, f"{tensor.name} lies in the graph"
                continue
            info = ExternalDataInfo(tensor)
            assert info.location == "weights.safetensors"
            content = raw[info.offset : info.offset + info.length]
            matching = {key for key, array in (stored | joint).items() if array.tobytes() == content}
            assert matching, f"{tensor.name} is no parameter"
            used |= matching
    assert used == set(stored) | set(joint)


def test_equal_input_gives_equal_bytes_with_an_alignment_or_without(post: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-c", "from tfexport.cli import main; main()"]
    command = [
        *run,
        "onnx",
        str(model_of(post)),
        "--output",
        str(tmp_path / "b"),
        "--no-verify",
        "--variants",
        "concat",
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {"encoder.onnx", "decoder.onnx", "reorder.onnx", "weights.safetensors", "manifest.json", "README.md"}
    assert {file.name for file in (tmp_path / "b").iterdir()} == files
    for name in files - {"manifest.json", "README.md"}:
        assert (post / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    one, other = (json.loads((path / "manifest.json").read_text()) for path in (post, tmp_path / "b"))
    for key in ("alignment", "parity", "provenance", "self_sha256"):
        assert one.pop(key) != other.pop(key, None)
    for kind in ("graphs", "files"):
        one[kind] = {name: entry for name, entry in one[kind].items() if name in other[kind]}
    assert one["files"].pop("README.md") != other["files"].pop("README.md")
    assert one == other


def test_a_graph_contains_nothing_of_the_machine_that_made_it(post: Path) -> None:
    for file in post.glob("*.onnx"):
        raw = file.read_bytes()
        assert b"/" + b"models/" not in raw
        assert str(Path.cwd()).encode() not in raw
        assert b".py" not in raw


def test_quantized_weights_have_one_variant_and_the_report_names_it(tmp_path: Path) -> None:
    config, lines = ExportConfig(precision="int8", variants=("concat", "contrib")), list[str]()
    bundle = export_bundle(str(DATES), tmp_path / "b", config, verify=False, report=lines.append)
    assert set(bundle.manifest.graphs) & set(DECODER.values()) == {DECODER["contrib"]}
    assert any("only the contrib variant" in line and "not concat" in line for line in lines)


def test_limits_and_precision_are_those_of_the_graphs(post: Path, dates_fp16: Path, tmp_path: Path) -> None:
    config = ExportConfig(precision="bf16", variants=("concat",), max_source_length=5, max_target_length=3)
    bundle = export_bundle(str(model_of(post)), tmp_path / "b", config, verify=False)
    assert bundle.manifest.spec.max_source_length == 5
    assert read_header(bundle.file("weights.safetensors"))["dec.pos"].shape == (3, 32)
    assert sorted(bundle.manifest.graphs) == ["decoder", "encoder", "reorder"]
    for path, wide in ((dates_fp16, "float16"), (bundle.path, "bfloat16")):
        found = described(path / "decoder.onnx")
        assert found["past_key.0"][0] == found["cross_value.1"][0] == wide
        assert found["logits"][0] == found["log_normalizer"][0] == "float32"
    size, full_size = ((path / "weights.safetensors").stat().st_size for path in (bundle.path, post))
    assert size < 0.6 * full_size
    with pytest.raises(BackendError, match="no bfloat16 kernels"):
        tfexport.load(bundle.path, backend="ort")


def test_an_export_that_cannot_succeed_writes_nothing(post: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_source_length is 99, above the model's position table of 24; ask for"):
        export_bundle(str(model_of(post)), tmp_path / "b", ExportConfig(max_source_length=99))
    arguments = ["onnx", str(model_of(post)), "--output", str(tmp_path / "b"), "--precision", "bf16"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "ONNX Runtime has no bfloat16 kernels on the CPU; use --precision fp16, or --no-verify" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_verification_leaves_the_old_bundle(
    post: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = str(model_of(post)), tmp_path / "b"
    shutil.copytree(post, output)
    old = open_bundle(output)

    def write_with_one_weight_off(model: Transformer, spec: ModelSpec, folder: Path, **_: Any) -> dict[str, GraphEntry]:
        graphs = {name: entry for name, entry in old.manifest.graphs.items() if name in ("encoder", "decoder")}
        for entry in graphs.values():
            shutil.copy(post / entry.file, folder)
        raw = bytearray((post / "weights.safetensors").read_bytes())
        weight = read_header(post / "weights.safetensors")["dec.layers.1.norm2.weight"]
        np.frombuffer(raw, np.float32, 32, weight.offset)[3] *= 1.01
        (folder / "weights.safetensors").write_bytes(raw)
        return graphs

    monkeypatch.setattr(pipeline, "write_graphs", write_with_one_weight_off)
    with pytest.raises(ParityError, match=r"onnx: ort concat differs by .* of the largest value at batch"):
        export_bundle(source, output, ExportConfig(), force=True)
    assert open_bundle(output).sha256 == old.sha256
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["b"]


class Branching(nn.Module):
    def hidden_states(self, source_ids: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        return source_ids if source_ids.sum() > 3 else -source_ids


def test_a_model_that_cannot_be_traced_is_one_line() -> None:
    with pytest.raises(
        GraphError, match=r"^hidden_states: the model cannot be traced \(.*\); remove branches on tensor"
    ):
        trace_encoder(Branching().eval(), model_spec(ENCODER_ALONE, "fp32"), 18)


def test_the_contract_check_lists_every_difference(post: Path, tmp_path: Path) -> None:
    model = onnx.load(str(post / "decoder_static.onnx"), load_external_data=False)
    model.graph.input[0].name = "tokens"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = "tokens" if name == "target_ids" else name
        if node.op_type == "Attention" and node.input[3]:
            next(attribute for attribute in node.attribute if attribute.name == "is_causal").i = 1
    (tmp_path / "weights.safetensors").write_bytes((post / "weights.safetensors").read_bytes())
    spec = open_bundle(post).manifest.spec
    with pytest.raises(GraphError) as caught:
        save_graph(ir.from_proto(model), tmp_path / "decoder_static.onnx", decoder_graph(spec, "static"))
    message = str(caught.value)
    assert "input tokens int64 [rows, target_len] is not in the contract" in message
    assert "input target_ids int64 [rows, target_len] is missing" in message
    assert (
        "has is_causal although the number of queries and keys may differ, which TensorRT ignores or misreads"
        in message
    )


def greedy_by_hand(bundle: Path, source: list[int], steps: int) -> Iterator[int]:
    """Decode with onnxruntime and numpy alone, the concat variant."""
    import onnxruntime as ort

    encoder = ort.InferenceSession(str(bundle / "encoder.onnx"))
    decoder = ort.InferenceSession(str(bundle / "decoder.onnx"))
    ids = np.array([source])
    names = [output.name for output in encoder.get_outputs()]
    cross = dict(zip(names, encoder.run(None, {"source_ids": ids, "source_mask": ids >= 0}), strict=True))
    past = {name.replace("cross", "past"): array[:, :, :0] for name, array in cross.items()}
    token = np.array([[1]])
    for _ in range(steps):
        outputs = [output.name for output in decoder.get_outputs()]
        feed = {"target_ids": token, "source_mask": ids >= 0, "num_candidates": np.array([1]), **cross, **past}
        found = dict(zip(outputs, decoder.run(None, feed), strict=True))
        past = {name.replace("present", "past"): found[name] for name in outputs if name.startswith("present")}
        assert found["logits"].argmax(-1) == found["candidate_ids"][:, 0]
        token = found["candidate_ids"]
        yield int(token[0, 0])


def test_a_graph_decodes_without_this_project(post: Path) -> None:
    model, source = load_model(model_of(post)), [5, 9, 20, 7]
    target = [1]
    with torch.no_grad():
        for _ in range(6):
            logits = model(torch.tensor([source]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([target]))
            target.append(int(logits[0, -1].argmax()))
    assert list(greedy_by_hand(post, source, 6)) == target[1:]


def test_another_precision_has_the_graphs_of_an_export(dates_bundle: Path, dates_fp16: Path, tmp_path: Path) -> None:
    written = write_precision(open_bundle(dates_bundle), "fp16", "static", tmp_path)
    expected = open_bundle(dates_fp16).manifest.graphs
    assert written == {name: expected[name] for name in ("encoder", "decoder_static")}
    files = ["decoder_static.onnx", "encoder.onnx", "reorder.onnx", "weights.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for file in files:
        assert (tmp_path / file).read_bytes() == (dates_fp16 / file).read_bytes(), file


def test_a_bundle_without_a_model_has_no_other_precision(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(dates_bundle)
    with pytest.raises(BundleError) as caught:
        write_precision(replace(bundle, manifest=replace(bundle.manifest, config=None)), "fp16", "static", tmp_path)
    assert str(caught.value) == (
        f"{bundle.path}: has graphs in fp32 and no model to cast; "
        "export it again with: tfexport onnx SOURCE --precision fp16"
    )
    assert not list(tmp_path.iterdir())


def test_weights_beyond_a_precision_are_listed(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = replace(open_bundle(dates_bundle), path=tmp_path / "bundle")
    shutil.copytree(dates_bundle, bundle.path)
    weights = load_file(bundle.path / "weights.safetensors")
    weights["enc.layers.0.ffn.fc1.weight"][0, 0] = 7e4
    weights["enc.layers.2.norm1.bias"][3] = -1e5
    save_file(weights, bundle.path / "weights.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(GraphError) as caught:
        write_precision(bundle, "fp16", "concat", tmp_path / "out")
    assert str(caught.value) == (
        f"{bundle.path}: enc.layers.0.ffn.fc1.weight is too large for fp16; "
        "enc.layers.2.norm1.bias is too large for fp16; use bf16 or fp32"
    )
    assert not list((tmp_path / "out").iterdir())
