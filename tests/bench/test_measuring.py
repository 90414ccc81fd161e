"""Measurements of decoder calls, statistics and settings."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from tests.decode.scripted import EOS, ScriptedBatch, ScriptedSession, drawn
from tfexport.bench._loops import (
    STEPS_TOGETHER,
    Call,
    Samples,
    closed_loop,
    random_batches,
    text_batches,
    timed_call,
)
from tfexport.bench._report import cell_metrics, distribution, is_stable, time_split
from tfexport.bench.config import BenchConfig, Cell, Scenario, resolve
from tfexport.decode.offline import decode
from tfexport.errors import ConfigError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, GreedySteps, Ids


class Clock:
    """Time that passes only when something takes it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A decoder that takes `seconds` a call, half of them for the encoder, and gives four tokens a source."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.batches: list[int] = []

    def __call__(self, sources: Sequence[Sequence[int]]) -> Call:
        began, count = self.clock.now, len(sources)
        self.batches.append(count)
        self.clock.now += self.seconds
        step_s = array("d", [self.seconds / 8] * 4)
        return Call(
            began, began + self.seconds / 2, self.clock.now, count, count, 4 * count, self.seconds / 2, 0, step_s
        )


# ---- statistics


def test_p99_needs_a_thousand_samples() -> None:
    few, enough = distribution([[0.001] * 600, [0.002] * 399]), distribution([[0.001] * 600, [0.002] * 400])
    assert (few["p99"], few["note"]) == (None, "p99 needs 1,000 samples, there are 999")
    assert few["p95"] == 2
    assert enough["p99"] == 2
    none = distribution([[], []])
    assert (none["p50"], none["avg"], none["count"], none["note"]) == (None, None, 0, "no samples")


@pytest.mark.parametrize(
    ("windows", "stable"),
    [
        ([900, 5, 100, 101, 99], True),
        ([100, 91, 109], True),
        ([100, 100, 116], False),
        ([100, 100], False),
    ],
)
def test_a_run_is_stable_if_its_last_three_are_within_ten_percent(windows: list[float], stable: bool) -> None:
    assert is_stable(windows) is stable


def samples(*step_s: Sequence[float], windows: Sequence[float] = (10.0, 10.0, 10.0)) -> Samples:
    """Calls of one source whose time is 1 ms of encoder, the steps and 1 ms more."""
    found, began = Samples(windows=array("d", windows)), 0.0
    for steps in step_s:
        ended = began + sum(steps) + 0.002
        call = Call(began, began + 0.001 + steps[0], ended, 1, 7, len(steps), 0.001, 0.0, array("d", steps))
        found.add(call)
        began = ended
    found.elapsed_s = began
    return found


def test_metrics_equal_values_computed_by_hand() -> None:
    runs = [samples([0.002, 0.002, 0.002], [0.002]), samples([0.004, 0.004])]
    found = cell_metrics(runs)
    seconds = 0.008 + 0.004 + 0.010
    assert found["output_token_throughput"]["value"] == pytest.approx(6 / seconds)
    assert found["output_token_throughput"]["per_process"] == pytest.approx([4 / 0.012, 2 / 0.010])
    assert found["request_throughput"]["value"] == pytest.approx(3 / seconds)
    assert (found["input_sequence_length"]["value"], found["output_sequence_length"]["value"]) == (7, 2)
    assert found["time_to_first_token"]["p50"] == pytest.approx(3)
    # After the first token: two more steps and 1 ms; none, so no sample; one more step and 1 ms.
    assert found["inter_token_latency"]["count"] == 2
    assert found["inter_token_latency"]["avg"] == pytest.approx((2.5 + 5) / 2)
    split = time_split(runs)
    assert split["encode"] == pytest.approx(0.003 / seconds)
    assert split["step"] == pytest.approx(0.016 / seconds)
    assert sum(split.values()) == pytest.approx(1)


# ---- scenarios


def test_a_closed_loop_calls_again_after_the_last_call_returns() -> None:
    clock = Clock()
    slow = Slow(clock, 0.25)
    found = closed_loop(slow, [[[5]], [[6], [7]]], 10.0, now=clock)
    assert len(found.latency_s) == 40
    assert (found.sequences, found.tokens) == (60, 240)
    assert slow.batches == [1, 2] * 20
    assert found.elapsed_s == pytest.approx(10)
    assert list(found.windows) == pytest.approx([24] * 10)
    assert list(found.latency_s) == pytest.approx([0.25] * 40)
    found = closed_loop(Slow(clock, 7), [[[5]]], 1.0, now=clock)
    assert (len(found.latency_s), len(found.windows)) == (3, 3)  # at least three windows, however slow the calls are


# ---- one call


@pytest.mark.parametrize(("count", "num_beams"), [(1, 1), (3, 1), (1, 3), (3, 3)])
def test_timing_does_not_change_a_call(count: int, num_beams: int) -> None:
    session = ScriptedSession(20, drawn(20, eos_bias=1.0))
    sources = [[7, 8, 9], [5], [11, 12]][:count]
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=8)
    call = timed_call(session, config, sources)
    steps, session.steps = session.steps, []
    expected = decode(session, sources, config)
    assert session.steps == steps
    assert call.tokens == sum(len(best[0].token_ids) for best in expected)
    assert (call.sequences, call.source_tokens, len(call.step_s)) == (count, sum(map(len, sources)), len(steps))
    assert call.began < call.began + call.encode_s < call.first_token <= call.ended
    assert call.encode_s + sum(call.step_s) + call.reorder_s < call.ended - call.began
    assert call.reorder_s > 0 or len(sources) == 1  # a text that is done leaves the others


class MultiStepSession(ScriptedSession):
    """One whose batches take several steps in one call; `taken` has the number of steps of each."""

    def __init__(self) -> None:
        super().__init__(20, drawn(20, eos_bias=-5.0), max_target_length=64)
        self.taken: list[int] = []

    def batch(self, width: int = 1) -> MultiStepBatch:
        return MultiStepBatch(self, width)


class MultiStepBatch(ScriptedBatch):
    session: MultiStepSession

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        found = [self.step(target_ids, steps.num_candidates)]
        while len(found) < steps.most and steps.stop_ids.isdisjoint(found[-1].token_ids[:, 0].tolist()):
            found.append(self.step(found[-1].token_ids[:, 0], steps.num_candidates))
        self.session.taken.append(len(found))
        columns = zip(*((each.token_ids, each.logits, each.log_normalizer) for each in found), strict=True)
        return Candidates(*map(np.stack, columns))


@pytest.mark.parametrize("count", [1, 3])
def test_steps_of_one_run_are_timed_together(count: int) -> None:
    sources, config = [[7, 8, 9], [5], [11, 12]][:count], DecodeConfig(max_new_tokens=60)
    timed_one, free = MultiStepSession(), MultiStepSession()
    call = timed_call(timed_one, config, sources)
    found = decode(free, sources, config)
    assert call.tokens == sum(len(best[0].token_ids) for best in found)
    assert timed_one.steps == free.steps
    assert len(call.step_s) == len(free.steps)
    assert max(timed_one.taken) == STEPS_TOGETHER < max(free.taken)
    assert call.encode_s + sum(call.step_s) + call.reorder_s < call.ended - call.began
    assert call.began < call.first_token < call.ended - sum(call.step_s[1:])  # the first step is taken alone


def test_a_target_length_is_reached_exactly() -> None:
    session = ScriptedSession(20, drawn(20, eos_bias=50.0))
    config = BenchConfig(target_length=(6,)).decoding(Cell(2, 4, 6))
    call = timed_call(session, config, [[7, 8], [9]])
    assert (call.tokens, len(call.step_s)) == (12, 6)


# ---- sources


def test_random_sources_are_ordinary_tokens_and_repeat() -> None:
    spec = ScriptedSession(20, drawn(20)).spec
    batches = random_batches(spec, Cell(3, 5, 4), 1)
    assert np.array(batches).shape == (64, 3, 5)
    assert batches == random_batches(spec, Cell(3, 5, 4), 1)
    assert batches != random_batches(spec, Cell(3, 5, 4), 2)
    tokens = spec.tokens
    assert not {tokens.pad, tokens.start, EOS} & set(np.ravel(batches).tolist())
    assert len(random_batches(spec, Cell(4096, 256, 4), 1)) == 1


def test_texts_are_batched_by_length_without_loss() -> None:
    sources = [[5] * length for length in (3, 1, 2, 9, 4, 8, 7)]
    batches = text_batches(sources, 3, 0)
    assert sorted(len(source) for batch in batches for source in batch) == [1, 2, 3, 4, 7, 8, 9]
    assert sorted(tuple(map(len, batch)) for batch in batches) == [(1,), (4, 3, 2), (9, 8, 7)]


# ---- configuration


SPEC = ScriptedSession(20, drawn(20)).spec  # takes 16 tokens on both sides


@pytest.mark.parametrize(
    ("scenario", "batch_size", "duration"),
    [("single", (1,), 5.0), ("offline", (32,), 5.0), ("server", (32,), 8.0), ("sweep", (1, 2, 4, 8, 16, 32), 1.0)],
)
def test_missing_settings_are_filled_in(scenario: Scenario, batch_size: tuple[int, ...], duration: float) -> None:
    config = BenchConfig(scenario=scenario, rate=5.0 if scenario == "server" else None)
    resolved = resolve(config, SPEC, has_texts=False)
    assert (resolved.batch_size, resolved.duration) == (batch_size, duration)
    assert (resolved.source_length, resolved.target_length) == ((16,), (16,))
    assert len(resolved.cells) == len(batch_size)
    with_texts = resolve(config, SPEC, has_texts=True)
    assert {(cell.source_length, cell.target_length) for cell in with_texts.cells} == {(None, None)}
    long = dataclasses.replace(SPEC, max_source_length=512, max_target_length=512)
    assert resolve(config, long, has_texts=False).cells[0] == Cell(batch_size[0], 32, 64)


def test_a_sweep_has_every_combination() -> None:
    config = BenchConfig(scenario="sweep", batch_size=(1, 4), source_length=(3, 5), target_length=(2,))
    assert config.cells == [Cell(1, 3, 2), Cell(4, 3, 2), Cell(1, 5, 2), Cell(4, 5, 2)]


def test_a_rate_needs_the_server_scenario() -> None:
    with pytest.raises(ConfigError, match="rate is only valid in the server scenario"):
        BenchConfig(rate=3.0)


@pytest.mark.parametrize(
    ("config", "has_texts", "message"),
    [
        (BenchConfig(source_length=(17,), target_length=(18,)), False, "source_length is 17.*target_length is 18"),
        (BenchConfig(source_length=(5,)), True, "source_length is set"),
        (BenchConfig(scenario="sweep", batch_size=tuple(range(1, 102))), False, "101 combinations"),
        (BenchConfig(scenario="server", rate=1e5, duration=600.0), False, "60000000 requests"),
    ],
)
def test_settings_beyond_the_bundle_are_refused(config: BenchConfig, has_texts: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, SPEC, has_texts=has_texts)
