"""A model for many callers: requests join and leave the running batches, answers come as if each were alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

from tfexport.decode.align import Alignment
from tfexport.decode.pieces import Pieces
from tfexport.decode.result import Hypothesis
from tfexport.errors import DeadlineExceeded, Draining, EngineFailed, InputError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.model.copies import NO_COPIES_IN_STREAMS, check_copies, with_copies
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.model.result import Result, result_of
from tfexport.serve.alignments import MAX_WAITING, Alignments
from tfexport.serve.config import ServingConfig
from tfexport.serve.generation import Answer, Generation, Ids, Item, Texts
from tfexport.serve.in_flight import InFlight, on_loop
from tfexport.serve.observer import Guarded, Observer
from tfexport.serve.prepare import prepare
from tfexport.serve.requests import allowed_s, new_job, new_request
from tfexport.serve.served import Served
from tfexport.serve.worker import Worker

logger = logging.getLogger(__name__)
State = Literal["starting", "ready", "draining", "failed", "stopped"]


class Engine:
    """Serves one model to many callers of one event loop; results are those of `Model.generate` of each text alone.

    `async with Engine(bundle) as engine:` starts it and drains it at the end.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        config: ServingConfig | None = None,
        *,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        """Name what is served; `start` loads it.

        Args:
            bundle: path of the bundle.
            config: slots, queue and limits; None for the defaults.
            observer: told of everything, for metrics.
            options: of `tfexport.load`: backend, form, threads, device, engine, trusted_keys, warm_up.
        """
        self.config = config or ServingConfig()
        self._bundle, self._options = bundle, options
        self._observer = Guarded(observer) if observer else Observer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: Served | None = None
        self._state: State = "starting"
        self._in_flight = InFlight(self._observer)
        self._retiring: list[Served] = []
        self._replacing = asyncio.Lock()

    @property
    def state(self) -> State:
        """What the engine is about; "failed" once its thread has."""
        if self._served and self._served.worker.failure is not None:
            return "failed"
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests and its thread gives signs of life."""
        return self.state == "ready" and self._current.worker.silent_s < self.config.stall_s

    @property
    def is_alive(self) -> bool:
        """Whether it may still answer, or be about to: its thread has neither failed nor hung for `hang_s`."""
        is_hung = self._served is not None and self._served.worker.silent_s >= self.config.hang_s
        return self.state != "failed" and not is_hung

    @property
    def model(self) -> Model:
        """The model that new requests are decoded with.

        Raises:
            EngineFailed: the engine was not started.
        """
        return self._current.model

    @property
    def num_waiting(self) -> int:
        """Requests that have not joined a batch."""
        return sum(len(worker.waiting) for worker in self._workers)

    @property
    def num_running(self) -> int:
        """Requests that are decoded."""
        return len(self._in_flight) - self.num_waiting

    @property
    def slots(self) -> int:
        """Rows that are decoded at once."""
        return self._current.worker.slots

    @property
    def num_slots_used(self) -> int:
        """Rows that are decoded just now."""
        return sum(worker.num_rows for worker in self._workers)

    async def start(self) -> Self:
        """Load the bundle, warm it up, compare it with its recorded texts, and begin to take requests.

        Raises:
            TfexportError: what `tfexport.load` raises.
            ParityError: the model says something else than was recorded.
            EngineFailed: the engine was started before.
            Draining: the engine was drained before it was ready.
        """
        if self._loop or self.state != "starting":
            raise EngineFailed("an engine is started once; make another one")
        self._loop = asyncio.get_running_loop()
        model = await self._open(self._bundle)
        if self._state != "starting":
            model.close()
            raise Draining("the engine was drained before it was ready")
        self._served = self._serve(model)
        self._state = "ready"
        return self

    async def replace(self, bundle: str | PathLike[str] | None = None) -> None:
        """Serve another bundle, and no request is lost: what was accepted is answered by the old one.

        Where the thread of the old one hangs, its requests get `Draining` after `hang_s`, and it is left behind.

        Args:
            bundle: path; None for the one that is served, whose files have changed.

        Raises:
            TfexportError: the bundle cannot be served; the old one goes on.
        """
        self._check_loop()
        async with self._replacing:
            old = self._current
            self._check_replaceable()
            model = await self._open(bundle or self._bundle)
            try:
                self._check_replaceable()
            except TfexportError:
                model.close()
                raise
            self._served, self._bundle = self._serve(model), bundle or self._bundle
            self._retiring.append(old)
            await self._stop(old, Draining("the bundle was replaced"), None)
            self._retiring.remove(old)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, finish those that were accepted, and stop.

        Args:
            timeout_s: after which those that are left get `Draining`; None for as long as there are signs of life.

        Returns:
            Whether all were answered.
        """
        if self._served is None or self._state == "stopped":
            self._state = "stopped"
            return True
        self._state = "draining"
        reason = Draining("the engine is about to stop; ask another one")
        self._served.worker.close(reason)  # before anything else can happen
        stops = (self._stop(served, reason, timeout_s) for served in (*self._retiring, self._served))
        are_answered = all(await asyncio.gather(*stops))
        self._state = "stopped"
        return are_answered

    async def _stop(self, served: Served, reason: Draining, timeout_s: float | None) -> bool:
        """Let a model finish what it has accepted, then close it; answer the rest with the reason after the time."""
        has_ended = await served.finish(reason, timeout_s, self.config.hang_s)
        if not has_ended:
            served.abort(reason)
            self._in_flight.end_all(served, reason)
            has_ended = await asyncio.to_thread(served.worker.join, self.config.stall_s)
        served.alignments.close(reason)
        if has_ended:
            served.model.close()
        else:  # it needs its model
            logger.warning("the thread of a model hangs and is left behind; its memory is free when it goes on")
        return served.is_answered

    async def __aenter__(self) -> Self:
        """Start."""
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain."""
        await self.drain()

    def submit(
        self,
        text: str,
        *,
        prefix: str = "",
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[str, Result]:
        """Ask for a text; the answers are those of `Model.generate` of it alone.

        Args:
            text: of the source.
            prefix: what each answer begins with.
            stream: hand out pieces as they come, to who iterates over the generation.
            priority: seconds that the request counts as older than it is.
            timeout_s: seconds that it may take; None, or more than the engine allows, for what that allows.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, which go before both.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: the model, or this engine, cannot take the request.
            QueueFull: too many requests, or alignments, wait; it says when to come again.
            Draining: the engine is about to stop.
            EngineFailed: the engine has failed.
        """
        with self._in_flight.refusals():
            model = self.model
            if model.tokenizer is None:
                raise InputError("this bundle has no tokenizer; ask with token ids")
            tokenizer, decoding = model.tokenizer, model.decoding(config, **options)
            if decoding.replace_unknowns:
                self._check_copies(stream)
            (source,) = tokenizer.encode([text])
            begin, fixed = tokenizer.begin_target(prefix), len(tokenizer.text.target_prefix)
            request = new_request(
                model, source, begin, decoding, self.config, self.slots, num_fixed=fixed, stream=stream
            )
            given = fixed if decoding.prefix_bias_beta else len(begin)
            tokens = Texts(Pieces(tokenizer.decode, given, decoding.strings)) if stream else None

            def answers(found: Sequence[Hypothesis]) -> list[Result]:
                results = [result_of(tokenizer, one, decoding) for one in found]
                if decoding.replace_unknowns:
                    return with_copies(model.session, tokenizer, [text], [source], results, decoding)
                return results

            job = new_job(request, self.config, priority, timeout_s)
            return self._begin(Generation(job, answers, tokens, self.config.stream_buffer, self._end))

    def submit_ids(
        self,
        source: Iterable[int],
        *,
        prefix: Iterable[int] = (),
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[int, Hypothesis]:
        """Ask with token ids; see `submit`.

        Args:
            source: token ids, special tokens included.
            prefix: token ids that each answer begins with, without the start token.
            stream: hand out token ids as they come.
            priority: seconds that the request counts as older than it is.
            timeout_s: seconds that it may take.
            config: how to decode, in place of the bundle's defaults.
            options: fields of `DecodeConfig`, which go before both.

        Raises:
            TfexportError: those of `submit`.
        """
        with self._in_flight.refusals():
            model = self.model
            decoding = model.decoding(config, **options)
            request = new_request(model, source, prefix, decoding, self.config, self.slots, stream=stream)
            job = new_job(request, self.config, priority, timeout_s)
            tokens = Ids() if stream else None
            return self._begin(Generation(job, list, tokens, self.config.stream_buffer, self._end))

    async def generate(self, text: str, **options: Any) -> list[Result]:
        """Return the answers to a text, best first; `submit` has the arguments.

        Raises:
            TfexportError: those of `submit`.
            DeadlineExceeded: the request took too long.
        """
        return await self.submit(text, **options)

    async def generate_ids(self, source: Iterable[int], **options: Any) -> list[Hypothesis]:
        """Return the answers to token ids, best first; `submit_ids` has the arguments."""
        return await self.submit_ids(source, **options)

    def stream(self, text: str, **options: Any) -> AsyncIterator[str]:
        """Return the answer to a text in pieces as they come; `submit` has the arguments."""
        return aiter(self.submit(text, stream=True, **options))

    def stream_ids(self, source: Iterable[int], **options: Any) -> AsyncIterator[int]:
        """Return the answer to token ids one by one as they come; `submit_ids` has the arguments."""
        return aiter(self.submit_ids(source, stream=True, **options))

    async def align(
        self, source: str | Iterable[int], target: str | Iterable[int], *, timeout_s: float | None = None
    ) -> Alignment:
        """Say which source tokens those of a given target were read from, as `Model.align` does.

        Pairs are read one after the other, beside the running batches.

        Args:
            source: text, or token ids with special tokens.
            target: text where the source is one, or token ids without the start token.
            timeout_s: seconds that it may take; None, or more than the engine allows, for what that allows.

        Raises:
            ConfigError: the bundle was exported without alignment, or the backend has none.
            InputError: the model cannot take the pair.
            QueueFull: too many alignments wait.
            DeadlineExceeded: it took too long.
            TfexportError: those of `submit`.
        """
        start = time.monotonic()
        with self._in_flight.refusals():
            self._check_loop()
            served, most_s = self._current, allowed_s(self.config, timeout_s)
            served.worker.waiting.check_open()
            served.alignments.check_room(MAX_WAITING)
            try:
                async with asyncio.timeout(None if most_s == math.inf else most_s):
                    found = await served.alignments.submit(partial(_aligned, served.model, source, target))
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the {most_s:.3g} s of the request were over before it was aligned; come again later"
                ) from None
        self._observer.aligned(time.monotonic() - start)
        return found

    @property
    def _workers(self) -> list[Worker]:
        return [served.worker for served in (*self._retiring, self._served) if served]

    def _check_loop(self) -> None:
        """Refuse who runs on another event loop, or on none: nothing would ever wake it."""
        loop = None
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        if self._loop and loop is not self._loop:
            raise EngineFailed("the engine belongs to the event loop that it was started on; ask it from there")

    def _check_replaceable(self) -> None:
        """Refuse another bundle where it would never be served."""
        if self._state != "ready":
            raise Draining("the engine is about to stop and takes no other bundle")

    @property
    def _current(self) -> Served:
        if self._served is None:
            raise EngineFailed("the engine was not started; use async with, or await start()")
        return self._served

    async def _open(self, bundle: str | PathLike[str]) -> Model:
        def opened() -> Model:
            model = load(bundle, **self._options)
            try:
                prepare(model, self.config.slots)
            except TfexportError:
                model.close()
                raise
            return model

        return await asyncio.to_thread(opened)

    def _serve(self, model: Model) -> Served:
        assert self._loop
        deliver, fail = on_loop(self._loop, self._in_flight.deliver), on_loop(self._loop, self._fail)
        worker = Worker(model.session, self.config, self._observer, deliver, fail)
        weakref.finalize(self, worker.abort, Draining("the engine is gone")).atexit = False
        return Served(model, worker, Alignments(self._loop))

    def _check_copies(self, stream: bool) -> None:
        """Refuse to replace unknown tokens where nobody can say by what, or not in time."""
        if stream:
            raise InputError(f"stream: {NO_COPIES_IN_STREAMS}")
        check_copies(self.model.session, self.model.tokenizer)
        self._current.alignments.check_room(self.config.max_waiting)

    def _begin(self, generation: Generation[Item, Answer]) -> Generation[Item, Answer]:
        self._check_loop()
        self._in_flight.begin(generation, self._current)
        return generation

    def _end(self, generation: Generation[Any, Any], reason: TfexportError) -> None:
        """End a generation; it is told here, so that whoever holds a generation holds its engine."""
        self._in_flight.end(generation, reason)

    def _fail(self, failed: EngineFailed) -> None:
        """End what was accepted by a thread that has failed."""
        for served in (*self._retiring, self._current):
            if served.worker.failure is not None:
                self._in_flight.end_all(served, failed)


def _aligned(model: Model, source: str | Iterable[int], target: str | Iterable[int]) -> Alignment:
    """Align a pair of texts, of token ids, or of a text and the token ids of its target."""
    if isinstance(source, str) and isinstance(target, str):
        return model.align([source], [target])[0]
    if isinstance(target, str):
        raise InputError("align: the source is token ids and the target a text; give token ids of both")
    if isinstance(source, str) and model.tokenizer is None:
        raise InputError("align: this bundle has no tokenizer; give token ids")
    source_ids = model.tokenizer.encode([source])[0] if model.tokenizer and isinstance(source, str) else source
    return model.align_ids([source_ids], [target])[0]  # type: ignore[list-item]
