"""What models, tokenizers, observers and event loops may do wrong: who waits hears of it, and nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.served import ENGINE_THREAD, Hanging, Outcomes, engine_threads, is_idle, serving, text_of, until
from tfexport.errors import BackendError, EngineFailed, InputError, TfexportError
from tfexport.model.model import Model
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.session import Candidates, Ids
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer
from tfexport.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


async def test_rows_that_compute_no_numbers_fail_alone(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 7  # whose rows read it compute nothing
    step, multi = ContribBatch.step, ContribBatch.multi_step
    expected = {text: text_of(model.generate([text])) for text in texts}

    def broken(found: Candidates, target_ids: Ids) -> Candidates:
        found.logits[..., target_ids == poison, :] = np.nan
        return found

    monkeypatch.setattr(ContribBatch, "step", lambda batch, ids, count: broken(step(batch, ids, count), ids))
    monkeypatch.setattr(ContribBatch, "multi_step", lambda batch, ids, *rest: broken(multi(batch, ids, *rest), ids))
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
async def test_a_backend_that_fails_is_told_to_everybody(
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


async def test_whoever_left_the_queue_hears_of_a_failure_too(
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


async def test_a_tokenizer_that_fails_ends_its_own_request_alone(
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
async def test_a_tokenizer_that_fails_at_stop_strings_ends_its_own_request_alone(
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


async def test_an_observer_that_fails_disturbs_nobody(
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
    assert "the observer has failed" in caplog.text


def test_an_event_loop_that_is_closed_hears_nothing(random_bundle: Path) -> None:
    async def start() -> tuple[Engine, list[Any]]:
        engine = await Engine(random_bundle, ServingConfig(slots=1), threads=1).start()
        return engine, [engine.submit_ids([5, 6]) for _ in range(50)]

    with asyncio.Runner() as runner:
        engine, asked = runner.run(start())
    assert asyncio.run(engine.drain(30))
    assert not engine_threads()
    assert not all(generation.is_done for generation in asked)


def test_an_engine_that_nobody_holds_ends_its_thread(random_bundle: Path) -> None:
    async def start() -> None:
        engine = await Engine(random_bundle, threads=1).start()
        engine.submit_ids([5, 6])

    asyncio.run(start())
    for _ in range(500):  # the thread answers the request first
        gc.collect()
        if not engine_threads():
            break
        time.sleep(0.01)
    assert not engine_threads()
