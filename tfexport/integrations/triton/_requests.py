"""Read requests from tensors of Triton's Python backend, and answer them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import numpy as np

from tfexport._io.strict_json import parse_json
from tfexport.errors import BackendError, TfexportError
from tfexport.model.result import Result
from tfexport.serve import inference
from tfexport.serve.config import Limits, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.inference import OUTPUTS, Answer, InvalidRequestError, Source, Submitted, Tensor

logger = logging.getLogger(__name__)
CANCEL_POLL_S = 0.1
_DATATYPES = {"bool": "BOOL", "int64": "INT64", "float32": "FP32", "float64": "FP64", "object": "BYTES"}
_NUMPY = {datatype: name for name, datatype in _DATATYPES.items()}


def read_request(request: Any, limits: Limits, *, stream: bool) -> tuple[list[Source], list[dict[str, Any]]]:
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    for tensor in request.inputs():
        tensors[tensor.name()], size = _read(tensor.name(), tensor.as_numpy())
        num_bytes += size
        if num_bytes > limits.max_body_bytes:
            raise InvalidRequestError(f"the inputs are above the limit of {limits.max_body_bytes} bytes; send less")
    if stream and (ids := tensors.get("input_ids")):  # one source without a batch dimension
        tensors["input_ids"] = Tensor(ids.name, ids.datatype, (1, *ids.shape), ids.values)
    sources, options = inference.parse_inputs(tensors, _parameters(request), limits)
    for source, given in zip(sources, options, strict=True):
        if not isinstance(source, str) and isinstance(given.get("prefix"), str):
            given["prefix"] = _parsed("prefix", given["prefix"])
    return sources, options


def part_outputs(items: Sequence[str] | Sequence[int]) -> dict[str, Tensor]:
    if isinstance(items[0], str):
        return {"text_output": Tensor("text_output", "BYTES", (1,), ["".join(map(str, items))])}
    return {"output_ids": Tensor("output_ids", "INT64", (len(items),), items)}


def last_outputs(answer: Answer) -> dict[str, Tensor]:
    """Return a stream's last outputs: an empty text and all ids."""
    values: dict[str, Sequence[Any]] = {"text_output": [""]} if isinstance(answer, Result) else {}
    values |= {"output_ids": answer.token_ids, "finish_reason": [answer.finish_reason]}
    if answer.score is not None:
        values["scores"] = [answer.score]
    return {name: Tensor(name, OUTPUTS[name][0], (len(given),), given) for name, given in values.items()}


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an output as an array; text becomes bytes in an object array."""
    values = [text.encode() for text in tensor.values] if tensor.datatype == "BYTES" else tensor.values
    return np.array(values, dtype=_NUMPY[tensor.datatype]).reshape(tensor.shape)


def _read(name: str, array: np.ndarray[Any, Any]) -> tuple[Tensor, int]:
    if array.size == 0:
        raise InvalidRequestError(f"input {name} has the shape {list(array.shape)}, expected sizes above 0")
    values, datatype = array.ravel().tolist(), _DATATYPES[array.dtype.name]
    size = sum(map(len, values)) if datatype == "BYTES" else array.nbytes
    if datatype == "BYTES":
        values = inference.texts(name, values)
    else:
        inference.check_finite(name, values)
    return Tensor(name, datatype, array.shape, values), size


def _parameters(request: Any) -> dict[str, Any]:
    try:
        given: dict[str, Any] = parse_json((request.parameters() or "{}").encode())
    except ValueError as error:
        raise InvalidRequestError(f"the parameters are not JSON: {error}") from error
    if timeout_us := request.timeout():
        given["timeout"] = timeout_us
    # Triton's parameters cannot be lists, so these options are JSON in a string.
    return given | {name: _parsed(name, given[name]) for name in inference.LISTS if isinstance(given.get(name), str)}


def _parsed(name: str, text: Any) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise InvalidRequestError(f'{name} is not JSON: {error}; write a list as in "[3, 17]"') from error


class Reply(Protocol):
    """Sends the answer to a request; unusable after the last part or an error."""

    def send(self, outputs: Mapping[str, Tensor], *, is_last: bool) -> None: ...

    def fail(self, error: TfexportError) -> None: ...

    def is_cancelled(self) -> bool: ...


class EngineThread:
    """Answers requests with an engine, on an event loop in its own thread."""

    def __init__(self, bundle: str | PathLike[str], config: ServingConfig, *, stream: bool, **options: Any) -> None:
        self.engine, self._stream = Engine(bundle, config, **options), stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[Reply, Sequence[Submitted]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tfexport-loop", daemon=True)
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self._stop()
            raise

    def answer(self, sources: Sequence[Source], options: Sequence[Mapping[str, Any]], reply: Reply) -> None:
        self._loop.call_soon_threadsafe(self._submit, sources, options, reply)

    def reject(self, reply: Reply, error: TfexportError) -> None:
        self._loop.call_soon_threadsafe(reply.fail, error)

    def finish(self) -> None:
        """Answer all accepted requests, and stop the engine and the thread."""
        self._run(self._drain())
        self._stop()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on the event loop

    async def _start(self) -> None:
        await self.engine.start()
        self._watcher = asyncio.create_task(self._cancel_abandoned())

    async def _drain(self) -> None:
        await self.engine.drain()
        await asyncio.gather(*self._tasks)
        self._watcher.cancel()

    def _submit(self, sources: Sequence[Source], options: Sequence[Mapping[str, Any]], reply: Reply) -> None:
        try:
            if self._stream:
                requests = [inference.submit(self.engine, sources[0], options[0], stream=True)]
            else:
                requests = inference.submit_all(self.engine, sources, options)
        except TfexportError as error:
            reply.fail(error)
            return
        self._open[reply] = requests
        task = asyncio.create_task(self._answer(requests, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, requests: Sequence[Submitted], reply: Reply) -> None:
        error: TfexportError | None = None
        try:
            if self._stream:
                outputs = await self._streamed(requests[0], reply)
            else:
                answers = [await request for request in requests]
                outputs = inference.outputs_of(answers, self.engine.model.spec.tokens.pad)
        except TfexportError as raised:
            error = raised
        except Exception:
            logger.exception("a request could not be answered")
            error = BackendError("the request could not be answered; see the server's log")
        # Triton must not be asked about a reply after its end was sent, so forget the reply first.
        for request in self._open.pop(reply):
            request.cancel()
        if error:
            reply.fail(error)
        else:
            reply.send(outputs, is_last=True)

    async def _streamed(self, request: Submitted, reply: Reply) -> dict[str, Tensor]:
        # Sending takes as long as a step of a small model, so send items together.
        async for items in request.together():
            reply.send(part_outputs(items), is_last=False)
        return last_outputs((await request)[0])

    async def _cancel_abandoned(self) -> None:
        while True:
            await asyncio.sleep(CANCEL_POLL_S)
            for reply, requests in tuple(self._open.items()):
                if reply.is_cancelled():
                    for request in requests:
                        request.cancel()
