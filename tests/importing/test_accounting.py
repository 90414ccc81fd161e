"""Every tensor of a checkpoint is used, a known buffer, or explained; other weights than those compared are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.from_scratch.notebook_004 import Notebook004, positions
from tfexport.errors import CheckpointError, ParityError
from tfexport.importing._buffers import buffer_kind
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import Imported, import_checkpoint
from tfexport.importing.layout.layout import builtin_layouts, read_layout, render_layout
from tfexport.importing.reference.outputs import record_reference

VOCAB, WIDTH = 31, 30
LAYOUT: dict[str, Any] = {"layout": "notebook-004", "heads": 6}
State = dict[str, Tensor]


class Tagger(Notebook004):
    """A model with a head for a second task, which the recorded outputs do not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = nn.Linear(WIDTH, 7)
        self.register_buffer("mask", torch.ones(9, 9).tril())
        self.register_buffer("table", positions(40, WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor([3, 4]))


def saved(model: nn.Module, folder: Path) -> Path:
    """Write a checkpoint and reference outputs of it."""
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "model.pt")
    record_reference(model, Notebook004.forward, folder / "reference", source_vocab=VOCAB, target_vocab=VOCAB, heads=6)
    return folder


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(Tagger().eval(), tmp_path_factory.mktemp("tagger"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(Notebook004().eval(), tmp_path_factory.mktemp("own"))


def state(folder: Path) -> State:
    found: State = torch.load(folder / "model.pt", weights_only=True)["model"]
    return found


def refused(path: Path, output: Path, config: ImportConfig, reference: Path | None = None) -> ParityError:
    with pytest.raises(ParityError) as caught:
        import_checkpoint(path, output, config, reference=reference)
    assert not output.exists()
    return caught.value


def used(imported: Imported) -> dict[str, str]:
    return dict(imported.certificate.tensors)


def test_a_head_that_the_outputs_do_not_cover_ends_a_proven_import(tagger: Path, tmp_path: Path) -> None:
    reference, weights = tagger / "reference", state(tagger)
    share = (WIDTH * 7 + 7) / sum(tensor.numel() for tensor in weights.values())
    error = refused(tagger / "model.pt", tmp_path / "m", ImportConfig(**LAYOUT), reference)
    assert "2 tensors " in error.reason
    assert f"{share:.2%}" in error.reason
    assert "tagger.weight, tagger.bias" in error.reason
    assert "--ignore" in error.remedy
    config = ImportConfig(**LAYOUT, ignore=("tagger.*",))
    imported = import_checkpoint(tagger / "model.pt", tmp_path / "m", config, reference=reference)
    assert imported.certificate.proven
    found = used(imported)
    assert found.keys() == weights.keys()
    assert {name for name, use in found.items() if use.startswith("ignored")} == {"tagger.weight", "tagger.bias"}
    assert found["tagger.weight"] == "ignored: --ignore tagger.*"
    assert found["mask"] == "buffer: causal mask"
    assert found["table"] == "buffer: position table"
    assert found["num_batches_tracked"] == "buffer: integers or flags"
    assert found["generator.weight"] == "used"
    assert json.loads((tmp_path / "m" / "certificate.json").read_text())["tensors"] == found
    assert any("2 ignored (2 --ignore tagger.*)" in note for note in imported.notes)
    # The layout that was written knows what was left out.
    assert "tagger.*" in read_layout(tmp_path / "m" / "layout.yaml").ignore
    again = ImportConfig(layout=str(tmp_path / "m" / "layout.yaml"))
    assert used(import_checkpoint(tagger / "model.pt", tmp_path / "n", again)).keys() == weights.keys()


def test_a_search_does_not_leave_weights_out_either(tagger: Path, tmp_path: Path) -> None:
    """Also one that the reference outputs prove."""
    error = refused(tagger / "model.pt", tmp_path / "m", ImportConfig(builtin=False), tagger / "reference")
    assert "tagger.weight, tagger.bias" in error.reason


def test_a_guess_does_not_leave_weights_out(own: Path, tmp_path: Path) -> None:
    weights = state(own) | {f"extra.{i}.weight": torch.randn(WIDTH, WIDTH, 3) for i in range(2)}
    torch.save(weights, tmp_path / "a.pt")
    given: dict[str, Any] = {"heads": 6, "accept_unverified": True}
    error = refused(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**given))
    assert "extra.*.weight" in error.reason
    imported = import_checkpoint(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**given, ignore=("extra.*",)))
    assert imported.layout.name == "notebook-004"
    assert not imported.certificate.proven
    assert used(imported).keys() == weights.keys()


def test_folded_and_ignored_by_the_layout(tmp_path: Path) -> None:
    from models.from_scratch.notebook_000 import Notebook000
    from models.from_scratch.notebook_002 import Notebook002

    for model, name in ((Notebook000(), "notebook-000"), (Notebook002(), "notebook-002")):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        config = ImportConfig(layout=name, heads=4, settings=("tokens.pad=0", "tokens.start=0", "tokens.eos=0"))
        found = used(import_checkpoint(tmp_path / f"{name}.pt", tmp_path / name, config))
        assert found.keys() == model.state_dict().keys()
        expected = {"folded"} if name == "notebook-000" else {"ignored: layout notebook-002"}
        assert expected < {*found.values()}


# Entries next to the state dict


def test_the_state_of_an_optimizer_is_recognized_and_counted(tmp_path: Path) -> None:
    model = Notebook004()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    count = 3 * len(list(model.parameters()))
    saved = {"model": model.state_dict(), "optimizer_state": optimizer.state_dict(), "rng_state": torch.get_rng_state()}
    torch.save(saved, tmp_path / "a.pt")
    imported = import_checkpoint(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**LAYOUT))
    assert used(imported)["optimizer_state.*"] == f"ignored: state of the optimizer, {count} tensors"
    assert any(f"{count} state of the optimizer" in note for note in imported.notes)


@pytest.mark.parametrize("name", ["head", "semantic_decoder", "net2"])
def test_weights_in_an_entry_of_their_own_are_not_left_out(name: str, own: Path, tmp_path: Path) -> None:
    head = {"weight": torch.randn(5, WIDTH), "scale": torch.ones(())}
    torch.save({"model": state(own), name: head, "ema": {"w": torch.ones(3)}}, tmp_path / "a.pt")
    error = refused(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**LAYOUT))
    assert "1 tensor with " in error.reason
    assert f"{name}.weight" in error.reason
    config = ImportConfig(**LAYOUT, ignore=(f"{name}.*",))
    found = used(import_checkpoint(tmp_path / "a.pt", tmp_path / "m", config))
    assert found[f"{name}.weight"] == f"ignored: --ignore {name}.*"
    assert found["ema.*"].startswith("ignored: averaged weights")


def test_an_entry_by_choice_leaves_the_others_out(own: Path, tmp_path: Path) -> None:
    torch.save({"a": state(own), "b": {"weight": torch.ones(3)}}, tmp_path / "a.pt")
    found = used(import_checkpoint(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**LAYOUT, entry="a")))
    assert found["b.weight"] == "ignored: not in --entry a"


def test_a_pattern_that_matches_nothing_is_an_error(own: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--ignore 'absent") as caught:
        import_checkpoint(own / "model.pt", tmp_path / "m", ImportConfig(**LAYOUT, ignore=("absent.*", "generat*")))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("position_ids", torch.arange(9)[None], "integers or flags"),
        ("fc.weight_packed", torch.arange(9), ""),
        ("fc.qweight", torch.ones(3, 3, dtype=torch.int32), ""),
        ("bn.num_batches_tracked", torch.tensor(3), "integers or flags"),
        ("version", torch.tensor([3.0]), "single number"),
        ("rotary.inv_freq", 10_000 ** -torch.linspace(0, 1, 8), "rotary positions"),
        ("rotary.cos_cached", torch.outer(torch.arange(9.0), torch.rand(4)).cos(), "rotary positions"),
        ("rope.freqs_cis", torch.polar(torch.ones(9, 4), torch.rand(9, 4)), "rotary positions"),
        ("frequency.weight", torch.rand(9, 4), ""),
        ("rotary.freqs", torch.randn(64), ""),
        ("attn.bias", torch.ones(1, 1, 6, 6).tril(), "causal mask"),
        ("attn.mask", torch.full((6, 6), -torch.inf).triu(1), "causal mask"),
        ("attn.bias", torch.randn(6, 6).tril(), ""),
        ("pe", positions(20, 8)[None], "position table"),
        ("pe", torch.cat([torch.zeros(1, 8), positions(20, 8)]), "position table"),
        ("classes", nn.functional.normalize(torch.randn(20, 8)), ""),
        ("pos_embedding", torch.randn(20, 8), ""),
        ("norm.weight", torch.ones(8), ""),
    ],
)
def test_buffers_are_recognized_by_their_values(name: str, tensor: Tensor, kind: str) -> None:
    assert buffer_kind(name, tensor) == kind


# Other weights than those compared


def without_bias(weights: State) -> None:
    del weights["generator.bias"]


def third_layer(weights: State) -> None:
    last = {name: tensor for name, tensor in weights.items() if "decoder" in name and ".1." in name}
    assert last
    weights |= {name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in last.items()}


def one_layer(weights: State) -> None:
    for name in [name for name in weights if "decoder" in name and ".1." in name]:
        del weights[name]


def more_ids(weights: State) -> None:
    for name, tensor in weights.items():
        if tensor.shape[:1] == (VOCAB,):
            weights[name] = torch.cat([tensor, tensor[:3]])


def a_head(weights: State) -> None:
    weights["head.weight"] = torch.randn(5, WIDTH)


@pytest.mark.parametrize("change", [without_bias, third_layer, one_layer, more_ids, a_head])
@pytest.mark.parametrize("config", [LAYOUT, {}], ids=["layout", "auto"])
def test_a_checkpoint_with_other_tensors_than_recorded_is_refused(
    change: Callable[[State], None], config: Mapping[str, Any], own: Path, tmp_path: Path
) -> None:
    weights = state(own)
    change(weights)
    torch.save(weights, tmp_path / "a.pt")
    error = refused(tmp_path / "a.pt", tmp_path / "m", ImportConfig(**config), own / "reference")
    assert "a.pt" in error.subject
    assert "record again" in error.remedy


def test_a_buffer_that_only_one_of_both_has_is_no_other_weight(own: Path, tmp_path: Path) -> None:
    torch.save(state(own) | {"mask": torch.ones(9, 9).tril(), "version": torch.ones(1)}, tmp_path / "a.pt")
    imported = import_checkpoint(tmp_path / "a.pt", tmp_path / "m", reference=own / "reference")
    assert imported.certificate.proven
    assert used(imported)["mask"] == "buffer: causal mask"


def test_rounded_weights_give_the_recorded_outputs(tmp_path: Path) -> None:
    """A fold rounds weights of 16 bits when it is stored, which is not an error of the checkpoint."""
    torch.manual_seed(0)
    model = Notebook004().eval()
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(half)

    def forward(model: nn.Module, *inputs: Tensor) -> Tensor:
        return Notebook004.forward(model, *inputs) / 3  # type: ignore[arg-type]

    record_reference(model, forward, tmp_path / "reference", source_vocab=VOCAB, target_vocab=VOCAB, heads=6)
    save_file(half, tmp_path / "a.safetensors")
    text = render_layout(builtin_layouts()["notebook-004"])
    assert "generator.{wb} -> out.{wb}" in text
    (tmp_path / "a.yaml").write_text(text.replace("-> out.{wb}", "-> out.{wb} |> mul 1 / 3"))
    config = ImportConfig(layout=str(tmp_path / "a.yaml"))
    imported = import_checkpoint(tmp_path / "a.safetensors", tmp_path / "m", config, reference=tmp_path / "reference")
    assert imported.certificate.proven
    assert any("own weights the error is" in note for note in imported.notes)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert (stored["out.weight"].dtype, stored["enc.embed.weight"].dtype) == (torch.float32, torch.bfloat16)
