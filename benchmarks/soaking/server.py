"""A real server: `tfexport serve` in a process of its own, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from soaking.asks import Ask, Outcome
from soaking.target import environment, python
from tfexport.bench.http_client import HttpClient, Response
from tfexport.errors import BenchError, ServingError

_COMMAND = "from tfexport.cli import main; main()"
_MODEL = "soaked"
# Seconds: until it serves, or has reloaded; within which who leaves has left; that who is late allows.
_PATIENCE_S, _LEAVES_WITHIN_S, _LATE_WITHIN_S = 120, 0.02, 0.005
_NONSENSE: tuple[tuple[str, Any], ...] = (
    ("generate", {}),
    ("generate", []),
    ("generate", {"text_input": ""}),
    ("generate", {"text_input": "a" * 50_000}),
    ("generate", {"text_input": "a", "parameters": {"num_beams": 0}}),
    ("generate", {"text_input": "a", "parameters": {"temprature": 1}}),
    ("generate", {"text_input": "a", "parameters": {"num_return_sequences": 10**9}}),
    ("generate", {"input_ids": [-1]}),
    ("generate_stream", {"text_input": "a", "parameters": {"num_beams": 2}}),
    ("infer", {"inputs": [{"name": "text_input", "shape": [2**40], "datatype": "BYTES", "data": ["a"]}]}),
    ("nothing", {"text_input": "a"}),
)


class Server:
    """The server and a client of its; the bundle's path is a link that leads to one of two copies in turn."""

    name, callers = "server", 3

    def __init__(self, process: Process, url: str, folder: Path, copies: Sequence[Path]) -> None:
        """Take what `start` has started."""
        self.pid, self.temporary = process.pid, folder / "temporary"
        self._process, self._client, self._log = process, HttpClient(url), folder / "log"
        self._link, self._copies = folder / _MODEL, itertools.cycle(copies)

    @classmethod
    async def start(cls, folder: Path, copies: Sequence[Path], *options: str) -> Self:
        """Start a server.

        Args:
            folder: empty, for its log and temporary files.
            copies: of the bundle, which the link leads to in turn.
            options: of `tfexport serve`.

        Raises:
            BenchError: it does not begin.
        """
        folder.mkdir()
        (folder / _MODEL).symlink_to(copies[0])
        command = python("-c", _COMMAND, "serve", str(folder / _MODEL), "--port", "0", *options)
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=PIPE, stderr=log, env=environment(folder / "temporary")
            )
        assert process.stdout is not None
        told = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while (line := await process.stdout.readline()) and not line.startswith(b"ready after"):
                    told.append(line.decode())
        found = re.match(r"listening on (\S+),", told[0]) if told else None
        if not found or process.returncode is not None:
            raise BenchError(f"server: has not begun: {(folder / 'log').read_text('utf-8')[-500:]}")
        return cls(process, found[1], folder, [*copies[1:], copies[0]])

    async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Ask all at once."""
        return list(await asyncio.gather(*map(self._ask, asks)))

    async def reload(self) -> None:
        """Move the link and send SIGHUP."""
        before = self._reloads()
        new = self._link.with_name("new")
        new.symlink_to(next(self._copies))
        os.replace(new, self._link)
        self._process.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while (after := self._reloads()) == before:
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise BenchError(f"server: has not reloaded within {_PATIENCE_S} s") from error
        if ": reloaded in" not in after[-1]:
            raise BenchError(f"server: {after[-1]}")

    def disconnect(self) -> None:
        """Close what the client keeps open."""
        self._client.close()

    async def close(self) -> int:
        """Stop it as an operator does."""
        self.disconnect()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return await self._process.wait()

    def _reloads(self) -> list[str]:
        return re.findall(r"^.*reloaded.*$", self._log.read_text("utf-8"), re.MULTILINE)

    async def _ask(self, ask: Ask) -> Outcome:
        try:
            if ask.way == "leave":
                return await self._leave(ask)
            if ask.way == "wrong":
                endpoint, data = _NONSENSE[int(ask.draw * len(_NONSENSE))]
                return _refused(await self._client.post(_path(endpoint), data))
            if ask.way == "tokenise":
                return _tokens(await self._client.post("/tokenize", {"prompt": ask.text}))
            if ask.way == "stream":
                return _streamed(await self._client.post(_path("generate_stream"), _body(ask)))
            extra = {"timeout_ms": 1000 * _LATE_WITHIN_S * ask.draw + 1e-3} if ask.way == "late" else {}
            return _answered(await self._client.post(_path("generate"), _body(ask, **extra)))
        except (BenchError, ServingError) as error:
            return f"failed: {error}"

    async def _leave(self, ask: Ask) -> Outcome:
        """Ask in one of two ways, and close the connection before the answer has come, or not."""
        is_stream = not ask.options
        asking = self._client.post(_path("generate_stream" if is_stream else "generate"), _body(ask))
        try:
            async with asyncio.timeout(_LEAVES_WITHIN_S * ask.draw):
                answer = await asking
        except TimeoutError:
            return "left"
        return (_streamed if is_stream else _answered)(answer)


def _path(endpoint: str) -> str:
    return f"/v2/models/{_MODEL}/{endpoint}"


def _body(ask: Ask, **parameters: Any) -> dict[str, Any]:
    return {"text_input": ask.text, "parameters": {**ask.options, **parameters}}


def _answered(answer: Response) -> Outcome:
    if answer.status == 504:
        return "late"
    if answer.status != 200:
        return _failed(answer)
    found = answer.json()["text_output"]
    return found if isinstance(found, list) else [found]


def _tokens(answer: Response) -> Outcome:
    return list(map(str, answer.json()["tokens"])) if answer.status == 200 else _failed(answer)


def _streamed(answer: Response) -> Outcome:
    if answer.status != 200:
        return _failed(answer)
    events = [event for event in answer.body.decode().split("\n\n") if event]
    if any(not event.startswith("data: ") for event in events):
        return f"failed: {answer.words}"
    return ["".join(json.loads(event.removeprefix("data: "))["text_output"] for event in events)]


def _refused(answer: Response) -> Outcome:
    is_short = len(answer.body) < 5000 and b"Traceback" not in answer.body
    return "refused" if 400 <= answer.status < 500 and is_short else _failed(answer)


def _failed(answer: Response) -> Outcome:
    return f"failed: {answer.status} {answer.words}"
