"""The server scenario over HTTP: `generate_stream` of Triton's generate extension, as `tfexport serve` has it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from tfexport.bench.http_client import HttpClient, Response
from tfexport.bench.open_loop import Answer, Source
from tfexport.bench.samples import Samples
from tfexport.errors import BenchError, ServingError
from tfexport.generation import DecodeConfig

# Too many requests, not ready or draining, too late: the server is well, and has no time.
BUSY = {429, 503, 504}
_SAMPLE = re.compile(r'(tfexport_\w+)\{[^}]*model="([^"]*)"[^}]*\} (\S+)')


class HttpCaller:
    """Asks a model of a server, and notes when its tokens come."""

    def __init__(self, client: HttpClient, model: str, decoding: DecodeConfig) -> None:
        """Take who carries requests, the name of the model, and how all are decoded."""
        self._client = client
        self._parameters: dict[str, Any] = {"num_beams": decoding.num_beams}
        if decoding.max_new_tokens is not None:
            self._parameters |= {
                "max_new_tokens": decoding.max_new_tokens,
                "min_new_tokens": decoding.min_new_tokens,
            }
        self._streams = decoding.num_beams == 1
        self._path = f"/v2/models/{quote(model, safe='')}/generate" + ("_stream" if self._streams else "")

    async def __call__(self, source: Source) -> Answer:
        """Ask with a text or token ids; see `tfexport.bench.open_loop.Ask`."""
        clock, came = asyncio.get_running_loop().time, list[float]()
        ids = await self.ids(source, lambda: came.append(clock()))
        length = 0 if isinstance(source, str) else len(source)
        return Answer(came[0] if self._streams else None, clock(), length, len(ids))

    async def ids(self, source: Source, on_data: Callable[[], None] = lambda: None) -> list[int]:
        """Return the token ids of the best answer.

        Raises:
            ServingError: the server has no time for it.
            BenchError: the server cannot be asked, or refuses the request for what it is.
        """
        key = "text_input" if isinstance(source, str) else "input_ids"
        answer = await self._client.post(self._path, {key: source, "parameters": self._parameters}, on_data)
        if answer.status in BUSY:
            raise ServingError(f"the server answers {answer.status}: {answer.words}")
        if answer.status != 200:
            raise BenchError(f"bench: the server answers {answer.status}: {answer.words}")
        last = _last_event(answer.body) if self._streams else answer.json()
        if "error" in last:
            raise ServingError(str(last["error"]))
        if not isinstance(last.get("output_ids"), list):
            raise BenchError("bench: the server's answer has no output_ids; expected one of tfexport serve")
        return list(last["output_ids"])


def _last_event(body: bytes) -> Any:
    """Return the data of the last event of a stream."""
    return Response(200, body.rstrip().rpartition(b"data: ")[2]).json()


async def only_model(client: HttpClient) -> str:
    """Return the name of the model of a server that has one.

    Raises:
        BenchError: it has several, or says nothing of models.
    """
    answer = await client.get("/v2")
    if answer.status != 200:
        raise BenchError(f"bench: the server answers {answer.status} to /v2: {answer.words}; name its model by --model")
    models = answer.json().get("models", [])
    if len(models) != 1:
        raise BenchError(f"bench: the server has the models {', '.join(models)}; choose one by --model")
    return str(models[0])


class Metrics:
    """What the metrics of a server have grown by since the last look; a server without them is fine."""

    def __init__(self, client: HttpClient, model: str) -> None:
        """Take who asks, and for which model."""
        self._client, self._model = client, model
        self._before: Mapping[str, float] = {}

    async def look(self) -> None:
        """Note how they stand."""
        self._before = await self._read()

    async def add_to(self, samples: Samples) -> None:
        """Complete the samples of an open loop with what the server says of it."""
        now = await self._read()
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        steps, slots = grown.get("tfexport_step_batch_size_count"), now.get("tfexport_slots")
        if steps and slots:
            samples.slot_occupancy = grown["tfexport_step_batch_size_sum"] / steps / slots
            samples.source_tokens = int(grown["tfexport_source_tokens_total"])
            samples.encoding_s = grown["tfexport_encode_seconds_sum"]
            samples.stepping_s = grown["tfexport_decode_step_seconds_sum"]
            samples.busy_s = samples.elapsed_s

    async def _read(self) -> dict[str, float]:
        answer = await self._client.get("/metrics")
        found = _SAMPLE.findall(answer.body.decode(errors="replace")) if answer.status == 200 else []
        return {name: float(value) for name, model, value in found if model == self._model and "_bucket" not in name}
