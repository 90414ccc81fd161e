"""Layouts applied to state dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.importing.layout.test_layout import message_of
from tfexport.errors import CheckpointError
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names
from tfexport.importing.layout.layout import Layout
from tfexport.nn.transformer import Transformer

ARCH: dict[str, Any] = {"norm": "layernorm", "norm_eps": 1e-5, "norm_place": "post", "activation": "relu"}
TOKENS = {"pad": 0, "start": 1, "eos": 2}


# The canonical names are the simplest layout.
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


def test_a_recurrent_decoder_with_the_names_of_marian() -> None:
    """Marian stores matrices [in, out] and biases [1, out]; heads are those of cross-attention."""
    model = tiny.model(tiny.VARIANTS["ssru"], dtype=torch.float32)
    tensors = state(model)
    for layer in (0, 1):
        ours, theirs = f"dec.layers.{layer}.self", f"decoder_l{layer + 1}_rnn"
        tensors[f"{theirs}_W"] = tensors.pop(f"{ours}.update.weight").T
        tensors[f"{theirs}_Wf"] = tensors.pop(f"{ours}.forget.weight").T
        tensors[f"{theirs}_bf"] = tensors.pop(f"{ours}.forget.bias")[None]
    lines = (
        *(line.replace("{enc,dec}.layers.{i}.self", "enc.layers.{i}.self") for line in IDENTITY.map),
        "decoder_l{i+1}_rnn_{W,Wf} -> dec.layers.{i}.self.{update,forget}.weight |> transpose",
        "decoder_l{i+1}_rnn_bf -> dec.layers.{i}.self.forget.bias |> squeeze",
    )
    layout = replace(IDENTITY, map=lines, arch={**ARCH, "dec.mixer": "ssru"})
    found = apply_layout(layout, tensors, heads=4)
    assert found.config == model.config
    with torch.no_grad():
        assert torch.equal(output(found), model.double()(*tiny.batch()))


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


def test_a_map_between_the_sides_that_does_not_fit_is_refused() -> None:
    tensors = {**state(), "bridge.weight": torch.zeros(31, 32, dtype=torch.float64)}
    layout = replace(IDENTITY, map=(*IDENTITY.map, "bridge.{wb} -> enc.proj.{wb}"))
    message = message_of(CheckpointError, lambda: apply_layout(layout, tensors, heads=4))
    assert message.count("enc.proj before dec.layers.1.cross.v.weight: [32, 32] does not fit [31, 32]") == 1


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
