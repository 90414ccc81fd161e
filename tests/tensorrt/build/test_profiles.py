"""Test that profiles of all engines follow from a few limits, and that contradictions are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tfexport.contract import ModelSpec, TokenIds, Variant, decoder_graph
from tfexport.errors import ConfigError
from tfexport.sources import Convolution, FeatureSource, ImageSource
from tfexport.tensorrt.build._profiles import Profiles, make_profiles
from tfexport.tensorrt.config import PREFILL, EngineConfig, EngineLimits, ShapeRange

SPEC = ModelSpec(
    d_model=32,
    source_vocab=50,
    max_source_length=64,
    tokens=TokenIds(pad=0, start=1, eos=2),
    precision="fp16",
    vocab=500,
    layers=2,
    heads=4,
    head_dim=6,
    value_dim=10,
    max_target_length=16,
)
ENCODER_ONLY = ModelSpec(d_model=32, source_vocab=50, max_source_length=64, tokens=SPEC.tokens, precision="fp16")


def profiles(variant: Variant = "static", spec: ModelSpec = SPEC, **settings: object) -> Profiles:
    return make_profiles(spec, variant, EngineConfig(**settings))  # type: ignore[arg-type]


def refusal(variant: Variant = "static", spec: ModelSpec = SPEC, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        profiles(variant, spec, **settings)
    return str(caught.value)


def test_the_static_variant_by_hand() -> None:
    made = profiles(max_batch=8)
    assert made.limits == EngineLimits(
        max_batch=8, max_source_length=64, max_target_length=16, max_candidates=256, capacities=(16,)
    )
    assert list(made.engines) == ["encoder", "decoder_static", "reorder"]
    (encoder,) = made.engines["encoder"]
    assert encoder == dict.fromkeys(("source_ids", "source_mask"), ShapeRange((1, 1), (4, 32), (8, 64)))
    step, prefill = made.engines["decoder_static"]
    assert step["target_ids"] == ShapeRange((1, 1), (4, 1), (8, 1))
    assert prefill["target_ids"] == ShapeRange((1, 2), (4, 8), (8, 16))
    assert step["cross_key.1"] == ShapeRange((1, 4, 1, 6), (4, 4, 32, 6), (8, 4, 64, 6))
    assert step["past_value.0"] == ShapeRange((1, 4, 16, 10), (4, 4, 16, 10), (8, 4, 16, 10))
    assert step["cache_lengths"] == ShapeRange((1,), (4,), (8,))
    assert step["num_candidates"] == ShapeRange((1,), (1,), (256,))
    (reorder,) = made.engines["reorder"]
    # One row, flat: 4 heads of 6 or 10, over 1 to 64 tokens.
    assert reorder == {
        "cache": ShapeRange((1, 24), (4, 40 * 16), (8, 40 * 64)),
        "order": ShapeRange((1,), (4,), (8,)),
    }


def test_the_concat_variant_by_hand() -> None:
    step, prefill = profiles("concat", max_batch=8).engines["decoder"]
    assert list(step) == list(prefill) == [tensor.name for tensor in decoder_graph(SPEC, "concat").inputs]
    assert {name for name in step if step[name] != prefill[name]} == {"target_ids"}
    assert step["past_key.0"] == prefill["past_key.0"] == ShapeRange((1, 4, 0, 6), (4, 4, 7, 6), (8, 4, 15, 6))
    alone, _ = profiles("concat", max_target_length=1).engines["decoder"]
    assert alone["past_key.0"].max == (32, 4, 0, 6)


def test_an_encoder_only_bundle_has_one_plan() -> None:
    made = profiles(spec=ENCODER_ONLY)
    assert list(made.engines) == ["encoder"]
    assert made.limits == EngineLimits(max_batch=32, max_source_length=64, max_target_length=0, max_candidates=0)


LONG = replace(SPEC, max_target_length=4096)


@pytest.mark.parametrize(
    ("limit", "capacities"),
    [(255, (255,)), (256, (128, 256)), (1024, (128, 512, 1024)), (4096, (128, 512, 2048, 4096))],
)
def test_capacities_are_chosen_by_the_limit(limit: int, capacities: tuple[int, ...]) -> None:
    made = profiles(spec=LONG, max_target_length=limit)
    assert made.limits.capacities == capacities
    decoders = [f"decoder_static_{capacity}" for capacity in capacities[:-1]]
    assert list(made.engines) == ["encoder", *decoders, "decoder_static", "reorder"]
    assert profiles("concat", spec=LONG, max_target_length=limit).limits.capacities == ()


@pytest.mark.parametrize("given", [(3,), (3, 16)])
def test_a_decoder_reads_no_more_than_its_capacity(given: tuple[int, ...]) -> None:
    made = profiles(capacities=given, max_batch=8)
    assert made.limits.capacities == (3, 16)
    assert list(made.engines) == ["encoder", "decoder_static_3", "decoder_static", "reorder"]
    step, prefill = made.engines["decoder_static_3"]
    assert step["past_key.0"] == prefill["past_key.0"] == ShapeRange((1, 4, 3, 6), (4, 4, 3, 6), (8, 4, 3, 6))
    assert step["target_ids"] == ShapeRange((1, 1), (4, 1), (8, 1))
    assert prefill["target_ids"] == ShapeRange((1, 2), (4, 3), (8, 3))
    whole = profiles(max_batch=8).engines
    assert {name: made.engines[name] for name in whole} == whole


def test_capacities_ascend_and_are_within_the_limit_and_for_the_static_variant() -> None:
    for capacities, listed in (((0, 4), "0, 4"), ((4, 4), "4, 4")):
        assert f"engine: capacities are {listed}, expected them to ascend from 1" in refusal(capacities=capacities)
    assert refusal(capacities=(4, 17)) == "engine: capacities are 4, 17, expected at most max_target_length, 16"
    assert "expected at most max_target_length, 9" in refusal(capacities=(10,), max_target_length=9)
    alone = refusal("concat", capacities=(4,))
    assert alone == "engine: capacities are 4, which are only for static decoders; leave them out"
    assert refusal(spec=ENCODER_ONLY, capacities=(4,)) == alone
    with pytest.raises(ConfigError, match="capacities are only for the static variant; leave them out"):
        EngineConfig(variant="concat", capacities=(4,))


# Features and images.

SIZES = {name: getattr(SPEC, name) for name in ("vocab", "layers", "heads", "head_dim", "value_dim")}
READS: dict[str, Any] = {"d_model": 32, "tokens": SPEC.tokens, "precision": "fp16", "max_target_length": 16, **SIZES}
HALVES = (Convolution(kernel=3, stride=2, padding=1),) * 2  # a position has up to four frames
SPEECH = ModelSpec(features=FeatureSource(dim=80, convolutions=HALVES), max_source_length=64, **READS)
FIXED = ModelSpec(features=FeatureSource(dim=80, convolutions=HALVES, frames=30), max_source_length=64, **READS)
CAPTIONS = ModelSpec(image=ImageSource(channels=3, height=6, width=8, positions=12), max_source_length=64, **READS)


def test_frames_follow_the_positions() -> None:
    made = profiles(spec=SPEECH, max_batch=8, max_source_length=50, opt_source_length=25)
    (encoder,) = made.engines["encoder"]
    assert made.limits.max_source_length == 50
    assert encoder["features"] == ShapeRange((1, 4, 80), (4, 100, 80), (8, 200, 80))
    assert encoder["feature_mask"] == ShapeRange((1, 4), (4, 100), (8, 200))
    for profile in made.engines["decoder_static"]:
        assert profile["source_mask"] == ShapeRange((1, 1), (4, 25), (8, 50))


@pytest.mark.parametrize(
    ("spec", "positions", "encoder"),
    [(FIXED, 8, {"features": (30, 80), "feature_mask": (30,)}), (CAPTIONS, 12, {"pixels": (3, 6, 8)})],
)
def test_sources_of_one_length_have_one_shape(
    spec: ModelSpec, positions: int, encoder: dict[str, tuple[int, ...]]
) -> None:
    made = profiles(spec=spec, max_batch=4)
    shapes = {name: ShapeRange((1, *shape), (2, *shape), (4, *shape)) for name, shape in encoder.items()}
    assert made.engines["encoder"] == (shapes,)
    assert made.limits.max_source_length == positions
    step, _ = made.engines["decoder_static"]
    assert step["source_mask"] == ShapeRange((1, positions), (2, positions), (4, positions))
    assert made == profiles(spec=spec, max_batch=4, max_source_length=positions)


# Other options.


def test_profiles_are_tuned_for_the_given_sizes() -> None:
    made = profiles(max_batch=6, max_source_length=20, opt_batch=2, opt_source_length=15, max_candidates=400)
    assert (made.limits.max_batch, made.limits.max_source_length, made.limits.max_candidates) == (6, 20, 400)
    (encoder,) = made.engines["encoder"]
    assert encoder["source_ids"] == ShapeRange((1, 1), (2, 15), (6, 20))
    for profile in made.engines["decoder_static"]:
        assert profile["cross_key.0"] == ShapeRange((1, 4, 1, 6), (2, 4, 15, 6), (6, 4, 20, 6))
        assert profile["past_key.0"] == ShapeRange((1, 4, 16, 6), (2, 4, 16, 6), (6, 4, 16, 6))
        assert profile["num_candidates"] == ShapeRange((1,), (1,), (400,))
    (reorder,) = made.engines["reorder"]
    assert reorder == {"cache": ShapeRange((1, 24), (2, 640), (6, 800)), "order": ShapeRange((1,), (2,), (6,))}


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({}, (2, 8, 16)), ({"max_prefill": 4096}, (2, 2048, 4096)), ({"max_prefill": 5}, (2, 3, 5))],
)
@pytest.mark.parametrize("variant", ["static", "concat"])
def test_a_prefill_reads_sixteen_tokens_by_default(
    variant: Variant, settings: dict[str, int], tokens: tuple[int, int, int]
) -> None:
    plan = {"static": "decoder_static", "concat": "decoder"}[variant]
    found = profiles(variant, spec=LONG, **settings).engines[plan][PREFILL]["target_ids"]
    assert found == ShapeRange(*zip((1, 16, 32), tokens, strict=True))


def test_a_prefill_of_one_position_is_one_token() -> None:
    _, prefill = profiles(capacities=(1,)).engines["decoder_static_1"]
    assert prefill["target_ids"] == ShapeRange((1, 1), (16, 1), (32, 1))


@pytest.mark.parametrize(
    ("spec", "name", "limit"),
    [
        (SPEC, "max_source_length", 64),
        (SPEC, "max_target_length", 16),
        (SPEC, "max_candidates", 500),
        (replace(SPEC, vocab=100_000), "max_candidates", 3840),
        (SPEC, "max_prefill", 16),
        (SPEC, "opt_batch", 32),
        (SPEC, "opt_source_length", 64),
    ],
)
def test_sizes_above_the_limits_are_named(spec: ModelSpec, name: str, limit: int) -> None:
    profiles(spec=spec, **{name: limit})
    message = refusal(spec=spec, **{name: limit + 1}, capacities=(17,))
    assert f"{name} is {limit + 1}, " in message
    assert f" {limit}; " in message
    assert "capacities are 17" in message, "all problems at once"


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (FIXED, {"max_source_length": 7}),
        (CAPTIONS, {"opt_source_length": 11}),
        (ENCODER_ONLY, {"max_candidates": 5}),
        (ENCODER_ONLY, {"max_target_length": 5}),
    ],
)
def test_sizes_that_a_model_does_not_have_are_named(spec: ModelSpec, settings: dict[str, object]) -> None:
    assert "leave it out" in refusal(spec=spec, **settings)
