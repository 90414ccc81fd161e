"""Serve one model to concurrent callers with continuous batching."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from os import PathLike
from typing import Any, Literal, Self, TypeVar

from tfexport.decode.align import Alignment
from tfexport.decode.request import Request, check_requests, num_speech_tokens
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import Pieces
from tfexport.errors import (
    BackendError,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InputError,
    TfexportError,
    raise_all,
    shortened,
)
from tfexport.generation import DecodeConfig
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.model.result import NO_COPIES_IN_STREAMS, Classification, Result, check_copies, result_of, with_copies
from tfexport.runtime.session import Floats
from tfexport.runtime.sources import read_source, stand_in
from tfexport.serve._generation import AnyGeneration, Generation, num_rows
from tfexport.serve._served import MAX_WAITING, Served, outcome_of, prepare
from tfexport.serve.config import MAX_S, ServingConfig
from tfexport.serve.observer import Observer, guarded

T = TypeVar("T")
State = Literal["starting", "ready", "draining", "failed", "stopped"]


class Engine:
    """Serve one model to callers on one event loop, with a replica on each device.

    Each result equals that of `Model.generate` for the same text on its own. `async with Engine(bundle) as engine:`
    starts the engine, and drains it at the end of the block.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        config: ServingConfig | None = None,
        *,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        """Configure the engine; `start` loads the bundle.

        `observer` receives the measurements. `options` are those of `tfexport.load`: backend, variant, threads, device,
        engine, trusted_keys and warm_up. `device` may name several, as in "cuda:0,cuda:1": each loads the bundle, and a
        request is decoded by the replica with the fewest rows.
        """
        self.config = config or ServingConfig()
        device = options.pop("device", "cpu")
        self.devices: tuple[Any, ...] = tuple(device.split(",")) if isinstance(device, str) else (device,)
        self._bundle, self._options = bundle, options
        self._observer = guarded(observer) if observer else Observer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: tuple[Served, ...] = ()  # by device
        self._state: State = "starting"
        self._retiring: list[Served] = []
        self._replacing = asyncio.Lock()

    @property
    def state(self) -> State:
        """State of the engine; "failed" after the threads of all replicas have failed."""
        if self._served and all(served.worker.failure is not None for served in self._served):
            return "failed"
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests and the thread of a replica makes progress."""
        return self.state == "ready" and self.num_replicas_ready > 0

    @property
    def is_alive(self) -> bool:
        """Whether no thread has failed, nor hung for `hang_s` seconds."""
        workers = [served.worker for served in self._served]
        return all(worker.failure is None and worker.silent_s < self.config.hang_s for worker in workers)

    @property
    def num_replicas(self) -> int:
        """Number of devices that the model is loaded on."""
        return len(self.devices)

    @property
    def num_replicas_ready(self) -> int:
        """Number of replicas whose threads have not failed and make progress."""
        return sum(served.is_working for served in self._served)

    @property
    def model(self) -> Model:
        """The model of the first device; raises `EngineFailed` before `start`."""
        return self._current[0].model

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not joined a batch."""
        queues = [served.worker.waiting for served in self._all_served]
        return sum(len(queue) + queue.num_unread for queue in queues)

    @property
    def num_running(self) -> int:
        """Number of requests that are being decoded."""
        return sum(len(served.open) for served in self._all_served) - self.num_waiting

    @property
    def slots(self) -> int:
        """Maximum number of rows that are decoded at once, by all replicas."""
        return sum(served.worker.slots for served in self._current)

    @property
    def num_slots_used(self) -> int:
        """Number of rows that are being decoded."""
        return sum(served.worker.num_rows for served in self._all_served)

    async def start(self) -> Self:
        """Load the bundle, warm it up, check its recorded texts, and accept requests."""
        if self._loop or self.state != "starting":
            raise EngineFailed("an engine can be started only once; create another one")
        self._loop = asyncio.get_running_loop()
        self._served = await self._load(self._bundle, "starting", "the engine was drained before it was ready")
        self._state = "ready"
        return self

    async def replace(self, bundle: str | PathLike[str] | None = None) -> None:
        """Load and serve another bundle, or the current path again.

        The old model answers the requests that it has accepted. If its thread hangs, they raise `Draining` after
        `hang_s` seconds, and the old model is not closed. After an error, the engine continues with the old model.
        """
        self._check_loop()
        async with self._replacing:
            old, path = self._current, bundle or self._bundle
            self._served = await self._load(path, "ready", "the engine is stopping and loads no other bundle")
            self._bundle = path
            self._retiring += old
            reason = Draining("the bundle was replaced")
            await asyncio.gather(*(served.stop(reason, None) for served in old))
            self._retiring = [served for served in self._retiring if served not in old]

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Finish the accepted requests and stop; return whether all were answered.

        Requests that are open after `timeout_s` raise `Draining`; None waits while the engine's thread makes progress.
        """
        if not self._served or self._state == "stopped":
            self._state = "stopped"
            return True
        self._state = "draining"
        reason = Draining("the engine is stopping; send the request to another one")
        for served in self._served:  # before the first await, so that no request is accepted meanwhile
            served.worker.waiting.close(reason)
        are_answered = all(await asyncio.gather(*(served.stop(reason, timeout_s) for served in self._all_served)))
        self._state = "stopped"
        return are_answered

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    def submit(
        self,
        text: Any,
        *,
        prefix: str = "",
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[str, Result]:
        """Submit a source; each answer equals that of `Model.generate` for it.

        Args:
            text: source text; or for a model of audio or images what `Model.read` takes, except for paths. It is read
                on another thread, and awaiting the answer raises `InputError` if that fails.
            prefix: text that each answer starts with.
            stream: whether iterating over the generation yields pieces of text as they are generated.
            priority: seconds that are added to the request's age in the queue.
            timeout_s: time limit of the request; the engine's limit applies if it is lower.
            config: decoding options, instead of the bundle's defaults.
            options: fields of `DecodeConfig`, which override both.

        Raises:
            ConfigError: options are unknown, out of range or contradictory.
            InputError: the model or this engine does not support the request.
            QueueFull: too many requests or alignments are waiting; its `retry_after_s` suggests when to retry.
            Draining: the engine is stopping.
            EngineFailed: the engine has failed.
        """
        with self._refusals():
            served = self._least_loaded()
            model = served.model
            if model.tokenizer is None:
                raise InputError("this bundle has no tokenizer; pass token ids")
            tokenizer, decoding = model.tokenizer, model.decoding(config, **options)
            if decoding.replace_unknowns:
                if stream:
                    raise InputError(f"stream: {NO_COPIES_IN_STREAMS}")
                check_copies(model.session, tokenizer)
                served.calls.check_room(self.config.max_waiting)
            if model.spec.source_vocab:
                read, (ready,) = None, tokenizer.encode([text])
            elif isinstance(text, str):
                raise InputError(f"the source is a text, but this model reads {model.reads}; send a file or an array")
            else:
                read, ready = partial(_read, model, text), stand_in(model.spec.source)
            prefix_ids, num_fixed = tokenizer.begin_target(prefix), len(tokenizer.text.target_prefix)

            def answers(hypotheses: Sequence[Hypothesis]) -> list[Result]:
                results = [result_of(tokenizer, hypothesis, decoding) for hypothesis in hypotheses]
                if decoding.replace_unknowns:
                    return with_copies(model.session, tokenizer, [text], [ready], results, decoding)
                return results

            pieces = None
            if stream:
                num_forced = num_fixed if decoding.prefix_bias_beta else len(prefix_ids)
                num_forced += num_speech_tokens(model.spec, decoding)
                pieces = Pieces(tokenizer.decode, num_forced, decoding.strings)
            limits = priority, timeout_s
            return self._begin(served, ready, prefix_ids, decoding, num_fixed, stream, *limits, answers, pieces, read)

    def submit_ids(
        self,
        source: Any,
        *,
        prefix: Iterable[int] = (),
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[int, Hypothesis]:
        """Submit token ids with special tokens, or an array of features or pixels.

        The other arguments and the errors are those of `submit`. `prefix` excludes the start token. Streams yield ids.
        """
        with self._refusals():
            served = self._least_loaded()
            decoding = served.model.decoding(config, **options)
            return self._begin(served, source, prefix, decoding, 0, stream, priority, timeout_s, list, None)

    async def generate(self, text: Any, **options: Any) -> list[Result]:
        """Return the answers to a source, best first; see `submit`."""
        return await self.submit(text, **options)

    async def generate_ids(self, source: Any, **options: Any) -> list[Hypothesis]:
        """Return the answers to token ids, best first; see `submit_ids`."""
        return await self.submit_ids(source, **options)

    def stream(self, text: Any, **options: Any) -> AsyncIterator[str]:
        """Yield pieces of the answer as they are generated; see `submit`."""
        return aiter(self.submit(text, stream=True, **options))

    def stream_ids(self, source: Any, **options: Any) -> AsyncIterator[int]:
        """Yield token ids of the answer as they are generated; see `submit_ids`."""
        return aiter(self.submit_ids(source, stream=True, **options))

    async def align(self, source: Any, target: str | Iterable[int], *, timeout_s: float | None = None) -> Alignment:
        """Align the tokens of a source and a target, as `Model.align` does.

        Source ids include special tokens, and target ids exclude the start token. Pairs are aligned one at a time,
        concurrently with the running batches.
        """
        start = time.monotonic()
        compute = partial(_align, source=source, target=target)
        alignment = await self._call(compute, timeout_s, MAX_WAITING, ("alignments", "the alignment"))
        self._observer.aligned(time.monotonic() - start)
        return alignment

    async def embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, timeout_s: float | None = None
    ) -> tuple[Floats, int]:
        """Embed texts or token ids as `Model.embed`; also return the number of tokens.

        An encoder-only bundle encodes one call at a time.
        """
        return await self._encode(Model.embed, texts, timeout_s)

    async def classify(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, timeout_s: float | None = None
    ) -> list[Classification]:
        """Label texts or token ids as `Model.classify`."""
        return (await self._encode(Model.classify, texts, timeout_s))[0]

    async def _encode(self, method: Callable[..., T], texts: Sequence[Any], timeout_s: float | None) -> tuple[T, int]:
        start, cancel = time.monotonic(), threading.Event()

        def compute(model: Model) -> tuple[T, int]:
            sources = model.source_ids(texts, paths=False)
            num_tokens = sum(read_source(model.spec.source, source)[1] for source in sources)
            self._observer.joined(time.monotonic() - start, num_tokens)
            return method(model, sources, cancel=cancel), num_tokens

        try:
            found = await self._call(compute, timeout_s, self.config.max_waiting, ("requests", "the answer"))
        finally:
            cancel.set()
        self._observer.ended("ok", "", time.monotonic() - start, 0, None)
        return found

    async def _call(
        self, compute: Callable[[Model], T], timeout_s: float | None, max_waiting: int, names: tuple[str, str]
    ) -> T:
        with self._refusals():
            self._check_loop()
            raise_all(InputError, "request", _time_problems(timeout_s))
            served, limit_s = self._least_loaded(), self._limit_s(timeout_s)
            served.worker.waiting.check_open()
            served.calls.check_room(max_waiting, names[0])
            try:
                async with asyncio.timeout(None if limit_s == math.inf else limit_s):
                    return await served.calls.submit(partial(compute, served.model))
            except TimeoutError:
                problem = f"the time limit of {limit_s:.3g} s was exceeded before {names[1]}"
                raise DeadlineExceeded(f"{problem}; try again later") from None

    @property
    def _all_served(self) -> list[Served]:
        return [*self._retiring, *self._served]

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except (TfexportError, asyncio.CancelledError) as error:
            self._observer.ended(outcome_of(error), "", time.monotonic() - start, 0, None)
            raise

    def _check_loop(self) -> None:
        # A caller on another event loop would never be woken.
        loop = None
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        if self._loop and loop is not self._loop:
            raise EngineFailed("the engine was started on another event loop; call it from that one")

    @property
    def _current(self) -> tuple[Served, ...]:
        if not self._served:
            raise EngineFailed("the engine was not started; use async with, or await start()")
        return self._served

    def _least_loaded(self) -> Served:
        """Return the replica with the fewest rows, if possible one that makes progress."""
        if len(self._current) == 1:
            return self._current[0]
        return min(self._current, key=lambda served: (not served.is_working, served.load))

    async def _load(self, bundle: str | PathLike[str], state: State, refusal: str) -> tuple[Served, ...]:
        # Raises `Draining` if the engine leaves `state` meanwhile.
        def load_models() -> list[Model]:
            models = []
            with contextlib.ExitStack() as loaded:
                for device in self.devices:
                    models.append(load(bundle, device=device, **self._options))
                    loaded.callback(models[-1].close)
                    prepare(models[-1], self.config.slots)
                loaded.pop_all()
            return models

        if self._state == state:
            models = await asyncio.to_thread(load_models)
            if self._state == state:
                return tuple(Served(model, self.config, self._observer) for model in models)
            for model in models:
                model.close()
        raise Draining(refusal)

    def _begin(
        self,
        served: Served,
        source: Any,
        prefix: Iterable[int],
        decoding: DecodeConfig,
        num_fixed: int,
        stream: object,
        priority: float,
        timeout_s: float | None,
        answers: Callable[[Sequence[Hypothesis]], list[Any]],
        pieces: Pieces | None,
        read: Callable[[], list[Any]] | None = None,
    ) -> AnyGeneration:
        slots = served.worker.slots
        raise_all(InputError, "request", [*self._problems(decoding, slots, stream, priority, timeout_s)])
        model, now = served.model, time.monotonic()
        text_of = model.tokenizer.decode if model.tokenizer else None

        def checked(sources: list[Any]) -> Request:
            (request,) = check_requests(model.session, sources, decoding, [prefix], text_of, num_fixed)
            request.stream = bool(stream)
            return request

        end = now + self._limit_s(timeout_s)
        generation: AnyGeneration = Generation(checked([source]), now, priority, end, answers=answers)
        generation.pieces, generation.buffer = pieces, self.config.stream_buffer
        generation.leave = served.end
        self._check_loop()
        served.begin(generation, None if read is None else lambda: checked(read()))
        return generation

    def _problems(
        self, decoding: DecodeConfig, slots: int, stream: object, priority: object, timeout_s: object
    ) -> Iterator[str]:
        if not isinstance(stream, bool):
            yield f"stream is {shortened(stream)}, expected True or False"
        if decoding.num_beams > self.config.max_num_beams:
            yield f"num_beams is {decoding.num_beams}, the limit is {self.config.max_num_beams}; lower it"
        if (rows := num_rows(decoding)) > slots:
            problem = f"the request needs {rows} slots, the engine has {slots}"
            yield f"{problem}; lower num_beams or num_return_sequences"
        for name in ("num_beams", "num_return_sequences") if stream else ():
            if (number := getattr(decoding, name)) > 1:
                yield f"{name} is {number}, but a stream returns only one answer; set it to 1"
        if not _is_between(-MAX_S, priority, MAX_S):
            yield f"priority is {shortened(priority)}, expected seconds from -{MAX_S} to {MAX_S}"
        yield from _time_problems(timeout_s)

    def _limit_s(self, timeout_s: float | None) -> float:
        return min(timeout_s or math.inf, self.config.timeout_s or math.inf)


def _time_problems(timeout_s: object) -> list[str]:
    if timeout_s is None or _is_between(math.ulp(0), timeout_s, MAX_S):
        return []
    return [f"timeout_s is {shortened(timeout_s)}, expected None or above 0 and up to {MAX_S}"]


def _is_between(low: float, value: object, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _read(model: Model, source: Any) -> list[Any]:
    try:
        return model.read([source], paths=False)
    except BackendError as error:  # a package for this format is not installed
        raise InputError(*error.problems, subject=error.subject, remedy=error.remedy) from error


def _align(model: Model, source: Any, target: str | Iterable[int]) -> Alignment:
    if not model.spec.source_vocab:
        (source,) = model.read([source], paths=False)
        return model.align([source], [target])[0] if isinstance(target, str) else model.align_ids([source], [target])[0]
    if isinstance(target, str):
        if isinstance(source, str):
            return model.align([source], [target])[0]
        raise InputError("align: the source is token ids, but the target is text; pass both as token ids")
    if isinstance(source, str):
        if model.tokenizer is None:
            raise InputError("align: this bundle has no tokenizer; pass token ids")
        (source,) = model.tokenizer.encode([source])
    return model.align_ids([source], [target])[0]
