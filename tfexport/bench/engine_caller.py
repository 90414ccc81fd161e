"""The server scenario in process: requests to the engine that a service would embed."""

from __future__ import annotations

import asyncio
import threading
from array import array

from tfexport.bench.open_loop import Answer, Source
from tfexport.bench.samples import MAX_STEPS, Samples
from tfexport.generation import DecodeConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer


class Watch(Observer):
    """Adds up what an engine tells of its work since `restart`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Forget what was noted."""
        self._queue_s, self._encode_s, self._step_s = array("d"), array("d"), array("d")
        self._encoding_s = self._stepping_s = 0.0
        self._num_steps = self._num_rows = 0

    def joined(self, waited_s: float, source_tokens: int) -> None:
        """Note how long a request has waited."""
        with self._lock:
            self._queue_s.append(waited_s)

    def encoded(self, took_s: float) -> None:
        """Note a run of the encoder."""
        with self._lock:
            self._encoding_s += took_s
            self._encode_s.append(took_s)

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Note steps, and how many rows they had; of those taken together, each counts the mean."""
        with self._lock:
            self._stepping_s += took_s
            self._num_steps += num_steps
            self._num_rows += num_steps * num_rows
            if len(self._step_s) + num_steps <= MAX_STEPS:
                self._step_s.extend([took_s / num_steps] * num_steps)

    def add_to(self, samples: Samples, slots: int) -> None:
        """Complete the samples of an open loop."""
        with self._lock:
            samples.queue_s, samples.encode_s, samples.step_s = self._queue_s, self._encode_s, self._step_s
            samples.encoding_s, samples.stepping_s = self._encoding_s, self._stepping_s
            samples.busy_s = samples.elapsed_s
            if self._num_steps:
                samples.slot_occupancy = self._num_rows / (self._num_steps * slots)


class EngineCaller:
    """Asks an engine, and notes when its tokens are there."""

    def __init__(self, engine: Engine, decoding: DecodeConfig) -> None:
        """Take an engine that was started, and how all requests are decoded."""
        self._engine, self._decoding = engine, decoding
        self._streams = decoding.num_beams == 1

    async def __call__(self, source: Source) -> Answer:
        """Ask with token ids; see `tfexport.bench.open_loop.Ask`."""
        assert not isinstance(source, str)
        clock, first = asyncio.get_running_loop().time, None
        generation = self._engine.submit_ids(source, stream=self._streams, config=self._decoding)
        if self._streams:
            async for _ in generation:
                first = first or clock()
        (best,) = await generation
        ended = clock()
        return Answer(first or min(generation.job.began, ended), ended, len(source), len(best.token_ids))
