"""What a form was never taught it does not do, whoever asks: new fields, new values, with and without verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import tiny
from tfexport.contract import Form
from tfexport.errors import GraphError
from tfexport.export.decoders import FORMS
from tfexport.export.write import write_graphs
from tfexport.nn.config import StackConfig, TransformerConfig, model_spec

EVERY = pytest.mark.parametrize("form", FORMS)


class WindowStack(StackConfig):
    """A side of tomorrow."""

    num_key_value_heads: int = 2


class WindowConfig(TransformerConfig):
    """A model of tomorrow."""

    attention_window: int | None = None


def with_new_field() -> TransformerConfig:
    today = tiny.config()
    return WindowConfig(**{name: getattr(today, name) for name in today.__dataclass_fields__})


def with_new_value(name: str, value: str) -> TransformerConfig:
    """Give a switch a value that the configuration of today would not take."""
    config = tiny.config()
    object.__setattr__(config, name, value)
    return config


@EVERY
@pytest.mark.parametrize("name", ["post", "pre-std", "umt5", "mixed", "modern"])
def test_every_form_knows_the_plain_variants(form: Form, name: str) -> None:
    assert FORMS[form].supports(tiny.VARIANTS[name], "fp32") == []


@EVERY
def test_a_field_that_a_form_does_not_list_is_refused_whatever_its_value(form: Form) -> None:
    assert FORMS[form].supports(with_new_field(), "fp32") == ["attention_window is None"]


@EVERY
def test_a_field_of_one_side_is_refused_with_the_side(form: Form) -> None:
    side = tiny.config().decoder
    assert side is not None
    stack = WindowStack(**{name: getattr(side, name) for name in side.__dataclass_fields__})
    config = replace(tiny.config(), decoder=stack)
    assert FORMS[form].supports(config, "fp32") == ["decoder.num_key_value_heads is 2"]


@EVERY
@pytest.mark.parametrize(
    ("name", "value"), [("positions", "shaw"), ("relative_bias", "kerple"), ("norm", "batch"), ("activation", "tanh")]
)
def test_a_value_that_a_form_does_not_list_is_refused(form: Form, name: str, value: str) -> None:
    assert FORMS[form].supports(with_new_value(name, value), "fp32") == [f"{name} is {value}"]


def test_an_export_is_refused_where_no_form_is_left(tmp_path: Path) -> None:
    """`write_graphs` verifies nothing: the forms are asked before anything is traced."""
    model = tiny.model(tiny.config(), dtype=torch.float32)
    spec = model_spec(model.config, "fp32")
    model.config = with_new_value("positions", "shaw")
    with pytest.raises(GraphError) as caught:
        write_graphs(model, spec, tmp_path, forms=("concat", "static"), opset=18, report=lambda line: None)
    assert str(caught.value) == (
        "decoder: no concat form of this model: positions is shaw; "
        "no static form of this model: positions is shaw; list what is new in tfexport/export/decoders"
    )
    assert not list(tmp_path.iterdir())


def test_an_encoder_alone_is_asked_too(tmp_path: Path) -> None:
    model = tiny.model(replace(tiny.ENCODER_ALONE), dtype=torch.float32)
    spec = model_spec(model.config, "fp32")
    object.__setattr__(model.config, "relative_bias", "kerple")
    with pytest.raises(GraphError, match=r"^encoder: relative_bias is kerple; list what is new in"):
        write_graphs(model, spec, tmp_path, forms=("concat",), opset=18, report=lambda line: None)
