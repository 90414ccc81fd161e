"""Audio and images over HTTP: `/v1/audio/transcriptions`, and forms for `generate`."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.features.signals import wav
from tests.serve.http.served import OFFERS, Served, on_port, serving
from tests.serve.http.test_refusals import check
from tests.serve.running import running
from tests.test_inputs import samples
from tfexport.model.model import Model
from tfexport.serve.config import HttpConfig

TRANSCRIBE = "/v1/audio/transcriptions"
FILE = ("speech.wav", wav(samples()), "audio/wav")


async def upload(served: Served, path: str = TRANSCRIBE, file: Any = FILE, **fields: str) -> Any:
    return await served.client.post(path, files={"file": file}, data=fields)


async def test_sixteen_uploads_at_once_get_the_text_of_the_model(speech_bundle: Path, speech: Model) -> None:
    files = [wav(samples(0.1 + 0.11 * number, number)) for number in range(16)]
    expected = [speech.generate([file])[0] for file in files]
    assert len({one.text for one in expected}) > 3
    async with serving(speech_bundle, slots=5) as served:
        answers = await asyncio.gather(*(upload(served, file=("a.wav", file)) for file in files))
        assert [answer.json() for answer in answers] == [{"text": one.text} for one in expected]
        positions = sum((len(source) + 1) // 2 for source in speech.read(files))
        assert served.metrics.measured().total("tfexport_source_tokens_total", "dates") == positions
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == len(files)


async def test_fields_of_a_transcription(speech_bundle: Path, speech: Model) -> None:
    async with serving(speech_bundle) as served:
        for fields, options in (
            ({"model": "dates", "temperature": "0", "language": "", "prompt": ""}, {}),
            ({"num_beams": "3", "max_new_tokens": "4"}, {"num_beams": 3, "max_new_tokens": 4}),
            ({"temperature": "0.9", "seed": "5"}, {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 5}),
        ):
            (expected,) = speech.generate([FILE[1]], **options)
            assert (await upload(served, **fields)).json() == {"text": expected.text}
            assert (await upload(served, **fields, response_format="text")).text == expected.text
        (expected,) = speech.generate([FILE[1]])
        lines = (await upload(served, stream="true")).text.split("\n\n")[:-1]
        *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {one["type"] for one in deltas} == {"transcript.text.delta"}
        assert "".join(one["delta"] for one in deltas) == expected.text
        assert done == {"type": "transcript.text.done", "text": expected.text}


BAD_FILES: tuple[tuple[bytes, str], ...] = (
    (b"", "is empty"),
    (b"hello", "is not audio in a supported format"),
    (b"\x1a\x45\xdf\xa3" + bytes(99), "is not audio in a supported format"),  # WebM
    (b"RIFF\x08\0\0\0WAVE", "is not a valid WAV file"),
    (FILE[1][:999], "is truncated"),
    (wav(samples(0.01)), "expected at least"),
    (wav(samples(61)), "has 61.0 s, expected at most 60 s"),
    (wav(np.zeros(0, np.int16)), "has no samples"),
    (wav(samples(5)), "the limit is 200"),
)
BAD_FIELDS: tuple[tuple[dict[str, str], str], ...] = (
    ({"language": "de"}, "language is 'de'"),
    ({"prompt": "Hello"}, "prompt is 'Hello'"),
    ({"response_format": "srt"}, "response_format is 'srt', expected 'json'"),
    ({"response_format": "verbose_json"}, "the model has no timestamps"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": "-1"}, "temperature is -1"),
    ({"stream": "perhaps"}, "stream is 'perhaps'"),
    ({"num_beams": "9"}, "num_beams is 9, the limit is 8"),
    ({"nonsense": "1"}, "unknown key nonsense"),
)
HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
BAD_BODIES: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"json": {"file": "a.wav"}}, 415, "expected multipart/form-data"),
    ({"data": {"file": "a.wav"}}, 415, "expected multipart/form-data"),
    ({"content": FILE[1], "headers": {"Content-Type": "audio/wav"}}, 415, "expected multipart/form-data"),
    ({"content": FILE[1], "headers": {"Content-Type": "multipart/form-data"}}, 400, "Missing boundary"),
    ({"content": FILE[1], "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, "is not a form"),
    (
        {"content": HEAD + FILE[1], "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        400,
        "The end is missing",
    ),
    ({"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, "The end is missing"),
    ({"files": {"model": (None, "dates")}}, 400, "missing key file"),
    ({"files": {"file": (None, "speech.wav")}}, 400, "file is a text, expected a file"),
    ({"files": {"model": FILE, "file": (None, "a")}}, 400, "is a file, expected a text"),
    ({"files": [("file", FILE), ("file", FILE)]}, 400, "Too many files"),
    ({"files": [("file", FILE), *[("model", (None, "dates"))] * 2]}, 400, "given twice"),
    ({"files": {"file": ("a.wav", bytes(25 << 20))}}, 413, "the limit is 26214400"),
    ({"files": {"file": FILE, "model": (None, "dates" * 300_000)}}, 400, "exceeded maximum size"),
    ({"files": {"file": FILE, "model": (None, "other")}}, 404, "model 'other' is unknown"),
)


async def test_bad_uploads_are_refused_with_the_reason(speech_bundle: Path) -> None:
    async with serving(speech_bundle) as served:

        async def refuses(answer: Any, status: int, why: str) -> None:
            error = (answer := await answer).json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (status, "invalid_request_error", status)
            assert why in error["message"], error

        for file, why in BAD_FILES:
            await refuses(upload(served, file=("a.wav", file)), 400, why)
            await refuses(upload(served, file=("a.wav", file), stream="true"), 400, why)
        for fields, why in BAD_FIELDS:
            await refuses(upload(served, **fields), 400, why)
        for body, status, why in BAD_BODIES:
            await refuses(served.client.post(TRANSCRIBE, **body), status, why)
        count = 2 * len(BAD_FILES) + len(BAD_FIELDS) + len(BAD_BODIES) - 1
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == count
        assert (await upload(served)).status_code == 200


async def test_an_upload_is_cut_at_the_limit_while_it_arrives(speech_bundle: Path) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield HEAD
        while True:
            sent += 1 << 14
            yield bytes(1 << 14)

    headers = {"Content-Type": "multipart/form-data; boundary=x", "Transfer-Encoding": "chunked"}
    for limit in (100_000, 3_000_000):
        async with serving(speech_bundle, HttpConfig(max_upload_bytes=limit)) as served:
            sent = 0
            answer = await served.client.post(TRANSCRIBE, content=endless(), headers=headers)
            assert (answer.status_code, str(limit) in answer.text) == (413, True)
            assert sent < limit + (1 << 16)
            assert (await upload(served)).status_code == 200


async def test_uploads_above_the_memory_of_sixteen_are_429(speech_bundle: Path) -> None:
    wait = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield HEAD + bytes(90_000)
        await wait.wait()

    headers = {"Content-Type": "multipart/form-data; boundary=x", "Transfer-Encoding": "chunked"}
    async with serving(speech_bundle, HttpConfig(max_upload_bytes=100_000, max_body_bytes=1024)) as served:
        asked = [
            asyncio.create_task(served.client.post(TRANSCRIBE, content=slow(), headers=headers)) for _ in range(20)
        ]
        done, held = await asyncio.wait(asked, timeout=0.5)
        assert (len(held), {task.result().status_code for task in done}) == (17, {429})
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == 3
        assert (await served.client.get("/livez")).status_code == 200
        wait.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {400}
        assert (await upload(served)).status_code == 200


async def test_forms_are_answered_by_generate(speech_bundle: Path, speech: Model) -> None:
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    expected = speech.generate([FILE[1]], **options)
    async with serving(speech_bundle) as served:
        fields = {"id": "7", "parameters": json.dumps(options)}
        found = (await upload(served, "/v2/models/dates/generate", **fields)).json()
        assert (found["id"], found["text_output"]) == ("7", [one.text for one in expected])
        lines = (await upload(served, "/v2/models/dates/generate_stream")).text.split("\n\n")[:-1]
        pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
        assert "".join(pieces) == speech.generate([FILE[1]])[0].text
        for parameters, why in (("x", "parameters is not JSON"), ('{"beams": 4}', "unknown key parameters.beams")):
            check(await upload(served, "/v2/models/dates/generate", parameters=parameters), 400, why)
        check(await upload(served, "/v2/models/dates/align"), 415, "expected application/json")


async def test_texts_and_files_are_for_their_models(speech_bundle: Path, dates_bundle: Path, tmp_path: Path) -> None:
    (path := tmp_path / "a.wav").write_bytes(FILE[1])
    asked = (
        ("/v1/completions", {"prompt": str(path)}),
        ("/v1/completions", {"prompt": str(path), "stream": True}),
        ("/translate", {"q": str(path), "source": "en", "target": "de"}),
        ("/v2/models/dates/generate", {"text_input": str(path)}),
        ("/v2/models/dates/generate_stream", {"text_input": str(path)}),
        ("/tokenize", {"prompt": str(path)}),
    )
    async with serving(speech_bundle, OFFERS) as served:
        for place, data in asked:
            answer = await served.client.post(place, json=data)
            assert (answer.status_code, "this model reads audio" in answer.text) == (400, True), place
        check(await served.post("generate", {"input_ids": [5, 6]}), 400, "expected numbers [frames, 20]")
    async with serving(dates_bundle, OFFERS) as served:
        for place in (TRANSCRIBE, "/v2/models/dates/generate", "/v2/models/dates/generate_stream"):
            answer = await upload(served, place)
            assert (answer.status_code, "the text is bytes, expected a text" in answer.text) == (400, True), place


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_uploads_a_file_as_the_server_shows(speech_bundle: Path, speech: Model, tmp_path: Path) -> None:
    (tmp_path / "speech.wav").write_bytes(FILE[1])
    with running(tmp_path, speech_bundle, "--threads", 1) as server:
        assert server.lines[1].endswith("up to 200 source positions and 24 target tokens")
        words = shlex.split(server.lines[-2])
        answer = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["text_output"] == speech.generate([FILE[1]])[0].text


@pytest.mark.parametrize("is_binary", [True, False])
def test_tensors_hold_features_or_files(speech_bundle: Path, speech: Model, is_binary: bool) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    files = [wav(samples(0.3 + number, number)) for number in range(3)]
    expected = [[speech.generate([file], num_beams=2)[0].text.encode()] for file in files]
    tensors = [triton.InferInput("features", features.shape, "FP32") for features in speech.read(files)]
    for tensor, features in zip(tensors, speech.read(files), strict=True):
        tensor.set_data_from_numpy(features, binary_data=is_binary)
    with on_port(speech_bundle, "speech") as address:
        client = triton.InferenceServerClient(address)
        found = [client.infer("speech", [tensor], parameters={"num_beams": 2}) for tensor in tensors]
        assert [one.as_numpy("text_output")[0].tolist() for one in found] == expected
        tensor = triton.InferInput("file_input", [3], "BYTES")
        tensor.set_data_from_numpy(np.array(files, object))
        found = client.infer("speech", [tensor], parameters={"num_beams": 2})
        assert found.as_numpy("text_output").tolist() == expected
        inputs = {one["name"]: (one["datatype"], one["shape"]) for one in client.get_model_metadata("speech")["inputs"]}
        client.close()
    assert inputs == {"file_input": ("BYTES", [-1]), "features": ("FP32", [-1, 20])}


def tensor(name: str = "features", **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [2, 20], "datatype": "FP32", "data": [0.5] * 40} | changes


BAD_TENSORS: tuple[tuple[list[dict[str, Any]], str], ...] = (
    ([tensor(shape=[40])], "expected float features [frames, 20]"),
    ([tensor(shape=[4, 10])], "expected float features [frames, 20]"),
    ([tensor(shape=[2, 21])], "has 40 values, its shape is [2, 21]"),
    ([tensor(datatype="FP64")], "features is FP64, expected FP32"),
    ([tensor(data=["a"])], "expected FP32"),
    ([tensor(data=[1e39])], "expected FP32"),
    ([tensor("pixels", shape=[1, 2, 20])], "expected float features [frames, 20]"),
    ([tensor(), tensor("pixels")], "the inputs are features, pixels; expected"),
    ([tensor(), {"name": "input_lengths", "shape": [1], "datatype": "INT64", "data": [2]}], "input_lengths is set"),
    ([tensor("file_input", shape=[1], datatype="BYTES", data=["RIFF"])], "expected binary data"),
    ([tensor("text_input", shape=[1], datatype="BYTES", data=["a.wav"])], "this model reads audio"),
    ([tensor("input_ids", shape=[1, 2], datatype="INT64", data=[5, 6])], "expected numbers [frames, 20]"),
)


async def test_bad_tensors_are_refused_with_the_reason(speech_bundle: Path, dates_bundle: Path) -> None:
    async with serving(speech_bundle, HttpConfig(max_body_bytes=2048, max_upload_bytes=4096)) as served:
        for inputs, why in BAD_TENSORS:
            check(await served.post("infer", {"inputs": inputs}), 400, why)
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == len(BAD_TENSORS)

        async def binary(datatype: str, data: bytes, shape: list[int], name: str = "features") -> Any:
            size = {"parameters": {"binary_data_size": len(data)}}
            head = json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": datatype} | size]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(head))}
            return await served.client.post("/v2/models/dates/infer", content=head + data, headers=headers)

        nan = np.full((3, 20), np.nan, np.float32).tobytes()
        check(await binary("FP32", nan, [3, 20]), 400, "infinite or not a number")
        check(await binary("FP32", nan[:-1], [3, 20]), 400, "not a whole number of FP32")
        check(await binary("FP32", bytes(5000), [1250]), 413, "the limit is 4096")
        check(await binary("FP32", bytes(3000), [750]), 400, "expected float features")
        check(await binary("FP32", bytes(8), [1] * 1000), 413, "the JSON has")
        parts = b"".join(len(part).to_bytes(4, "little") + part for part in (b"RIFF", b"x"))
        check(await binary("BYTES", parts, [2], "file_input"), 400, "source 1 of 2: ")
    async with serving(dates_bundle, HttpConfig(max_body_bytes=2048)) as served:
        check(await served.post("infer", {"inputs": [tensor()]}), 400, "the text is ")
        check(await binary("INT64", bytes(2400), [1, 300], "input_ids"), 413, "the limit is 2048")
