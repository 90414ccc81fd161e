"""The matcher and the search find models without their layouts, from their reference outputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from tests.conftest import Once
from tests.importing.selfmade import SELFMADE
from tfexport.errors import CheckpointError
from tfexport.importing._files import without_prefix
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect._draft import drafts
from tfexport.importing.detect.search import Budget, Detection, detect
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import Canonical, apply_layout, possible_heads
from tfexport.importing.layout.layout import Layout, parse_layout, render_layout
from tfexport.importing.reference.compare import compare
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference, record_reference

RECORDS = Path(__file__).resolve().parents[4] / "shared" / "goldens"
NAMES = sorted(path.name.split(".")[0] for path in RECORDS.glob("*.golden.safetensors"))
# Candidates that every model here is found with: three tenths of what an import has.
ENOUGH = 6_000
# Models with the longest searches, and those that another one covers.
LONG = ("Misleading", "NumberedBlocks", "FusedGates", "fairseq_post", "hf_bart", "hf_t5", "hkproj_2023_05")
TOKENS: dict[str, Any] = {"tokens.pad": 0, "tokens.start": 1, "tokens.eos": 2}


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


def made(name: str, path: Path, **options: Any) -> ReferenceOutputs:
    if name in ("Mixed", "Scattered", "OneForBoth"):
        options["source_vocab"] = TARGET
    if name == "EncoderAlone":
        options["target_vocab"] = None
    return recorded(SELFMADE[name], path, **options)


def recorded(make: Callable[[], nn.Module], path: Path, **options: Any) -> ReferenceOutputs:
    torch.manual_seed(0)
    options = {"source_vocab": SOURCE, "target_vocab": TARGET, "heads": HEADS, **options}
    reference = record_reference(make(), lambda model, *inputs: model(*inputs), path, **options)
    wide = {key: one.double() if one.is_floating_point() else one for key, one in reference.state.items()}
    return replace(reference, state=wide)


@pytest.fixture(scope="session")
def reference_of(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], ReferenceOutputs]:
    return lambda name: read_reference(once(f"reference-{name}", lambda path: made(name, path)))


def check(
    reference: ReferenceOutputs, found: Detection, tensors: Mapping[str, Tensor] | None = None, *, within: float = 1e-12
) -> tuple[Layout, Canonical]:
    """Apply an accepted layout, as the text of a file, and compare with the error that the search reports."""
    assert found.search is not None
    assert found.search.accepted, found.search
    assert found.search.best is not None
    layout = parse_layout(render_layout(found.layout), "found")
    canonical = apply_layout(layout, tensors or reference.state, settings=TOKENS, attributes=reference.attributes)
    error = compare(canonical, reference).error
    assert error == found.search.best.error
    assert error < within
    return layout, canonical


@pytest.mark.parametrize("name", each(SELFMADE))
def test_selfmade_models_are_found(name: str, once: Once, tmp_path: Path) -> None:
    """The certificate lists every tensor of the checkpoint, and no other."""
    reference = once(f"reference-{name}", lambda path: made(name, path))
    torch.manual_seed(0)
    torch.save(state := SELFMADE[name]().state_dict(), tmp_path / "model.pt")
    config = ImportConfig(builtin=False, search_budget=ENOUGH)
    certificate = import_checkpoint(tmp_path / "model.pt", tmp_path / "m", config, reference=reference).certificate
    assert certificate.proven
    assert certificate.error is not None
    assert certificate.error < 1e-12
    assert certificate.tensors.keys() == without_prefix(state, []).keys()
    assert {use.partition(":")[0] for use in certificate.tensors.values()} <= {"used", "folded", "buffer"}


@pytest.mark.skipif(not NAMES, reason="recorded outputs of other implementations are not here")
@pytest.mark.parametrize("name", each(NAMES))
def test_other_implementations_are_found_without_their_layouts(name: str) -> None:
    tensors = load_file(RECORDS / f"{name}.safetensors")
    reference = read_reference(RECORDS / f"{name}.golden.safetensors")
    check(reference, detect(tensors, reference, [], budget=Budget(ENOUGH)), tensors, within=1e-6)


def test_the_number_of_heads_is_found(tmp_path: Path) -> None:
    reference = made("Square", tmp_path / "g", heads=None)
    found = detect(reference.state, reference, [])
    check(reference, found)
    assert found.layout.arch["num_heads"] == HEADS


def test_given_settings_are_not_searched(reference_of: Callable[[str], ReferenceOutputs]) -> None:
    reference = reference_of("Mixed")
    found = detect(reference.state, reference, [], settings={"norm": "std"}, budget=Budget(100))
    assert found.search is not None
    assert not found.search.accepted
    assert found.layout.arch["norm"] == "std"


def test_a_failed_search_reports_the_best_error(tmp_path: Path) -> None:
    """A model that no layout expresses: its decoder subtracts where others add."""

    class Odd(NumberedBlocks):
        def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
            return super().forward(source, keep, target).sin() * 5

    reference = recorded(Odd, tmp_path / "g")
    lines: list[str] = []
    budget = Budget(200, lines.append)
    found = detect(reference.state, reference, [], budget=budget, report=lines.append)
    assert found.search is not None
    assert not found.search.accepted
    assert found.search.best is not None
    assert found.search.best.error > 1e-3
    assert found.search.proposals >= 1
    assert found.search.is_cut
    assert 200 <= budget.spent <= 201  # what comes near is run on the whole batch too
    assert "searching: 180 of 200 candidates" in lines
    assert any("error" in line for line in lines)
    parse_layout(render_layout(found.layout), "started")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no list of equal layers among 0 tensors"),
        ({f"conv.{i}.weight": torch.ones(8, 8, 3, 3) for i in range(9)}, "no list of equal layers"),
    ],
)
def test_other_networks_are_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        next(drafts(tensors))


def test_layers_without_a_network_are_refused() -> None:
    tensors = {f"layers.{i}.attn.{name}.weight": torch.ones(8, 8) for i in range(2) for name in "qkvo"}
    with pytest.raises(CheckpointError, match="no attention and feed-forward network"):
        next(drafts(tensors))


def test_the_number_of_key_value_heads_follows_from_the_keys() -> None:
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
    """Heads in a list, roles by word, sides by word: one proposal, without a reference."""
    found = detect(HeadLists().state_dict(), None, [])
    assert found.search is None
    assert "encode_layers.{i}.sa.heads.{h}.query.{weight,bias} -> enc.layers.{i}.self.q.{weight,bias} |> join_rows" in [
        line.replace("{query,key,value}", "query").replace("{q,k,v}", "q") for line in found.layout.map
    ]
