"""Serve from several processes: a parent accepts, its children answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from tfexport.errors import TfexportError
from tfexport.runtime.cpu import available_cores, share_cores
from tfexport.serve._link import Link
from tfexport.serve.http import unavailable
from tfexport.serve.server import IGNORED, SWITCH_INTERVAL_S, Server, leave, listen

assert sys.platform == "linux", "ServerConfig allows several processes only there"

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ACCEPTED_AT_ONCE = 64
FULL_S = 0.005  # wait if no child takes another connection
ANSWER_S = 5  # wait for a child that is asked for its health or metrics


class Processes(Server):
    """Serve bundles over HTTP from several processes, each with its own models.

    The parent loads no model. It passes each new connection to the next child, so that all have about the same number,
    and lets them stop and reload. Children ask it for the health and metrics of all, and end if it ends.
    """

    def run(self) -> bool:
        """Serve until a signal; return whether every accepted request was answered."""
        count, cores = self._config.processes, available_cores()
        if count > cores:
            logger.warning("%d processes on %d cores are slow under load; set --processes %d", count, cores, cores)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        share_cores(count)
        children: list[_Child] = []
        with contextlib.closing(listen(self._config, self._service.config.max_send_s)) as listener:
            gc.freeze()  # the collector would write to memory that all processes share
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                for _ in range(count):
                    children.append(self._start(listener, children))
                return asyncio.run(_Parent(listener, children).run())
            finally:
                for child in children:
                    child.process.kill()
                    child.process.join()

    def _start(self, listener: socket.socket, before: Sequence[_Child]) -> _Child:
        (link, link_of_child), (passing, passed) = socket.socketpair(), socket.socketpair()

        def serve() -> None:
            # Ctrl-C and systemd send signals to all processes. The parent decides what they mean.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            connections = _Passed(passed, listener.getsockname())
            for end in (listener, link, passing, *(end for child in before for end in (child.end, child.passing))):
                end.close()  # the parent's ends close when it ends, if no other process has them
            if before:  # the first one prints what all would print
                self._report = lambda line: None
                logging.disable(logging.WARNING)
            stop = partial(self._on_stop, signal.SIGTERM, None)
            functions = {"health": self._service.health, "measured": self._service.measured, "stop": stop}
            self._link = Link(link_of_child, functions | {"reload": self._reload_now})
            sys.exit(0 if asyncio.run(self._run(connections)) else 1)

        process = multiprocessing.get_context("fork").Process(target=serve)
        process.start()
        link_of_child.close()
        passed.close()
        return _Child(process, link, passing)

    async def _run(self, listener: socket.socket) -> bool:
        await self._link.connect()
        self._link.ended.add_done_callback(lambda ended: None if ended.cancelled() else leave(1))
        self._service.everywhere = self._everywhere
        is_done = await super()._run(listener)
        await self._link.call("keep", "measured", self._service.measured())
        return is_done

    async def _load(self) -> None:
        try:
            await super()._load()
        except (TfexportError, ModuleNotFoundError) as error:
            await self._link.call("fail", error)  # the parent raises it, and ends this process
        await self._link.call("ready")
        logging.disable(logging.NOTSET)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield

    async def _everywhere(self, method: str) -> list[Any]:
        found: list[Any] = await self._link.call("everywhere", method)
        if None in found:
            raise unavailable("a process of the server does not respond; see the log, and restart the server")
        return found

    async def _reload_now(self) -> None:
        self._begin_reload()
        if self._reloading:
            await self._reloading


class _Passed(socket.socket):
    """Connections that the parent accepts, as a socket that asyncio listens on."""

    def __init__(self, end: socket.socket, address: Any) -> None:
        super().__init__(fileno=end.detach())
        self._address = address

    def getsockname(self) -> Any:
        """Return the address of the server."""
        return self._address

    def listen(self, _backlog: int = 0) -> None:
        """Do nothing; the parent listens."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection."""
        _, descriptors, *_ = socket.recv_fds(self, 1, 1)
        if not descriptors:  # the parent has ended
            raise BlockingIOError
        return socket.socket(fileno=descriptors[0]), None


class _Child:
    """A process, as its parent sees it."""

    def __init__(self, process: BaseProcess, end: socket.socket, passing: socket.socket) -> None:
        self.process, self.end, self.passing = process, end, passing
        self._last: dict[str, Any] = {}

    async def connect(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.link = Link(self.end, {**functions, "keep": self._last.__setitem__})
        await self.link.connect()

    async def ask(self, method: str) -> list[Any]:
        """Return the result of a method, or None if the process does not respond.

        Counters must not fall while processes end, so a process that has ended counts with its last result.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                self._last[method] = await self.link.call(method)
        except TimeoutError:
            return [None]
        except ConnectionError:
            return [self._last[method]] if method in self._last else []
        return [self._last[method]]


class _Parent:
    """Pass connections, signals and questions on to the children until they end."""

    def __init__(self, listener: socket.socket, children: Sequence[_Child]) -> None:
        self._listener, self._children, self._turns = listener, children, itertools.cycle(children)
        self._held: socket.socket | None = None  # a connection that no child takes yet
        self._num_ready, self._are_ready = 0, asyncio.Event()
        self._is_stopping = self._was_signaled = False
        self._reloading: asyncio.Future[Any] | None = None

    async def run(self) -> bool:
        """Return whether every accepted request was answered.

        Raises the error of a child that cannot load.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        functions: dict[str, Callable[..., Any]] = {
            "everywhere": self._everywhere,
            "ready": self._ready,
            "fail": self._fail,
        }
        for child in self._children:
            await child.connect(functions)
            child.passing.setblocking(False)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        ends = asyncio.gather(*map(self._end_of, self._children))
        await asyncio.wait([ends, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            await self._failure
        return all(ends.result())

    async def _end_of(self, child: _Child) -> bool:
        await child.link.ended
        await asyncio.to_thread(child.process.join)
        code, was_stopping = child.process.exitcode or 0, self._is_stopping
        if code < 0 or not was_stopping:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            logger.error("process %s has ended unexpectedly (%s); the server stops", child.process.pid, how)
        if not was_stopping:
            self._stop()
        return was_stopping and code == 0

    async def _everywhere(self, method: str) -> list[Any]:
        return [*itertools.chain(*await asyncio.gather(*(child.ask(method) for child in self._children)))]

    async def _ready(self) -> None:
        self._num_ready += 1
        if self._num_ready == len(self._children):
            self._are_ready.set()
        await self._are_ready.wait()

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():  # all processes may fail for the same reason
            self._failure.set_exception(error)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._held is None:
                try:
                    self._held, _ = self._listener.accept()
                except OSError:  # no connection waits, or its client has left
                    return
            if not self._pass_on(self._held):
                self._loop.remove_reader(self._listener)
                self._loop.call_later(FULL_S, self._accept_again)
                return
            self._held.close()
            self._held = None

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        self._accept()

    def _pass_on(self, connection: socket.socket) -> bool:
        for child in itertools.islice(self._turns, len(self._children)):
            with contextlib.suppress(OSError):  # it takes no more for now, or has ended
                socket.send_fds(child.passing, [b"c"], [connection.fileno()])
                return True
        return False

    def _stop(self) -> None:
        self._is_stopping = True
        if self._are_ready.is_set():
            self._stopping = asyncio.create_task(self._everywhere("stop"))
        else:
            self._kill()

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()

    def _on_stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._was_signaled:
            self._kill()
            leave(128 + number, f"{name} again: aborted")
        if not self._are_ready.is_set():
            self._kill()
            leave(0, f"{name}: stopped before it was ready")
        self._was_signaled = True
        if not self._is_stopping:
            self._stop()

    def _on_reload(self) -> None:
        if not self._are_ready.is_set() or self._is_stopping or (self._reloading and not self._reloading.done()):
            logger.warning(IGNORED)
        else:
            reloads = (child.link.call("reload") for child in self._children)
            self._reloading = asyncio.gather(*reloads, return_exceptions=True)
