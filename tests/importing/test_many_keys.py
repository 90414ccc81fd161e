"""A checkpoint of very many keys: refused in one line, with work that grows as they do, counted and not timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from tests.importing.detect.test_work import work
from tfexport.cli import main
from tfexport.errors import CheckpointError
from tfexport.importing.importer import import_checkpoint


def many(number: int) -> dict[str, Tensor]:
    """Make parts of layers that belong to no model."""
    return {f"encoder.layers.{i // 40}.part{i % 40}.weight": torch.full((2, 2), float(i)) for i in range(number)}


def test_twenty_thousand_are_refused_in_one_line(tmp_path: Path) -> None:
    save_file(many(20_000), tmp_path / "many.safetensors")
    done = CliRunner().invoke(main, ["import", str(tmp_path / "many.safetensors"), "--output", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: ")
    assert len(said) < 3000
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_four_times_the_keys_take_four_times_the_work(kind: str, tmp_path: Path) -> None:
    def refused(number: int) -> None:
        with pytest.raises(CheckpointError):
            import_checkpoint(tmp_path / f"{number}.{kind}", tmp_path / "out")

    counts = []
    for number in (8, 400, 1600):  # the first loads what is loaded once
        path = tmp_path / f"{number}.{kind}"
        save_file(many(number), path) if kind == "safetensors" else torch.save(many(number), path)
        counts.append(work(lambda number=number: refused(number)))  # type: ignore[misc]
    assert counts[2] < 6 * counts[1]
