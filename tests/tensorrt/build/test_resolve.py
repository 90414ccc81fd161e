"""Test the options that are resolved before a build, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bundle.made import CONTENT, FACTS, GRAPHS, fill, make_contrib
from tests.tensorrt.artifact import stored
from tests.tensorrt.artifact.stored import L4
from tfexport.bundle.bundle import Bundle, create_bundle
from tfexport.contract import GraphEntry, graph_contract
from tfexport.errors import ConfigError, EngineError
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build.resolve import resolve
from tfexport.tensorrt.config import EngineConfig, EngineLimits, cache_bytes

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return stored.make(tmp_path / "bundle")


@pytest.fixture
def old(rtx: Library) -> Library:
    """Return an old TensorRT, without a layer for caches or compute capabilities to choose."""
    module = SimpleNamespace(
        IBuilderConfig=object,
        LayerType=SimpleNamespace(),
        BuilderFlag=trt.BuilderFlag,
        HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS=1),
    )
    return replace(rtx, target="tensorrt", trt=module, version="10.3.0")


def only(path: Path, graph: str, **facts: Any) -> Bundle:
    """Make a bundle with one variant of the decoder."""
    graphs = {name: entry for name, entry in GRAPHS.items() if name in ("encoder", graph)}
    files = {entry.file for entry in graphs.values()} | {"weights.safetensors"}
    with create_bundle(path) as builder:
        fill(builder, {name: data for name, data in CONTENT.items() if name in files}, graphs=graphs, **facts)
    return builder.bundle


def test_unset_options_are_chosen(bundle: Bundle, rtx: Library) -> None:
    resolved = resolve(bundle, EngineConfig(), rtx, None)
    assert resolved.config == EngineConfig(
        target="tensorrt-rtx",
        variant="static",
        precision="fp32",
        max_source_length=16,
        max_target_length=16,
        capacities=(16,),
        compute_capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"),
    )
    assert resolved.graphs == ("encoder", "decoder_static")
    assert resolved.sources == {
        name: bundle.manifest.files[name].sha256
        for name in ("encoder.onnx", "decoder_static.onnx", "weights.safetensors")
    }
    assert not resolved.is_exported_again


def test_the_variant_is_one_that_bundle_and_library_have(
    bundle: Bundle, rtx: Library, old: Library, tmp_path: Path
) -> None:
    concat, static = only(tmp_path / "concat", "decoder"), only(tmp_path / "static", "decoder_static")
    assert resolve(concat, EngineConfig(), rtx, None).config.variant == "concat"
    assert resolve(static, EngineConfig(), rtx, None).config.variant == "static"
    on_old = resolve(bundle, EngineConfig(), old, L4)
    assert on_old.config.variant == "concat"
    assert on_old.notes == (
        "building the concat variant, not static, which tensorrt 10.3.0 does not support; TensorRT 10.15 and newer do",
    )
    with pytest.raises(EngineError, match="variant is static, the bundle has only concat; export it with --variants"):
        resolve(concat, EngineConfig(variant="static"), rtx, None)
    for given in (EngineConfig(variant="static"), EngineConfig()):
        with pytest.raises(EngineError, match=r"variant is static, which tensorrt 10\.3\.0 does not support"):
            resolve(static, given, old, L4)


def test_keys_and_values_of_two_widths_need_the_concat_variant(bundle: Bundle, rtx: Library, tmp_path: Path) -> None:
    def narrow(bundle: Bundle) -> Bundle:
        spec = replace(bundle.manifest.spec, head_dim=2)
        graphs = {
            name: GraphEntry.of(entry.file, entry.opset, graph_contract(spec, name))
            for name, entry in bundle.manifest.graphs.items()
        }
        return replace(bundle, manifest=replace(bundle.manifest, spec=spec, graphs=graphs, config=None))

    why = "static, which needs keys and values of the same width, and a head has 2 and 4"
    chosen = resolve(narrow(bundle), EngineConfig(), rtx, None)
    assert (chosen.config.variant, chosen.notes) == ("concat", (f"building the concat variant, not {why}",))
    assert resolve(narrow(bundle), EngineConfig(variant="concat"), rtx, None).notes == ()
    assert resolve(bundle, EngineConfig(), rtx, None).notes == ()
    with pytest.raises(EngineError, match=f"^trt: variant is {why}; use --variant concat$"):
        resolve(narrow(bundle), EngineConfig(variant="static"), rtx, None)
    with pytest.raises(EngineError, match=f"variant is {why}; export it with --variants concat,static$"):
        resolve(narrow(only(tmp_path / "static", "decoder_static")), EngineConfig(), rtx, None)


def test_no_engine_is_built_from_contrib(bundle: Bundle, rtx: Library, old: Library, tmp_path: Path) -> None:
    with_contrib = make_contrib(tmp_path / "with", GRAPHS)
    assert resolve(with_contrib, EngineConfig(), rtx, None).config.variant == "static"
    assert resolve(with_contrib, EngineConfig(), old, L4).config.variant == "concat"
    alone = make_contrib(tmp_path / "alone", {"encoder": GRAPHS["encoder"]})
    for given in (EngineConfig(), EngineConfig(variant="static")):
        with pytest.raises(
            EngineError, match=r"has only the contrib variant.*; export it with --variants concat,static"
        ):
            resolve(alone, given, rtx, None)
    with pytest.raises(ConfigError, match="variant is contrib, which only ONNX Runtime supports; use static or concat"):
        EngineConfig(variant="contrib")


def test_another_precision_needs_a_model(rtx: Library, bundle: Bundle, tmp_path: Path) -> None:
    assert resolve(bundle, EngineConfig(precision="fp16"), rtx, None).is_exported_again
    graphs_only = only(tmp_path / "graphs", "decoder", config=None)
    with pytest.raises(EngineError, match="precision is fp16, the bundle has fp32 and no model to export again"):
        resolve(graphs_only, EngineConfig(precision="fp16"), rtx, None)
    assert resolve(graphs_only, EngineConfig(precision="fp32"), rtx, None).spec == FACTS["spec"]


@pytest.mark.parametrize(
    ("capabilities", "gpu"), [((), None), (("8.6", "8.9"), None), ((), replace(L4, compute_capability="8.0"))]
)
def test_fp8_needs_gpus_that_have_it(bundle: Bundle, rtx: Library, capabilities: tuple[str, ...], gpu: Any) -> None:
    config = EngineConfig(weights="fp8", compute_capabilities=capabilities)
    with pytest.raises(EngineError, match=r"fp8 need compute capability 8\.9 or newer, not 8\.[06]"):
        resolve(bundle, config, rtx, gpu)
    assert resolve(bundle, replace(config, compute_capabilities=("8.9", "12.0")), rtx, gpu).config.weights == "fp8"


def test_the_timing_cache_is_not_in_the_manifest(bundle: Bundle, old: Library) -> None:
    resolved = resolve(bundle, EngineConfig(timing_cache="/tmp/timings"), old, L4)
    assert (resolved.options.timing_cache, resolved.config.timing_cache) == ("/tmp/timings", None)


def test_the_memory_of_the_caches() -> None:
    """32 rows, 2 layers of 2 heads with keys and values of 4 floats; 16 target and 16 source tokens."""
    spec = FACTS["spec"]
    sizes = EngineLimits(max_batch=32, max_source_length=16, max_target_length=16, max_candidates=10)
    token = 2 * 2 * (4 + 4) * 4
    scratch = 32 * 2 * 4 * 4 * 16
    assert cache_bytes(spec, sizes) == 32 * token * (2 * 16 + 16) + scratch
