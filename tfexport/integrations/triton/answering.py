"""Asking an engine for what requests want, and answering each as soon as it is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfexport.errors import BackendError, TfexportError
from tfexport.integrations.triton.requests import last_outputs, part_outputs
from tfexport.serve.engine import Engine
from tfexport.serve.inference import Asked, Source, Tensor, outputs_of, submit, submit_all

logger = logging.getLogger(__name__)
# Seconds between looks at whether clients have gone.
GONE_S = 0.1


class Reply(Protocol):
    """Where the answer to a request goes; nothing may be called once the last part of it was sent."""

    def send(self, outputs: Mapping[str, Tensor], *, is_last: bool) -> None:
        """Send tensors."""
        ...

    def fail(self, error: TfexportError) -> None:
        """Say what was wrong, and end."""
        ...

    def is_gone(self) -> bool:
        """Say whether nobody waits for it any more."""
        ...


class Answering:
    """Holds the requests of an engine that are not answered yet; it belongs to the engine's event loop."""

    def __init__(self, engine: Engine, *, stream: bool) -> None:
        """Begin with none.

        Args:
            engine: started.
            stream: send what comes as it comes.
        """
        self._engine, self._stream = engine, stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[Reply, Sequence[Asked]] = {}
        self._watcher = asyncio.create_task(self._watch())

    def take(self, sources: Sequence[Source], options: Sequence[Mapping[str, Any]], reply: Reply) -> None:
        """Ask the engine, and answer when it has."""
        try:
            if self._stream:
                asked = [submit(self._engine, sources[0], options[0], stream=True)]
            else:
                asked = submit_all(self._engine, sources, options)
        except TfexportError as error:
            reply.fail(error)
            return
        self._open[reply] = asked
        task = asyncio.create_task(self._answer(asked, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Answer all that was taken, and stop the engine."""
        await self._engine.drain()
        await asyncio.gather(*self._tasks)
        self._watcher.cancel()

    async def _answer(self, asked: Sequence[Asked], reply: Reply) -> None:
        try:
            outputs = await (self._streamed(asked[0], reply) if self._stream else self._whole(asked))
        except TfexportError as error:
            self._close(reply)
            reply.fail(error)
        except Exception:
            logger.exception("a request could not be answered")
            self._close(reply)
            reply.fail(BackendError("the request could not be answered; the server's log says why"))
        else:
            self._close(reply)
            reply.send(outputs, is_last=True)

    async def _whole(self, asked: Sequence[Asked]) -> dict[str, Tensor]:
        found = [await one for one in asked]
        return outputs_of(found, self._engine.model.spec.tokens.pad)

    async def _streamed(self, asked: Asked, reply: Reply) -> dict[str, Tensor]:
        """Send what comes as it comes; return what is left for the end."""
        async for items in asked.together():  # to send takes as long as a step of a small model
            reply.send(part_outputs(items), is_last=False)
        return last_outputs((await asked)[0])

    def _close(self, reply: Reply) -> None:
        """Forget a reply before its end is sent: Triton may not be asked of it any more."""
        for one in self._open.pop(reply):
            one.cancel()

    async def _watch(self) -> None:
        """Cancel what nobody waits for."""
        while True:
            await asyncio.sleep(GONE_S)
            for reply, asked in tuple(self._open.items()):
                if reply.is_gone():
                    for one in asked:
                        one.cancel()
