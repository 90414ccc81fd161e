"""Wrong options of an import are found before the checkpoint is read or a layout is searched, all at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tests.importing.selfmade import SELFMADE
from tfexport.errors import ConfigError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.importing.reference.outputs import record_reference

TOKENS = ("tokens.pad=0", "tokens.start=1", "tokens.eos=2")


def never(*_: object, **__: object) -> None:
    raise AssertionError("this is too late")


def refused(path: Path, config: ImportConfig, **options: Any) -> ConfigError:
    """Import to a fresh folder; nothing may be left there."""
    output = path.parent / "work"
    output.mkdir()
    builtin_layouts()  # read once per process
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        import_checkpoint(path, output / "model", config, **options)
    assert time.perf_counter() - started < 1
    assert not list(output.iterdir())
    return caught.value


def test_every_wrong_option_is_listed_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfexport.importing.importer.read_checkpoint", never)
    (tmp_path / "model.pt").write_bytes(b"not read")
    wrong = ("norm_place=middle", "eps=1", "activation", "num_heads=2", "tokens.pad=-1", "tokens.end=3")
    config = ImportConfig(layout="notebook-4", heads=4, settings=(*wrong, "max_length=many", "dec.norm=rms"))
    error = refused(
        tmp_path / "model.pt", config, reference=tmp_path / "absent", target_tokenizer=tmp_path / "absent.json"
    )
    expected = (
        "'activation': expected KEY=VALUE",
        "num_heads is given twice",
        "norm_place is 'middle', expected post or pre",
        "switch eps is unknown, expected one of norm_place, ",
        "tokens.pad is -1, expected an id",
        "token end is unknown, expected one of unk, pad",
        "max_length is 'many', expected a whole number",
        "switch dec.norm is unknown",
        "layout 'notebook-4' is not a file or one of ajhalthor, ",
        "absent: is missing",
        "absent.json: is missing",
        "give --tokenizer too",
    )
    for part in expected:
        assert sum(part in problem for problem in error.problems) == 1, part
    assert len(error.problems) == len(expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = SELFMADE["Square"]().eval()
    torch.save(model.state_dict(), folder / "model.pt")
    sizes = {"source_vocab": SOURCE, "target_vocab": TARGET, "heads": HEADS}
    record_reference(model, lambda model, *inputs: model(*inputs), folder / "reference", **sizes)
    return folder


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"heads": 7}, "num_heads is 7"),
        ({"settings": ("tokens.pad=4000", "tokens.start=1", "tokens.eos=2")}, "4000"),
        ({"settings": ("tokens.pad=bos", "tokens.start=1", "tokens.eos=2")}, "tokens.pad is 'bos', expected an id"),
    ],
)
@pytest.mark.parametrize("reference", ["reference", None])
def test_settings_that_do_not_fit_the_shapes_are_refused_before_the_search(
    options: dict[str, Any], problem: str, reference: str | None, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tfexport.importing.importer.detect", never)
    (tmp_path / "model.pt").symlink_to(model / "model.pt")
    config = ImportConfig(builtin=False, **{"settings": TOKENS, **options})
    error = refused(tmp_path / "model.pt", config, reference=reference and model / reference)
    assert any(problem in one for one in error.problems)
