"""The timing harness: what counts, in which order turns are taken, and what ratios are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from timing import Effort, Ratio, Stopwatch, geometric_mean, interleaved, median, ratio, repeat


def scripted(times: Sequence[float]) -> Stopwatch:
    """Return a stopwatch that shows what it is told, and fails when it is asked more often."""
    left = iter(times)
    return lambda: next(left)


def test_warm_ups_do_not_count_and_runs_go_on_until_both_are_reached() -> None:
    effort = Effort(warm_up=2, least_runs=3, least_s=0.2)
    assert repeat(scripted([9, 9, 0.3, 0.2, 0.1]), effort) == [0.3, 0.2, 0.1]
    assert repeat(scripted([9, 9, 0.0625, 0.0625, 0.0625, 0.0625]), effort) == [0.0625] * 4
    assert repeat(scripted([0.5]), Effort(warm_up=0)) == [0.5]
    assert repeat(scripted([0, 1, 2, 3]), Effort(least_runs=2, least_s=100, most_runs=3)) == [1, 2, 3]


def test_a_long_warm_up_is_the_only_run() -> None:
    effort = Effort(warm_up=2, least_runs=3, long_s=0.5)
    assert repeat(scripted([0.5]), effort) == [0.5]
    assert repeat(scripted([0.4, 0.6]), effort) == [0.6]
    assert repeat(scripted([0.4, 0.4, 9, 9, 9]), effort) == [9, 9, 9]


def test_every_other_round_goes_backwards() -> None:
    assert list(interleaved("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_ratio_is_the_median_of_rounds() -> None:
    theirs, ours = [[2, 3, 4], [2.0], [2.0], [99.0]], [[1, 1, 4], [2.0], [1.0]]
    assert ratio(theirs, ours) == Ratio(2.0, 1.0, 3.0)
    assert median(theirs[:3]) == 2.0
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
