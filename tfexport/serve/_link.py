"""Call functions of another process of the server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import pickle
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_HEAD = struct.Struct("!I")  # bytes of the message that follows


class Link:
    """Call functions of the process at the other end of a socket, and answer calls."""

    def __init__(self, end: socket.socket, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._end, self._functions = end, functions
        self._numbers, self._answers = itertools.count(), dict[int, asyncio.Future[Any]]()
        self._tasks = set[asyncio.Task[None]]()

    async def connect(self) -> None:
        """Begin to answer calls; `ended` is done when the other process ends."""
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        self.ended = asyncio.create_task(self._read(reader))

    async def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of a function; raise `ConnectionError` if the process ends."""
        if self.ended.done():
            raise ConnectionResetError
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(number, name, arguments)
        try:
            return await answer
        finally:
            del self._answers[number]

    def _send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        self._writer.write(_HEAD.pack(len(data)) + data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                number, name, value = pickle.loads(await reader.readexactly(length))  # noqa: S301 - of this program
                if name is not None:
                    task = asyncio.create_task(self._answer(number, name, value))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (answer := self._answers.get(number)) and not answer.done():  # its caller may have given up
                    answer.set_result(value)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError())

    async def _answer(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        value = self._functions[name](*arguments)
        self._send(number, None, await value if inspect.isawaitable(value) else value)
