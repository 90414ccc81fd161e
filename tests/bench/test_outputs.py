"""`tfexport compare` on two bundles, of which one has shortlists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import DATES, Once
from tests.importing.marian_shortlist import write_shortlist
from tfexport.bench.outputs import compare_outputs
from tfexport.bundle.bundle import open_bundle
from tfexport.cli import main
from tfexport.errors import InputError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig

TEXTS = ["Dienstag, 3. März 2026", "le 14 juillet 1989", "2 May 2001"]


@pytest.fixture(scope="module")
def short(once: Once, dates_bundle: Path) -> Path:
    """Export models/dates with the tokens of the source and a few others; its recorded texts need more."""

    def make(path: Path) -> None:
        vocab = open_bundle(dates_bundle).manifest.spec.source_vocab
        table = write_shortlist(path.with_name("dates.lex"), [[]] * vocab, 8)
        export_bundle(str(DATES), path, ExportConfig(shortlist=table))

    return once("dates-short", make)


def compared(first: Path, second: Path, tmp_path: Path, *options: str) -> tuple[str, dict[str, object]]:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    command = ["compare", str(first), str(second), "--input", str(tmp_path / "texts.txt"), "--threads", "1", *options]
    plain, data = (CliRunner().invoke(main, [*command, *more]) for more in ([], ["--json"]))
    assert plain.exit_code == data.exit_code == 0
    return plain.stdout, json.loads(data.stdout)


def test_equal_bundles(dates_bundle: Path, tmp_path: Path) -> None:
    lines, found = compared(dates_bundle, dates_bundle, tmp_path, "--num-beams", "2")
    assert found["texts"] == 3
    assert found["changed"] == 0
    assert found["examples"] == []
    assert "0 of 3" in lines


def test_changed_outputs_are_counted_and_shown(dates_bundle: Path, short: Path, tmp_path: Path) -> None:
    lines, found = compared(dates_bundle, short, tmp_path)
    examples = found["examples"]
    assert isinstance(examples, list)
    assert found["changed"] == len(examples) == 2
    for text, before, after in examples:
        assert text in TEXTS
        assert before != after
        assert before in lines
        assert after in lines


def test_a_bundle_without_text_is_refused(dates_bundle: Path, random_bundle: Path) -> None:
    with pytest.raises(InputError, match=str(random_bundle)):
        compare_outputs((dates_bundle, random_bundle), TEXTS, loading={"threads": 1}, options={})
