"""Requests and answers of the Triton backend, without Triton: an engine on a thread, and arrays."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfexport.errors import QueueFull, TfexportError
from tfexport.integrations.triton._requests import EngineThread, as_array, read_request
from tfexport.model.model import Model
from tfexport.serve.config import Limits, ServingConfig
from tfexport.serve.inference import InvalidRequestError, Tensor

TEXT = "Dienstag, 3. März 2026"


@dataclass(eq=False)
class Recorded:
    """A reply that records its parts."""

    parts: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    error: TfexportError | None = None
    cancelled: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)

    def send(self, outputs: Mapping[str, Tensor], *, is_last: bool) -> None:
        assert not self.is_over.is_set()
        self.parts.append({name: as_array(tensor) for name, tensor in outputs.items()})
        if is_last:
            self.is_over.set()

    def fail(self, error: TfexportError) -> None:
        assert not self.is_over.is_set()
        self.error = error
        self.is_over.set()

    def is_cancelled(self) -> bool:
        assert not self.is_over.is_set()
        return self.cancelled


def submit(thread: EngineThread, *sources: Any, **options: Any) -> Recorded:
    reply = Recorded()
    thread.answer(sources, [options] * len(sources), reply)
    return reply


def answered(thread: EngineThread, *sources: Any, **options: Any) -> Recorded:
    reply = submit(thread, *sources, **options)
    assert reply.is_over.wait(60)
    return reply


@pytest.fixture
def start(dates_bundle: Path) -> Iterator[Callable[..., EngineThread]]:
    """Return a function that starts an engine, which ends with the test."""
    threads = []

    def start_one(*, stream: bool, **config: Any) -> EngineThread:
        threads.append(EngineThread(dates_bundle, ServingConfig(**config), stream=stream, threads=1))
        return threads[-1]

    yield start_one
    for thread in threads:
        thread.finish()
    assert not [one for one in threading.enumerate() if one.name == "tfexport-loop"]


def test_answers_equal_those_of_generate(start: Callable[..., EngineThread], model: Model) -> None:
    thread = start(stream=False)
    (one,) = answered(thread, TEXT, "3 May 1999", num_beams=3, num_return_sequences=2).parts
    expected = [model.generate([text], num_beams=3, num_return_sequences=2) for text in (TEXT, "3 May 1999")]
    assert one["text_output"].tolist() == [[result.text.encode() for result in each] for each in expected]
    assert one["scores"].dtype == np.float32
    assert one["scores"] == pytest.approx(np.array([[result.score for result in each] for each in expected]))
    assert (one["output_ids"].dtype, one["output_ids"].shape[:2]) == (np.int64, (2, 2))
    assert "the text is empty" in str(answered(thread, TEXT, "").error)
    assert answered(thread, TEXT).error is None


def test_a_stream_has_several_parts(start: Callable[..., EngineThread], model: Model) -> None:
    thread = start(stream=True)
    (expected,) = model.generate([TEXT])
    *pieces, last = answered(thread, TEXT).parts
    assert pieces
    assert b"".join(piece["text_output"].item() for piece in pieces) == expected.text.encode()
    assert last["text_output"].tolist() == [b""]
    assert tuple(last["output_ids"]) == expected.token_ids
    assert last["finish_reason"].tolist() == [b"eos"]
    assert "num_beams is 2, but a stream" in str(answered(thread, TEXT, num_beams=2).error)


def test_abandoned_requests_are_cancelled_and_a_full_queue_rejects(start: Callable[..., EngineThread]) -> None:
    thread = start(stream=False, slots=1, max_waiting=1)
    replies = [submit(thread, TEXT) for _ in range(20)]
    for reply in replies:
        reply.cancelled = True
    assert all(reply.is_over.wait(60) for reply in replies)
    assert [reply for reply in replies if isinstance(reply.error, QueueFull)]
    assert answered(thread, TEXT).error is None


def triton_request(inputs: Mapping[str, Any], parameters: str = "", timeout: int = 0) -> Any:
    """Return a request with the methods of Triton's Python backend."""
    tensors = [
        SimpleNamespace(name=lambda name=name: name, as_numpy=lambda values=values: values)
        for name, values in inputs.items()
    ]
    return SimpleNamespace(inputs=lambda: tensors, parameters=lambda: parameters, timeout=lambda: timeout)


def texts(*values: bytes) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=object)


def test_inputs_and_parameters_are_read() -> None:
    inputs = {"text_input": texts(b"a", "ä".encode()), "prefix": texts(b"1", b"2"), "temperature": np.array([0.5])}
    parameters = {"do_sample": True, "suppress_tokens": "[3, 17]", "sequence_bias": "[[[3, 4], -2]]", "timeout_ms": 500}
    sources, options = read_request(triton_request(inputs, json.dumps(parameters), 250_000), Limits(), stream=False)
    assert sources == ["a", "ä"]
    given = {"temperature": 0.5, "do_sample": True, "suppress_tokens": [3, 17], "sequence_bias": [[[3, 4], -2]]}
    assert options == [{**given, "timeout_s": 0.25, "prefix": prefix} for prefix in ("1", "2")]


def test_ids_are_read_with_their_lengths_and_their_prefix() -> None:
    inputs = {"input_ids": np.array([[5, 6, 2], [7, 2, 0]]), "input_lengths": np.array([3, 2])}
    sources, _ = read_request(triton_request(inputs), Limits(), stream=False)
    assert sources == [[5, 6, 2], [7, 2]]
    stream = {"input_ids": np.array([5, 6, 2]), "prefix": texts(b"[11, 12]")}
    sources, (options,) = read_request(triton_request(stream), Limits(), stream=True)
    assert (sources, options["prefix"]) == ([[5, 6, 2]], [11, 12])


@pytest.mark.parametrize(
    ("inputs", "parameters", "why"),
    [
        ({}, "", "the inputs are none; expected text_input or input_ids"),
        ({"text_input": texts(b"\xff")}, "", "input text_input: text 1 is not UTF-8"),
        ({"text_input": texts()}, "", r"input text_input has the shape \[0\]"),
        ({"text_input": texts(b"a" * 2000)}, "", "the inputs are above the limit of 1024 bytes"),
        ({"text_input": texts(b"a" * 600), "prefix": texts(b"a" * 600)}, "", "the inputs are above the limit"),
        ({"text_input": texts(*[b"a"] * 65)}, "", "65 sources are given, the limit is 64"),
        ({"text_input": texts(b"a"), "top_p": np.array([np.nan])}, "", "input top_p has a value that is not finite"),
        ({"text_input": texts(b"a")}, '{"top_p": NaN}', "the parameters are not JSON: 'NaN' is not a finite number"),
        ({"text_input": texts(b"a")}, '{"topp": 1}', "unknown parameter 'topp'"),
        ({"text_input": texts(b"a")}, '{"suppress_tokens": "3,17"}', "suppress_tokens is not JSON"),
        ({"text_input": texts(b"a")}, '{"timeout_ms": "5"}', "timeout_ms is '5', expected a number"),
        ({"input_ids": np.array([[5]]), "prefix": texts(b"a")}, "", "prefix is not JSON"),
        ({"input_ids": np.array([[5]]), "text_input": texts(b"a")}, "", "expected text_input or input_ids"),
    ],
)
def test_invalid_requests_are_rejected(inputs: dict[str, Any], parameters: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        read_request(triton_request(inputs, parameters), Limits(max_body_bytes=1024), stream=False)
