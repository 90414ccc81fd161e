"""Read requests from tensors of Triton's Python backend, and answer them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, TypeVar

import numpy as np

from tfexport._io.strict_json import parse_json
from tfexport.errors import BackendError, TfexportError
from tfexport.model.result import Result
from tfexport.serve.config import Limits, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.inference import (
    OUTPUTS,
    Answer,
    InvalidRequestError,
    Source,
    Submitted,
    Tensor,
    check_finite,
    outputs_of,
    parse_inputs,
    submit,
    submit_all,
    texts,
)

_DATATYPES = {"bool": "BOOL", "int64": "INT64", "float32": "FP32", "float64": "FP64", "object": "BYTES"}
_NUMPY = {datatype: name for name, datatype in _DATATYPES.items()}
# Triton's parameters cannot be lists, so these options are JSON in a string.
_LISTS = ("suppress_tokens", "bad_words_ids", "eos_token_id", "forced_eos_token_id")


def read_request(request: Any, limits: Limits, *, stream: bool) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the sources of a request, and the arguments of `submit` for each.

    If `stream`, the request has one source, and its tensors have no batch dimension.
    """
    tensors: dict[str, Tensor] = {}
    left = limits.max_body_bytes
    for given in request.inputs():
        tensor, size = _read(given.name(), given.as_numpy())
        if (left := left - size) < 0:
            raise InvalidRequestError(f"the inputs are above the limit of {limits.max_body_bytes} bytes; send less")
        tensors[tensor.name] = tensor
    if stream and (ids := tensors.get("input_ids")):
        tensors["input_ids"] = Tensor(ids.name, ids.datatype, (1, *ids.shape), ids.values)
    sources, options = parse_inputs(tensors, _parameters(request), limits)
    return sources, [_with_ids(source, given) for source, given in zip(sources, options, strict=True)]


def part_outputs(items: Sequence[str] | Sequence[int]) -> dict[str, Tensor]:
    """Return a stream's outputs for new pieces of text or new tokens."""
    if isinstance(items[0], str):
        return {"text_output": Tensor("text_output", "BYTES", (1,), ["".join(map(str, items))])}
    return {"output_ids": Tensor("output_ids", "INT64", (len(items),), items)}


def last_outputs(answer: Answer) -> dict[str, Tensor]:
    """Return a stream's last outputs: an empty text and all ids."""
    values: dict[str, Sequence[Any]] = {
        **({"text_output": [""]} if isinstance(answer, Result) else {}),
        "output_ids": answer.token_ids,
        "scores": [answer.score],
        "finish_reason": [answer.finish_reason],
    }
    return {name: Tensor(name, OUTPUTS[name][0], (len(given),), given) for name, given in values.items()}


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an output as an array; text becomes bytes in an object array."""
    values: Iterable[Any] = tensor.values
    if tensor.datatype == "BYTES":
        values = [text.encode() for text in tensor.values]
    return np.array(values, dtype=_NUMPY[tensor.datatype]).reshape(tensor.shape)


def _read(name: str, array: np.ndarray[Any, Any]) -> tuple[Tensor, int]:
    if array.size == 0:
        raise InvalidRequestError(f"input {name} has the shape {list(array.shape)}, expected sizes above 0")
    values, datatype = array.ravel().tolist(), _DATATYPES[array.dtype.name]
    size = sum(map(len, values)) if datatype == "BYTES" else array.nbytes
    if datatype == "BYTES":
        values = texts(name, values)
    else:
        check_finite(name, values)
    return Tensor(name, datatype, array.shape, values), size


def _parameters(request: Any) -> dict[str, Any]:
    try:
        given: dict[str, Any] = parse_json((request.parameters() or "{}").encode())
    except ValueError as error:
        raise InvalidRequestError(f"the parameters are not JSON: {error}") from error
    if timeout_us := request.timeout():
        given["timeout"] = timeout_us
    return given | {name: _parsed(name, given[name]) for name in _LISTS if isinstance(given.get(name), str)}


def _with_ids(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    # If the source is a list of ids, the prefix is one too.
    prefix = given.get("prefix")
    is_listed = isinstance(prefix, str) and not isinstance(source, str)
    return {**given, "prefix": _parsed("prefix", prefix)} if is_listed else dict(given)


def _parsed(name: str, text: Any) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise InvalidRequestError(f'{name} is not JSON: {error}; write a list as in "[3, 17]"') from error


logger = logging.getLogger(__name__)
# Seconds between checks for cancelled requests.
GONE_S = 0.1


class Reply(Protocol):
    """Sends the answer to a request; unusable after the last part or an error."""

    def send(self, outputs: Mapping[str, Tensor], *, is_last: bool) -> None:
        """Send tensors."""

    def fail(self, error: TfexportError) -> None:
        """Send an error."""

    def is_gone(self) -> bool:
        """Return whether the client has cancelled the request."""
        ...


class Answering:
    """Tracks an engine's unanswered requests; use it only on the engine's event loop."""

    def __init__(self, engine: Engine, *, stream: bool) -> None:
        self._engine, self._stream = engine, stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[Reply, Sequence[Submitted]] = {}
        self._watcher = asyncio.create_task(self._watch())

    def take(self, sources: Sequence[Source], options: Sequence[Mapping[str, Any]], reply: Reply) -> None:
        """Submit a request to the engine, and answer it when it is done."""
        try:
            if self._stream:
                asked = [submit(self._engine, sources[0], options[0], stream=True)]
            else:
                asked = submit_all(self._engine, sources, options)
        except TfexportError as error:
            reply.fail(error)
            return
        self._open[reply] = asked
        task = asyncio.create_task(self._answer(asked, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Answer all accepted requests and stop the engine."""
        await self._engine.drain()
        await asyncio.gather(*self._tasks)
        self._watcher.cancel()

    async def _answer(self, asked: Sequence[Submitted], reply: Reply) -> None:
        try:
            outputs = await (self._streamed(asked[0], reply) if self._stream else self._whole(asked))
        except TfexportError as error:
            self._close(reply)
            reply.fail(error)
        except Exception:
            logger.exception("a request could not be answered")
            self._close(reply)
            reply.fail(BackendError("the request could not be answered; the server's log says why"))
        else:
            self._close(reply)
            reply.send(outputs, is_last=True)

    async def _whole(self, asked: Sequence[Submitted]) -> dict[str, Tensor]:
        found = [await one for one in asked]
        return outputs_of(found, self._engine.model.spec.tokens.pad)

    async def _streamed(self, asked: Submitted, reply: Reply) -> dict[str, Tensor]:
        async for items in asked.together():  # sending takes as long as a step of a small model, so send items together
            reply.send(part_outputs(items), is_last=False)
        return last_outputs((await asked)[0])

    def _close(self, reply: Reply) -> None:
        # Triton must not be asked about a reply after its end was sent, so forget the reply first.
        for one in self._open.pop(reply):
            one.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(GONE_S)
            for reply, asked in tuple(self._open.items()):
                if reply.is_gone():
                    for one in asked:
                        one.cancel()


Found = TypeVar("Found")


class EngineThread:
    """An engine on an event loop in its own thread; use the engine on that loop only."""

    def __init__(self, bundle: str | PathLike[str], config: ServingConfig, **options: Any) -> None:
        """Start the thread and the engine; arguments and errors are those of `Engine`."""
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
        """Run a coroutine on the event loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the event loop, after earlier calls."""
        self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the thread; the engine must be drained."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
