"""Unknown tokens of served answers are replaced by words of the source."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.meetings import SAID, TEXTS
from tests.serve.served import ENGINE_THREAD, Outcomes, is_idle, serving, text_of, until
from tests.serve.test_mixed import same
from tfexport.errors import BackendError, Cancelled, DeadlineExceeded, QueueFull
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.runtime.ort.backend import OrtSession
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 3, "seed": 1},
    {"stop_strings": "and Be"},
    {"prefix": "Monday"},
)
COPY = {"replace_unknowns": True}


@pytest.fixture(scope="module")
def aligning(meetings: Path) -> Model:
    return load(meetings, threads=1)


class Blocked:
    """Holds alignments up until it is told to let them go, or to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        align = OrtSession.align

        def blocked(session: OrtSession, *arguments: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            assert self.go_on.wait(60)
            if self.error:
                raise self.error
            return align(session, *arguments)

        monkeypatch.setattr(OrtSession, "align", blocked)

    def have_begun(self) -> bool:
        return bool(self.threads)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Blocked:
    return Blocked(monkeypatch)


async def test_answers_are_those_of_generate(meetings: Path, aligning: Model) -> None:
    def alone(text: str, prefix: str = "", **options: Any) -> list[Any]:
        return aligning.generate([text], prefixes=[prefix], **options)

    asked = [(text, kind | copy) for text in TEXTS for kind in KINDS for copy in ({}, COPY)]
    observer = Outcomes()
    async with serving(meetings, observer) as engine:
        found = await asyncio.gather(*(engine.generate(text, **kind) for text, kind in asked))
        for (text, kind), mine in zip(asked, found, strict=True):
            assert same(mine, alone(text, **kind))
        copied = [text_of(await engine.generate(text, **COPY)) for text in TEXTS]
        assert copied == [[output] for output in SAID]
        assert text_of(await engine.generate(TEXTS[0])) == ["Friday : and Ben"]
        (ids,) = await engine.generate_ids([3, 13, 5, 14, 12, 2], **COPY)
        assert 3 in ids.token_ids  # as in the library, which leaves ids as they are
    assert set(observer.counts) == {"ok"}


async def test_running_rows_go_on_meanwhile(meetings: Path, blocked: Blocked) -> None:
    async with serving(meetings) as engine:
        aligned = engine.submit(TEXTS[0], **COPY)
        await until(blocked.have_begun)
        for _ in range(3):
            assert text_of(await engine.generate(TEXTS[0])) == ["Friday : and Ben"]
        assert not aligned.is_done
        assert (engine.num_running, engine.num_slots_used) == (1, 0)
        assert ENGINE_THREAD not in blocked.threads
        blocked.go_on.set()
        assert text_of(await aligned) == SAID[:1]


async def test_cancelled_and_late_requests_end_during_alignment(meetings: Path, blocked: Blocked) -> None:
    observer = Outcomes()
    async with serving(meetings, observer) as engine:
        late, gone, stays = (engine.submit(TEXTS[0], timeout_s=limit, **COPY) for limit in (0.3, None, None))
        await until(blocked.have_begun)
        gone.cancel()
        for generation, error in ((gone, Cancelled), (late, DeadlineExceeded)):
            with pytest.raises(error):
                await generation
        blocked.go_on.set()
        assert text_of(await stays) == SAID[:1]
        await until(lambda: is_idle(engine))
        assert len(blocked.threads) == 2  # for whoever has left nothing is computed
    assert observer.counts == {"cancelled": 1, "deadline": 1, "ok": 1}


@pytest.mark.parametrize(
    ("error", "message"), [(BackendError("align: NaN"), "^align: NaN"), (ValueError("x"), "Value")]
)
async def test_an_alignment_that_fails_ends_its_own_request(
    meetings: Path, blocked: Blocked, error: Exception, message: str
) -> None:
    observer = Outcomes()
    async with serving(meetings, observer) as engine:
        blocked.error = error
        blocked.go_on.set()
        failing, other = engine.submit(TEXTS[0], **COPY), engine.submit(TEXTS[1])
        with pytest.raises(BackendError, match=message):
            await failing
        assert await other
        blocked.error = None
        assert text_of(await engine.generate(TEXTS[0], **COPY)) == SAID[:1]
        assert engine.is_ready
    assert observer.counts == {"error": 1, "ok": 2}


@pytest.mark.parametrize("stop", [Engine.replace, Engine.drain])
async def test_accepted_requests_are_aligned_before_the_model_closes(
    meetings: Path, blocked: Blocked, stop: Callable[[Engine], Awaitable[object]]
) -> None:
    async with serving(meetings) as engine:
        asked = [engine.submit(text, **COPY) for text in TEXTS]
        await until(blocked.have_begun)
        first = engine.model
        stopping = asyncio.ensure_future(stop(engine))
        await until(lambda: engine.state == "draining" or engine.model is not first)
        done, _ = await asyncio.wait([stopping], timeout=0.1)
        assert not done
        blocked.go_on.set()
        assert [text_of(await one) for one in asked] == [[output] for output in SAID]
        await stopping


async def test_a_drain_does_not_wait_for_an_alignment_that_hangs(meetings: Path, blocked: Blocked) -> None:
    observer = Outcomes()
    async with serving(meetings, observer) as engine:
        asked, pair = engine.submit(TEXTS[0], **COPY), asyncio.ensure_future(engine.align(TEXTS[0], SAID[0]))
        await until(blocked.have_begun)
        assert not await engine.drain(0.1)
        found = await asyncio.gather(asked, pair, return_exceptions=True)
        assert [str(one) for one in found] == ["the engine is stopping; send the request to another one"] * 2
        blocked.go_on.set()
    assert observer.counts == {"draining": 2}


async def test_the_alignment_queue_is_limited(meetings: Path, blocked: Blocked) -> None:
    async with serving(meetings, max_waiting=2) as engine:
        asked = []
        with pytest.raises(QueueFull, match="2 alignments are waiting, which is the limit; try again later"):
            while True:
                asked.append(engine.submit(TEXTS[0], **COPY))
                await until(lambda: engine.num_waiting == 0)
        assert await engine.generate(TEXTS[0])
        blocked.go_on.set()
        await asyncio.gather(*asked)
