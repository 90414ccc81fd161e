"""Kernels and fused attention, from the inspector's JSON or the plan, and the file that keeps the JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import RTX, make, manifest, store
from tfexport._io.sealed_directory import FileEntry
from tfexport.bundle.contents import unlisted_files
from tfexport.contract import ENCODER
from tfexport.errors import EngineError
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.inspector import inspect_plan, kernels_of, num_attentions, num_fused
from tfexport.tensorrt.store import add_engine, open_engine

SEPARATOR = "\x1f"
# As TensorRT 10 reports a decoder with details: two attentions, one of them fused.
REPORT = json.dumps(
    {
        "Layers": [
            {
                "Name": "_gemm_mha_v2_myl0_4",
                "LayerType": "kgen",
                "TacticName": "_gemm_mha_v2_0x5a21",
                "Inputs": [{"Name": "q", "Dimensions": [1, 4, 7, 32], "Format/Datatype": "Half"}],
                "Outputs": [{"Name": "y", "Dimensions": [1, 4, 7, 32], "Format/Datatype": "Half"}],
                "Metadata": f"[ONNX Layer: node_matmul]{SEPARATOR}[ONNX Layer: node_softmax]",
            },
            {"Name": "__myl_MulSumAdd_myl0_5", "LayerType": "kgen", "Inputs": [], "Outputs": [], "Metadata": ""},
            {"Name": "__myl_MulSumAdd_myl0_9", "LayerType": "kgen", "Inputs": [], "Outputs": [], "Metadata": ""},
            {"Name": "node_softmax_1", "LayerType": "SoftMax", "Inputs": [], "Outputs": [], "Metadata": None},
            {"Name": "topk", "LayerType": "TopK", "Inputs": [], "Outputs": []},
        ],
        "Bindings": ["q", "y"],
    }
)


def test_kernels_are_counted_without_their_position() -> None:
    kernels = kernels_of(b"function={ name=of.the.plan", REPORT)
    assert kernels == {"SoftMax": 1, "TopK": 1, "__myl_MulSumAdd": 2, "_gemm_mha_v2": 1}
    assert num_fused(kernels) == 1


def test_a_plan_without_details_has_names_only() -> None:
    assert kernels_of(b"", json.dumps({"Layers": ["a_myl0_1", "b_myl0_2", "a_myl0_3"]})) == {"a": 2, "b": 1}


def test_a_plan_of_rtx_names_its_kernels() -> None:
    plan = b"\0function={ name=_gemm_mha_v2, x}\0function={ name=__myl_Cast}\0function={ name=_gemm_mha_v2}"
    assert kernels_of(plan, "") == {"__myl_Cast": 1, "_gemm_mha_v2": 2}
    assert kernels_of(b"other", "") == {}


def test_attentions_of_a_network_are_counted_without_the_selection() -> None:
    assert num_attentions({"ATTENTION_INPUT": 4, "SOFTMAX": 1}, selects=True) == 4
    assert num_attentions({"SOFTMAX": 3}, selects=False) == 3


class Runtime:
    """A runtime that loads one plan only."""

    engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        if plan != b"plan" or not self.engine_host_code_allowed:
            return None
        return SimpleNamespace(
            create_engine_inspector=lambda: SimpleNamespace(get_engine_information=lambda kind: kind)
        )


def test_an_inspection_asks_for_json(monkeypatch: pytest.MonkeyPatch, rtx: Library) -> None:
    monkeypatch.setattr(Library, "runtime", lambda self, log: Runtime())
    assert inspect_plan(rtx, b"plan", has_host_code=True) == str(rtx.trt.LayerInformationFormat.JSON)
    assert inspect_plan(rtx, b"plan", has_host_code=False) == inspect_plan(rtx, b"", has_host_code=True) == ""


def test_the_report_is_part_of_the_sealed_engine(tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle")
    report = FileEntry(bytes=len(REPORT), sha256=hashlib.sha256(REPORT.encode()).hexdigest())
    described = manifest(bundle, RTX, layers=report)
    with pytest.raises(EngineError, match=r"layers\.json is missing"):
        store(bundle, described)
    folder = store(bundle, manifest(bundle))
    (folder / "layers.json").write_text(REPORT)
    (folder / "engine.json").write_bytes(described.to_bytes())
    engine = open_engine(bundle.path, folder.name)
    engine.check_plans()
    assert not unlisted_files(bundle.path)
    (folder / "layers.json").write_text(REPORT.replace("kgen", "gemm"))
    with pytest.raises(EngineError, match=r"layers\.json"):
        open_engine(bundle.path, folder.name).check_plans()
    with add_engine(bundle.path, folder.name, force=True) as draft:  # a new build replaces all of it
        for name in ("build.log", "engine.json", "layers.json", *(f"{plan}.plan" for plan in described.plans)):
            (draft / name).write_bytes((folder / name).read_bytes())
        (draft / "layers.json").write_text(REPORT)
    assert ENCODER in open_engine(bundle.path, folder.name).manifest.plans
