"""Layouts: their grammar, their arithmetic, their folds, and that they are strict both ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.conftest import ROOT
from tests.test_docs import blocks
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.layout._grammar import Rule, evaluate, matches
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names
from tfexport.importing.layout.layout import Layout, override, parse_layout, parse_setting, read_layout, render_layout
from tfexport.importing.layout.ops import Context, parse_step, run, sinusoid
from tfexport.nn.positions import sinusoid_table
from tfexport.nn.transformer import Transformer

ARCH: dict[str, Any] = {"norm": "layernorm", "norm_eps": 1e-5, "norm_place": "post", "activation": "relu"}
TOKENS = {"pad": 0, "start": 1, "eos": 2}


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
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


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("a.{x,y}", "b", "1 lists on the left and 0 on the right"),
        ("a.{x,y}", "b.{1,2,3}", "differ in length"),
        ("a.{x,x}", "b.{1,2}", "names a word twice"),
        ("a.{i}", "b", "{i} is on the left only"),
        ("a", "b.{wb}", "{wb} is on the right only"),
        ("a.{2i}", "b.{2i}", "{i}"),
        ("a", "b.{h}", "{h} may be on the left only"),
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
        (START + "arch: {enc: {activation: relu}}", "switch enc.activation is unknown"),
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


# Applying: the canonical names themselves are the simplest foreign model.

IDENTITY = Layout(
    name="identity",
    map=(
        "{enc,dec}.embed.weight -> {enc,dec}.embed.weight",
        "{enc,dec}.pos -> {enc,dec}.pos",
        "{enc,dec}.layers.{i}.self.{q,k,v,o}.{wb} -> {enc,dec}.layers.{i}.self.{q,k,v,o}.{wb}",
        "dec.layers.{i}.cross.{q,k,v,o}.{wb} -> dec.layers.{i}.cross.{q,k,v,o}.{wb}",
        "{enc,dec}.layers.{i}.norm{1,2}.{wb} -> {enc,dec}.layers.{i}.norm{1,2}.{wb}",
        "dec.layers.{i}.norm3.{wb} -> dec.layers.{i}.norm3.{wb}",
        "{enc,dec}.layers.{i}.ffn.{fc1,fc2}.{wb} -> {enc,dec}.layers.{i}.ffn.{fc1,fc2}.{wb}",
        "out.{wb} -> out.{wb}",
    ),
    arch=ARCH,
    tokens=TOKENS,
)


def state(model: Transformer | None = None) -> dict[str, Tensor]:
    model = model or tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def output(canonical: Canonical) -> Tensor:
    with torch.no_grad():
        return canonical.model().double()(*tiny.batch())


def test_the_identity() -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    found = apply_layout(IDENTITY, state(model), heads=4)
    assert found.config == model.config
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(output(found), model.double()(*tiny.batch()))


def test_lines_record_their_sources_and_results() -> None:
    found = apply_layout(IDENTITY, state(), heads=4)
    assert [use.line for use in found.lines] == list(IDENTITY.map)
    assert found.lines[0].sources == found.lines[0].targets == ("enc.embed.weight", "dec.embed.weight")
    assert {name for use in found.lines for name in use.targets} == set(found.tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_do_not_change(dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in state().items()}
    found = apply_layout(IDENTITY, tensors, heads=4)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in found.tensors.values()} == {dtype}


def test_every_problem_is_named_at_once() -> None:
    tensors = state()
    del tensors["out.weight"], tensors["out.bias"]
    tensors["enc.layers.0.norm1.weight"] = torch.ones(31)
    tensors["step"] = torch.tensor(3)
    tensors["enc.pos"] = tensors["enc.pos"].long()
    message = message_of(CheckpointError, lambda: apply_layout(IDENTITY, tensors))
    for problem in (
        "map 8 'out.{wb} -> out.{wb}': no key matches",
        "key step is not used",
        "key enc.pos holds int64, expected floating point",
        "the number of heads is missing, and shapes do not show it; give --heads, one of 1, 2, 4, 8, 16, 32",
        "missing out.weight [31, 32]",
        "enc.layers.0.norm1.weight is [31], expected [32]",
    ):
        assert problem in message, message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.update({"enc.layers.7.norm1.weight": torch.ones(32)}), "missing enc.layers.2.self.q.weight"),
        (lambda s: s.pop("dec.layers.1.cross.k.weight"), "missing dec.layers.1.cross.k.weight [32, 32]"),
        (lambda s: s.update({"out.weight": s["out.weight"].T}), "out.weight is [32, 31], expected [31, 32]"),
        (lambda s: s["dec.layers.0.ffn.fc1.bias"].fill_(float("nan")), "dec.layers.0.ffn.fc1.bias holds NaN or inf"),
        (lambda s: s.update({"enc.embed.weight": torch.ones(3)}), "enc.embed.weight [3], expected [vocab, d_model]"),
        (lambda s: s.pop("enc.embed.weight"), "enc.embed.weight is missing"),
    ],
)
def test_a_state_dict_that_does_not_fit(change: Callable[[dict[str, Tensor]], object], problem: str) -> None:
    tensors = state()
    change(tensors)
    assert problem in message_of(CheckpointError, lambda: apply_layout(IDENTITY, tensors, heads=4))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"map": (*IDENTITY.map, "out.bias -> dec.norm.bias")}, "key out.bias is used twice, by map 8 and map 9"),
        ({"map": (*IDENTITY.map, "nothing.{wb} -> dec.norm.{wb}")}, "map 9 'nothing.{wb} -> dec.norm.{wb}': no key"),
        ({"ignore": ("out.*",)}, "key out.bias is both used and ignored"),
        ({"arch": {**ARCH, "dec.final_norm": True}}, "missing dec.norm.weight [32]"),
        ({"arch": {**ARCH, "positions": "none", "max_length": 9}}, "unexpected enc.pos [24, 32]"),
        ({"arch": {**ARCH, "max_length": 9}}, "max_length is 9, but enc.pos is stored"),
        ({"arch": {}}, "switch norm_place of enc is missing"),
        ({"arch": {}}, "switch norm_eps is missing, and shapes do not show it; give --set norm_eps=…"),
        ({"tokens": {"pad": 0}}, "tokens start, eos are missing"),
        ({"tokens": {**TOKENS, "eos": 99}}, "tokens.eos is 99, expected below target_vocab 31"),
        ({"assert_tied": (("enc.embed.weight", "out.weight"),)}, "enc.embed.weight and out.weight differ"),
        ({"post": ("enc.norm.{wb} |> mul 2",)}, "post 1 'enc.norm.{wb} |> mul 2': no tensor matches"),
        ({"post": ("out.weight |> zero_row 31",)}, "post 1: out.weight [31, 32]: has 31 rows, there is no row 31"),
        ({"derive": {"enc.norm.weight": "tie dec.norm.weight"}}, "derive enc.norm.weight: dec.norm.weight is missing"),
        ({"derive": {"enc.norm.weight": "attr a.b"}}, "no tensor a.b outside of the state dict"),
        ({"derive": {"enc.norm.weight": "sinusoid interleaved"}}, "give --set max_length=N"),
    ],
)
def test_a_layout_that_does_not_fit(changes: dict[str, Any], problem: str) -> None:
    layout = replace(IDENTITY, **changes)
    assert problem in message_of(CheckpointError, lambda: apply_layout(layout, state(), heads=4))


def test_heads_that_do_not_divide() -> None:
    message = message_of(CheckpointError, lambda: apply_layout(IDENTITY, state(), heads=64))
    assert "num_heads is 64, which does not divide 32 rows" in message


def test_one_tensor_from_two_keys_has_to_be_the_same() -> None:
    lines = ("{enc.embed,shared}.weight -> {enc,enc}.embed.weight", "dec.embed.weight -> dec.embed.weight")
    layout = replace(IDENTITY, map=(*lines, *IDENTITY.map[1:]))
    tensors = state()
    tensors["shared.weight"] = tensors["enc.embed.weight"].clone()
    assert apply_layout(layout, tensors, heads=4).config.tie_embeddings is False
    tensors["shared.weight"][3, 4] += 1e-6
    message = message_of(CheckpointError, lambda: apply_layout(layout, tensors, heads=4))
    assert "enc.embed.weight comes from enc.embed.weight and from shared.weight, which differ" in message


def test_equal_tables_are_stored_once() -> None:
    tensors = state()
    tensors["dec.embed.weight"] = tensors["out.weight"] = tensors["enc.embed.weight"].clone()
    found = apply_layout(IDENTITY, tensors, heads=4)
    assert (found.config.tie_embeddings, found.config.tie_output) == (True, True)
    assert "out.weight" not in dict(found.model().named_parameters())


def test_the_zeroed_row_does_not_change_the_tied_table() -> None:
    layout = replace(IDENTITY, post=("enc.embed.weight |> zero_row pad",))
    tensors = state()
    tensors["dec.embed.weight"] = tensors["enc.embed.weight"].clone()
    found = apply_layout(layout, tensors, heads=4)
    assert found.config.tie_embeddings is False
    assert not found.tensors["enc.embed.weight"][0].any()
    assert found.tensors["dec.embed.weight"][0].any()


def test_biases_that_some_have_are_filled() -> None:
    tensors = state()
    gone = [f"{side}.layers.{i}.self.k.bias" for side in ("enc", "dec") for i in range(2)]
    for name in gone:
        del tensors[name]
    found = apply_layout(IDENTITY, tensors, heads=4)
    assert not any(found.tensors[name].any() for name in gone)
    assert found.notes == ("4 missing biases are set to 0, enc.layers.0.self.k.bias first",)
    without = {name: tensor for name, tensor in state().items() if ".self." not in name or "bias" not in name}
    without = {name: tensor for name, tensor in without.items() if ".cross." not in name or "bias" not in name}
    assert apply_layout(IDENTITY, without, heads=4).config.attention_bias is False


def test_sides_may_differ_in_heads() -> None:
    found = apply_layout(IDENTITY, state(), settings={"num_heads": 4, "dec.num_heads": 2})
    assert found.config.decoder is not None
    assert (found.config.encoder.num_heads, found.config.decoder.num_heads) == (4, 2)


# Folds that change what a model computes, each undone by its layout.

FUSED = IDENTITY.map[:2] + IDENTITY.map[3:]
SELF = "{enc,dec}.layers.{i}.self"


def fused(order: str) -> dict[str, Tensor]:
    """Fuse q, k and v of self-attention: in blocks, or by head."""
    tensors = state()
    for side in ("enc", "dec"):
        for i in range(2):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"{side}.layers.{i}.self.{part}.{kind}") for part in "qkv"]
                if order == "heads":
                    parts = [part.reshape(4, 8, -1) for part in parts]
                    joined = torch.stack(parts, 1).reshape(96, -1).squeeze(-1)
                else:
                    joined = torch.cat(parts)
                tensors[f"{side}.layers.{i}.self.qkv.{kind}"] = joined
    return tensors


@pytest.mark.parametrize(("order", "right", "wrong"), [("heads", "heads", "rows"), ("rows", "rows", "heads")])
def test_fused_projections_in_both_orders(order: str, right: str, wrong: str) -> None:
    own = output(apply_layout(IDENTITY, state(), heads=4))
    for step, is_same in ((right, True), (wrong, False)):
        lines = (f"{SELF}.qkv.{{wb}} -> {SELF}.[q/k/v].{{wb}} |> split_{step}", f"{SELF}.o.{{wb}} -> {SELF}.o.{{wb}}")
        found = apply_layout(replace(IDENTITY, map=(*FUSED, *lines)), fused(order), heads=4)
        assert torch.equal(output(found), own) is is_same


def test_projections_by_head() -> None:
    own = output(apply_layout(IDENTITY, state(), heads=4))
    tensors = state()
    for side in ("enc", "dec"):
        for i in range(2):
            for part in "qkv":
                for kind in ("weight", "bias"):
                    whole = tensors.pop(f"{side}.layers.{i}.self.{part}.{kind}")
                    for head, rows in enumerate(whole.chunk(4)):
                        tensors[f"{side}.layers.{i}.self.heads.{head}.{part}.{kind}"] = rows
            whole = tensors.pop(f"{side}.layers.{i}.self.o.weight")
            tensors[f"{side}.layers.{i}.self.o"] = whole.T.reshape(4, 8, 32)
    lines = (
        f"{SELF}.heads.{{h}}.{{q,k,v}}.{{wb}} -> {SELF}.{{q,k,v}}.{{wb}} |> join_rows",
        f"{SELF}.o -> {SELF}.o.weight |> flatten |> transpose",
        f"{SELF}.o.bias -> {SELF}.o.bias",
    )
    found = apply_layout(replace(IDENTITY, map=(*FUSED, *lines)), tensors, heads=4)
    assert torch.equal(output(found), own)
    del tensors["enc.layers.0.self.heads.2.q.weight"]
    message = message_of(
        CheckpointError, lambda: apply_layout(replace(IDENTITY, map=(*FUSED, *lines)), tensors, heads=4)
    )
    assert "has 3 heads, expected 4" in message


def test_scales_fold_into_weights() -> None:
    """Scaled embeddings, a scaled query and gains stored as gamma - 1 are the same model as switches say."""
    own = output(
        apply_layout(IDENTITY, state(), heads=4, settings={"embedding_scale": "sqrt(d_model)", "attention_scale": 1.0})
    )
    folded = replace(
        IDENTITY,
        post=(
            "{enc,dec}.embed.weight |> mul sqrt(d_model)",
            "{enc,dec}.layers.{i}.self.q.{wb} |> mul sqrt(d_k)",
            "dec.layers.{i}.cross.q.{wb} |> mul sqrt(d_k)",
            "{enc,dec}.layers.{i}.norm{1,2}.weight |> add 1",
        ),
    )
    tensors = {name: tensor.double() for name, tensor in state().items()}
    gains = {name: gain - 1 for name, gain in tensors.items() if name.endswith(("norm1.weight", "norm2.weight"))}
    tensors |= gains
    assert (output(apply_layout(folded, tensors, heads=4)) - own).abs().max() < 1e-12


def test_fitting_and_other_names_are_distinguished() -> None:
    assert fits_names(IDENTITY, state())
    assert not fits_names(IDENTITY, ["a", "b"])
    assert not fits_names(IDENTITY, [*state(), "more"])
    assert not fits_names(IDENTITY, [key for key in state() if ".self." not in key])


def test_nothing_is_read_before_the_shapes_fit() -> None:
    """Tensors without values get as far as the values."""
    meta = {name: tensor.to("meta") for name, tensor in state().items()}
    meta["out.bias"] = torch.ones(7)
    assert "out.bias is [7], expected [31]" in message_of(
        CheckpointError, lambda: apply_layout(IDENTITY, meta, heads=4)
    )


# The documentation is that of the code.


def test_the_documented_file_is_one() -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs" / "reference" / "layouts.md") if block.language == "yaml")
    assert parse_layout(text, "docs").name == "mine"


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("enc.layers.0.self.relative_positions_keys.weight", "relative positions by Shaw"),
        ("encoder.layers.1.moe.experts.3.fc1.weight", "a mixture of experts"),
        ("generator.copy_attn.weight", "a copy mechanism"),
        ("rnn.weight_hh_l0", "a recurrent layer"),
    ],
)
def test_an_inexpressible_architecture_is_refused_by_name(key: str, what: str) -> None:
    tensors = {**state(), key: torch.ones(3)}
    message = message_of(CheckpointError, lambda: apply_layout(IDENTITY, tensors, heads=4))
    assert f"key {key} looks like {what}, which the canonical model does not support" in message
