"""Which models have a contrib form, and what is said and done where one has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny
from tests.export.test_protocol import SPEC as PROTOCOL_SPEC
from tests.export.test_protocol import made
from tfexport.contract import ModelSpec
from tfexport.errors import GraphError
from tfexport.export import write
from tfexport.export._module_probe import traits_of
from tfexport.export.decoders.contrib import CONTRIB, joint_weights
from tfexport.export.write import write_graphs
from tfexport.nn.config import model_spec
from tfexport.precision import Precision

WIDTH = "keys and values are not equally wide, or 8 does not divide that"
CAPPED = tiny.config(attention_softcap=2.0)
UNFIT: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "soft cap": (lambda: tiny.model(CAPPED, dtype=torch.float32), ["attention_softcap is 2.0"]),
    "heads of 12": (lambda: tiny.model(tiny.config(decoder={"d_k": 12, "d_v": 12}), dtype=torch.float32), [WIDTH]),
    "wider values": (lambda: tiny.model(tiny.config(decoder={"d_k": 8, "d_v": 16}), dtype=torch.float32), [WIDTH]),
    "half precision": (lambda: tiny.model(tiny.config(), dtype=torch.float16), ["it is fp16"]),
    "its own module": (made, ["a layer attends in its own way, not through cache.attend"]),
    "an encoder alone": (lambda: tiny.model(tiny.ENCODER_ALONE, dtype=torch.float32), ["it is an encoder alone"]),
    "everything": (
        lambda: tiny.model(tiny.VARIANTS["t5"], dtype=torch.float16),
        [WIDTH, "attention_softcap is 2.0", "it is fp16"],
    ),
}


def problems_of(model: nn.Module) -> list[str]:
    return CONTRIB.supports(traits_of(model, PROTOCOL_SPEC), precision_of(model))


def precision_of(model: nn.Module) -> Precision:
    return "fp16" if next(model.parameters()).dtype == torch.float16 else "fp32"


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_have_no_contrib_form_are_told_why(name: str) -> None:
    make, problems = UNFIT[name]
    assert problems_of(make()) == problems


def test_what_lies_side_by_side_is_query_key_and_value() -> None:
    model = tiny.model(tiny.config(attention_bias=False), dtype=torch.float32)
    assert list(joint_weights(model)) == [
        tuple(f"{side}.layers.{layer}.self.{part}.weight" for part in "qkv")
        for side in ("enc", "dec")
        for layer in range(2)
    ]
    assert list(joint_weights(made())) == []


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what would be traced; nothing is, for it takes seconds."""
    traced: list[str] = []

    def trace_decoder(model: nn.Module, spec: ModelSpec, form: str, opset: int, **more: bool) -> Any:
        traced.append(form)
        raise GraphError("stops here")

    monkeypatch.setattr(write, "trace_encoder", lambda *arguments: None)
    monkeypatch.setattr(write, "trace_decoder", trace_decoder)
    return traced


@pytest.mark.parametrize("name", ["soft cap", "half precision", "its own module"])
def test_other_forms_are_exported_and_the_report_says_why(name: str, untraced: list[str], tmp_path: Path) -> None:
    make, problems = UNFIT[name]
    model, told = make(), list[str]()
    spec = model_spec(model.config, precision_of(model)) if isinstance(model, tiny.Transformer) else PROTOCOL_SPEC
    with pytest.raises(GraphError, match="stops here"):
        write_graphs(model, spec, tmp_path, forms=("contrib", "static"), opset=18, report=told.append)
    assert untraced == ["static"]
    assert told[0] == f"no contrib form of this model: {problems[0]}"


def test_contrib_alone_is_refused_where_there_is_none(untraced: list[str], tmp_path: Path) -> None:
    model = tiny.model(tiny.VARIANTS["t5"], dtype=torch.float16)
    spec = model_spec(model.config, "fp16")
    with pytest.raises(GraphError) as caught:
        write_graphs(model, spec, tmp_path, forms=("contrib",), opset=18, report=lambda line: None)
    assert str(caught.value) == (
        f"decoder: no contrib form of this model: {WIDTH} and attention_softcap is 2.0 and it is fp16; "
        "export it with --forms concat,static"
    )
    assert not untraced
    assert not list(tmp_path.iterdir())
