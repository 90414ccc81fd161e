"""Invalid arguments, and failing models, tokenizers, observers and event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.running import eventually
from tests.serve.served import ENGINE_THREAD, Hanging, Outcomes, engine_threads, is_idle, serving, text_of, until
from tfexport.errors import BackendError, ConfigError, Draining, EngineFailed, InputError, TfexportError
from tfexport.model.model import Model
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.session import Candidates, Ids
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer
from tfexport.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


async def test_rows_with_nan_fail_without_the_others(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 7  # whose rows read it compute nothing
    step, multi = ContribBatch.step, ContribBatch.multi_step
    expected = {text: text_of(model.generate([text])) for text in texts}

    def broken(found: Candidates, target_ids: Ids) -> Candidates:
        found.logits[..., target_ids == poison, :] = np.nan
        return found

    monkeypatch.setattr(ContribBatch, "step", lambda batch, ids, count: broken(step(batch, ids, count), ids))
    monkeypatch.setattr(ContribBatch, "multi_step", lambda batch, ids, steps: broken(multi(batch, ids, steps), ids))
    async with serving(dates_bundle, slots=64) as engine:
        waiting = [(text, asyncio.ensure_future(engine.generate(text))) for text in texts]
        prefix = [6, poison]
        kinds: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3})
        failing = [engine.submit_ids([5, 6], prefix=prefix, **options) for options in (*kinds, {"stream": True})]
        for generation in failing:
            with pytest.raises(BackendError, match="NaN or infinite"):
                await generation
        handed_out = []
        with pytest.raises(BackendError, match="NaN"):
            async for token in failing[-1]:
                handed_out.append(token)  # noqa: PERF401
        assert handed_out == prefix
        ends = [poison in model.tokenizer.encode_target(one) for text in texts for one in expected[text]]  # type: ignore[union-attr]
        assert not all(ends)
        for (text, task), has_poison in zip(waiting, ends, strict=True):
            if not has_poison:
                assert text_of(await task) == expected[text]
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
        await until(lambda: is_idle(engine))
        assert engine.is_ready


@pytest.mark.parametrize("name", ["add", "step", "remove", "reorder"])
@pytest.mark.parametrize("error", [BackendError("out of memory"), MemoryError("out of memory")])
async def test_a_backend_failure_reaches_every_request(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    observer = Outcomes()
    async with serving(dates_bundle, observer, slots=4) as engine:
        await engine.generate(texts[0], num_beams=2)
        monkeypatch.setattr(ContribBatch, name, broken)

        async def ask(**options: Any) -> list[Any]:  # the thread may have failed before the next one is submitted
            return await engine.submit(texts[0], **options)

        asked = [ask(num_beams=2, max_new_tokens=3 + number) for number in range(6)]
        found = await asyncio.gather(*asked, ask(timeout_s=1e-7), return_exceptions=True)
        assert all(isinstance(one, TfexportError | list) for one in found)
        assert any(isinstance(one, EngineFailed) and "out of memory" in str(one) for one in found)
        assert engine.state == "failed"
        await until(lambda: is_idle(engine))
        with pytest.raises(EngineFailed):
            engine.submit(texts[0])
    assert sum(observer.counts.values()) == 9


async def test_requests_between_queue_and_batch_receive_a_failure(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("out of memory")

    hanging = Hanging(monkeypatch)
    async with serving(dates_bundle) as engine:
        first = engine.submit(texts[3])
        await until(hanging.has_begun)
        monkeypatch.setattr("tfexport.serve._generation.alternatives", broken)
        options = {"return_alternatives": True, "num_return_sequences": 2}
        asked = [engine.submit(text, **options) for text in texts[:3]]  # type: ignore[arg-type]
        hanging.end()
        found = await asyncio.gather(*asked, first, return_exceptions=True)
        assert all(isinstance(one, EngineFailed) for one in found)


async def test_a_tokenizer_failure_ends_only_its_request(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, failing = Tokenizer.decode, model.generate([texts[0]])[0].token_ids
    expected = {text: text_of(model.generate([text])) for text in texts}

    def broken(tokenizer: Tokenizer, ids: Any) -> str:
        if tuple(ids)[:3] == failing[:3] and len(ids) > 3:
            raise ValueError("no such token")
        return decode(tokenizer, ids)

    good = [text for text in texts if model.generate([text])[0].token_ids[:3] != failing[:3]]
    assert len(good) > 4
    observer = Outcomes()
    async with serving(dates_bundle, observer) as engine:
        monkeypatch.setattr(Tokenizer, "decode", broken)
        broken_stream, whole = engine.submit(texts[0], stream=True), engine.submit(texts[0])
        others = [engine.submit(text, stream=number % 2 == 0) for number, text in enumerate(good)]
        for generation in (broken_stream, whole):
            with pytest.raises(BackendError, match="decoded to text: ValueError"):
                await generation
        for text, generation in zip(good, others, strict=True):
            assert text_of(await generation) == expected[text]
        with pytest.raises(BackendError, match="decoded to text"):
            _ = [piece async for piece in broken_stream]
        await until(lambda: is_idle(engine))
    assert observer.counts == {"error": 2, "ok": len(good)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": True},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_alternatives": True, "num_return_sequences": 2},
        {"prefix": "", "forced_bos_token_id": 20, "max_new_tokens": 1},
    ],
)
async def test_a_tokenizer_failure_at_stop_strings_ends_only_its_request(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert model.tokenizer
    decode, (nine,) = Tokenizer.decode, model.tokenizer.encode_target("9")
    assert nine == 20
    asked = [(text, {"stop_strings": "-0", "num_beams": 1 + 2 * (number % 2)}) for number, text in enumerate(texts)]
    expected = [text_of(model.generate([text], **kind)) for text, kind in asked]  # type: ignore[arg-type]

    def broken(tokenizer: Tokenizer, ids: Any) -> str:
        if ids[0] == nine and threading.current_thread().name == ENGINE_THREAD:
            raise ValueError("no such token")
        return decode(tokenizer, ids)

    observer = Outcomes()
    async with serving(dates_bundle, observer, slots=64) as engine:
        monkeypatch.setattr(Tokenizer, "decode", broken)
        others = [engine.submit(text, **kind) for text, kind in asked]  # type: ignore[arg-type]
        failing = engine.submit(texts[0], stop_strings="-0", **({"prefix": "9"} | options))
        with pytest.raises(BackendError, match="the tokens of the text cannot be decoded to find stop strings: Value"):
            await failing
        assert [text_of(await one) for one in others] == expected
        await until(lambda: is_idle(engine))
        assert engine.is_ready
    assert observer.counts == {"error": 1, "ok": len(asked)}


async def test_an_observer_failure_does_not_affect_requests(
    dates_bundle: Path, model: Model, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Observer):
        def ended(self, *_: object) -> None:
            raise ValueError

        joined = encoded = stepped = began = ended

    async with serving(dates_bundle, Raising()) as engine:
        found = await asyncio.gather(*(engine.generate(text) for text in texts))
        assert list(map(text_of, found)) == [text_of(model.generate([text])) for text in texts]
        with pytest.raises(InputError):
            engine.submit("")
    assert "the observer failed" in caplog.text


def test_a_closed_event_loop_receives_nothing(random_bundle: Path) -> None:
    async def start() -> tuple[Engine, list[Any]]:
        engine = await Engine(random_bundle, ServingConfig(slots=1), threads=1).start()
        return engine, [engine.submit_ids([5, 6]) for _ in range(50)]

    with asyncio.Runner() as runner:
        engine, asked = runner.run(start())
    assert asyncio.run(engine.drain(30))
    assert not engine_threads()
    assert not all(generation.is_done for generation in asked)


def test_an_unreferenced_engine_ends_its_thread(random_bundle: Path) -> None:
    async def start() -> None:
        engine = await Engine(random_bundle, threads=1).start()
        engine.submit_ids([5, 6])

    asyncio.run(start())
    eventually(lambda: not (gc.collect(), engine_threads())[1])  # the thread answers the request first


NONSENSE: tuple[tuple[str, dict[str, Any], type[TfexportError], str], ...] = (
    ("text", {"text": b"1 May"}, InputError, "bytes, expected a text"),
    ("text", {"text": ""}, InputError, "^input: the text is empty"),
    ("text", {"prefix": 5}, InputError, "prefix is int, expected a text"),
    ("text", {"priority": float("nan")}, InputError, "priority is nan, expected seconds"),
    ("text", {"priority": 1e300}, InputError, r"priority is 1e\+300"),
    ("text", {"priority": "high"}, InputError, "priority is 'high'"),
    ("text", {"priority": True}, InputError, "priority is True"),
    ("text", {"timeout_s": 0}, InputError, "timeout_s is 0, expected"),
    ("text", {"timeout_s": float("nan")}, InputError, "timeout_s is nan"),
    ("text", {"timeout_s": 10**400}, InputError, "timeout_s is 1000"),
    ("text", {"timeout_s": "5"}, InputError, "timeout_s is '5'"),
    ("text", {"config": 5}, ConfigError, "config is 5, expected a DecodeConfig"),
    ("text", {"num_beams": 9}, InputError, "num_beams is 9, the limit is 8"),
    ("text", {"do_sample": True, "num_return_sequences": 40}, InputError, "needs 40 slots, the engine has 32"),
    ("text", {"num_beams": 2, "stream": True}, InputError, "num_beams is 2, but a stream"),
    ("text", {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
    ("text", {"nonsense": 1}, ConfigError, "nonsense"),
    ("text", {"max_new_tokens": 10**6}, InputError, "lower max_new_tokens"),
    ("text", {"replace_unknowns": True}, ConfigError, "replace_unknowns: this bundle was exported without alignment"),
    ("text", {"replace_unknowns": True, "stream": True}, InputError, "stream: replace_unknowns is true, but the"),
    ("ids", {"source": "567"}, InputError, "source is '567', expected a list"),
    ("text", {"stream": "no"}, InputError, "stream is .no., expected True or False"),
    ("ids", {"source": [-1]}, InputError, "source has -1"),
    ("ids", {"source": []}, InputError, "^decode: the source is empty"),
    ("ids", {"prefix": "20"}, InputError, "prefix is '20'"),
    ("ids", {"prefix": [None]}, InputError, "prefix has None"),
)


async def test_invalid_requests_are_refused_and_counted(dates_bundle: Path, texts: list[str]) -> None:
    observer = Outcomes()
    async with serving(dates_bundle, observer) as engine:
        for kind, given, error, message in NONSENSE:
            with pytest.raises(error, match=message):
                if kind == "text":
                    engine.submit(**({"text": texts[0]} | given))
                else:
                    engine.submit_ids(**({"source": [5, 6]} | given))
        assert is_idle(engine)
        assert await engine.generate_ids(np.array([5, 6]), prefix=iter(range(5, 7)))
    assert observer.counts == {"invalid": len(NONSENSE), "ok": 1}


async def test_an_engine_accepts_calls_only_on_its_event_loop(dates_bundle: Path, texts: list[str]) -> None:
    async with serving(dates_bundle) as engine:

        async def ask() -> None:
            engine.submit(texts[0])

        async def replace() -> None:
            await engine.replace()

        for asked in (lambda: asyncio.run(ask()), lambda: engine.submit(texts[0]), lambda: asyncio.run(replace())):
            with pytest.raises(EngineFailed, match="started on another event loop"):
                await asyncio.to_thread(asked)
        assert is_idle(engine)


async def test_an_engine_is_started_once_and_not_after_it_was_drained(dates_bundle: Path) -> None:
    async with serving(dates_bundle) as engine:
        with pytest.raises(EngineFailed, match="started only once"):
            await engine.start()
    engine = Engine(dates_bundle, threads=1)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    assert await engine.drain()
    with pytest.raises(Draining, match="before it was ready"):
        await starting
    assert engine.state == "stopped"
    with pytest.raises(EngineFailed, match="started only once"):
        await engine.start()
    engine = Engine(dates_bundle)
    with pytest.raises(EngineFailed, match="not started"):
        await engine.replace()
    with pytest.raises(EngineFailed, match="not started"):
        engine.submit("x")
