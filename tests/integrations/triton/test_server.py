"""Models in a real Triton server: answers, errors and faults, as its own clients see them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import queue
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.integrations.triton.server import PYTHON, Client, Triton, triton
from tests.serve.http.test_generate import KINDS
from tests.serve.running import PATIENCE_S, eventually
from tests.test_docs import blocks
from tfexport.integrations.triton.repository import write_repository
from tfexport.model.model import Model
from tfexport.serve.config import Limits, ServingConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no Triton server is installed; scripts/triton-tests installs one"),
]
TEXT, ISO = "Dienstag, 3. März 2026", "2026-03-03"
LONGEST = 4096
IDS = [5, 6, 7, 2]


@pytest.fixture(scope="module")
def long_bundle(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Export the preset tiny for targets of thousands of tokens, which take seconds."""
    import torch

    from tfexport.export import export_bundle
    from tfexport.export.config import ExportConfig
    from tfexport.nn.directory import save_model
    from tfexport.nn.presets import preset
    from tfexport.nn.transformer import Transformer

    def make(path: Path) -> None:
        torch.manual_seed(0)
        directory = path.with_name("long-model")
        save_model(Transformer(dataclasses.replace(preset("tiny"), max_target_length=LONGEST)), directory)
        export_bundle(str(directory), path, ExportConfig(variants=("contrib",)), verify=False)

    return once("long", make)


@pytest.fixture(scope="module")
def repository(dates_bundle: Path, long_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundles = {"dates": dates_bundle, "long": long_bundle}
    return write(bundles, tmp_path_factory.mktemp("triton") / "models")


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with triton(tmp_path_factory.mktemp("server"), repository) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Triton) -> Client:
    return Client(server, request.param)


def write(bundles: dict[str, Path], output: Path, stream: bool = True, **config: Any) -> Path:
    serving = ServingConfig(**config)
    return write_repository(bundles, output, serving=serving, limits=Limits(), stream=stream, threads=1)


def exactly(number: int) -> dict[str, int]:
    return {"max_new_tokens": number, "min_new_tokens": number}


def as_parameters(options: dict[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in options.items()}


def error_of(client: Client, *inputs: Any, model: str = "dates", **parameters: Any) -> str:
    """Return the status and message of a failed request."""
    with pytest.raises(client.module.InferenceServerException) as raised:
        client.infer(model, *inputs, **parameters)
    assert "\n" not in raised.value.message()
    return f"{raised.value.status()} {raised.value.message()}"


class Answers:
    """A callback of the gRPC client that records results and errors."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any = None, error: Any = None) -> None:
        self.received.put((result, error))

    def next(self) -> Any:
        result, error = self.received.get(timeout=PATIENCE_S)
        if error:
            raise error
        return result


def streamed(client: Client, model: str, *inputs: Any, **parameters: Any) -> list[Any]:
    """Return all parts of a stream; the last one has the finish reason."""
    answers = Answers()
    client.client.start_stream(answers)
    try:
        client.client.async_stream_infer(model, list(inputs), parameters=parameters or None)
        parts = [answers.next()]
        while parts[-1].as_numpy("finish_reason") is None:
            parts.append(answers.next())
    finally:
        client.client.stop_stream()
    return parts


def post(server: Triton, path: str, data: Any) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path, json.dumps(data), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.parametrize("options", KINDS, ids=lambda options: ",".join(options) or "greedy")
def test_answers_are_those_of_generate(client: Client, model: Model, texts: list[str], options: dict[str, Any]) -> None:
    strings = options.get("stop_strings", [])
    inputs = [client.tensor("stop_strings", [one.encode() for one in strings])] if strings else []
    parameters = as_parameters({name: value for name, value in options.items() if name != "stop_strings"})
    for start in range(0, 24, 8):
        some = texts[start : start + 8]
        found = client.infer(
            "dates", client.tensor("text_input", [one.encode() for one in some]), *inputs, **parameters
        )
        expected = [model.generate([text], **options) for text in some]
        assert found.as_numpy("text_output").tolist() == [[one.text.encode() for one in each] for each in expected]
        scores = np.array([[one.score for one in each] for each in expected])
        assert found.as_numpy("scores") == pytest.approx(scores, abs=1e-5)
        lengths, ids = found.as_numpy("output_lengths"), found.as_numpy("output_ids")
        token_ids = [[tuple(ids[i, j, :n]) for j, n in enumerate(row)] for i, row in enumerate(lengths)]
        assert token_ids == [[one.token_ids for one in each] for each in expected]
        reasons = [[one.finish_reason.encode() for one in each] for each in expected]
        assert found.as_numpy("finish_reason").tolist() == reasons


def test_ids_of_unequal_length(client: Client, model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    sources = model.tokenizer.encode(texts[:8])
    padded = np.zeros((8, max(map(len, sources))), np.int64)
    for row, source in zip(padded, sources, strict=True):
        row[: len(source)] = source
    lengths = client.tensor("input_lengths", [len(source) for source in sources])
    found = client.infer("dates", client.tensor("input_ids", padded), lengths, prefix="[12]")
    expected = model.generate_ids(sources, prefixes=[[12]] * 8)
    rows = zip(found.as_numpy("output_ids")[:, 0], found.as_numpy("output_lengths")[:, 0], strict=True)
    assert [tuple(row[:length]) for row, length in rows] == [one.token_ids for (one,) in expected]
    assert found.as_numpy("text_output") is None


def test_options_may_be_inputs(client: Client, model: Model, texts: list[str]) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "seed": 3, "suppress_tokens": [20, 21]}
    inputs = [client.tensor(name, value if isinstance(value, list) else [value]) for name, value in options.items()]
    sources = client.tensor("text_input", [text.encode() for text in texts[:2]])
    found = client.infer("dates", sources, client.tensor("prefix", [b"1", b"20"]), *inputs)
    expected = [
        model.generate([text], prefixes=[prefix], **options)[0].text
        for text, prefix in zip(texts[:2], ("1", "20"), strict=True)
    ]
    assert [one.decode() for one in found.as_numpy("text_output")[:, 0]] == expected


def test_triton_s_generate_endpoints(server: Triton, model: Model) -> None:
    data = {"text_input": TEXT, "num_beams": 4, "length_penalty": 0.4, "suppress_tokens": [20, 21]}
    (expected,) = model.generate([TEXT], num_beams=4, length_penalty=0.4, suppress_tokens=[20, 21])
    status, body = post(server, "/v2/models/dates/generate", data)
    assert status == 200, body
    assert json.loads(body)["text_output"] == expected.text
    assert json.loads(body)["output_ids"] == list(expected.token_ids)
    status, body = post(server, "/v2/models/dates_stream/generate_stream", {"text_input": TEXT})
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == ISO
    assert events[-1]["finish_reason"] == "eos"


def test_the_client_of_the_guide(server: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block for block in blocks(ROOT / "docs" / "guides" / "triton.md") if block.language == "python")
    assert "127.0.0.1:8000" in program.text
    exec(compile(program.text.replace("127.0.0.1:8000", server.http), program.name, "exec"), {})
    assert capsys.readouterr().out == program.prints


def test_streams_have_several_parts(server: Triton, model: Model, texts: list[str]) -> None:
    client = Client(server, "grpc")
    for text in texts[:8]:
        *pieces, last = streamed(client, "dates_stream", client.tensor("text_input", [text.encode()]))
        (expected,) = model.generate([text])
        assert "".join(piece.as_numpy("text_output").item().decode() for piece in pieces) == expected.text
        assert pieces
        assert (last.as_numpy("text_output").item(), last.as_numpy("finish_reason").item()) == (b"", b"eos")
        assert tuple(last.as_numpy("output_ids")) == expected.token_ids
    *parts, last = streamed(client, "long_stream", client.tensor("input_ids", IDS), **exactly(50))
    ids = last.as_numpy("output_ids").tolist()
    assert [token for part in parts for token in part.as_numpy("output_ids").tolist()] == ids
    assert len(ids) == 50
    for parameters, why in (({"num_beams": 2}, "only one answer"), ({"nonsense": 1}, "unknown parameter")):
        with pytest.raises(client.module.InferenceServerException, match=why):
            streamed(client, "dates_stream", client.tensor("text_input", [TEXT.encode()]), **parameters)
    with pytest.raises(client.module.InferenceServerException, match="the text is empty"):
        streamed(client, "dates_stream", client.tensor("text_input", [b""]))


def test_invalid_requests_fail_with_one_line(client: Client, server: Triton, model: Model) -> None:
    """Triton's own checks, the conversion of tensors and the engine; test_answering.py has more cases."""
    text = client.tensor("text_input", [TEXT.encode()])
    ids = client.tensor("input_ids", [IDS])
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([client.tensor("text_input", [5])], {}, "data-type is 'INT64'"),
        ([client.tensor("text_input", [[TEXT.encode()]])], {}, "unexpected shape"),
        ([client.tensor("bogus", [5]), text], {}, "unexpected inference input 'bogus'"),
        ([client.tensor("num_beams", [2, 3]), text], {}, "unexpected shape"),
        ([], {}, "expected text_input or input_ids"),
        ([client.tensor("text_input", np.array([], object))], {}, "has the shape [0]"),
        ([client.tensor("text_input", [b"\xff\xfe"])], {}, "text 1 is not UTF-8"),
        ([client.tensor("text_input", [TEXT.encode(), b"  "])], {}, "source 2 of 2: "),
        ([client.tensor("text_input", [b"a" * 100_000])], {}, "the text has 100000 characters"),
        ([client.tensor("text_input", [b"a" * 2_000_000])], {}, "above the limit of 1048576 bytes"),
        ([client.tensor("input_ids", [[5] * 65])], {}, "65"),
        ([client.tensor("input_ids", [[2**62]])], {}, "expected ids 0 to"),
        ([ids, client.tensor("input_lengths", [5])], {}, "input_lengths does not fit"),
        ([text], {"top_p": math.inf}, "'Infinity' is not a finite number"),
        ([text], {"topp": 0.5}, "unknown parameter 'topp'"),
        ([text], {"num_beams": 9}, "num_beams is 9, the limit is 8"),
        ([text], {"temperature": 0.5}, "temperature is 0.5 but do_sample is false"),
        ([text, client.tensor("seed", [1])], {"seed": 2}, "seed is given as a parameter and as an input"),
        ([text], {"timeout_ms": -1}, "timeout_ms is -1, expected above 0"),
    ]
    for inputs, parameters, why in cases:
        error = error_of(client, *inputs, **parameters)
        assert why in error
        assert error.startswith("400 " if client.kind == "http" else "StatusCode.INVALID_ARGUMENT "), error
    assert client.asked("dates", TEXT) == [[ISO]]
    assert client.client.is_server_ready()
    assert server.process.poll() is None


def test_short_requests_finish_before_a_long_one(server: Triton) -> None:
    client, answers = Client(server, "grpc"), Answers()
    ids = client.tensor("input_ids", [IDS])
    client.infer("long", ids, **exactly(10))
    for length in (4000, *[10] * 12):
        client.client.async_infer("long", [ids], callback=answers, parameters=exactly(length))
    lengths = [answers.next().as_numpy("output_lengths").item() for _ in range(13)]
    assert lengths == [*[10] * 12, 4000]


def test_cancelled_requests_free_their_slots(long_bundle: Path, tmp_path: Path) -> None:
    """The request would take a minute; another one takes its slot as soon as it is cancelled."""
    repository = write({"long": long_bundle}, tmp_path / "models", stream=False, slots=1)
    with triton(tmp_path / "work", repository) as server:
        client, answers = Client(server, "grpc"), Answers()
        many = client.tensor("input_ids", [IDS] * 64)
        ids = client.tensor("input_ids", [IDS])
        call = client.client.async_infer("long", [many], callback=answers, parameters=exactly(LONGEST))
        eventually(lambda: execution_count(client, "long") == 1)
        call.cancel()
        with pytest.raises(client.module.InferenceServerException, match="ancelled"):
            answers.next()
        began = time.perf_counter()
        assert client.infer("long", ids, **exactly(10)).as_numpy("output_lengths").item() == 10
        assert time.perf_counter() - began < 30


def test_a_full_queue_rejects_and_a_deadline_ends(long_bundle: Path, tmp_path: Path) -> None:
    repository = write({"long": long_bundle}, tmp_path / "models", stream=False, slots=1, max_waiting=2)
    with triton(tmp_path / "work", repository) as server:
        client = Client(server, "grpc")
        ids = client.tensor("input_ids", [IDS])
        answers = [Answers() for _ in range(20)]
        for one in answers:
            client.client.async_infer("long", [ids], callback=one, parameters=exactly(1000))
        ended = [one.received.get(timeout=PATIENCE_S) for one in answers]
        lengths = [result.as_numpy("output_lengths").item() for result, error in ended if not error]
        refused = [error for _, error in ended if error]
        assert len(lengths) >= 3
        assert set(lengths) == {1000}
        assert refused
        assert {error.status() for error in refused} == {"StatusCode.UNAVAILABLE"}
        assert all("2 requests with 8 source tokens are waiting" in error.message() for error in refused)
        plain = Client(server, "http")
        late = error_of(plain, plain.tensor("input_ids", [IDS]), model="long", timeout_ms=1, **exactly(4000))
        assert late.startswith("503 the time limit of 0.001 s was exceeded")
        assert client.infer("long", ids, **exactly(10)).as_numpy("output_lengths").item() == 10


def execution_count(client: Client, model: str) -> int:
    """Return the number of requests that a model has received."""
    (stats,) = client.client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(stats.get("execution_count", 0))


def test_requests_in_flight_are_answered_before_the_server_stops(repository: Path, tmp_path: Path) -> None:
    with triton(tmp_path / "work", repository) as server:
        client, answers, stream = Client(server, "grpc"), [Answers() for _ in range(8)], Answers()
        ids = client.tensor("input_ids", [IDS])
        for one in answers:
            client.client.async_infer("long", [ids], callback=one, parameters=exactly(2000))
        streaming = Client(server, "grpc")
        streaming.client.start_stream(stream)
        streaming.client.async_stream_infer("long_stream", [client.tensor("input_ids", IDS)], parameters=exactly(2000))
        stream.next()
        # Triton passes requests on in order, so earlier ones are in flight.
        client.infer("long", ids, **exactly(1))
        server.process.send_signal(signal.SIGTERM)
        assert [one.next().as_numpy("output_lengths").item() for one in answers] == [2000] * 8
        while (last := stream.next()).as_numpy("finish_reason") is None:
            pass
        assert len(last.as_numpy("output_ids")) == 2000
        streaming.client.close()
        client.client.close()
        assert server.process.wait(PATIENCE_S) == 0
        assert "failed" not in server.tail()


def test_a_killed_process_fails_its_requests_and_no_others(repository: Path, tmp_path: Path) -> None:
    """Triton starts a new process only when the model is unloaded and loaded again."""
    options = "--model-control-mode explicit --load-model dates --load-model long".split()
    with triton(tmp_path / "work", repository, *options) as server:
        client, answers = Client(server, "grpc"), Answers()
        ids = client.tensor("input_ids", [IDS])
        client.infer("long", ids, **exactly(1))
        client.client.async_infer("long", [ids], callback=answers, parameters=exactly(4000), client_timeout=5)
        eventually(lambda: execution_count(client, "long") == 2)
        os.kill(server.stub("long"), signal.SIGKILL)
        assert "is not healthy" in error_of(client, ids, model="long")
        assert client.asked("dates", TEXT) == [[ISO]]
        with pytest.raises(client.module.InferenceServerException):
            answers.next()
        client.client.unload_model("long")
        eventually(lambda: not client.client.is_model_ready("long"))
        client.client.load_model("long")
        assert client.infer("long", ids, **exactly(10)).as_numpy("output_lengths").item() == 10
        assert client.asked("dates", TEXT) == [[ISO]]


def test_a_model_is_not_ready_while_it_is_loaded(repository: Path, tmp_path: Path) -> None:
    with (
        triton(tmp_path / "work", repository, "--model-control-mode", "explicit") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        client, other = Client(server, "grpc"), Client(server, "grpc")
        loading: Future[Any] = pool.submit(other.client.load_model, "dates")
        eventually(lambda: server.stub("dates"))
        stub = server.stub("dates")
        os.kill(stub, signal.SIGSTOP)  # so that loading takes long
        assert not client.client.is_model_ready("dates")
        assert not loading.done()
        os.kill(stub, signal.SIGCONT)
        loading.result(PATIENCE_S)
        assert client.client.is_model_ready("dates")
        assert client.asked("dates", TEXT) == [[ISO]]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("1/bundle/weights.safetensors", "weights.safetensors was changed"),
        ("config.pbtxt", "write the repository anew"),
    ],
)
def test_another_bundle_is_not_served(repository: Path, tmp_path: Path, file: str, why: str) -> None:
    copied = tmp_path / "models"
    shutil.copytree(repository / "dates", copied / "dates")
    content = (copied / "dates" / file).read_bytes()
    content = re.sub(rb"[0-9a-f]{64}", b"0" * 64, content) if file == "config.pbtxt" else content[:-1] + b"?"
    (copied / "dates" / file).write_bytes(content)
    with triton(tmp_path / "work", copied, "--model-control-mode", "explicit") as server:
        client = Client(server, "grpc")
        with pytest.raises(client.module.InferenceServerException, match=why):
            client.client.load_model("dates")
        assert not client.client.is_model_ready("dates")
