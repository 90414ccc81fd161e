"""Results are displayed as tables in notebooks."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from tfexport.decode.align import Alignment
from tfexport.importing.reference.certificate import Certificate, Changed
from tfexport.model.result import Result, Results
from tfexport.verify import Decodes, Numbers, Report

SCRIPT = "<script>alert(1)</script>"
NUMBERS = (Numbers("ort static", 1e-7, 1e-6, 2e-5, "-"), Numbers("ort concat", 0.1, 1.0, 2e-5, f"batch 0 {SCRIPT}"))
CERTIFICATE = Certificate(
    layout=SCRIPT,
    proven=True,
    error=1e-15,
    tolerance=1e-10,
    switches={"norm": Changed(value="pre", nearest="post", error=0.5), "eps": Changed(value=1, nearest=2, error=0)},
    unverified=("eps: 1 is not told from 2",),
)


def cells(shown: str) -> list[list[str]]:
    assert "<script" not in shown
    rows = [[cell.text or "" for cell in row] for row in ElementTree.fromstring(shown).iter("tr")]
    assert len({len(row) for row in rows}) == 1, "every row has all columns"
    return rows


def test_results() -> None:
    one = Result(SCRIPT, (4, 5, 2), -0.123456, "eos", 3)
    expected = [["index", "text", "score", "finish_reason"], ["3", SCRIPT, "-0.1235", "eos"]]
    assert cells(one._repr_html_()) == expected
    assert cells(Results([one, one])._repr_html_()) == [*expected, expected[1]]
    assert repr(one) == f"Result(text={SCRIPT!r}, score=-0.123456, finish_reason='eos', index=3)"


def test_alignments_are_heat_maps() -> None:
    weights = np.array([[1, 0, 0], [0.25, 0.5, 0.25]], np.float32)
    found = Alignment((4, 5, 2), (6, 7), weights, (0, 1))
    assert cells(found._repr_html_()) == [
        ["", "4", "5", "2"],
        ["6", "1.00", "0.00", "0.00"],
        ["7", "0.25", "0.50", "0.25"],
    ]
    spelled = Alignment((4, 5, 2), (6, 7), weights, (0, 1), ("a", SCRIPT, "</s>"), ("b", "&"))
    assert [row[0] for row in cells(spelled._repr_html_())] == ["", "b", "&"]
    assert cells(spelled._repr_html_())[0] == ["", "a", SCRIPT, "</s>"]
    assert "weights" not in repr(found)


def test_reports_and_certificates_are_tables_of_checks() -> None:
    report = Report(f"the model {SCRIPT}", 4, 0, NUMBERS, (Decodes("ort static", "greedy", 4, 3, 1, None, True),))
    rows = cells(report._repr_html_())
    assert [row[-1] for row in rows] == ["", "✓", "✗", "✓"]
    assert rows[3] == ["ort static", "greedy", "3/4 exact, 1 tie", "✓"]
    assert repr(report).splitlines()[-1] == f"parity with the model {SCRIPT}: FAILED"
    rows = cells(CERTIFICATE._repr_html_())
    assert rows[1:] == [
        ["reference outputs", "1.0e-15 ≤ 1.0e-10", "✓"],
        ["norm", "pre (error with post: 5.0e-01)", "✓"],
        ["unverified", "eps: 1 is not told from 2", "·"],
    ]
    assert repr(CERTIFICATE).startswith(f"Certificate(layout={SCRIPT!r}, proven=True, error=1e-15")
