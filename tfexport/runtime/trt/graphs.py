"""Run something directly the first time and as a CUDA graph ever after."""

from __future__ import annotations

from collections.abc import Callable

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
