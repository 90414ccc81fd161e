"""The trained model and every preset build with TensorRT-RTX in both variants and three precisions.

By default each preset has one layer, fp16 and a small vocabulary; `scripts/verify_engines` builds them whole too.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import DATES
from tests.tensorrt.engine_graphs import kernels
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.contract import DECODER, ENCODER, REORDER, Variant
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.export.passes import fix_capacity
from tfexport.export.reorder import reorder_graph
from tfexport.nn.config import TransformerConfig
from tfexport.nn.directory import save_model
from tfexport.nn.presets import PRESETS, preset
from tfexport.nn.transformer import Transformer
from tfexport.precision import Precision
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build._profiles import make_profiles
from tfexport.tensorrt.build.builder import build_engine, resolve_options
from tfexport.tensorrt.build.network import Graph, parse_graph
from tfexport.tensorrt.config import EngineConfig, decoder_plans, default_capacities, updates_in_place

MIB = 1024 * 1024
SETTINGS = EngineConfig(max_batch=8)
PRECISIONS = ("fp32", "fp16", "bf16")


class Plan(NamedTuple):
    data: bytes
    layers: Mapping[str, int]
    log: list[str]


def shallow(config: TransformerConfig, layers: int = 1) -> TransformerConfig:
    one = {
        side: dataclasses.replace(stack, layers=layers)
        for side in ("encoder", "decoder")
        if (stack := getattr(config, side)) is not None
    }
    vocab = {name: min(size, 500) for name in ("source_vocab", "target_vocab") if (size := getattr(config, name))}
    tokens = dataclasses.replace(config.tokens, pad=0, start=1, eos=2, unk=None)
    return dataclasses.replace(config, **one, **vocab, tokens=tokens)  # type: ignore[arg-type]


@pytest.fixture
def bundle(model: str, precision: Precision, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bundle]:
    shared = {"fp32": "dates_bundle", "fp16": "dates_fp16"}
    if model == "dates" and precision in shared:
        yield open_bundle(request.getfixturevalue(shared[precision]))
        return
    if model == "dates":
        source = str(DATES)
    elif request.node.get_closest_marker("slow"):
        source = f"preset:{model}"
    else:
        save_model(Transformer(shallow(preset(model))), tmp_path / "model")
        source = str(tmp_path / "model")
    config = ExportConfig(precision=precision, variants=("concat", "static"))
    yield export_bundle(source, tmp_path / "bundle", config, verify=False)
    shutil.rmtree(tmp_path / "bundle")


def build(rtx: Library, bundle: Bundle, variant: Variant, plans: dict[str, Plan]) -> None:
    """Build the missing engines of one variant, as `tfexport trt` does, and print a row for each."""
    spec = bundle.manifest.spec
    profiles = make_profiles(spec, variant, SETTINGS)
    decoders = decoder_plans(variant if spec.has_decoder else None, profiles.limits)
    for name, wanted in profiles.engines.items():
        if name in plans:
            continue
        path = bundle.path / f"{DECODER[variant] if name in decoders else name}.onnx"
        if name == REORDER:
            graph = reorder_graph(spec.precision)
        elif name in decoders and updates_in_place(spec, variant):
            graph = fix_capacity(path, decoders[name])
        else:
            graph = path.read_bytes()
        start = time.perf_counter()
        network = parse_graph(rtx, Graph(name, graph, path))
        data = build_engine(network, wanted, resolve_options(rtx, SETTINGS, None))
        plan = Plan(data, network.layers, network.log.lines())
        print(
            f"\n{spec.precision:5}{name:16}{sum(plan.layers.values()):6} layers"
            f"{plan.layers.get('KV_CACHE_UPDATE', 0):4} cache updates{fused(plan):4} fused attentions"
            f"{len(plan.data) / MIB:8.1f} MiB{time.perf_counter() - start:7.1f} s",
            end="",
        )
        plans[name] = plan


def fused(plan: Plan) -> int:
    """Count kernels of fused attention in all profiles of a plan."""
    return sum(count for name, count in kernels(plan.data).items() if "mha" in name)


def check_decoder(plan: Plan, bundle: Bundle, variant: Variant) -> None:
    spec = bundle.manifest.spec
    attention = 2 * spec.layers if spec.cache.grows else spec.layers  # a recurrent layer has only that to the source
    assert plan.layers.get("KV_CACHE_UPDATE", 0) == (2 * spec.layers if updates_in_place(spec, variant) else 0)
    assert plan.layers.get("ATTENTION_INPUT", 0) == (attention if variant == "static" else 0)
    if spec.precision != "fp32" and kernels(plan.data):
        # In every layer, in the step and in the prefill, which a recurrent decoder does not have.
        assert fused(plan) == attention * (2 if spec.cache.grows else 1)


# The trained model. The slow ones: its other precisions, and every preset in the one that fuses attention; whole, every
# preset in all. Without them, tests/export/test_capacity.py and the test below show that attention is fused.
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param("dates", "fp32", id="dates fp32"),
        *[
            pytest.param("dates", precision, id=f"dates {precision}", marks=pytest.mark.slow)
            for precision in PRECISIONS[1:]
        ],
        *[pytest.param(name, "fp16", id=f"{name} one layer fp16", marks=pytest.mark.slow) for name in PRESETS],
        *[
            pytest.param(name, precision, id=f"{name} whole {precision}", marks=pytest.mark.slow)
            for name in PRESETS
            for precision in PRECISIONS
        ],
    ],
)
def test_every_model_builds_in_both_variants(rtx: Library, bundle: Bundle, model: str, precision: Precision) -> None:
    spec, config = bundle.manifest.spec, bundle.manifest.config
    assert config is not None
    assert spec.precision == precision
    print(f"\n{model}, weights of {(bundle.path / 'weights.safetensors').stat().st_size / MIB:.1f} MiB", end="")
    plans: dict[str, Plan] = {}
    for variant in ("static", "concat"):
        build(rtx, bundle, variant, plans)
    if precision != "fp32" and kernels(plans[ENCODER].data):
        assert fused(plans[ENCODER]) == config.encoder.layers
    assert "KV_CACHE_UPDATE" not in plans[ENCODER].layers
    if spec.has_decoder:
        assert plans[REORDER].layers["GATHER"] == 1
        check_decoder(plans.pop(DECODER["concat"]), bundle, "concat")
        decoders = [plan for name, plan in plans.items() if name not in (ENCODER, REORDER)]
        assert len(decoders) == (len(default_capacities(spec.max_target_length)) if spec.cache.grows else 1)
        for plan in decoders:
            check_decoder(plan, bundle, "static")
    else:
        assert list(plans) == [ENCODER]


@pytest.mark.slow
def test_a_prefill_of_the_concat_variant_is_fused_in_every_layer(rtx: Library, tmp_path: Path) -> None:
    """If its profile began at one token, one of three layers would need 1.1 GB (1.7.1)."""
    config = dataclasses.replace(shallow(preset("paper-base"), 3), max_source_length=32, max_target_length=32)
    save_model(Transformer(config), tmp_path / "model")
    export = ExportConfig(precision="fp16", variants=("concat",))
    bundle = export_bundle(str(tmp_path / "model"), tmp_path / "bundle", export, verify=False)
    plans: dict[str, Plan] = {}
    build(rtx, bundle, "concat", plans)
    check_decoder(plans[DECODER["concat"]], bundle, "concat")
    sizes = re.findall(r"Total Activation Memory: (\d+)", "\n".join(plans[DECODER["concat"]].log))
    assert len(sizes) == 2
    assert max(map(int, sizes)) < 100 * MIB
