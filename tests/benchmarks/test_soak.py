"""The soak: a short one of everything."""

from __future__ import annotations

import json
from pathlib import Path

import soak
from click.testing import CliRunner


def test_a_short_soak_finds_nothing_wrong(dates_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "soak.json"
    plan = ["--minutes", "0.05", "--warm-up", "0.03", "--rate", "100", "--reload-every", "1"]
    result = CliRunner().invoke(soak.main, [str(dates_bundle), *plan, "--output", str(output)])
    found = json.loads(output.read_text())
    assert result.exit_code == bool(found["problems"]), result.output
    assert found["problems"] == []
    assert found["counts"]["reloads"] >= 1
    assert min(found["counts"][way] for way in ("answer", "stream", "invalid")) > 0
