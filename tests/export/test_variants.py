"""Variants support what they list: other models, new fields and new values are refused before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny
from tests.export.test_protocol import SPEC as PROTOCOL_SPEC
from tests.export.test_protocol import made
from tfexport.contract import ModelSpec, Variant
from tfexport.errors import GraphError
from tfexport.export import write
from tfexport.export._module_probe import traits_of
from tfexport.export.decoders import VARIANTS
from tfexport.export.decoders.contrib import CONTRIB, joint_weights
from tfexport.export.write import write_graphs
from tfexport.nn.config import StackConfig, TransformerConfig, model_spec
from tfexport.precision import Precision

EVERY = pytest.mark.parametrize("variant", VARIANTS)


class WindowStack(StackConfig):
    num_key_value_heads: int = 2


class WindowConfig(TransformerConfig):
    attention_window: int | None = None


def with_new_value(name: str, value: str) -> TransformerConfig:
    """Give a switch a value that the configuration of today would not accept."""
    config = tiny.config()
    object.__setattr__(config, name, value)
    return config


@EVERY
@pytest.mark.parametrize("name", ["post", "pre-std", "umt5", "mixed", "modern"])
def test_every_variant_supports_the_plain_models(variant: Variant, name: str) -> None:
    assert VARIANTS[variant].supports(tiny.VARIANTS[name], "fp32") == []


@EVERY
def test_a_field_that_a_variant_does_not_list_is_refused(variant: Variant) -> None:
    today, side = tiny.config(), tiny.config().decoder
    assert side is not None
    config: TransformerConfig = WindowConfig(**{name: getattr(today, name) for name in today.__dataclass_fields__})
    assert VARIANTS[variant].supports(config, "fp32") == ["attention_window is None"]
    stack = WindowStack(**{name: getattr(side, name) for name in side.__dataclass_fields__})
    config = replace(today, decoder=stack)
    assert VARIANTS[variant].supports(config, "fp32") == ["decoder.num_key_value_heads is 2"]


@EVERY
@pytest.mark.parametrize(
    ("name", "value"), [("positions", "shaw"), ("relative_bias", "kerple"), ("norm", "batch"), ("activation", "tanh")]
)
def test_a_value_that_a_variant_does_not_list_is_refused(variant: Variant, name: str, value: str) -> None:
    assert VARIANTS[variant].supports(with_new_value(name, value), "fp32") == [f"{name} is {value}"]


UNFIT: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "soft cap": (
        lambda: tiny.model(tiny.config(attention_softcap=2.0), dtype=torch.float32),
        ["attention_softcap is 2.0"],
    ),
    "heads of 12": (
        lambda: tiny.model(tiny.config(decoder={"d_k": 12, "d_v": 12}), dtype=torch.float32),
        ["heads have width 12, expected a multiple of 8"],
    ),
    "half precision": (
        lambda: tiny.model(tiny.config(), dtype=torch.float16),
        ["precision is fp16, expected fp32"],
    ),
    "own module": (made, ["a layer computes attention itself instead of calling cache.attend"]),
    "encoder-only": (lambda: tiny.model(tiny.ENCODER_ALONE, dtype=torch.float32), ["the model is encoder-only"]),
    "everything": (
        lambda: tiny.model(tiny.VARIANTS["t5"], dtype=torch.float16),
        [
            "keys have width 6 and values 10, expected equal widths",
            "attention_softcap is 2.0",
            "precision is fp16, expected fp32",
        ],
    ),
}


def precision_of(model: nn.Module) -> Precision:
    return "fp16" if next(model.parameters()).dtype == torch.float16 else "fp32"


@pytest.mark.parametrize("name", UNFIT)
def test_contrib_names_unsupported_settings(name: str) -> None:
    make, problems = UNFIT[name]
    model = make()
    assert CONTRIB.supports(traits_of(model, PROTOCOL_SPEC), precision_of(model)) == problems


def test_query_key_and_value_are_stored_next_to_each_other() -> None:
    model = tiny.model(tiny.config(attention_bias=False), dtype=torch.float32)
    assert list(joint_weights(model)) == [
        tuple(f"{side}.layers.{layer}.self.{part}.weight" for part in "qkv")
        for side in ("enc", "dec")
        for layer in range(2)
    ]
    assert list(joint_weights(made())) == []


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which variants would be traced; nothing is, because that takes seconds."""
    variants: list[str] = []

    def trace_decoder(model: nn.Module, spec: ModelSpec, variant: str, opset: int, **more: bool) -> Any:
        variants.append(variant)
        raise GraphError("stops here")

    monkeypatch.setattr(write, "trace_encoder", lambda *arguments: None)
    monkeypatch.setattr(write, "trace_decoder", trace_decoder)
    return variants


@pytest.mark.parametrize("name", ["soft cap", "half precision", "own module"])
def test_other_variants_are_exported_and_the_report_gives_the_reason(
    name: str, traced: list[str], tmp_path: Path
) -> None:
    make, problems = UNFIT[name]
    model, lines = make(), list[str]()
    spec = model_spec(model.config, precision_of(model)) if isinstance(model, tiny.Transformer) else PROTOCOL_SPEC
    with pytest.raises(GraphError, match="stops here"):
        write_graphs(model, spec, tmp_path, variants=("contrib", "static"), opset=18, report=lines.append)
    assert traced == ["static"]
    assert lines[0] == f"the contrib variant does not support this model: {problems[0]}"


def refused(model: tiny.Transformer, spec: ModelSpec, folder: Path, *variants: Variant) -> str:
    with pytest.raises(GraphError) as caught:
        write_graphs(model, spec, folder, variants=variants, opset=18)
    assert not list(folder.iterdir())
    return str(caught.value)


def test_an_export_without_a_supported_variant_is_refused(traced: list[str], tmp_path: Path) -> None:
    model = tiny.model(tiny.VARIANTS["t5"], dtype=torch.float16)
    assert refused(model, model_spec(model.config, "fp16"), tmp_path, "contrib") == (
        f"decoder: the contrib variant does not support this model: {' and '.join(UNFIT['everything'][1])}; "
        "export it with --variants concat,static"
    )
    model = tiny.model(tiny.config(), dtype=torch.float32)
    spec = model_spec(model.config, "fp32")
    model.config = with_new_value("positions", "shaw")
    assert refused(model, spec, tmp_path, "concat", "static") == (
        "decoder: the concat variant does not support this model: positions is shaw; "
        "the static variant does not support this model: positions is shaw; "
        "add the new option to a variant in tfexport/export/decoders"
    )
    assert not traced
    alone = tiny.model(replace(tiny.ENCODER_ALONE), dtype=torch.float32)
    spec = model_spec(alone.config, "fp32")
    object.__setattr__(alone.config, "relative_bias", "kerple")
    assert refused(alone, spec, tmp_path, "concat").startswith("encoder: relative_bias is kerple; add the new option")
