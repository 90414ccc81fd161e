"""Options of recent models that no tensor shows are found from their reference outputs, and the heads too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from models.from_scratch.llama_like import LlamaLike
from models.from_scratch.pieces import SOURCE, TARGET
from tests.importing.detect.test_match import check, recorded
from tfexport.importing.detect.search import Budget, detect
from tfexport.importing.reference.certificate import certify
from tfexport.nn.switches import Value

HEADS = 4
ROTARY: dict[str, Value] = {"positions": "rotary", "relative_bias": "none", "rotary_scaling": "none"}
ALIBI: dict[str, Value] = {"positions": "none", "relative_bias": "alibi"}
LLAMA3: dict[str, Value] = {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_length": 8192}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "grouped heads": ({"kv_heads": 2}, ROTARY),
    "rotated cross-attention": ({"kv_heads": 2, "is_cross_turned": True}, {**ROTARY, "rotary_cross": True}),
    "one head of keys, tied": (
        {"kv_heads": 1, "interleaved": True, "tied": True},
        {**ROTARY, "rotary_pairs": "interleaved"},
    ),
    "ALiBi": ({"positions": "alibi"}, ALIBI),
    "ALiBi, norms with biases": ({"positions": "alibi", "norm": "layer"}, {**ALIBI, "norm": "layernorm"}),
    "no positions": ({"positions": "none"}, {"positions": "none", "relative_bias": "none"}),
    "sandwich": ({"sandwich": True}, {"enc.norm_place": "sandwich", "dec.norm_place": "sandwich"}),
    "parallel": ({"parallel": "shared"}, {"enc.parallel": "self", "dec.parallel": "self"}),
    "linear scaling": ({"scaling": "linear"}, {"rotary_scaling": "linear", "rotary_factor": 4.0}),
    "scaling of Llama 3.1": ({"scaling": "llama3", "dim": 64}, LLAMA3),
}


QUICK = ("grouped heads", "rotated cross-attention", "ALiBi", "parallel", "sandwich")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_options_of_recent_models_are_found(name: str, tmp_path: Path) -> None:
    given, expected = MODELS[name]
    source = TARGET if given.get("tied") else SOURCE
    reference = recorded(partial(LlamaLike, **given), tmp_path / "r", source_vocab=source, heads=None)
    layout, canonical = check(reference, detect(reference.state, reference, [], budget=Budget(3_000)))
    assert {key: value for key, value in canonical.config.switches().items() if key in expected} == expected
    assert canonical.config.encoder.num_heads == HEADS
    assert certify(canonical, reference, layout.name).proven
