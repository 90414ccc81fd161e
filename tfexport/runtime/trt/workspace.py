"""What the parts of a replica share: the engines, a stream, buffers and the memory for activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfexport.errors import BackendError
from tfexport.runtime.trt.engine import Context, Engine, Use
from tfexport.runtime.trt.resources import Memory, Pinned
from tfexport.spec import Form, ModelSpec
from tfexport.trt.config import EngineLimits
from tfexport.trt.cuda import Cuda

_ACTIVATIONS = "activations"


@dataclass(frozen=True)
class EngineSet:
    """What all replicas of a session share.

    Attributes:
        engines: by name of the graph.
        spec: of the model, in the precision of the engines.
        form: of the decoder; None for an encoder alone.
        limits: the largest shapes.
        cuda: the device.
    """

    engines: Mapping[str, Engine]
    spec: ModelSpec
    form: Form | None
    limits: EngineLimits
    cuda: Cuda


class DeviceResources:
    """A stream and its memory. Everything on it runs one after the other, so all contexts share their activations.

    Attributes:
        engines: what the session has.
        cuda: the device.
        stream: the only one that uses the buffers.
        memory: device buffers by tensor name.
        pinned: host arrays.
    """

    def __init__(self, engines: EngineSet) -> None:
        """Make the stream, and room for the activations of the engine that needs most.

        Raises:
            BackendError: the device has too little memory.
        """
        self.engines, self.cuda = engines, engines.cuda
        self.stream = engines.cuda.stream()
        self.memory = Memory(engines.cuda, self.stream)
        self.pinned = Pinned(engines.cuda)
        self._events: list[int] = []
        try:
            self.memory.reserve({_ACTIVATIONS: max(engine.num_bytes for engine in engines.engines.values())})
        except BackendError:
            self.close()
            raise

    def context(self, engine: str, profile: int = 0, use: Use = "any shapes") -> Context:
        """Make a context of an engine on this stream; see `Engine.context`."""
        activations = self.memory[_ACTIVATIONS]
        return self.engines.engines[engine].context(profile, activations, self.stream, use)

    def event(self) -> int:
        """Make an event, which `close` frees."""
        self._events.append(self.cuda.event())
        return self._events[-1]

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        self.cuda.synchronize(self.stream)

    def close(self) -> None:
        """Free memory, events and stream; nothing may run, and no context or graph may be used afterwards."""
        self.memory.close()
        self.pinned.close()
        while self._events:
            self.cuda.destroy_event(self._events.pop())
        self.cuda.destroy_stream(self.stream)
