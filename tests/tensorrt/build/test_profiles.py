"""Test that profiles of all engines follow from a few limits, and that contradictions are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tfexport.contract import ModelSpec, TokenIds, Variant, decoder_graph
from tfexport.errors import ConfigError
from tfexport.sources import Convolution, FeatureSource, ImageSource
from tfexport.tensorrt.build._profiles import Profiles, make_profiles
from tfexport.tensorrt.config import PREFILL, STEP, EngineConfig, EngineLimits, ShapeRange

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
    (alone,) = profiles("concat", max_target_length=1).engines["decoder"]
    assert alone["past_key.0"].max == (32, 4, 0, 6)


def test_an_encoder_only_bundle_has_one_plan() -> None:
    made = profiles(spec=ENCODER_ONLY)
    assert list(made.engines) == ["encoder"]
    assert made.limits == EngineLimits(max_batch=32, max_source_length=64, max_target_length=0, max_candidates=0)
    assert profiles(spec=ENCODER_ONLY, max_shapes="source_ids:5x6").limits.max_batch == 5
    assert "'target_ids'" in refusal(spec=ENCODER_ONLY, max_shapes="target_ids:5x6")
    too_long = refusal(spec=ENCODER_ONLY, max_source_length=100, max_target_length=100)
    assert "max_source_length is 100, the bundle has 64" in too_long
    assert "max_target_length is 100, the bundle has 0; leave it out for an encoder-only bundle" in too_long


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


def test_a_decoder_of_one_token_has_only_a_step() -> None:
    made = profiles(capacities=(1,), min_shapes="target_ids:1x2", opt_shapes="target_ids:8x3").engines
    assert len(made["decoder_static"]) == 2
    (step,) = made["decoder_static_1"]
    assert step["target_ids"].max == (32, 1)


@pytest.mark.parametrize("variant", ["static", "concat"])
def test_without_room_for_a_prefill_there_is_only_a_step(variant: Variant) -> None:
    made = profiles(variant, max_shapes="target_ids:32x1")
    assert {len(each) for each in made.engines.values()} == {1}
    assert made.limits == profiles(variant).limits


@pytest.mark.parametrize("variant", ["static", "concat"])
def test_a_prefill_reads_sixteen_tokens_by_default(variant: Variant) -> None:
    plan = {"static": "decoder_static", "concat": "decoder"}[variant]

    def prefill(**shapes: str) -> ShapeRange:
        return profiles(variant, spec=LONG, **shapes).engines[plan][PREFILL]["target_ids"]

    assert prefill() == ShapeRange((1, 2), (16, 8), (32, 16))
    assert prefill(max_shapes="target_ids:32x4096") == ShapeRange((1, 2), (16, 8), (32, 4096))
    assert prefill(max_shapes="target_ids:32x5") == ShapeRange((1, 2), (16, 5), (32, 5))
    assert prefill(opt_shapes="target_ids:32x64") == ShapeRange((1, 2), (32, 64), (32, 64)), "tuned for pieces of 64"
    assert prefill(opt_shapes="target_ids:32x3") == ShapeRange((1, 2), (32, 3), (32, 16))
    assert "target_len has min 1, opt 4097, max 4096" in refusal(variant, spec=LONG, opt_shapes="target_ids:32x4097")


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
    made = profiles(spec=SPEECH, max_batch=8, max_source_length=50)
    (encoder,) = made.engines["encoder"]
    assert made.limits.max_source_length == 50
    assert encoder["features"] == ShapeRange((1, 4, 80), (4, 100, 80), (8, 200, 80))
    assert encoder["feature_mask"] == ShapeRange((1, 4), (4, 100), (8, 200))
    for profile in made.engines["decoder_static"]:
        assert profile["source_mask"] == ShapeRange((1, 1), (4, 25), (8, 50))


def test_positions_follow_the_frames_of_a_shape() -> None:
    # 157 to 160 frames are 40 positions, and a session pads to 160.
    made = profiles(spec=SPEECH, max_shapes="features:8x157x80", opt_shapes="feature_mask:2x12")
    (encoder,) = made.engines["encoder"]
    assert (made.limits.max_batch, made.limits.max_source_length) == (8, 40)
    assert encoder["features"] == ShapeRange((1, 4, 80), (2, 12, 80), (8, 160, 80))
    assert made.engines["decoder_static"][STEP]["cross_key.0"] == ShapeRange((1, 4, 1, 6), (2, 4, 3, 6), (8, 4, 40, 6))
    assert profiles(spec=SPEECH, max_shapes="features:8x256x80,source_mask:8x64").limits.max_source_length == 64


@pytest.mark.parametrize(
    ("spec", "positions", "encoder"),
    [(FIXED, 8, {"features": (30, 80), "feature_mask": (30,)}), (CAPTIONS, 12, {"pixels": (3, 6, 8)})],
)
def test_sources_of_one_length_have_one_shape(
    spec: ModelSpec, positions: int, encoder: dict[str, tuple[int, ...]]
) -> None:
    made = profiles(spec=spec, max_batch=4, max_shapes=f"source_mask:4x{positions}")
    shapes = {name: ShapeRange((1, *shape), (2, *shape), (4, *shape)) for name, shape in encoder.items()}
    assert made.engines["encoder"] == (shapes,)
    assert made.limits.max_source_length == positions
    step, _ = made.engines["decoder_static"]
    assert step["source_mask"] == ShapeRange((1, positions), (2, positions), (4, positions))
    assert made == profiles(spec=spec, max_batch=4, max_source_length=positions)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (SPEECH, {"max_shapes": "features:4x257x80"}, "source_len reaches 65, the bundle has 64"),
        (SPEECH, {"max_shapes": "features:4x60x81"}, "max_shapes has 81 in features, expected 80 of batchxframesx80"),
        (SPEECH, {"min_shapes": "features:1x5x80"}, "source_len begins at 2, expected 1"),
        (SPEECH, {"max_shapes": "source_ids:4x60"}, "expected one of features, feature_mask, target_ids"),
        (SPEECH, {"max_shapes": "features:4x60x80,feature_mask:4x61"}, "frames 60 in features and 61 in feature_mask"),
        (SPEECH, {"max_shapes": "features:4x60x80,source_mask:4x16"}, "60 frames, which become 15 positions"),
        (FIXED, {"max_shapes": "features:4x29x80"}, "max_shapes has 29 in features, expected 30 of batchx30x80"),
        (FIXED, {"max_source_length": 7}, "max_source_length is 7, but every source has 8 positions"),
        (CAPTIONS, {"opt_shapes": "pixels:4x3x6x9"}, "opt_shapes has 9 in pixels, expected 8 of batchx3x6x8"),
        (CAPTIONS, {"max_shapes": "source_mask:4x11"}, "max_shapes has 11 in source_mask, expected 12 of batchx12"),
    ],
)
def test_shapes_that_a_source_cannot_have_are_named(spec: ModelSpec, settings: dict[str, object], message: str) -> None:
    assert message in refusal(spec=spec, **settings)


# Shapes in trtexec's spelling.


def test_a_shape_binds_its_dimensions_wherever_they_occur() -> None:
    made = profiles(max_shapes="source_ids:6x20", opt_shapes="cross_value.1:2x4x10x10", min_shapes="source_mask:1x1")
    assert (made.limits.max_batch, made.limits.max_source_length) == (6, 20)
    (encoder,) = made.engines["encoder"]
    assert encoder["source_ids"] == ShapeRange((1, 1), (2, 10), (6, 20))
    for profile in made.engines["decoder_static"]:
        assert profile["cross_key.0"] == ShapeRange((1, 4, 1, 6), (2, 4, 10, 6), (6, 4, 20, 6))
        assert profile["past_key.0"] == ShapeRange((1, 4, 16, 6), (2, 4, 16, 6), (6, 4, 16, 6))
    (reorder,) = made.engines["reorder"]
    assert reorder["order"] == ShapeRange((1,), (2,), (6,))


def test_candidates_can_be_raised_to_the_limit_of_topk() -> None:
    large = replace(SPEC, vocab=100_000)
    made = profiles(spec=large, max_shapes="num_candidates:3840")
    assert made.limits.max_candidates == 3840
    assert made.engines["decoder_static"][STEP]["num_candidates"] == ShapeRange((1,), (1,), (3840,))
    beyond = refusal(spec=large, max_shapes="num_candidates:3841")
    assert "num_candidates reaches 3841, a step returns at most 3840" in beyond
    assert "num_candidates reaches 501, a step returns at most 500" in refusal(max_shapes="num_candidates:501")


def test_the_past_of_the_concat_variant_limits_the_target() -> None:
    made = profiles("concat", max_shapes="past_key.0:32x4x9x6")
    assert made.limits.max_target_length == 10
    assert made.engines["decoder"][STEP]["past_value.1"].max == (32, 4, 9, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_shapes": "sauce:1x2"}, "max_shapes has 'sauce', expected one of source_ids, source_mask, target_ids, "),
        ({"max_shapes": "source_ids:4"}, "max_shapes has source_ids with 1 sizes, expected batchxsource_len"),
        ({"max_shapes": "num_candidates:1x2"}, "max_shapes has num_candidates with 2 sizes, expected num_candidates"),
        ({"min_shapes": "past_key.0:1x4x9x6"}, "min_shapes has 9 in past_key.0, expected 16 of rowsx4x16x6, which is"),
        ({"opt_shapes": "cross_key.0:1x5x9x6"}, "opt_shapes has 5 in cross_key.0, expected 4 of batchx4xsource_lenx6"),
        (
            {"max_shapes": "source_ids:4x8,source_mask:4x9"},
            "max_shapes has source_len 8 in source_ids and 9 in source_mask, expected one",
        ),
        ({"max_shapes": "source_ids:4x8,source_ids:4x8"}, "max_shapes has source_ids twice"),
        ({"min_shapes": "source_ids:4x9", "max_shapes": "source_ids:4x8"}, "source_len has min 9, opt 8, max 8"),
        ({"min_shapes": "source_ids:2x3"}, "batch begins at 2, expected 1, the smallest that a session uses; source"),
        ({"min_shapes": "target_ids:1x3"}, "target_len begins at 3, expected 1 or 2, the smallest"),
        ({"max_shapes": "source_ids:4x65"}, "source_len reaches 65, the bundle has 64"),
        ({"max_shapes": "target_ids:4x17"}, "target_len reaches 17, the bundle has 16"),
        ({"opt_shapes": "source_ids:3x8,target_ids:4x1"}, "opt has batch 3 and rows 4, expected a multiple"),
        ({"max_shapes": "source_ids:4x8,target_ids:8x1"}, "max has batch 4 and rows 8, expected them equal"),
    ],
)
def test_shapes_that_do_not_fit_are_named(settings: dict[str, object], message: str) -> None:
    assert message in refusal(**settings)


def test_tensors_of_too_many_elements_are_refused() -> None:
    """A row of the reorder has 4 · 10 · 64 elements, which are more than those of any cache in the decoder."""
    (reorder,) = profiles(max_batch=2**31 // 2560).engines["reorder"]
    assert reorder["cache"].max == (838860, 2560)
    message = refusal(max_batch=838_861)
    assert "reorder reads up to 838861x2560 = 2,147,484,160 elements, the limit is 2,147,483,647" in message


@pytest.mark.parametrize("text", ["source_ids", "source_ids:", ":4x8", "source_ids:4x", "source_ids:4X8", "a:-1x2"])
def test_a_shape_in_another_syntax_is_named(text: str) -> None:
    assert f"opt_shapes has {text!r}, expected name:1x2x3" in refusal(opt_shapes=text)


def test_all_problems_are_named_at_once() -> None:
    message = refusal(max_shapes="sauce:1,source_ids:4x900,past_key.0:1x4x9x6", min_shapes="source_ids:9x1")
    assert message.startswith("engine: ")
    for part in ("'sauce'", "9 in past_key.0", "source_len reaches 900", "batch has min 9"):
        assert part in message


@pytest.mark.parametrize(
    ("variant", "shapes", "tokens"),
    [("static", "source_ids:4x48", 48), ("concat", "past_key.0:4x4x14x6", 14), ("static", "source_ids:4x4", 8)],
)
def test_reordered_rows_are_as_wide_as_the_given_shapes(variant: Variant, shapes: str, tokens: int) -> None:
    made = profiles(variant, max_source_length=8, max_target_length=8, max_shapes=shapes)
    (reorder,) = made.engines["reorder"]
    assert reorder["cache"].max == (4, 4 * 10 * tokens)
