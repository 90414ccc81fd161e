"""The soak: a short one of everything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import soak


def test_a_short_soak_finds_nothing_wrong(dates_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "soak.json"
    plan = ["--minutes", "0.05", "--warm-up", "0.03", "--rate", "100", "--reload-every", "1"]
    result = CliRunner().invoke(soak.main, [str(dates_bundle), *plan, "--output", str(output)])
    found = json.loads(output.read_text())
    assert result.exit_code == bool(found["problems"]), result.output
    assert found["problems"] == []
    assert found["counts"]["reloads"] >= 1
    assert min(found["counts"][way] for way in ("answer", "stream", "invalid")) > 0


@pytest.mark.parametrize(("mb_an_hour", "hours", "expected"), [(2.0, 1.0, 2.0), (9.0, 0.1, None)])
def test_the_slope_of_memory(mb_an_hour: float, hours: float, expected: float | None) -> None:
    rows = [(3600 * hours * part / 9, 50 + mb_an_hour * hours * part / 9, 5, 9) for part in range(10)]
    state = soak.Soak(None, None, [], "m", samples=rows)  # type: ignore[arg-type]
    assert state.slope() == (None if expected is None else pytest.approx(expected))
