"""An engine on an event loop of its own thread, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from os import PathLike
from typing import Any, TypeVar

from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine

Found = TypeVar("Found")


class EngineThread:
    """Starts an engine, and runs coroutines beside it.

    Attributes:
        engine: to be used on its event loop.
    """

    def __init__(self, bundle: str | PathLike[str], config: ServingConfig, **options: Any) -> None:
        """Start the thread, and the engine on it; its arguments are those of `Engine`.

        Raises:
            TfexportError: those of `Engine.start`.
        """
        self.engine = Engine(bundle, config, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tfexport-loop", daemon=True)
        self._thread.start()
        try:
            self.run(self.engine.start())
        except BaseException:
            self.stop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Found]) -> Found:
        """Run a coroutine on the event loop, and wait for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the event loop, behind those that were given before."""
        self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the thread; the engine was drained before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
