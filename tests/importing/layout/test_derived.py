"""Tensors that no key gives: the gain of norms without parameters, and tables by column."""

from __future__ import annotations

import math

import pytest
import torch

from models.from_scratch.wmathor import Wmathor
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.layout.apply import apply_layout
from tfexport.importing.layout.layout import builtin_layouts, override, parse_derived, parse_layout, render_layout
from tfexport.importing.layout.ops import sinusoid

LINE = "layout: 1\nname: a\nmap: [a -> out.bias]\nderive: {%s}"


def test_ones_are_the_gains_of_every_layer() -> None:
    tokens = {f"tokens.{name}": 0 for name in ("start", "eos")}
    state = {key: tensor.half() for key, tensor in Wmathor().state_dict().items()}
    found = apply_layout(builtin_layouts()["wmathor"], state, heads=4, settings=tokens)
    norms = {name: tensor for name, tensor in found.tensors.items() if ".norm" in name}
    assert len(norms) == 2 * 2 + 2 * 3
    assert all(torch.equal(tensor, torch.ones(16, dtype=torch.float16)) for tensor in norms.values())
    uses = [use for use in found.lines if use.line == "derive dec.layers.{i}.norm3.weight: ones"]
    assert [use.targets for use in uses] == [("dec.layers.0.norm3.weight", "dec.layers.1.norm3.weight")]


def test_a_norm_that_nothing_gives_is_missed_in_every_layer() -> None:
    layout = builtin_layouts()["wmathor"]
    text = render_layout(layout).replace("  enc.layers.{i}.norm2.weight: ones\n", "")
    fewer = override(parse_layout(text, "fewer"), {"tokens.start": 0, "tokens.eos": 0})
    with pytest.raises(CheckpointError) as caught:
        apply_layout(fewer, Wmathor().state_dict(), heads=4)
    assert "missing enc.layers.0.norm2.weight [16]; missing enc.layers.1.norm2.weight [16]" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("enc.norm.weight: ones 2", "'ones 2' is none of tie NAME"),
        ("'enc.layers.{j}.norm1.weight': ones", "derive enc.layers.{j}.norm1.weight: no canonical name"),
        ("'enc.layers.{i}.norm{i}.weight': ones", "derive enc.layers.{i}.norm{i}.weight: no canonical name"),
    ],
)
def test_a_line_that_is_none(line: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(LINE % line, "own.yaml")
    assert problem in str(caught.value)


def test_a_table_by_column_has_no_two_equal_wavelengths() -> None:
    d = 6
    rows = [[(math.cos if j % 2 else math.sin)(place / 10000 ** (2 * j / d)) for j in range(d)] for place in range(300)]
    assert torch.equal(sinusoid("columns", 300, d), torch.tensor(rows, dtype=torch.float64).float())
    assert parse_derived("sinusoid columns").argument == "columns"
