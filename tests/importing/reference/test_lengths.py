"""Reference outputs reach the length limits, so that what differs only in long texts is not proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.from_scratch import notebook_004, of_today
from models.from_scratch.notebook_004 import Notebook004, positions
from models.from_scratch.of_today import OfToday
from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tfexport.errors import CheckpointError, ParityError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import Imported, import_checkpoint
from tfexport.importing.layout.layout import render_layout
from tfexport.importing.reference.lengths import LongRow
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference, record_reference, write_reference

PAD, START, END = 0, 1, 2


def notebook(length: int = 24) -> Notebook004:
    """Notebook 004 with a longer table."""
    torch.manual_seed(0)
    model = Notebook004(layers=1)
    for stack in (model.encoder, model.decoder):
        stack.input_embedding.pos_encoder.pos_enc = positions(length, 30)
    return model.eval()


def record(model: nn.Module, folder: Path, **options: Any) -> ReferenceOutputs:
    torch.save(model.state_dict(), folder / "model.pt")
    options = {"source_vocab": 31, "target_vocab": 31, "heads": 6, **options}
    options = {"pad_source": PAD, "start": START, "end": END, **options}
    return record_reference(model, lambda model, *inputs: model(*inputs), folder / "reference", **options)


def import_(folder: Path, **options: Any) -> Imported:
    options = {"layout": "notebook-004", **options}
    output = folder / "imported"
    return import_checkpoint(folder / "model.pt", output, ImportConfig(**options), reference=folder / "reference")


def windowed(size: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention within a sliding window over self-attention."""

    def within(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *more: float) -> Tensor:
        if q.shape[2] == k.shape[2]:
            keep = keep & ((torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs() < size)
        return attend(q, k, v, keep, *more)

    return within


@pytest.mark.parametrize("size", [16, 32])
def test_a_sliding_window_is_not_proven(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_004, "attend", windowed(size, notebook_004.attend))
    record(notebook(40), tmp_path)
    with pytest.raises(ParityError, match=rf"agrees up to {size} source and {size} target tokens"):
        import_(tmp_path)
    assert not (tmp_path / "imported").exists()


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the layout of a rotary model, which the search finds and long rows prove."""
    folder = tmp_path_factory.mktemp("rotary")
    torch.manual_seed(0)
    record(OfToday(), folder, source_vocab=SOURCE, target_vocab=TARGET, heads=HEADS)
    imported = import_(folder, layout="auto", builtin=False)
    assert imported.certificate.proven
    assert (imported.certificate.source_tokens, imported.certificate.target_tokens) == (1024, 1024)
    assert not [line for line in imported.certificate.unverified if "length" in line]
    (folder / "layout.yaml").write_text(render_layout(imported.layout))
    return folder / "layout.yaml"


def rescaled(x: Tensor) -> Tensor:
    """Rotate with a base that grows with texts of more than 16 tokens (dynamic NTK)."""
    half = x.shape[-1] // 2
    base = 10000.0 * max(1.0, 2 * x.shape[2] / 16 - 1) ** (half / (half - 1))
    frequency = 1.0 / base ** (torch.arange(0, 2 * half, 2) / (2 * half))
    angle = torch.arange(x.shape[2]).to(x.dtype)[:, None] * frequency
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def test_rescaled_rotary_positions_are_not_proven(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_today.OfToday, "turned", staticmethod(rescaled))
    record(OfToday(), tmp_path, source_vocab=SOURCE, target_vocab=TARGET, heads=HEADS)
    with pytest.raises(ParityError, match="not for 32 and 32"):
        import_(tmp_path, layout=str(layout))


def test_rows_reach_the_limits_of_the_model(tmp_path: Path) -> None:
    reference = record(notebook(), tmp_path)
    assert [row.lengths for row in reference.long] == [(16, 16), (24, 24)]
    imported = import_(tmp_path)
    assert imported.certificate.proven
    assert (imported.certificate.source_tokens, imported.certificate.target_tokens) == (24, 24)
    assert imported.summary().endswith("up to 24 source and 24 target tokens")
    assert not [line for line in imported.certificate.unverified if "length" in line]


def test_the_user_can_lower_the_limits(tmp_path: Path) -> None:
    reference = record(notebook(100), tmp_path, max_source_len=20, max_target_len=5)
    assert [row.lengths for row in reference.long] == [(16, 7), (20, 7)]
    certificate = import_(tmp_path).certificate
    assert certificate.proven
    assert (certificate.source_tokens, certificate.target_tokens) == (20, 7)
    assert {line.partition(":")[0] for line in certificate.unverified} >= {"source length", "target length"}


def test_a_file_without_long_rows_claims_no_more_than_it_has(tmp_path: Path) -> None:
    reference = record(notebook(), tmp_path)
    write_reference(replace(reference, long=(), tokens={}), tmp_path / "reference")
    settings = ("tokens.pad=0", "tokens.start=1", "tokens.eos=2")
    certificate = import_(tmp_path, settings=settings).certificate
    assert certificate.proven
    assert (certificate.source_tokens, certificate.target_tokens) == (9, 7)
    assert "source length: compared up to 9 tokens, the model accepts 24" in certificate.unverified


def test_sides_that_are_too_long_together_are_compared_separately(tmp_path: Path) -> None:
    def forward(model: Any, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        if source.shape[1] + target.shape[1] > 40:
            raise ValueError("too long")
        return model(source, mask, target)

    sizes = {"source_vocab": 31, "target_vocab": 31}
    reference = record_reference(notebook(100), forward, tmp_path / "reference", **sizes)
    assert [row.lengths for row in reference.long] == [(16, 16), (33, 7), (9, 31)]


@pytest.mark.parametrize(("error", "is_noted"), [(IndexError("17"), False), (KeyError("cache"), True)])
def test_an_error_that_is_no_length_limit_is_unverified(error: Exception, is_noted: bool, tmp_path: Path) -> None:
    def forward(model: Any, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        if source.shape[1] > 16:
            raise error
        return model(source, mask, target)

    model = notebook()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    sizes = {"source_vocab": 31, "target_vocab": 31, "heads": 6}
    reference = record_reference(model, forward, tmp_path / "reference", pad_source=PAD, start=START, end=END, **sizes)
    assert max(row.lengths[0] for row in reference.long) == 16
    assert read_reference(tmp_path / "reference").long_error == reference.long_error
    certificate = import_(tmp_path).certificate
    assert (
        any(line == "longer rows: 17 and 7 tokens ended with KeyError: 'cache'" for line in certificate.unverified)
        == is_noted
    )


def test_sides_of_equal_length_grow_together(tmp_path: Path) -> None:
    def forward(model: Any, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return model(source, mask, target) + torch.zeros(source.shape[1], 1)

    sizes = {"source_vocab": 31, "target_vocab": 31, "source_len": 7, "target_len": 7}
    reference = record_reference(notebook(), forward, tmp_path / "reference", **sizes)
    assert [row.lengths for row in reference.long] == [(16, 16), (24, 24)]


DAMAGE: dict[str, tuple[dict[str, Tensor], str]] = {
    "unknown part": ({"long.0.labels": torch.zeros(1)}, "long row 0 has"),
    "no number": ({"long.x.outputs": torch.zeros(1)}, "long row x has"),
    "float32": ({"long.0.outputs": torch.zeros(4, 31)}, "outputs are torch.float32"),
    "width": ({"long.0.outputs": torch.zeros(4, 30, dtype=torch.float64)}, "outputs are torch.float64"),
    "NaN": ({"long.0.outputs": torch.full((4, 31), torch.nan, dtype=torch.float64)}, "NaN"),
    "position": ({"long.0.positions": torch.tensor([0, 1, 2, 16])}, "positions reach 16"),
    "two rows": ({"long.0.source_ids": torch.zeros(2, 9, dtype=torch.int64)}, "ids are torch.int64"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_rows_are_refused(name: str, tmp_path: Path) -> None:
    record(notebook(), tmp_path)
    changes, message = DAMAGE[name]
    with safe_open(tmp_path / "reference", "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "sha256"}
    save_file(load_file(tmp_path / "reference") | changes, tmp_path / "damaged", metadata)
    with pytest.raises(CheckpointError, match=message):
        read_reference(tmp_path / "damaged")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    written, read = record(notebook(), tmp_path).long, read_reference(tmp_path / "reference").long
    assert len(read) == len(written) == 2
    for one, other in zip(written, read, strict=True):
        assert isinstance(other, LongRow)
        assert all(torch.equal(value, vars(other)[name]) for name, value in vars(one).items())


def test_recorded_ids_need_not_be_repeated(tmp_path: Path) -> None:
    record(notebook(), tmp_path)
    imported = import_(tmp_path)
    assert (imported.config.tokens.pad, imported.config.tokens.start, imported.config.tokens.eos) == (0, 1, 2)
    assert not [line for line in imported.certificate.unverified if "tokens" in line]
