"""Manage a loaded model and the threads that decode and align with it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tfexport.decode.offline import decode
from tfexport.errors import InputError, ParityError, QueueFull, ServingError
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.serve._worker import Worker
from tfexport.text.compare import check_texts

Found = TypeVar("Found")
# Maximum number of waiting alignments.
MAX_WAITING = 8
# Number of recorded texts that are checked before serving; `tfexport verify` checks all.
NUM_RECORDED = 8
WARM_UP_TOKENS = 4


class Alignments:
    """Compute alignments one at a time on a thread.

    They run concurrently with the batches. The object is used on one event loop only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._executor = loop, ThreadPoolExecutor(1, "tfexport-align")
        self._open: set[asyncio.Future[Any]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no alignment is waiting or running."""
        return not self._open

    def check_room(self, most: int) -> None:
        """Raise `QueueFull` if more than `most` alignments are waiting or running."""
        if len(self._open) > most:
            raise QueueFull(f"{most} alignments wait, which is the limit; come again later")

    def submit(self, compute: Callable[[], Found]) -> asyncio.Future[Found]:
        """Queue a computation; it is skipped if its future is cancelled first."""
        found: asyncio.Future[Found] = self._loop.create_future()
        self._open.add(found)
        found.add_done_callback(self._open.discard)
        self._executor.submit(self._compute, compute, found)
        return found

    async def join(self, end: float, hang_s: float) -> bool:
        """Wait for all computations; return whether they all ended.

        Stop waiting at `end`, a time of `time.monotonic`, or if one computation takes longer than `hang_s`.
        """
        while self._open:
            wait_s = max(0.0, min(end - time.monotonic(), hang_s))
            done, _ = await asyncio.wait(tuple(self._open), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return False
        return True

    def close(self, reason: ServingError) -> None:
        """Stop after the current computation; open futures raise `reason`."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for found in tuple(self._open):
            if not found.done():
                found.set_exception(copy.copy(reason))

    def _compute(self, compute: Callable[[], Found], found: asyncio.Future[Found]) -> None:
        if found.done():  # it was cancelled
            return
        settle: Callable[[Any], None] = found.set_result
        result: Any
        try:
            result = compute()
        except Exception as error:  # noqa: BLE001 - the future raises it
            settle, result = found.set_exception, error
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._loop.call_soon_threadsafe(lambda: None if found.done() else settle(result))


@dataclass(eq=False)
class Served:
    """A model with its threads.

    Attributes:
        is_answered: whether all accepted requests were answered.
    """

    model: Model
    worker: Worker
    alignments: Alignments
    is_answered: bool = True

    async def finish(self, reason: ServingError, timeout_s: float | None, hang_s: float) -> bool:
        """Refuse new requests with `reason`; return whether all accepted ones are done.

        Stop waiting after `timeout_s`, or after `hang_s` without progress of the thread.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.worker.waiting.close(reason)
        wait_s = 0.0
        while not await asyncio.to_thread(self.worker.join, wait_s):
            wait_s = min(end - time.monotonic(), hang_s - self.worker.silent_s)
            if wait_s <= 0:
                return False
        return await self.alignments.join(end, hang_s)

    def abort(self, reason: ServingError) -> None:
        """Stop decoding and aligning without further events."""
        self.is_answered &= self.alignments.is_idle
        self.worker.abort(reason)
        self.alignments.close(reason)


def prepare(model: Model, slots: int) -> None:
    """Warm a model up with one row and with all slots, and check its recorded texts.

    Raises:
        InputError: the model has no decoder.
        BackendError: the backend failed or computed NaN.
        ParityError: the tokenizer or an fp32 model returns other results than recorded.
    """
    spec = model.spec
    if not spec.has_decoder:
        raise InputError("the bundle is an encoder alone and generates no text; use tfexport embed")
    source = [spec.tokens.eos if spec.tokens.eos < spec.source_vocab else 0]
    room = min(WARM_UP_TOKENS, spec.max_target_length)
    warm_up = DecodeConfig(max_new_tokens=room, min_new_tokens=room)
    for rows in (1, slots):
        decode(model.session, [source] * rows, warm_up, batch_size=rows)
    if not model.tokenizer or not model.tokenizer.text.samples:
        return
    check_texts(model.tokenizer)
    text = model.tokenizer.text
    samples = [sample for sample in text.samples if sample.target_ids][:NUM_RECORDED]
    if not samples or model.session.accuracy != "fp32":
        return
    longest = max(len(sample.target_ids) for sample in samples)
    found = decode(
        model.session,
        [sample.source_ids for sample in samples],
        DecodeConfig(max_new_tokens=min(longest, spec.max_target_length - len(text.target_prefix))),
        prefixes=[text.target_prefix] * len(samples),
    )
    for sample, (best,) in zip(samples, found, strict=True):
        said = best.token_ids[: len(sample.target_ids)]
        if said != sample.target_ids:
            raise ParityError(
                f"the recorded text {sample.text!r} came out as {model.tokenizer.decode(said)!r}, expected "
                f"{sample.output!r}; run tfexport verify"
            )
