"""`infer` with tritonclient, and invalid tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serve.http.served import Serve
from tfexport.model.model import Model

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    client = triton.InferenceServerClient(address)
    yield client
    client.close()


def texts_input(texts: list[str], shape: list[int] | None = None, *, is_binary: bool = True) -> Any:
    tensor = triton.InferInput("text_input", shape or [len(texts)], "BYTES")
    tensor.set_data_from_numpy(
        np.array([text.encode() for text in texts], object).reshape(shape or -1), binary_data=is_binary
    )
    return tensor


def test_the_client_finds_the_server_and_its_model(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("dates")
    assert client.is_model_ready("dates", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("dates", "2")
    assert client.get_server_metadata()["name"] == "tfexport"
    metadata = client.get_model_metadata("dates", "1")
    assert [one["name"] for one in metadata["inputs"]] == ["text_input", "input_ids", "input_lengths"]
    assert {one["name"]: one["datatype"] for one in metadata["outputs"]}["scores"] == "FP32"


@pytest.mark.parametrize("is_binary", [True, False])
def test_texts_in_texts_out(client: Any, model: Model, texts: list[str], is_binary: bool) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=is_binary) for name in ("text_output", "output_ids")]
    result = client.infer("dates", [texts_input(texts[:5], is_binary=is_binary)], outputs=outputs, request_id="7")
    expected = [model.generate([text])[0] for text in texts[:5]]
    assert [one.decode() if is_binary else one for one in result.as_numpy("text_output")[:, 0]] == [
        one.text for one in expected
    ]
    assert result.as_numpy("output_ids").shape[:2] == (5, 1)
    assert result.as_numpy("scores") is None
    assert result.get_response()["id"] == "7"


def test_without_scores_they_are_no_output(client: Any, model: Model, texts: list[str]) -> None:
    inputs, parameters = [texts_input(texts[:2])], {"return_scores": False}
    result = client.infer("dates", inputs, parameters=parameters)
    assert result.as_numpy("text_output").ravel().tolist() == [one.text.encode() for one in model.generate(texts[:2])]
    assert result.as_numpy("scores") is None
    with pytest.raises(triton.InferenceServerException, match="output 'scores' does not exist"):
        client.infer("dates", inputs, parameters=parameters, outputs=[triton.InferRequestedOutput("scores")])


def test_outputs_are_bytes_by_default(client: Any, model: Model, texts: list[str]) -> None:
    result = client.infer(
        "dates",
        [texts_input(texts[:3], [3, 1])],
        parameters={"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.4},
        timeout=30_000_000,
        model_version="1",
    )
    expected = [model.generate([text], num_beams=4, num_return_sequences=2, length_penalty=0.4) for text in texts[:3]]
    assert result.as_numpy("text_output").tolist() == [[one.text.encode() for one in each] for each in expected]
    assert result.as_numpy("scores").tolist() == pytest.approx(
        np.array([[one.score for one in each] for each in expected]), abs=1e-5
    )
    lengths, ids = result.as_numpy("output_lengths"), result.as_numpy("output_ids")
    assert [[tuple(ids[i, j, : lengths[i, j]]) for j in range(2)] for i in range(3)] == [
        [one.token_ids for one in each] for each in expected
    ]
    assert set(result.as_numpy("finish_reason").ravel()) == {b"eos"}


def test_ids_of_unequal_length(client: Any, model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    sources = model.tokenizer.encode(texts[:4])
    padded = np.zeros((4, max(map(len, sources))), np.int64)
    for row, source in zip(padded, sources, strict=True):
        row[: len(source)] = source
    inputs = [triton.InferInput("input_ids", padded.shape, "INT64"), triton.InferInput("input_lengths", [4], "INT64")]
    inputs[0].set_data_from_numpy(padded)
    inputs[1].set_data_from_numpy(np.array([len(source) for source in sources]))
    result = client.infer("dates", inputs)
    expected = [one.token_ids for (one,) in model.generate_ids(sources)]
    lengths, ids = result.as_numpy("output_lengths")[:, 0], result.as_numpy("output_ids")[:, 0]
    assert [tuple(row[:length]) for row, length in zip(ids, lengths, strict=True)] == expected
    assert result.as_numpy("text_output") is None


def test_options_may_be_inputs(client: Any, model: Model, texts: list[str]) -> None:
    samples = {"do_sample": (True, "BOOL"), "temperature": (1.5, "FP64"), "seed": (3, "INT32")}
    types = {"BOOL": np.bool_, "FP64": np.float64, "INT32": np.int32}
    inputs = [texts_input(texts[:2]), triton.InferInput("prefix", [2], "BYTES")]
    inputs[1].set_data_from_numpy(np.array([b"1", b"20"], object))
    for name, (value, datatype) in samples.items():
        inputs.append(triton.InferInput(name, [1], datatype))
        inputs[-1].set_data_from_numpy(np.array([value], types[datatype]))
    result = client.infer("dates", inputs)
    options = {name: value for name, (value, _) in samples.items()}
    expected = [
        model.generate([text], prefixes=[prefix], **options)[0].text
        for text, prefix in zip(texts[:2], ("1", "20"), strict=True)
    ]
    assert [one.decode() for one in result.as_numpy("text_output")[:, 0]] == expected


def test_the_client_reads_statistics(client: Any, texts: list[str]) -> None:
    before = client.get_inference_statistics("dates", "1")["model_stats"][0]
    client.infer("dates", [texts_input(texts[:3])])
    after = client.get_inference_statistics()["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    stats = after["inference_stats"]
    assert stats["success"]["ns"] > stats["queue"]["ns"] > 0
    assert after["execution_count"] > before["execution_count"]


def test_the_client_receives_the_error_message(client: Any, texts: list[str]) -> None:
    with pytest.raises(triton.InferenceServerException, match=r"\[404\] model 'other' is unknown"):
        client.infer("other", [texts_input(texts[:1])])
    with pytest.raises(triton.InferenceServerException, match=r"\[400\] source 2 of 2: .*empty"):
        client.infer("dates", [texts_input([texts[0], ""])])
    with pytest.raises(triton.InferenceServerException, match=r"\[415\] Content-Encoding 'gzip'"):
        client.infer("dates", [texts_input(texts[:1])], request_compression_algorithm="gzip")


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["3 May 1999"]} | changes


def ids(**changes: Any) -> dict[str, Any]:
    return {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [5, 2]} | changes


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"inputs": []}, "inputs is []"),
    ({"inputs": [tensor(), tensor()]}, "given twice"),
    ({"inputs": [tensor(), ids()]}, "expected text_input or input_ids"),
    ({"inputs": [tensor(), tensor(name="nonsense")]}, "unknown parameter 'nonsense'"),
    ({"inputs": [tensor(datatype="FP32", data=[1.5])]}, "expected BYTES"),
    ({"inputs": [tensor(datatype="STRING")]}, "inputs[0].datatype is 'STRING'"),
    ({"inputs": [tensor(data=[5])]}, "text_input has 5, expected BYTES"),
    ({"inputs": [tensor(shape=[2])]}, "has 1 values, its shape is [2]"),
    ({"inputs": [tensor(shape=[0], data=[])]}, "inputs[0].shape[0] is 0"),
    ({"inputs": [tensor(shape=[2**31])]}, "inputs[0].shape[0] is 2147483648"),
    ({"inputs": [tensor(shape=[2**30, 2**30])]}, "its shape is [1073741824, 1073741824]"),
    ({"inputs": [tensor(shape=[1, 1, 1, 1])]}, "inputs[0].shape is [1, 1, 1, 1]"),
    ({"inputs": [tensor(shape=[1, 2], data=["a", "b"])]}, "expected [sources]"),
    ({"inputs": [tensor(shape=[65], data=["a"] * 65)]}, "the limit is 64"),
    ({"inputs": [tensor(parameters={"binary_data_size": 5})]}, "data or binary_data_size"),
    ({"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES"}]}, "data or binary_data_size"),
    ({"inputs": [tensor(extra=1)]}, "unknown key inputs[0].extra"),
    ({"inputs": [ids(data=[5, -1])]}, "source has -1, expected ids 0 to"),
    ({"inputs": [ids(data=[5, 2**63])]}, "expected INT64"),
    ({"inputs": [ids(data=[5, 1.5])]}, "expected INT64"),
    ({"inputs": [ids(shape=[2])]}, "expected [sources, length]"),
    ({"inputs": [ids(datatype="INT32")]}, "input_ids is INT32, expected INT64"),
    ({"inputs": [ids(datatype="INT8", data=[5, 200])]}, "input_ids has 200, expected INT8"),
    ({"inputs": [ids(), ids(name="input_lengths", shape=[1], data=[3])]}, "expected 1 of 1 to 2"),
    ({"inputs": [tensor(), tensor(name="prefix", shape=[2], data=["a", "b"])]}, "prefix has 2 texts"),
    ({"inputs": [tensor(), ids(name="seed", shape=[1], data=[0])], "parameters": {"seed": 1}}, "expected once"),
    ({"inputs": [tensor()], "parameters": {"sequence_id": 4}}, "unknown key parameters.sequence_id"),
    ({"inputs": [tensor()], "outputs": [{"name": "logits"}]}, "outputs[0].name is 'logits'"),
    ({"inputs": [ids()], "outputs": [{"name": "text_output"}]}, "output 'text_output' does not exist, expected"),
    ({"inputs": [tensor()], "outputs": [{"name": "scores", "parameters": {"classification": 3}}]}, "classification"),
]


async def test_wrong_tensors_are_400_with_the_reason(serve: Serve) -> None:
    async with serve() as served:
        for data, why in WRONG:
            answer = await served.post("infer", data)
            assert answer.status_code == 400, (data, answer.text)
            assert why in answer.json()["error"]
            assert len(answer.content) < 1200
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == len(WRONG)


@pytest.mark.parametrize(
    ("json_length", "binary", "why"),
    [
        ("10000", b"", "expected a number up to"),
        ("-1", b"", "expected a number up to"),
        ("1", b"", "the body is not JSON"),
        (None, b"\x02\0\0\0ab!", "1 bytes after the JSON belong to no input"),
        (None, b"\x02\0\0\0a", "binary_data_size is 6, but 5 bytes remain"),
        (None, b"\x03\0\0\0ab", "text 1 is longer than"),
        (None, b"\xff\xff\xff\xffab", "text 1 is longer than"),
        (None, b"\x02\0\0\0\xff\xfe", "text 1 is not UTF-8"),
    ],
)
async def test_wrong_bytes_after_the_json_are_400(
    serve: Serve, json_length: str | None, binary: bytes, why: str
) -> None:
    head = b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":6}}]}'
    async with serve() as served:
        headers = {"Inference-Header-Content-Length": json_length or str(len(head))}
        answer = await served.client.post("/v2/models/dates/infer", content=head + binary, headers=headers)
        assert (answer.status_code, why in answer.json()["error"]) == (400, True), answer.text
