"""Decoders that start from zeros and no token: recorded as they are, imported, and decoded as the original does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from models.from_scratch.labml import Labml
from models.from_scratch.parts import HEADS, TARGET
from models.from_scratch.tunz import Tunz
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.reference.golden import Golden, record
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

PAD, EOS = 1, 2


def golden_of(model: nn.Module, path: Path, vocab: int) -> Golden:
    return record(
        model,
        lambda model, *inputs: model(*inputs),
        path,
        source_vocab=vocab,
        target_vocab=TARGET,
        heads=HEADS,
        pad_source=PAD,
        pad_target=PAD,
    )


def greedy(model: Tunz, source: list[int], length: int) -> list[int]:
    """Decode as the original does: from zeros, which its `forward` puts in the place of the first id."""
    ids = torch.tensor([source])
    found: list[int] = []
    while len(found) < length and EOS not in found:
        target = torch.tensor([[PAD, *found]])
        with torch.no_grad():
            found.append(int(model(ids, torch.ones_like(ids, dtype=torch.bool), target)[0, -1].argmax()))
    return found


def test_a_first_id_that_counts_for_nothing_is_recorded_as_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    starting, usual = golden_of(Tunz(), tmp_path / "a", TARGET), golden_of(Labml(), tmp_path / "b", 19)
    assert starting.target_ids is not None
    assert usual.target_ids is not None
    assert set(starting.target_ids[:, 0].tolist()) == {PAD}
    assert PAD not in starting.target_ids[:, 1:][starting.target_mask[:, 1:]].tolist()  # type: ignore[index]
    assert PAD not in usual.target_ids[:, 0].tolist()


def test_a_decoder_that_starts_from_zeros_decodes_as_the_original(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tunz().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A shared table of large rows would say each token again.
            parameter.mul_(0.05 if "embedding" in name else 4.0)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "model", ImportConfig(layout="tunz", heads=HEADS))
    imported = load_model(tmp_path / "model")
    assert imported.config.tokens.start == PAD
    assert not imported.config.tie_output, "the output keeps its row of the padding"
    sources = [torch.randint(3, TARGET, (n,)).tolist() for n in range(1, 9)]
    expected = [greedy(model, source, 10) for source in sources]
    ours = decode(EagerSession(imported), sources, DecodeConfig(max_new_tokens=10))
    assert [list(best.token_ids) for (best,) in ours] == expected
    assert len({tuple(text) for text in expected}) > 4, "texts differ"
