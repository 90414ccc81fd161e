"""Grammar, arithmetic, folds and files of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT
from tests.test_docs import blocks
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.layout._grammar import Rule, evaluate, matches
from tfexport.importing.layout.layout import override, parse_layout, parse_setting, read_layout, render_layout
from tfexport.importing.layout.ops import Context, parse_step, run, sinusoid
from tfexport.nn.positions import sinusoid_table


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# Arithmetic


@pytest.mark.parametrize(
    ("text", "value"),
    [("sqrt(d_model)", math.sqrt(32)), ("1e-5", 1e-5), ("-(d_k + 2) * 3 / 4", -7.5), ("d_k ** -0.5", 8**-0.5)],
)
def test_arithmetic(text: str, value: float) -> None:
    assert evaluate(text, {"d_model": 32, "d_k": 8}) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')", "[1][0]", "sqrt(1, 2)", "exp(1)", "True", "1 if 1 else 2", "", "(" * 300),
        *("9 ** 9 ** 9 ** 9", "1 / 0", "sqrt(-1)", "(-8) ** 0.5", "unknown", "1j"),
    ],
)
def test_other_syntax_than_arithmetic_is_refused(text: str) -> None:
    message_of(ConfigError, lambda: evaluate(text, {"d_model": 32}))


# Patterns


@pytest.mark.parametrize(
    ("source", "target", "key", "name"),
    [
        ("a.{i}.w_{q,k}.{wb}", "enc.{i}.{q,k}.{wb}", "a.3.w_k.bias", "enc.3.k.bias"),
        ("s.{2i+1}.x", "e.{i}.x", "s.5.x", "e.2.x"),
        ("layer{i+1}.x", "e.{i}.x", "layer1.x", "e.0.x"),
        ("{a,b}.{x,y}", "{1,2}.{3,4}", "b.x", "2.3"),
        ("g{,.0}.{wb}", "{out,out}.{wb}", "g.0.weight", "out.weight"),
        ("{encoder,decoder}.pe", "{enc.pos,dec.pos}", "decoder.pe", "dec.pos"),
        ("b.{i}.attn{i}.x", "e.{i}", "b.1.attn1.x", "e.1"),
    ],
)
def test_a_key_is_renamed(source: str, target: str, key: str, name: str) -> None:
    assert Rule(source, target).match(key) == ((name,), None)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("s.{2i+1}.x", "s.4.x"),
        ("layer{i+1}.x", "layer0.x"),
        ("s.{i}.x", "s.01.x"),
        ("s.{i}.x", "s.x.x"),
        ("b.{i}.attn{i}.x", "b.1.attn2.x"),
        ("s.{i}.x", "t.s.1.x"),
    ],
)
def test_a_key_of_another_line_is_left(source: str, key: str) -> None:
    assert Rule(source, "e.{i}").match(key) is None


def test_parts_and_heads() -> None:
    assert Rule("a.{wb}", "e.[q/k/v].{wb}").match("a.bias") == (("e.q.bias", "e.k.bias", "e.v.bias"), None)
    keys = [f"a.{i}.h.{h}.w" for i in range(2) for h in (2, 0, 1, 10)]
    found = matches(Rule("a.{i}.h.{h}.w", "e.{i}.w"), keys)
    assert [match.targets for match in found] == [("e.0.w",), ("e.1.w",)]
    assert found[1].sources == ("a.1.h.0.w", "a.1.h.1.w", "a.1.h.2.w", "a.1.h.10.w")
    (joined,) = matches(Rule("{b|a|c}.{wb}", "e.{wb}"), ["a.bias", "b.bias"])
    assert joined == (("b.bias", "a.bias"), ("e.bias",))


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("a.{x,y}", "b", "1 lists on the left and 0 on the right"),
        ("a.{x,y}", "b.{1,2,3}", "differ in length"),
        ("a.{x,x}", "b.{1,2}", "names a word twice"),
        ("a.{i}", "b", "{i} is on the left only"),
        ("a", "b.{wb}", "{wb} is on the right only"),
        ("a.{2i}", "b.{2i}", "{i}"),
        ("a", "b.{h}", "may be on the left only"),
        ("a", "b.{c|d}", "may be on the left only"),
        ("a.{h}.{b|c}", "d", "may be there only once"),
        ("a.[q/k]", "b", "may be on the right only"),
        ("a.{i", "b.{i}", "close every bracket"),
        ("a.{0i}", "b.{i}", "counts no layers"),
        ("a" + ".{a,b,c,d,e,f,g,h,i,j}" * 5, "b", "its lists give more than 10000 names"),
    ],
)
def test_an_invalid_line_is_refused(source: str, target: str, problem: str) -> None:
    assert problem in message_of(ConfigError, lambda: Rule(source, target))


# Folds: each against NumPy-like indexing written out.


def fold(steps: str, *tensors: Tensor, parts: int = 1, **names: float) -> list[Tensor]:
    gain = torch.full((2,), 10.0, device=tensors[0].device)
    context = Context({"d_model": 6, "num_heads": 2, "d_k": 3, **names}, parts, "norm.bias", {"norm.weight": gain})
    return run([parse_step(step) for step in steps.split("|>")], tensors, context)


X = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("steps", "value", "expected"),
    [
        ("squeeze", X[None], X),
        ("transpose", X, X.T),
        ("transpose", X[0], X[0]),
        ("flatten", X.reshape(2, 2, 6), X),
        ("expand", torch.tensor([2.0]), torch.full((6,), 2.0)),
        ("add 1", X, X + 1),
        ("mul sqrt(d_model)", X.double(), X.double() * math.sqrt(6)),
        ("add_scaled 0.5 weight", torch.tensor([1.0, 2.0]), torch.tensor([6.0, 7.0])),
        ("slice pad + 1", X, X[2:]),
        ("rows 3,0", X, X[[3, 0]]),
        ("zero_row 2", X, torch.cat((X[:2], torch.zeros(1, 6), X[3:]))),
        ("append_zero_row", X, torch.cat((X, torch.zeros(1, 6)))),
        ("block_diag", torch.ones(1, 2), torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]])),
        ("block_diag", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 1.0, 2.0])),
        ("heads_last", X[:, 0], torch.tensor([0.0, 12.0, 6.0, 18.0])),
        ("transpose |> slice 1", X, X.T[1:]),
    ],
)
def test_folds(steps: str, value: Tensor, expected: Tensor) -> None:
    before = value.clone()
    (found,) = fold(steps, value, pad=1)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(value, before)
    (shape,) = fold(steps, value.to("meta"), pad=1)
    assert shape.shape == expected.shape


def test_splits() -> None:
    x = torch.arange(12)
    assert [part.tolist() for part in fold("split_rows", x, parts=3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [part.tolist() for part in fold("split_heads", x, parts=3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [len(part) for part in fold("split_rows [2*d_k, 4, 2]", x, parts=3)] == [6, 4, 2]


def test_heads_are_joined() -> None:
    assert torch.equal(fold("join_rows", X[:2], X[2:])[0], X)
    assert torch.equal(fold("join_columns", X[:, :3], X[:, 3:])[0], X)


def test_half_precision_is_not_rounded_away() -> None:
    gain = torch.tensor([1e-4], dtype=torch.float16)
    (found,) = fold("add 1", gain)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1 + gain.item(), abs=1e-7)


@pytest.mark.parametrize(
    ("steps", "parts", "problem"),
    [
        ("split_heads", 3, "4 rows, which 2 heads of 3 parts do not divide"),
        ("split_rows [1, 2]", 2, "expected 1 + 2"),
        ("slice 4", 1, "there is no row 4"),
        ("rows 1,9", 1, "there is no row 9"),
        ("zero_row 4", 1, "there is no row 4"),
        ("slice 0.5", 1, "expected a whole number"),
    ],
)
def test_a_fold_that_does_not_fit(steps: str, parts: int, problem: str) -> None:
    assert problem in message_of(CheckpointError, lambda: fold(steps, X, parts=parts))


@pytest.mark.parametrize("step", ["eval 1", "squeeze 1", "mul", "add_scaled 1", "mul os.system", "slice x(1)"])
def test_an_unknown_fold_is_refused(step: str) -> None:
    message_of(ConfigError, lambda: parse_step(step))


def test_tables_are_those_of_their_formulas() -> None:
    """Each against the formula in float64, within what float32 angles lose; the interleaved ones against ours too."""
    length, d = 40, 16
    for kind in ("interleaved", "interleaved_exp"):
        assert (sinusoid(kind, length, d) - sinusoid_table(length, d)).abs().max() < 1e-5
    for kind, wavelength in (("halves_paper", lambda k: 2 * k / d), ("halves_t2t", lambda k: k / (d / 2 - 1))):
        rows = [
            [math.sin(p / 10000 ** wavelength(k)) for k in range(d // 2)]
            + [math.cos(p / 10000 ** wavelength(k)) for k in range(d // 2)]
            for p in range(length)
        ]
        assert (sinusoid(kind, length, d) - torch.tensor(rows)).abs().max() < 1e-5
    # In float64, so that also odd widths are exact.
    rows = [[(math.cos if j % 2 else math.sin)(p / 10000 ** (2 * j / 7)) for j in range(7)] for p in range(length)]
    assert torch.equal(sinusoid("columns", length, 7), torch.tensor(rows, dtype=torch.float64).float())


# Files


FILE = """
layout: 1
name: own
arch: {norm: layernorm, norm_eps: 1.0e-5, activation: relu, embedding_scale: sqrt(d_model),
  enc: {norm_place: pre}, dec: {norm_place: post}}
tokens: {pad: 0, bos: 1, eos: 2, start: bos}
map:
  - "{src,tgt}.weight -> {enc,dec}.embed.weight |> mul 2"
  - head.weight ->? out.weight
derive: {enc.pos: sinusoid interleaved, dec.pos: tie enc.pos}
post: ["enc.embed.weight |> zero_row pad"]
assert_tied: [[a, b]]
ignore: ["*.mask"]
baseline: 1.0e-8
features: {dim: 8, convolutions: [{kernel: 3, stride: 2, channels: 4, activation: glu}]}
"""


def test_a_file_is_read_and_written_back() -> None:
    layout = parse_layout(FILE, "own.yaml")
    assert layout.switch("norm_place", "enc") == "pre"
    assert layout.switch("norm_place", "dec") == "post"
    assert layout.tokens["start"] == "bos"
    assert parse_layout(render_layout(layout), "again") == layout


def test_every_problem_of_a_file_is_named_at_once() -> None:
    text = FILE.replace("activation: relu", "activation: tanh, norms: x").replace("|> mul 2", "|> multiply 2")
    text = text.replace("out.weight", "output.weight").replace("start: bos", "start: nobody, mask: 1")
    message = message_of(ConfigError, lambda: parse_layout(text, "own.yaml"))
    problems = (
        "activation is 'tanh'",
        "switch norms is unknown",
        "fold 'multiply' is unknown",
        "output.weight: no canon",
    )
    for problem in (*problems, "tokens.start is 'nobody'", "token mask is unknown"):
        assert problem in message
    assert message.startswith("own.yaml: map ")


START = "layout: 1\nname: a\nmap: [a -> out.bias]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is None, expected an object"),
        ("[1, 2]", "the file is [1, 2], expected an object"),
        ("layout: 2\nname: a\nmap: [a -> out.bias]", "layout is 2, expected the version 1"),
        ("layout: 1\nname: a", "missing key map"),
        ("layout: 1\nname: a\nmap: []", "map has 0 lines"),
        ("layout: 1\nname: a\nmap: [1]", "map is (1,), expected a list of a text"),
        (START + "maps: []", "unknown key maps"),
        ("layout: 1\nname: a\nname: b\nmap: [a -> out.bias]", "name is given twice"),
        (START + "derive: {out.bias: a, out.bias: b}", "given twice"),
        ("layout: 1\nname: &x a\nmap: [*x]", "reference"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
        ("layout: 1\nname: a\nmap: [a => out.bias]", "expected 'SRC -> DST'"),
        ("layout: 1\nname: ../a\nmap: [a -> out.bias]", "name is '../a', expected 1 to 80 letters, digits, _, - and ."),
        ("layout: 1\nname: a\nmap: ['a -> out.{wb}']", "{wb} is on the right only"),
        ("layout: 1\nname: a\nmap: ['a -> enc.layers.0.self.[q/k].bias']", "one fold that splits need each other"),
        ("layout: 1\nname: a\nmap: ['a.{h} -> out.bias']", "join_rows or join_columns as the first fold"),
        (START + "derive: {out.weight: eval os}", "none of tie NAME"),
        (START + "baseline: 1", "baseline is 1, expected 0 or more and below 0.001"),
        (START + "arch: {embedding_scale: sqrt(vocab)}", "expected arithmetic in d_model"),
        (START + "arch: {enc: {norm: rms}}", "switch enc.norm is unknown"),
        ("a: " * 400, "not valid YAML"),
        (START + "arch: {1: 2}", "a key that is not a string"),
        (START + "assert_tied: [[a]]", "expected at least two keys"),
        (START + "derive: {out.bias: ones 2}", "'ones 2' is none of tie NAME"),
        (START + "derive: {'enc.layers.{i}.norm{i}.weight': ones}", "norm{i}.weight: no canonical name"),
        ("layout: " + "[" * 21, "it is nested too deeply"),
        ("layout: " + "[{a: " * 11, "it is nested too deeply"),
        ("x" * (1024 * 1024 + 1), "the limit is 1048576"),
    ],
)
def test_an_invalid_file_is_refused(text: str, problem: str) -> None:
    assert problem in message_of(ConfigError, lambda: parse_layout(text, "f.yaml"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "is missing" in message_of(ConfigError, lambda: read_layout(tmp_path / "absent.yaml"))
    assert "not a plain file" in message_of(ConfigError, lambda: read_layout(tmp_path))
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in message_of(ConfigError, lambda: read_layout(tmp_path / "a.yaml"))


def test_a_setting() -> None:
    texts = ("tokens.pad=3", "embedding_norm=true", "activation=gelu", "embedding_scale=sqrt(d_model)")
    pairs = [("tokens.pad", 3), ("embedding_norm", True), ("activation", "gelu"), ("embedding_scale", "sqrt(d_model)")]
    assert [parse_setting(text) for text in texts] == pairs


@pytest.mark.parametrize("text", ["norm_eps", "=1", "a=[1]", "a={", "a=" + "1" * 500])
def test_an_invalid_setting_is_refused(text: str) -> None:
    assert "expected KEY=VALUE" in message_of(ConfigError, lambda: parse_setting(text))


def test_a_token_never_overwrites_a_switch() -> None:
    layout = override(parse_layout(FILE, "f"), {"tokens.pad": 5, "norm_place": "post"})
    assert layout.tokens["pad"] == 5
    assert {key: value for key, value in layout.arch.items() if "place" in key} == {"norm_place": "post"}
    assert "switch pad is unknown" in message_of(ConfigError, lambda: override(layout, {"pad": 5}))
    assert "token norm is unknown" in message_of(ConfigError, lambda: override(layout, {"tokens.norm": 5}))


def test_the_documented_file_is_one() -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs" / "reference" / "layouts.md") if block.language == "yaml")
    assert parse_layout(text, "docs").name == "mine"
