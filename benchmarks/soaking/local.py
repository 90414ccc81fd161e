"""A model in process: `tfexport.load` in a process of its own, which is told what to ask in lines of JSON."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from soaking.asks import Ask, Outcome
from soaking.target import environment, python
from tfexport.errors import BenchError


class Local:
    """The process; one message at a time goes to it."""

    name, callers = "in process", 1

    def __init__(self, process: Process, folder: Path) -> None:
        """Take what `start` has started."""
        self.pid, self.temporary = process.pid, folder / "temporary"
        self._process, self._lock = process, asyncio.Lock()

    @classmethod
    async def start(cls, folder: Path, bundle: Path) -> Self:
        """Start the process and load the bundle.

        Raises:
            BenchError: it cannot be loaded.
        """
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *python("-m", "soaking.worker", str(bundle)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=environment(folder / "temporary"),
                limit=2**24,
            )
        local = cls(process, folder)
        await local._tell([])
        return local

    async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Have all asked from threads."""
        found: list[Outcome] = await self._tell([ask.to_dict() for ask in asks])
        return found

    async def reload(self) -> None:
        """Have the bundle loaded beside the other, which is closed."""
        await self._tell("reload")

    def disconnect(self) -> None:
        """Do nothing: there are none."""

    async def close(self) -> int:
        """Close its input, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()

    async def _tell(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._lock:
            try:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
            except ConnectionError:
                pass  # it has ended, which the answer that does not come says
            line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BenchError("in process: the process has ended; its log says how")
        return json.loads(line)
