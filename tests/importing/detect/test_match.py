"""The general matcher and the search: models it has never seen, compared with their goldens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.from_scratch.head_lists import HeadLists
from models.from_scratch.numbered_blocks import NumberedBlocks
from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tests.importing.selfmade import SELFMADE
from tfexport.errors import CheckpointError
from tfexport.importing.detect._draft import drafts
from tfexport.importing.detect.search import Budget, Detection, detect
from tfexport.importing.layout.apply import apply_layout, possible_heads
from tfexport.importing.layout.layout import Layout, builtin_layouts, parse_layout, render_layout
from tfexport.importing.reference.compare import compare
from tfexport.importing.reference.golden import Golden, read_golden, record

RECORDS = Path(__file__).resolve().parents[4] / "shared" / "goldens"
NAMES = sorted(path.name.split(".")[0] for path in RECORDS.glob("*.golden.safetensors"))
# Candidates that every model here is found with: three tenths of what an import has.
ENOUGH = 6_000
# Whose searches take longest.
LONG = ("Misleading", "FusedGates", "fairseq_post", "hf_bart")
TOKENS: dict[str, Any] = {"tokens.pad": 0, "tokens.start": 1, "tokens.eos": 2}


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


def made(name: str, path: Path, **options: Any) -> Golden:
    torch.manual_seed(0)
    is_joint, is_alone = name in ("Mixed", "Scattered", "OneForBoth"), name == "EncoderAlone"
    options = {"heads": HEADS, "target_vocab": None if is_alone else TARGET, **options}
    options["source_vocab"] = TARGET if is_joint else SOURCE
    return record(SELFMADE[name](), lambda model, *inputs: model(*inputs), path, **options)


@pytest.fixture(scope="session")
def golden_of(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], Golden]:
    return lambda name: read_golden(once(f"golden-{name}", lambda path: made(name, path)))


def check(found: Detection, tensors: dict[str, Tensor], golden: Golden) -> float:
    """Apply what was found, as the text of a file, and return the error."""
    assert found.search is not None
    assert found.search.accepted, found.search
    layout = parse_layout(render_layout(found.layout), "found")
    canonical = apply_layout(layout, tensors, settings=TOKENS, attributes=golden.attributes)
    error = compare(canonical, golden).error
    assert error == found.search.best.error if found.search.best else None
    return error


@pytest.mark.parametrize("name", each(SELFMADE))
def test_selfmade_models_are_found(name: str, golden_of: Callable[[str], Golden]) -> None:
    golden, budget = golden_of(name), Budget(ENOUGH)
    assert check(detect(golden.state, golden, [], budget=budget), dict(golden.state), golden) < 1e-12


@pytest.mark.skipif(not NAMES, reason="recorded outputs of other implementations are not here")
@pytest.mark.parametrize("name", each(NAMES))
def test_other_implementations_are_found_without_their_layouts(name: str) -> None:
    tensors = load_file(RECORDS / f"{name}.safetensors")
    golden = read_golden(RECORDS / f"{name}.golden.safetensors")
    assert check(detect(tensors, golden, [], budget=Budget(ENOUGH)), tensors, golden) < 1e-6


def test_heads_are_found_where_nobody_tells(tmp_path: Path) -> None:
    golden = made("Square", tmp_path / "g", heads=None)
    found = detect(golden.state, golden, [])
    assert check(found, dict(golden.state), golden) < 1e-12
    assert found.layout.arch["num_heads"] == HEADS


def test_what_is_given_is_not_searched(golden_of: Callable[[str], Golden]) -> None:
    golden = golden_of("Mixed")
    found = detect(golden.state, golden, [], settings={"norm": "std"}, budget=Budget(400))
    assert found.search is not None
    assert not found.search.accepted
    assert found.layout.arch["norm"] == "std"


def test_wrong_heads_are_not_accepted(golden_of: Callable[[str], Golden]) -> None:
    golden = golden_of("NumberedBlocks")
    found = detect(golden.state, golden, [], heads=2, budget=Budget(400))
    assert found.search is not None
    assert not found.search.accepted


def test_a_failed_search_says_how_near_it_came(golden_of: Callable[[str], Golden], tmp_path: Path) -> None:
    """A model that no layout expresses: its decoder subtracts where others add."""

    class Odd(NumberedBlocks):
        def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
            return super().forward(source, keep, target).sin() * 5

    torch.manual_seed(0)
    golden = record(
        Odd(), lambda m, *inputs: m(*inputs), tmp_path / "g", source_vocab=SOURCE, target_vocab=TARGET, heads=HEADS
    )
    said: list[str] = []
    budget = Budget(200, said.append)
    found = detect(golden.state, golden, [], budget=budget, report=said.append)
    assert found.search is not None
    assert not found.search.accepted
    assert found.search.best is not None
    assert found.search.best.error > 1e-3
    assert found.search.proposals >= 1
    assert found.search.is_cut
    assert 200 <= budget.spent <= 201  # what comes near is run on the whole batch too
    assert "searching: 180 of 200 candidates" in said
    assert any("error" in line for line in said)
    parse_layout(render_layout(found.layout), "started")


def test_without_a_golden_it_proposes_and_proves_nothing(golden_of: Callable[[str], Golden]) -> None:
    found = detect(golden_of("Mixed").state, None, [])
    assert found.search is None
    assert not found.is_builtin


def test_two_layouts_that_fit_by_name_are_both_named() -> None:
    some = next(iter(builtin_layouts().values()))
    twins = [Layout(name=name, map=("a.{wb} -> out.{wb}",), arch=some.arch) for name in ("one", "other")]
    with pytest.raises(CheckpointError, match=r"2 layouts fit by name \(one, other\).*golden, which decides"):
        detect({"a.weight": torch.ones(3, 3)}, None, twins)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no list of equal layers among 0 tensors"),
        ({"a.weight": torch.ones(3, 3)}, "no list of equal layers"),
        ({f"conv.{i}.weight": torch.ones(8, 8, 3, 3) for i in range(9)}, "no list of equal layers"),
        ({f"lstm.weight_hh_l{i}": torch.ones(8, 8) for i in range(4)}, "no list of equal layers"),
    ],
)
def test_what_is_no_transformer_is_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        next(drafts(tensors))


def test_layers_without_a_network_are_refused() -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))})
    with pytest.raises(CheckpointError, match=r"no list of equal layers|no attention and feed-forward network"):
        next(drafts(layers.state_dict()))


def test_heads_that_share_keys_are_as_many_as_rows_of_keys_allow() -> None:
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "ff.0": (16, 8), "ff.2": (8, 16)}
    tensors = {f"layers.{i}.{name}.weight": torch.randn(shape) for i in range(2) for name, shape in shapes.items()}
    tensors |= {f"layers.{i}.norm{n}.weight": torch.ones(8) for i in range(2) for n in (1, 2)}
    tensors["embed.weight"] = torch.randn(9, 8)
    layout = next(drafts(tensors))
    assert layout.arch["positions"] == "rotary"
    assert possible_heads(layout, tensors) == [2, 4]
    not_turned = replace(layout, arch={**layout.arch, "positions": "none"})
    assert possible_heads(not_turned, tensors) == [2, 4, 8]
    normed = {**tensors, **{f"layers.{i}.{n}_norm.weight": torch.ones(2) for i in range(2) for n in "qk"}}
    layout = next(drafts(normed))
    assert layout.arch["qk_norm"] == "head"
    assert possible_heads(layout, normed) == [4]


def test_the_first_proposal_reads_names() -> None:
    """Heads in a list, roles by word, sides by word: one proposal, without a golden."""
    layout = next(drafts(HeadLists().state_dict()))
    assert "encode_layers.{i}.sa.heads.{h}.query.{weight,bias} -> enc.layers.{i}.self.q.{weight,bias} |> join_rows" in [
        line.replace("{query,key,value}", "query").replace("{q,k,v}", "q") for line in layout.map
    ]
