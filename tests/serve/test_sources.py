"""An engine reads audio on another thread; its limits cover requests that are being read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Once
from tests.features.signals import wav
from tests.serve.served import Outcomes, is_idle, serving, text_of, until
from tests.test_inputs import AUDIO, SPEECH, samples, write_bundle
from tfexport.errors import BackendError, Cancelled, ConfigError, DeadlineExceeded, Draining, InputError, QueueFull
from tfexport.features.processor import AudioProcessor
from tfexport.model.model import Model
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
SIGNAL = samples()
FILE = wav(SIGNAL)


class Slow:
    """Lets the processor wait; `threads` has those that computed features."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.threads = threading.Event(), set[threading.Thread]()
        extract = AudioProcessor.extract

        def slow(processor: AudioProcessor, source: Any, *, rate: int | None = None) -> Any:
            if source != b"":  # of the warm-up
                self.threads.add(threading.current_thread())
                assert self.go_on.wait(30)
            return extract(processor, source, rate=rate)

        monkeypatch.setattr(AudioProcessor, "extract", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.go_on.set()


async def test_every_kind_of_source_gets_the_answers_of_the_model(speech_bundle: Path, speech: Model) -> None:
    ((features,), options) = speech.read([FILE]), {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    expected = text_of(speech.generate([FILE], **options))
    async with serving(speech_bundle) as engine:
        for source in (FILE, features, memoryview(features), (SIGNAL, 16_000)):
            assert text_of(await engine.generate(source, **options)) == expected
        (found,) = await engine.generate_ids(features, max_new_tokens=6)
        (greedy,) = speech.generate([FILE], max_new_tokens=6, prefixes=["w9"])
        assert found.token_ids == speech.generate_ids([features], max_new_tokens=6)[0][0].token_ids
        pieces = [piece async for piece in engine.stream(FILE, max_new_tokens=6, prefix="w9")]
        assert ("".join(pieces), len(pieces) > 3) == (greedy.text, True)


async def test_bad_sources_are_refused_and_counted(speech_bundle: Path, tmp_path: Path) -> None:
    (path := tmp_path / "a.wav").write_bytes(FILE)
    bad: list[Any] = [b"", b"fLaC", FILE[:99], str(path), path, [5, 6], None, np.zeros((9, 3)), (str(path), 16_000)]
    bad.append(np.zeros((500, 20), np.float32))  # longer than the model reads
    observer = Outcomes()
    async with serving(speech_bundle, observer) as engine:
        for source in bad:
            with pytest.raises(InputError):
                await engine.generate(source)
            with pytest.raises(InputError):
                await anext(aiter(engine.stream(source, prefix="w5")))
        with pytest.raises(ConfigError):
            engine.submit(FILE, num_beams=0)
        await until(lambda: is_idle(engine))
    assert observer.counts == {"invalid": 2 * len(bad) + 1}


async def test_the_event_loop_runs_while_a_source_is_read(speech_bundle: Path, speech: Model, slow: Slow) -> None:
    async with serving(speech_bundle) as engine:
        generation = engine.submit(FILE)
        await until(lambda: bool(slow.threads))
        assert (engine.num_waiting, engine.num_running) == (1, 0)
        assert threading.current_thread() not in slow.threads
        slow.go_on.set()
        assert text_of(await generation) == text_of(speech.generate([FILE]))


async def test_unread_requests_wait_in_the_queue(speech_bundle: Path, slow: Slow) -> None:
    observer = Outcomes()
    async with serving(speech_bundle, observer, max_waiting=2) as engine:
        first, late = engine.submit(FILE), engine.submit(FILE, timeout_s=0.05)
        with pytest.raises(QueueFull):
            engine.submit(FILE)
        with pytest.raises(DeadlineExceeded):
            await late
        assert engine.num_waiting == 1
        first.cancel()
        with pytest.raises(Cancelled):
            await first
        assert is_idle(engine)
        last = engine.submit(FILE, max_new_tokens=3)
        slow.go_on.set()
        assert len((await last)[0].token_ids) == 3
    assert observer.counts == {"ok": 1, "queue_full": 1, "deadline": 1, "cancelled": 1}


async def test_drain_and_replace_finish_what_is_being_read(speech_bundle: Path, slow: Slow) -> None:
    async with serving(speech_bundle) as engine:
        accepted = engine.submit(FILE)
        replaced = asyncio.create_task(engine.replace())
        await until(lambda: len(engine._all_served) == 2)
        also = engine.submit(FILE)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            engine.submit(FILE)
        slow.go_on.set()
        assert text_of(await accepted) == text_of(await also)
        assert await drained
        await replaced
        assert is_idle(engine)


async def test_drain_ends_what_is_not_read_in_time(speech_bundle: Path, slow: Slow) -> None:
    async with serving(speech_bundle) as engine:
        generation = engine.submit(FILE)
        await until(lambda: bool(slow.threads))
        assert not await engine.drain(0.1)
        with pytest.raises(Draining):
            await generation


async def test_a_processor_failure_ends_only_its_request(
    speech_bundle: Path, speech: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = AudioProcessor.extract

    def failing(processor: AudioProcessor, source: Any, *, rate: int | None = None) -> Any:
        if source == b"bug":
            raise RuntimeError("a bug")
        return extract(processor, source, rate=rate)

    monkeypatch.setattr(AudioProcessor, "extract", failing)
    async with serving(speech_bundle) as engine:
        broken, whole = engine.submit(b"bug"), engine.submit(FILE)
        with pytest.raises(BackendError):
            await broken
        assert text_of(await whole) == text_of(speech.generate([FILE]))


async def test_texts_and_files_are_for_their_models(dates_bundle: Path) -> None:
    async with serving(dates_bundle) as engine:
        assert isinstance(engine, Engine)
        for source in (FILE, memoryview(FILE), np.zeros((9, 20), np.float32)):
            with pytest.raises(InputError):
                engine.submit(source)


async def test_no_text_is_opened_as_a_file(speech_bundle: Path, once: Once, tmp_path: Path) -> None:
    (path := tmp_path / "a.wav").write_bytes(FILE)
    async with serving(speech_bundle) as engine:
        with pytest.raises(InputError):
            await engine.align(str(path), "w5")
    config = replace(SPEECH, decoder=None, target_vocab=None, max_target_length=None)
    encoder = once("speech-encoder", lambda path: write_bundle(path, config, AUDIO))
    async with serving(encoder) as engine:
        vectors, num_positions = await engine.embed([FILE, wav(SIGNAL[:4000])])
        assert num_positions == 24 + 12
        np.testing.assert_allclose(vectors, engine.model.embed([path, wav(SIGNAL[:4000])]), rtol=1e-5, atol=1e-6)
        for source in (str(path), np.zeros((500, 20), np.float32)):
            with pytest.raises(InputError):
                await engine.embed([source])
