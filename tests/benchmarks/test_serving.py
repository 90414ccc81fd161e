"""The comparison of ways to answer many callers: load, the search for a rate, who takes no part, and a quick run."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tfexport.errors import BenchError
from tfexport.export import export_bundle
from tfexport.graph.config import ExportConfig
from tfexport.models.directory import save_model

sys.path.insert(0, str(ROOT / "benchmarks"))

import serving as command
from comparison import lengths, serving
from comparison.contestants import EQUAL, FP32, INT8, PEER, Contestant, Run, poisson
from comparison.lengths import Text, equal_lengths
from comparison.serving import Effort, Standing
from comparison.workers import load
from comparison.workers.load import Ledger


class Doubling:
    """Decodes in no time, and notes the size of each batch and who asks."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, sources: list[list[int]]) -> list[list[int]]:
        self.sizes.append(len(sources))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        return [[2 * source[0]] for source in sources]


@pytest.mark.parametrize("policy", load.POLICIES)
def test_every_request_is_answered_with_its_own(policy: str) -> None:
    sources, decode = [[number] for number in range(70)], Doubling(0.002)
    found = load.run(policy, decode, sources, Ledger(None, 70, 60.0))
    assert found["outputs"] == [[2 * number] for number in range(70)]
    assert 0 < min(found["latencies_s"]) <= max(found["latencies_s"]) <= found["wall_s"]
    assert sum(decode.sizes) == 70
    if policy == "threads":
        assert set(decode.sizes) == {1}
        assert 1 < len(decode.threads) <= load.CLIENTS
    else:
        assert decode.sizes[:2] == [32, 32]
        assert len(decode.threads) == 1


def test_latencies_count_from_the_arrival_and_who_is_too_late_gives_up() -> None:
    arrivals = [0.0, 0.2, 0.2, 0.2]
    found = load.run("window", Doubling(0.3), [[1]] * 4, Ledger(arrivals, 4, 0.0))
    first, *others = found["latencies_s"]
    assert 0.3 <= first < 5
    assert others == [None] * 3  # at 0.3 s, which is after the last arrival


def run_of(p99_s: float, requests: int = 10) -> Run:
    return Run(requests, 1.0, 0.5, p99_s, [])


@pytest.mark.parametrize("limit", [3.0, 7.0, 9.5, 12.0])
def test_trials_close_in_on_the_highest_rate(limit: float) -> None:
    standing = Standing(FP32[0], 1, {}, 1.0, backlogs=[run_of(1.0)])
    for _ in range(Effort.trials):
        rate = standing.next_rate
        standing.tried(rate, run_of(1.0 if rate <= limit else math.inf), 3.0)
    assert 0.95 * limit <= standing.low <= limit
    assert standing.to_dict()["highest_rate"] == standing.low
    assert standing.to_dict()["requests_per_cpu_second"] == 20


def test_schedules_of_a_seed_differ_in_pace_alone() -> None:
    slow, fast = poisson(1.0, 50, 3), poisson(4.0, 50, 3)
    assert [4 * at for at in fast] == pytest.approx(slow)
    assert slow != poisson(1.0, 50, 4)


def test_equal_lengths_are_those_that_the_model_ends_at() -> None:
    texts = equal_lengths(5, 1000)
    assert {(len(text.source), text.length) for text in texts} == {(lengths.MEDIAN, lengths.MEDIAN)}
    asked = {lengths.SHORTEST + (token - lengths.FIRST_TOKEN) % (lengths.LONGEST - lengths.SHORTEST + 1)
             for text in texts for token in text.source}  # fmt: skip
    assert asked == {lengths.MEDIAN}


class Scripted:
    """Processes that answer each text with as many tokens as `extra` more than it asks for."""

    def __init__(self, **extra: int) -> None:
        self.extra = extra

    def run(self, contestant: Contestant, threads: int, sources: list[list[int]], *rest: object) -> Run:
        if contestant.system == PEER:
            raise BenchError("ctranslate2 fp32: no Python")
        more = self.extra.get(contestant.policy, 0)
        outputs = [[source[0]] * (len(source) + more) for source in sources]
        return Run(len(sources), 1.0 / threads, 1.0, 1.0, outputs)


def texts_of(count: int) -> list[Text]:
    return [Text([5] * (number + 1), number + 2) for number in range(count)]


def test_the_peer_may_be_absent_and_the_better_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.0)
    said: list[str] = []
    found = serving.measure(Scripted(), FP32, texts_of(8), [1, 2], Effort(requests=4, trials=1), said.append)  # type: ignore[arg-type]
    assert [(one["policy"], one["threads"]) for one in found] == [("slots", 2), ("window", 2), ("threads", 2)]
    assert said[0] == "not measured: ctranslate2 fp32: no Python"
    assert all(one["agreement"]["equal"] == 1 for one in found)


def test_other_work_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.0)
    with pytest.raises(BenchError, match="one call a thread: its texts have 2 tokens, 1 were asked for"):
        serving.measure(Scripted(threads=1), FP32, texts_of(8), [1], Effort(backlog=2), print)  # type: ignore[arg-type]


def test_a_pre_norm_model_says_the_same_in_ctranslate2(tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    from comparison.converters import write_ctranslate2

    model = lengths.build("tiny")
    save_model(model, tmp_path / "model")
    write_ctranslate2(tmp_path / "model", tmp_path / "ctranslate2", None)
    translator = ctranslate2.Translator(str(tmp_path / "ctranslate2"), intra_threads=1)
    for text in lengths.corpus(5, 1000):
        found = translator.translate_batch([[str(token) for token in text.source]], beam_size=1)
        assert len(found[0].hypotheses[0]) == text.length - 1


@pytest.fixture(scope="module")
def work(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bundles for a quick run; int8 is fp32 here."""
    work = tmp_path_factory.mktemp("work")
    folder = work / f"tiny{lengths.SUFFIX}"
    save_model(lengths.build("tiny"), folder / "weights")
    export_bundle(str(folder / "weights"), folder / "bundle-fp32", ExportConfig(forms=("contrib",)), verify=False)
    (folder / "bundle-int8-throughput").symlink_to(folder / "bundle-fp32")
    (work / "dates").mkdir()
    (work / "dates" / "weights").symlink_to(ROOT / "models" / "dates")
    (work / "dates" / "bundle-fp32").symlink_to(dates_bundle)
    return work


def test_a_quick_run_writes_result_and_table(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.0)
    output = tmp_path / "results" / "found.json"
    words = ["--output", str(output), "--model", "tiny", "--quick", "--work", str(work), "--python", "/nowhere/python"]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert {name: [one["policy"] for one in standings] for name, standings in found["loads"].items()} == {
        "log-normal": ["slots", "window", "threads", "slots"],
        "equal": ["slots", "window"],
    }
    for standing in (one for standings in found["loads"].values() for one in standings):
        assert standing["agreement"]["equal"] == 1
        assert standing["requests_per_second"] > 0
        assert len(standing["trials"]) == 2
    costs = found["costs"]["dates"]
    assert len(costs["idle"]["engine_s"]) == len(costs["idle"]["generate_s"]) == 5
    assert min(map(len, costs["burst"].values())) > 0
    assert min(costs["host"]["host_s"]) > 0 < min(costs["host"]["session_s"])
    table = output.with_suffix(".md").read_text()
    assert table.strip() == done.stdout.strip()
    for ours, other in (*((FP32[0], one) for one in FP32[1:3]), EQUAL):
        assert f"{ours} over {other} |" in table
    assert f"{INT8[0]} |" in table
    assert "| dates: host work a step, 32 rows of four kinds |" in table
    assert f"not measured: {PEER} fp32" in done.stderr
