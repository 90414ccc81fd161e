"""CUDA graphs of what a replica queues again and again, and the few of them that it keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from tfexport.errors import BackendError
from tfexport.tensorrt.cuda import Cuda, Graph

# Graphs of one kind that a replica keeps. Six batch sizes, three source lengths and two numbers of candidates are 36:
# one too few, and a batch that shrinks makes each of them anew, for a context, a run and a capture.
MAX_GRAPHS = 64

_log = logging.getLogger(__name__)


class CaptureSwitch:
    """Whether a session captures CUDA graphs: until one capture has failed, for what one engine cannot others cannot.

    Attributes:
        is_on: whether it does.
    """

    def __init__(self) -> None:
        """Begin switched on."""
        self.is_on = True

    def switch_off(self, reason: BackendError) -> None:
        """Capture nothing any more, and say so the first time."""
        if self.is_on:
            self.is_on = False
            _log.warning("trt: decoding goes on without CUDA graphs, so steps take longer: %s", reason)


class CudaGraphRunner:
    """What is queued on one stream again and again, always with the same shapes and addresses.

    The first time it is queued as it stands: an engine settles then what it does
    for the shapes it was given, which it may not while a graph is captured.
    Later calls capture it once under its name and launch the graph. Where a capture
    fails, it is queued as it stands for good, as in NVIDIA's samples
    (https://github.com/NVIDIA/TensorRT, samples/common/sampleInference.cpp).
    """

    def __init__(self, cuda: Cuda, stream: int, switch: CaptureSwitch) -> None:
        """Begin without a graph; the switch is the session's."""
        self._cuda, self._stream, self._switch = cuda, stream, switch
        self._captures: bool | None = None
        self._graphs: dict[str, Graph] = {}

    def run(self, name: str, queue: Callable[[], None], can_capture: Callable[[], bool]) -> None:
        """Queue `queue`, or the graph that was made of it.

        Args:
            name: of what is queued; equal names stand for the same calls.
            queue: queues it on the stream, and neither waits nor allocates. Called again when its capture has failed.
            can_capture: asked once, behind the first run. It is not kept: an owner and its replay would hold one
                another, and the contexts of both would stay until the garbage collector came, perhaps in a capture.

        Raises:
            BackendError: the library or CUDA refuses.
        """
        if self._captures and name not in self._graphs and self._switch.is_on:
            self._capture(name, queue)
        if name in self._graphs:
            self._cuda.launch(self._graphs[name], self._stream)
            return
        queue()
        if self._captures is None:
            self._captures = can_capture()

    def close(self) -> None:
        """Free the graphs; none may be running."""
        while self._graphs:
            self._cuda.destroy_graph(self._graphs.popitem()[1])

    def _capture(self, name: str, queue: Callable[[], None]) -> None:
        self._cuda.synchronize(self._stream)  # the first run may still be settling things
        try:
            with self._cuda.capture(self._stream) as graph:
                queue()
        except BackendError as error:
            self._switch.switch_off(error)
        else:
            self._graphs[name] = graph


class Closable(Protocol):
    """What has something to free."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class LruCache(Generic[T]):
    """The most recently used things by key. What it gives up it closes."""

    def __init__(self, most: int, before_close: Callable[[], None]) -> None:
        """Keep `most` things; `before_close` is called before some are closed."""
        self._most, self._before_close = most, before_close
        self._items: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what stands under `key`, made if it is not there."""
        found = self._items.pop(key, None)
        if found is None:
            if len(self._items) == self._most:
                self._before_close()
                self._items.pop(next(iter(self._items))).close()
            found = make()
        self._items[key] = found  # dictionaries keep the order in which keys came
        return found

    def clear(self) -> None:
        """Give up everything."""
        if self._items:
            self._before_close()
        while self._items:
            self._items.popitem()[1].close()
