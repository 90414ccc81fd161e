"""Sources that join and leave a batch in any order get the outputs that each gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.conftest import Model
from tests.tensorrt.session.trt_double import DoubleSession
from tfexport.contract import Variant
from tfexport.errors import InputError
from tfexport.runtime.session import Candidates, close_up
from tfexport.tensorrt.session._batch import TrtBatch


@dataclass
class Request:
    source: list[int]
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)  # prompt included


def requests(dates: Model, rng: np.random.Generator, count: int) -> list[Request]:
    made = []
    for _ in range(count):
        source = rng.integers(3, dates.spec.source_vocab, rng.choice([1, 2, 5, 9, 14, 30])).tolist()
        prompt = [dates.start, *rng.integers(3, dates.spec.vocab, rng.choice([0, 0, 1, 4])).tolist()]
        made.append(Request(source, prompt, int(rng.integers(1, dates.spec.max_target_length - len(prompt)))))
    return made


def poison(batch: TrtBatch, spec: Any, *names: str, slots: set[int] | None = None) -> None:
    """Fill the caches of the given slots with NaN, by default those of all free slots."""
    if batch._replica is None:
        return
    device, layout = batch._replica._device, batch._layout
    cuda: Any = device.cuda
    cuda.synchronize(device.stream)
    names = names or (*spec.cache.names("past"), *spec.cross.names("cross"))
    for name in names:
        size = device.memory._sizes[name]
        places = layout.capacity if name.startswith("past") else layout.source_len
        slot_bytes = spec.heads * places * (spec.head_dim if "_key" in name else spec.value_dim) * 4
        slot_bytes *= layout.width if name.startswith("past") else 1
        free = slots if slots is not None else set(range(size // slot_bytes)) - set(layout.slots.tolist())
        for slot in free:
            cuda.view(device.memory[name] + slot * slot_bytes, slot_bytes, on_device=True)[:] = 0xFF


def serve(
    session: DoubleSession, dates: Model, waiting: list[Request], rng: np.random.Generator, *, slots: int
) -> Iterator[TrtBatch]:
    """Decode greedily while requests join and leave at random; yields before every step."""
    batch, live = session.batch(), []
    while waiting or live:
        room = slots - len(live)
        if waiting and room and (not live or rng.random() < 0.5):
            new = [waiting.pop() for _ in range(min(int(rng.integers(1, room + 1)), len(waiting)))]
            for request in new:
                request.tokens = list(request.prompt)
            dates.add(batch, [request.source for request in new], [request.prompt for request in new])
            live += new
        yield batch
        assert batch.lengths.tolist() == [len(request.tokens) - 1 for request in live]
        found = batch.step(np.array([request.tokens[-1] for request in live]), int(rng.choice([1, 1, 1, 4])))
        for request, token in zip(live, found.token_ids[:, 0].tolist(), strict=True):
            request.tokens.append(token)
        done = {
            place
            for place, request in enumerate(live)
            if request.tokens[-1] == dates.spec.tokens.eos or len(request.tokens) == len(request.prompt) + request.limit
        }
        given_up = {place for place in range(len(live)) if place not in done and rng.random() < 0.02}
        waiting += [live[place] for place in given_up]
        leaving = rng.permutation(np.array([*done, *given_up], np.int64))
        batch.remove(leaving)
        live = [live[place] for place in close_up(len(live), leaving)]


@pytest.mark.parametrize("prompt", [False, True], ids=["late", "at once"])
@pytest.mark.parametrize("seed", range(3))
def test_sources_join_and_leave_in_any_order(dates: Model, seed: int, prompt: bool) -> None:
    rng = np.random.default_rng(seed)
    cuda, asked = CudaDouble(prompt=prompt), requests(dates, rng, 60)
    capacities = ((), (3, 9), (2, 5, 11))[seed]
    session = dates.trt(cuda=cuda, max_batch=int(rng.integers(3, 12)), capacities=capacities)
    steps: Counter[str] = Counter()
    for batch in serve(session, dates, list(asked), rng, slots=session.limits.rows.most or 1):
        steps["mixed" if len(set(batch.lengths.tolist())) > 1 else "equal"] += 1
        if rng.random() < 0.5:
            poison(batch, dates.spec)
    assert steps["mixed"] > 3 * steps["equal"]
    for request in asked:
        assert request.tokens == dates.greedy(request.source, request.prompt, request.limit)


def assert_as_alone(dates: Model, found: Any, sources: list[list[int]], histories: list[list[int]]) -> None:
    for row, (source, history) in enumerate(zip(sources, histories, strict=True)):
        logits = dates.logits(tuple(source), tuple(history))
        np.testing.assert_allclose(found.logits[row], logits[found.token_ids[row]], atol=1e-4)
        np.testing.assert_allclose(found.logits[row], -np.sort(-logits)[: found.logits.shape[1]], atol=1e-4)
        np.testing.assert_allclose(found.log_normalizer[row], np.log(np.exp(logits).sum()), atol=1e-4)


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("variant", ["static", "concat"])
@pytest.mark.parametrize("seed", range(2))
def test_beams_branch_while_sources_join_and_leave(dates: Model, variant: Variant, width: int, seed: int) -> None:
    """Rows continue with random tokens and change places within their source."""
    rng = np.random.default_rng(seed)
    session = dates.trt(variant, max_batch=5 * width, capacities=(3, 8) if variant == "static" and seed else ())
    batch, sources, histories = session.batch(width), [], []  # type: ignore[var-annotated]
    for number in range(40):
        room = 5 - len(sources)
        if (not sources) if variant == "concat" else (room and (not sources or rng.random() < 0.4)):
            length = 1 + number % 3
            new = [rng.integers(3, dates.spec.source_vocab, rng.integers(1, 12)).tolist() for _ in range(room)]
            new = new[: int(rng.integers(1, room + 1))]
            prompts = [
                [dates.start, *[5] * (length if variant == "concat" else int(rng.integers(0, 3)))]
                for _ in range(len(new))
            ]
            dates.add(batch, new, prompts)
            sources += new
            histories += [list(prompt) for prompt in prompts for _ in range(width)]
        found = batch.step(np.array([history[-1] for history in histories]), int(rng.choice([1, 3])))
        assert_as_alone(dates, found, [source for source in sources for _ in range(width)], histories)
        rows = np.concatenate([s * width + rng.integers(0, width, width) for s in range(len(sources))])
        batch.reorder(rows)
        histories = [[*histories[row], int(rng.integers(3, dates.spec.vocab))] for row in rows]
        full = [s for s in range(len(sources)) if len(histories[s * width]) >= dates.spec.max_target_length]
        leaving = np.array(sorted({*full, *np.flatnonzero(rng.random(len(sources)) < 0.1).tolist()}), np.int64)
        kept = close_up(len(sources), leaving)
        batch.remove(leaving)
        sources = [sources[place] for place in kept]
        histories = [histories[place * width + beam] for place in kept for beam in range(width)]


def test_a_row_of_nan_affects_neither_neighbors_nor_the_next_in_its_slot(dates: Model) -> None:
    session = dates.trt(max_batch=4)
    batch, _ = dates.started(session, 3)
    histories = [[dates.start] for _ in range(3)]
    sources = list(dates.sources[:3])

    def step(bad: int | None = None) -> np.ndarray:
        """Step and compare all rows but one; return the logits of that one."""
        found = batch.step(np.array([history[-1] for history in histories]), 1)
        kept = [row for row in range(len(sources)) if row != bad]
        part = Candidates(found.token_ids[kept], found.logits[kept], found.log_normalizer[kept])
        assert_as_alone(dates, part, [sources[row] for row in kept], [histories[row] for row in kept])
        for row, history in enumerate(histories):
            history.append(5 if row == bad else int(found.token_ids[row, 0]))
        return found.logits[bad if bad is not None else 0]

    step()
    for name in ("cross_value.0", "past_value.1"):
        poison(batch, dates.spec, name, slots={int(batch._layout.slots[1])})
        step(bad=1)  # a step that was started early may have read good numbers
        assert np.isnan(step(bad=1)).all()
    batch.remove(np.array([1]))
    sources, histories = ([each[0], each[2]] for each in (sources, histories))  # type: ignore[assignment]
    step()
    for newcomer in dates.sources[5:7]:
        dates.add(batch, [newcomer])
        sources.append(newcomer)
        histories.append([dates.start])
        step()
        step()
    assert batch._layout.slots.size == 4, "every slot is in use, that of the NaN too"


def test_slots_are_compacted_when_a_quarter_would_do(dates: Model) -> None:
    cuda = CudaDouble()
    batch, _ = dates.started(dates.trt(cuda=cuda), 8)
    histories = [[dates.start] for _ in range(8)]
    sources = dates.sources[:8]
    for leaving, size, moved in (([], 8, 0), ([0, 3, 5], 8, 0), ([0, 1], 8, 0), ([0], 2, 2), ([], 2, 0), ([1], 2, 0)):
        kept = close_up(len(sources), np.array(leaving, np.int64))
        batch.remove(np.array(leaving, np.int64))
        sources, histories = [sources[place] for place in kept], [histories[place] for place in kept]
        slots, before = batch._layout.slots, cuda.counts["launch"]
        found = batch.step(np.array([history[-1] for history in histories]), 1)
        assert_as_alone(dates, found, sources, histories)
        assert (batch._layout.size, np.count_nonzero(batch._layout.slots != slots)) == (size, moved)
        assert moved or cuda.counts["launch"] - before == 1, "the step was under way, and the next one is"
        for history, token in zip(histories, found.token_ids[:, 0].tolist(), strict=True):
            history.append(token)


def test_no_source_joins_in_the_concat_variant(dates: Model) -> None:
    session = dates.trt("concat")
    batch = session.batch()
    assert (batch.can_join, dates.trt().batch().can_join) == (False, True)
    with pytest.raises(InputError, match=r"while their prompts are of unequal length; .*--variant static --force"):
        dates.add(batch, dates.sources[:2], [[dates.start], [dates.start, 5]])
    dates.add(batch, dates.sources[:2])
    with pytest.raises(InputError, match=r"while others are being decoded; .*--variant static --force"):
        dates.add(batch, dates.sources[:1])
    batch.step(np.full(2, dates.start), 1)
    batch.remove(np.array([0, 1]))
    dates.add(batch, dates.sources[:1], [[dates.start, 5]])
    found = batch.step(np.array([5]), 3)
    assert_as_alone(dates, found, dates.sources[:1], [[dates.start, 5]])
