"""engine.json is read as it was written, and refused with every invalid value."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt.artifact import stored
from tfexport._io.strict_json import render
from tfexport.bundle.bundle import Bundle
from tfexport.errors import BundleError, ConfigError
from tfexport.tensorrt._manifest import EngineManifest
from tfexport.tensorrt.config import EngineConfig, ShapeRange, engine_key


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return stored.make(tmp_path_factory.mktemp("bundles") / "bundle")


def written(data: dict[str, Any]) -> bytes:
    """Write a manifest with its sum, independently of the code under test."""
    plain = (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()
    data = {**data, "self_sha256": hashlib.sha256(plain).hexdigest()}
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


def changed(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> bytes:
    data = json.loads(stored.manifest(bundle).to_bytes())
    del data["self_sha256"]
    change(data)
    return written(data)


def encoder_profile(data: dict[str, Any]) -> dict[str, Any]:
    return data["plans"]["encoder"]["profiles"][0]


def test_every_capacity_has_a_plan(bundle: Bundle) -> None:
    def shorter(data: dict[str, Any]) -> None:
        for part in ("config", "limits"):
            data[part]["capacities"] = [4, 16]

    def with_plan(data: dict[str, Any]) -> None:
        shorter(data)
        data["plans"]["decoder_static_4"] = data["plans"]["decoder_static"] | {"file": "decoder_static_4.plan"}

    engine = EngineManifest.from_bytes(changed(bundle, with_plan))
    assert engine.limits.capacities == (4, 16)
    with pytest.raises(BundleError, match="reorder, expected decoder_static, decoder_static_4, encoder, reorder"):
        EngineManifest.from_bytes(changed(bundle, shorter))


@pytest.mark.parametrize("config", [stored.RTX, stored.TENSORRT], ids=["rtx", "tensorrt"])
def test_a_manifest_is_read_as_it_was_written(bundle: Bundle, config: EngineConfig) -> None:
    engine = stored.manifest(bundle, config)
    raw = engine.to_bytes()
    assert EngineManifest.from_bytes(raw) == engine
    data = json.loads(raw)
    del data["self_sha256"]
    assert written(data) == raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["config"].update(target=None), "config.target is null"),
        (lambda data: data["config"].update(compute_capabilities=[]), "config.compute_capabilities is empty"),
        (lambda data: data["config"].update(compute_capabilities=["sm_86"]), "compute_capabilities has 'sm_86'"),
        (lambda data: data["limits"].update(capacities=[4]), "capacities end at 4, expected 16"),
        (lambda data: data["limits"].update(capacities=[16, 16]), "capacities are 16, 16, expected them to ascend"),
        (lambda data: data["limits"].update(capacities=[]), "limits.capacities are (), expected config's, (16,)"),
        (
            lambda data: data["plans"].update(decoder_static_4=data["plans"]["decoder_static"]),
            "plans are decoder_static, decoder_static_4, encoder, reorder, expected decoder_static, encoder, reorder",
        ),
        (lambda data: data["sources"].update({"encoder.onnx": "abc"}), "sources.encoder.onnx is 'abc', expected 64 h"),
        (lambda data: data.update(sources={}), "sources is empty"),
        (lambda data: data["plans"].pop("reorder"), "plans are decoder_static, encoder, expected decoder_static, e"),
        (lambda data: data["plans"]["encoder"].update(file="/etc/passwd"), "file is '/etc/passwd', expected encoder.p"),
        (lambda data: data["plans"]["encoder"]["profiles"].pop(), "plans.encoder has 0 profiles, expected at most 1"),
        (lambda data: encoder_profile(data).pop("source_ids"), "plans.encoder: profile 0 has no range for source_ids"),
        (
            lambda data: encoder_profile(data).update(x={"min": [1], "opt": [1], "max": [1]}),
            "plans.encoder: profile 0 has 'x', which is not an input",
        ),
        (lambda data: encoder_profile(data)["source_ids"].update(min=[9, 99]), "source_ids has (9, 99)"),
        (lambda data: encoder_profile(data)["source_ids"].update(max=[32]), "expected shapes that ascend from 0"),
        (lambda data: data["plans"]["decoder_static"]["aliases"].update(logits="none"), "aliases has 'logits': 'none'"),
        (lambda data: data.update(format_version=2), "made by a newer tfexport (format 2, this one reads 1)"),
    ],
)
def test_every_invalid_value_is_named(bundle: Bundle, change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(BundleError, match=re.escape(message)):
        EngineManifest.from_bytes(changed(bundle, change))


def test_a_recorded_manifest_is_read_and_written_the_same() -> None:
    """Read what tfexport 0.1.0 wrote for `tfexport trt BUNDLE --max-batch 4 --compute-capability 8.9`.

    Its "form" is the variant of today. Later versions added fields.
    """
    recorded = json.loads((Path(__file__).parents[1] / "data" / "engine.json").read_text())
    engine = EngineManifest.from_bytes(render(recorded))
    recorded["config"]["variant"] = recorded["config"].pop("form")
    recorded["config"]["fp32_layers"], recorded["layers"] = [], None
    for plan in recorded["plans"].values():
        plan["kernels"] = {}
    assert json.loads(engine.to_bytes()) | {"self_sha256": ""} == recorded | {"self_sha256": ""}
    assert engine.limits.max_batch == 4
    assert engine.config.compute_capabilities == ("8.9",)
    assert engine.plans["encoder"].profiles[0]["source_ids"] == ShapeRange((1, 1), (2, 32), (4, 64))


def test_changed_bytes_are_refused(bundle: Bundle) -> None:
    raw = stored.manifest(bundle).to_bytes()
    with pytest.raises(BundleError, match=r"engine\.json was changed"):
        EngineManifest.from_bytes(raw.replace(b'"max_batch": 32', b'"max_batch": 64', 1))


def test_the_folder_is_named_after_the_options() -> None:
    rtx = EngineConfig(target="tensorrt-rtx", variant="static", precision="fp16", weights="int8")
    assert engine_key(rtx) == "tensorrt-rtx-static-fp16-int8"
    assert engine_key(EngineConfig(target="tensorrt", precision="bf16")) == "tensorrt-bf16"
    fp16 = EngineConfig(target="tensorrt", variant="static", precision="fp16")
    assert engine_key(fp16, "w8a8") == "tensorrt-static-w8a8"
    assert engine_key(fp16, "fp8") == "tensorrt-static-fp8"


def test_an_encoder_only_bundle_has_one_plan(bundle: Bundle) -> None:
    whole = stored.manifest(bundle)
    alone = dataclasses.replace(stored.RTX, variant=None, max_target_length=None, capacities=())
    plans = {"encoder": whole.plans["encoder"]}
    engine = dataclasses.replace(
        whole, config=alone, limits=dataclasses.replace(whole.limits, capacities=()), plans=plans
    )
    assert EngineManifest.from_bytes(engine.to_bytes()) == engine
    with pytest.raises(ConfigError, match="plans are encoder, expected decoder_static, encoder, reorder"):
        dataclasses.replace(whole, plans=plans)


def test_a_plan_of_tensorrt_names_its_gpu(bundle: Bundle) -> None:
    machine = dataclasses.replace(stored.manifest(bundle).machine, gpu=None)
    with pytest.raises(ConfigError, match="machine names no GPU"):
        stored.manifest(bundle, stored.TENSORRT, machine=machine)
