"""Every switch and bias flag of the configuration changes the model's outputs, and each is in one table."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests import tiny
from tests.tiny import VARIANTS
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError
from tfexport.nn.config import StackConfig, TransformerConfig, model_spec
from tfexport.nn.switches import SWITCHES

BASE, PRE, T5 = VARIANTS["post"], VARIANTS["pre-std"], VARIANTS["t5"]
ROTARY = replace(BASE, positions="rotary")

CHANGES: dict[str, tuple[TransformerConfig, dict[str, Any]]] = {
    "encoder.norm_place": (BASE, {"encoder": replace(BASE.encoder, norm_place="pre")}),
    "decoder.norm_place": (BASE, {"decoder": replace(BASE.encoder, norm_place="pre")}),
    "encoder.final_norm": (BASE, {"encoder": replace(BASE.encoder, final_norm=True)}),
    "decoder.final_norm": (BASE, {"decoder": replace(BASE.encoder, final_norm=True)}),
    "embedding_norm": (BASE, {"embedding_norm": True}),
    "mixer": (BASE, {"decoder": replace(BASE.encoder, mixer="ssru")}),
    "mixer average": (BASE, {"decoder": replace(BASE.encoder, mixer="average")}),
    "norm std": (BASE, {"norm": "std"}),
    "norm rms": (BASE, {"norm": "rms"}),
    "norm_eps": (BASE, {"norm_eps": 1e-2}),
    "norm_eps of std": (replace(BASE, norm="std"), {"norm_eps": 1e-2}),
    "norm_eps of rms": (replace(BASE, norm="rms"), {"norm_eps": 1e-2}),
    "activation gelu": (BASE, {"activation": "gelu"}),
    "activation silu": (BASE, {"activation": "silu"}),
    "activation gelu_tanh": (replace(BASE, activation="gelu"), {"activation": "gelu_tanh"}),
    "feed_forward": (BASE, {"feed_forward": "glu"}),
    "relative_bias": (BASE, {"relative_bias": "t5", "relative_buckets": 8, "relative_max_distance": 16}),
    "relative_bias of each layer": (T5, {"relative_bias": "t5_per_layer"}),
    "relative_buckets": (T5, {"relative_buckets": 6}),
    "relative_max_distance": (T5, {"relative_max_distance": 5}),
    "encoder.residual_scale": (BASE, {"encoder": replace(BASE.encoder, residual_scale=0.9)}),
    "decoder.residual_scale": (BASE, {"decoder": replace(BASE.encoder, residual_scale=0.9)}),
    "residual_scale of pre-norm": (PRE, {"encoder": replace(PRE.encoder, residual_scale=0.9)}),
    "positions": (BASE, {"positions": "none"}),
    "positions rotary": (replace(BASE, positions="none"), {"positions": "rotary"}),
    "rotary_base": (ROTARY, {"rotary_base": 500.0}),
    "rotary_dim": (ROTARY, {"rotary_dim": 4}),
    "rotary_scaling": (ROTARY, {"rotary_scaling": "linear"}),
    "rotary_factor": (replace(ROTARY, rotary_scaling="linear"), {"rotary_factor": 2.0}),
    "rotary_original_length": (replace(ROTARY, rotary_scaling="llama3"), {"rotary_original_length": 16}),
    "parallel": (PRE, {"encoder": replace(PRE.encoder, parallel="self")}),
    "parallel cross": (PRE, {"decoder": replace(PRE.encoder, parallel="cross")}),
    "rotary_pairs": (ROTARY, {"rotary_pairs": "interleaved"}),
    "rotary_cross": (ROTARY, {"rotary_cross": True}),
    "qk_norm head": (BASE, {"qk_norm": "head"}),
    "qk_norm all": (replace(BASE, qk_norm="head"), {"qk_norm": "all"}),
    "attention_softcap": (BASE, {"attention_softcap": 5.0}),
    "logit_softcap": (BASE, {"logit_softcap": 5.0}),
    "relative_bias alibi": (BASE, {"relative_bias": "alibi"}),
    "sandwich": (PRE, {"encoder": replace(PRE.encoder, norm_place="sandwich")}),
    "activation relu2": (BASE, {"activation": "relu2"}),
    "activation quick_gelu": (replace(BASE, activation="gelu"), {"activation": "quick_gelu"}),
    "embedding_scale": (BASE, {"embedding_scale": 1.1}),
    "attention_scale": (BASE, {"attention_scale": 1.0}),
    "logit_scale": (BASE, {"logit_scale": 0.5}),
    "attention_bias": (BASE, {"attention_bias": False}),
    "feed_forward_bias": (BASE, {"feed_forward_bias": False}),
    "norm_bias": (BASE, {"norm_bias": False}),
    "output_bias": (BASE, {"output_bias": False}),
    "tie_embeddings": (BASE, {"tie_embeddings": True}),
    "tie_output": (BASE, {"tie_output": True}),
    "num_heads": (BASE, {"encoder": replace(BASE.encoder, num_heads=2)}),
    "num_kv_heads": (BASE, {"encoder": replace(BASE.encoder, num_kv_heads=2)}),
}


def test_every_switch_has_a_field_and_is_tried_below() -> None:
    tried = {name for _, change in CHANGES.values() for name in change} | {name.rpartition(".")[2] for name in CHANGES}
    assert tried >= set(SWITCHES) - {"head", "pooling"}  # tests/importing/test_heads.py
    for name, switch in SWITCHES.items():
        kind = StackConfig if switch.per_side else TransformerConfig
        (default,) = (field.default for field in fields(kind) if field.name == name)
        if switch.default is not None and not switch.per_side:
            is_arithmetic = isinstance(switch.default, str) and switch.values in (int, float)
            assert default == (None if is_arithmetic else switch.default)


def test_a_configuration_returns_all_its_switches() -> None:
    found = replace(BASE, decoder=replace(BASE.encoder, norm_place="pre")).switches()
    assert {name.removeprefix("enc.").removeprefix("dec.") for name in found} == set(SWITCHES)
    assert (found["enc.norm_place"], found["dec.norm_place"], found["norm"]) == ("post", "pre", "layernorm")
    assert not [name for name in tiny.ENCODER_ALONE.switches() if name.startswith("dec.")]


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_changes_the_logits(name: str) -> None:
    """Parameters are equal, and the difference is far above float64 noise."""
    base, change = CHANGES[name]
    batch = tiny.batch()
    with torch.no_grad():
        before, after = tiny.model(base)(*batch), tiny.model(replace(base, **change))(*batch)
    assert (before - after).abs().max() > 1e-6 * before.abs().max()


def test_an_encoder_only_model_has_no_other_parameters() -> None:
    model, (source_ids, source_mask, _) = tiny.model(tiny.ENCODER_ALONE), tiny.batch()
    assert not [name for name, _ in model.named_parameters() if not name.startswith("enc.")]
    with torch.no_grad():
        expected = tiny.model(BASE).hidden_states(source_ids, source_mask)
        assert torch.equal(model.hidden_states(source_ids, source_mask), expected)


def test_files_without_newer_switches_are_read_as_before() -> None:
    """Configurations and specifications without grouped heads, rotary positions and soft caps."""
    config = BASE.to_dict()
    for name in ("qk_norm", "rotary_base", "rotary_dim", "rotary_pairs", "rotary_cross"):
        del config[name]
    del config["attention_softcap"], config["logit_softcap"]
    for side in ("encoder", "decoder"):
        del config[side]["num_kv_heads"], config[side]["residual_scale"]
    assert TransformerConfig.from_dict(config) == BASE
    scaled = TransformerConfig.from_dict({**config, "residual_scale": 0.5})
    assert scaled == replace(
        BASE, encoder=replace(BASE.encoder, residual_scale=0.5), decoder=replace(BASE.encoder, residual_scale=0.5)
    )
    alone = {**config, "residual_scale": 0.5, "decoder": None, "target_vocab": None, "max_target_length": None}
    assert TransformerConfig.from_dict(alone).encoder.residual_scale == 0.5
    spec = model_spec(BASE, "fp32")
    before = spec.to_dict()
    del before["kv_heads"]
    assert ModelSpec.from_dict(before) == spec
    assert spec.cache_heads == spec.heads == 4
    assert model_spec(VARIANTS["modern"], "fp32").cache_heads == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"positions": "rotary", "rotary_dim": 3}, "rotary_dim is 3, expected an even number up to d_k 8 of the en"),
        ({"positions": "rotary", "rotary_base": 0.0}, "rotary_base is 0.0, expected above 0"),
        ({"attention_softcap": -1.0}, "attention_softcap is -1.0, expected 0 or more"),
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0, expected 0 or more"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(BASE, **changes)
