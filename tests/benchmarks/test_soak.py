"""The soak: a short one of everything, what it calls a failure, and what it compares with what."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tfexport.errors import BenchError

sys.path.insert(0, str(ROOT / "benchmarks"))

import soak as command
from soaking import report, run
from soaking.asks import ENDS, KINDS, WAYS, Ask, Outcome, bursts, first_run, is_expected
from soaking.run import Plan, Record, Soak
from soaking.watched import Sample, mb_an_hour, sample

TEXTS = ["3 May 1999", "29 Ekim 1923"]


def test_a_short_one_of_everything(dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NUM_TEXTS", 3)
    monkeypatch.setattr(run, "_SETTLES_IN_S", 0.5)
    output = tmp_path / "made" / "soak.json"
    plan = ["--minutes", "0.04", "--warm-up", "0.02", "--rate", "60", "--reload-every", "1"]
    result = CliRunner().invoke(command.main, [str(dates_bundle), *plan, "--output", str(output)])
    found = json.loads(output.read_text())
    assert result.exit_code == bool(found["problems"]), result.output
    assert found["is_over"]
    for one in found["targets"]:
        assert (one["num_problems"], one["exit_code"]) == (0, 0), one["problems"]
        assert one["num_reloads"] >= 1
        assert {way.partition(":")[0] for way in one["counts"]} <= set(WAYS)
        assert one["before"]["temporary_files"] == one["after"]["temporary_files"] == 0
        assert len(one["samples"]["at_s"]) == len(one["samples"]["rss_mb"]) > 1
    page = output.with_suffix(".md").read_text()
    assert page.startswith("# Soak: 0 minutes after 0 of warm-up, ")
    assert "| slope of memory / of what is no file's, MB an hour |" in page
    assert ElementTree.parse(output.with_suffix(".svg")).getroot().tag.endswith("svg")


class Scripted:
    """A target in this process: says each text backwards, but for what a test has it do."""

    name, callers = "scripted", 2

    def __init__(self, folder: Path) -> None:
        self.pid, self.temporary = os.getpid(), folder
        self.num_reloads = 0

    async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
        return [ENDS.get(ask.way, [ask.text[::-1]]) for ask in asks]

    async def reload(self) -> None:
        self.num_reloads += 1

    def disconnect(self) -> None: ...

    async def close(self) -> int:
        return 0


def soaked(target: Scripted, monkeypatch: pytest.MonkeyPatch, minutes: float = 0.01) -> tuple[Record, list[str]]:
    """Soak it for a moment; return its record and the problems of the report."""
    monkeypatch.setattr(run, "_SETTLES_IN_S", 0)
    plan = Plan(load_s=60 * minutes, warm_up_s=0.05, rate=2000, reload_every_s=0.1, sample_every_s=0.05)
    soak = Soak([target], TEXTS, plan)
    asyncio.run(soak.run(lambda line: None))
    return soak.records[0], report.document(soak, "", is_over=True)["problems"]


def test_nothing_is_wrong_with_what_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Scripted(tmp_path)
    record, problems = soaked(target, monkeypatch)
    assert problems == []
    assert record.num_reloads == target.num_reloads >= 1
    assert record.counts["answer: texts"] > record.counts["wrong: refused"] > 0


def test_a_text_that_changes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(Scripted):
        async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
            return [["other"] if self.num_reloads and ask.way == "stream" else one
                    for ask, one in zip(asks, await super().ask(asks), strict=True)]  # fmt: skip

    record, problems = soaked(Changing(tmp_path), monkeypatch)
    assert record.num_problems > 0
    assert any("stream" in problem and "['other'], not [" in problem for problem in problems)


def test_what_is_left_behind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, held = threading.Event(), []

    class Keeping(Scripted):
        async def reload(self) -> None:
            await super().reload()
            held.append(tempfile.NamedTemporaryFile(dir=self.temporary))  # noqa: SIM115
            threading.Thread(target=leave.wait).start()

    try:
        _, problems = soaked(Keeping(tmp_path), monkeypatch)
    finally:
        leave.set()
        for file in held:
            file.close()
    told = " ".join(problems)
    assert all(f"{name} at the end" in told for name in ("threads", "descriptors", "temporary files"))


def test_a_target_that_dies_ends_the_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Scripted):
        async def reload(self) -> None:
            raise BenchError("scripted: has died")

        async def close(self) -> int:
            return 9

    record, problems = soaked(Dying(tmp_path), monkeypatch, minutes=5)
    assert record.exit_code == 9
    assert {"scripted: exit code 9", "scripted: has died"} <= set(problems)


def test_targets_that_disagree_at_first_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Scripted):
        async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
            return [["other"] for _ in asks]

    soak = Soak([Scripted(tmp_path), Other(tmp_path)], TEXTS, Plan(load_s=1, warm_up_s=0))
    with pytest.raises(BenchError, match=r"\['other'\], not \['9991 yaM 3'\]"):
        asyncio.run(soak.run(lambda line: None))


def record_of(rss: Sequence[float], every_s: float) -> Record:
    rest = Sample(0, 0, 0, 5, 9, 0)
    samples = [Sample(every_s * index, value, value, 5, 9, 0) for index, value in enumerate(rss)]
    return Record("scripted", Counter({"answer: texts": 3}), samples=samples, before=rest, after=rest, exit_code=0)


@pytest.mark.parametrize(
    ("mb_a_sample", "every_s", "fails"),
    [(0.01, 20.0, True), (0.003, 20.0, False), (-0.1, 20.0, False), (0.01, 1.0, False)],
)
def test_memory_that_rises_fails_once_the_time_was_long_enough(mb_a_sample: float, every_s: float, fails: bool) -> None:
    noise = random.Random(0)
    rss = [300 + mb_a_sample * index + noise.gauss(0, 0.05) for index in range(200)]
    assert mb_an_hour(record_of(rss, every_s).samples) == pytest.approx(3600 * mb_a_sample / every_s, rel=0.2)
    soak = Soak([], TEXTS, Plan(load_s=1, warm_up_s=0))
    soak.records = [record_of(rss, every_s)]
    problems = report.document(soak, "", is_over=True)["problems"]
    assert [problem.partition(" by")[0] for problem in problems] == ["scripted: memory rises"] * fails


def test_a_process_is_seen_as_it_is(tmp_path: Path) -> None:
    before = sample(os.getpid(), tmp_path, 1)
    block = bytearray(os.urandom(50_000_000))
    with (tmp_path / "file").open("wb"):
        after = sample(os.getpid(), tmp_path, 2)
    assert after.rss_mb - before.rss_mb == pytest.approx(50, abs=5)
    assert after.anonymous_mb - before.anonymous_mb == pytest.approx(50, abs=5)
    assert (after.descriptors, after.temporary_files) == (before.descriptors + 1, 1)
    assert after.threads == before.threads == len(list(Path("/proc/self/task").iterdir()))
    assert len(block) == 50_000_000
    with pytest.raises(BenchError, match="has ended"):
        sample(2**30, tmp_path, 3)


def test_what_is_asked_is_in_the_first_run() -> None:
    first = {ask.key for ask in first_run(TEXTS)}
    assert len(first) == len(TEXTS) * (len(KINDS) + 3)  # samples with three seeds, and tokens
    drawn = bursts(TEXTS, random.Random(1), 12)
    asks = [ask for _ in range(200) for ask in next(drawn)]
    assert {ask.key for ask in asks if ask.way != "wrong"} == first
    assert {ask.way for ask in asks} == set(WAYS)


def test_what_may_come_of_what() -> None:
    def expected(way: str, outcome: Outcome) -> bool:
        ask = Ask(way, TEXTS[0])
        return is_expected(ask, outcome, {ask.key: ["right"]})

    assert all(expected(way, ["right"]) == (way != "wrong") for way in WAYS)
    assert not any(expected(way, ["wrong"]) for way in WAYS)
    assert not any(expected(way, "failed: 500") for way in WAYS)
    assert [way for way in WAYS if expected(way, "left")] == ["leave"]
    assert [way for way in WAYS if expected(way, "late")] == ["late"]
    assert [way for way in WAYS if expected(way, "refused")] == ["wrong"]
