"""CUDA graphs of what a replica queues again and again, and the few of them that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from tfexport.trt.cuda import Cuda, Graph


class CudaGraphRunner:
    """What is queued on one stream again and again, always with the same shapes and addresses.

    The first time it is queued as it stands: an engine settles then what it does
    for the shapes it was given, which it may not while a graph is captured.
    Later calls capture it once under its name and launch the graph.
    """

    def __init__(self, cuda: Cuda, stream: int) -> None:
        """Begin without a graph."""
        self._cuda, self._stream = cuda, stream
        self._captures: bool | None = None
        self._graphs: dict[str, Graph] = {}

    def run(self, name: str, queue: Callable[[], None], can_capture: Callable[[], bool]) -> None:
        """Queue `queue`, or the graph that was made of it.

        Args:
            name: of what is queued; equal names stand for the same calls.
            queue: queues it on the stream, and neither waits nor allocates.
            can_capture: asked once, behind the first run. It is not kept: an owner and its replay would hold one
                another, and the contexts of both would stay until the garbage collector came, perhaps in a capture.

        Raises:
            BackendError: the library or CUDA refuses.
        """
        if not self._captures:
            queue()
            if self._captures is None:
                self._captures = can_capture()
            return
        if name not in self._graphs:
            with self._cuda.capture(self._stream) as graph:
                queue()
            self._graphs[name] = graph
        self._cuda.launch(self._graphs[name], self._stream)

    def close(self) -> None:
        """Free the graphs; none may be running."""
        while self._graphs:
            self._cuda.destroy_graph(self._graphs.popitem()[1])


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
