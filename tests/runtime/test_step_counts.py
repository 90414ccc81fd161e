"""The cost of a decode step in counts, which do not depend on the machine's load: kernels, runs, bytes."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import tfexport
from tests import tiny
from tfexport.bundle.bundle import open_bundle
from tfexport.decode.loop import Loop
from tfexport.decode.request import check_requests
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.nn.directory import save_model
from tfexport.nn.presets import build_preset
from tfexport.runtime.cpu import step_weight_bytes
from tfexport.runtime.ort._binding import Binding
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.ort._device import OrtDevice
from tfexport.runtime.session import Candidates, GreedySteps, Ids

BATCH, NEW_TOKENS, BEAMS = 8, 60, 4
LENGTH = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}


@pytest.fixture
def model(random_bundle: Path) -> Iterator[Model]:
    with tfexport.load(random_bundle, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def sources() -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(0).integers(4, 1000, (BATCH, 12)).tolist()
    return found


def test_kernels_of_a_step(random_bundle: Path, tmp_path: Path) -> None:
    """Count what is left when ONNX Runtime has optimized the graph: it has no loops, so each node is one call."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(random_bundle / "decoder_contrib.onnx"), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(str(tmp_path / "optimized.onnx"), load_external_data=False).graph.node
    calls, layers = Counter(node.op_type for node in nodes), 2
    assert (calls["GroupQueryAttention"], calls["MultiHeadAttention"]) == (layers, layers)
    # Joint query, key and value, and five more a layer; the projection to the vocabulary.
    assert calls["Gemm"] + calls["FusedGemm"] + calls["MatMul"] == 6 * layers + 1
    assert not {"Transpose", "Split", "Expand", "Slice", "ReduceLogSumExp", "TensorScatter"} & set(calls)
    assert len(nodes) <= 60, calls


def test_logits_are_filled_by_all_threads(tmp_path: Path) -> None:
    """ONNX Runtime does not join a product with a large vocabulary and its bias again."""
    vocab = 12_000
    save_model(tiny.model(tiny.config(target_vocab=vocab), dtype=torch.float32), tmp_path / "model")
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(variants=("contrib",)))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "bundle" / "optimized.onnx")
    decoder = str(tmp_path / "bundle" / "decoder_contrib.onnx")
    ort.InferenceSession(decoder, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    biases = {weight.name for weight in graph.initializer if [*weight.dims] == [vocab]}
    readers = [node.op_type for node in graph.node if biases & {*node.input}]
    assert readers == ["Add"]


def test_cross_attention_of_a_step_does_not_scale(random_bundle: Path) -> None:
    """With a scale ONNX Runtime takes a kernel that is half as fast where a source has hundreds of tokens."""
    nodes = onnx.load(str(random_bundle / "decoder_contrib.onnx"), load_external_data=False).graph.node
    attentions = [node for node in nodes if node.op_type == "MultiHeadAttention"]
    scales = [attribute.f for node in attentions for attribute in node.attribute if attribute.name == "scale"]
    assert scales == [1.0] * 2


def test_weights_that_are_loaded_twice(random_bundle: Path) -> None:
    """ONNX Runtime packs what it multiplies with, and keeps the original too where rows are looked up in it."""
    nodes = onnx.load(str(random_bundle / "decoder_contrib.onnx"), load_external_data=False).graph.node
    looked_up = {node.input[0] for node in nodes if node.op_type == "Gather"}
    multiplied = {node.input[1] for node in nodes if node.op_type in ("Gemm", "MatMul")}
    assert len(multiplied) > 2
    assert not looked_up & multiplied


def test_order_of_loading(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger graph loads while the other holds nothing: what it packs lies in memory twice for a moment."""
    loaded: list[str] = []
    load = OrtDevice.load

    def noted_load(device: OrtDevice, graph: Path, *arguments: Any, **options: Any) -> ort.InferenceSession:
        loaded.append(graph.stem)
        return load(device, graph, *arguments, **options)

    monkeypatch.setattr(OrtDevice, "load", noted_load)
    tfexport.load(random_bundle, backend="ort").close()
    assert loaded == ["decoder_contrib", "encoder_contrib"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count bindings, encoded batches and runs of the decoder."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(Binding, "__init__")
    count(Binding, "run")
    count(ContribBatch, "_encode")
    for name in ("bind_cpu_input", "bind_ortvalue_input", "bind_ortvalue_output", "bind_output"):
        count(ort.IOBinding, name)
    return counts


def test_runs_and_bindings_of_a_call(model: Model, sources: list[list[int]], calls: Counter[str]) -> None:
    """Greedy search runs the encoder once and the decoder once for each token, and binds equal shapes once."""
    model.generate_ids(sources, **LENGTH)
    assert (calls["_encode"], calls["run"], calls["__init__"]) == (1, NEW_TOKENS, 1)
    calls.clear()
    model.generate_ids(sources, num_beams=BEAMS, **LENGTH)
    # One row per source in the first step.
    assert (calls["_encode"], calls["run"], calls["__init__"]) == (1, NEW_TOKENS, 2)


@pytest.mark.parametrize(("num_beams", "shapes"), [(1, 1), (BEAMS, 2)])
def test_bindings_of_an_equal_call(
    num_beams: int, shapes: int, model: Model, sources: list[list[int]], calls: Counter[str]
) -> None:
    """A later call binds only its sources, and releases them at its end."""
    options = {"num_beams": num_beams, **LENGTH}
    model.generate_ids(sources, **options)
    calls.clear()
    model.generate_ids(sources, **options)
    names = 1 + len(model.spec.cross.names("cross"))
    assert calls == {"_encode": 1, "run": NEW_TOKENS, "bind_cpu_input": 2 * names * shapes}


@pytest.mark.parametrize(
    ("count", "num_beams", "most", "most_of_a_step"),
    [(1, 1, 600, 20), (1, BEAMS, 750, 160), (BATCH, 1, 900, 20), (BATCH, BEAMS, 1600, 320)],
)
def test_function_calls_of_a_call(
    count: int, num_beams: int, most: int, most_of_a_step: int, model: Model, sources: list[list[int]]
) -> None:
    """Count functions of Python and C that a call runs: what the computer spends on it besides the model."""

    def functions(num_tokens: int) -> int:
        options = {"num_beams": num_beams, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        for _ in range(2):
            model.generate_ids(sources[:count], **options)
        events: list[str] = []
        sys.setprofile(lambda frame, event, value: events.append(event))
        try:
            model.generate_ids(sources[:count], **options)
        finally:
            sys.setprofile(None)
        return events.count("call") + events.count("c_call")

    one, several = functions(1), functions(9)
    assert one <= most
    assert (several - one) / 8 <= most_of_a_step


def test_runs_and_bindings_if_sources_join(model: Model, sources: list[list[int]], calls: Counter[str]) -> None:
    """A source that joins costs the encoder a run; shapes that were bound before are not bound again."""
    loop = Loop(model.session, 4)
    config = DecodeConfig(min_new_tokens=6)
    for text, request in enumerate(check_requests(model.session, sources, config)):
        loop.submit([dataclasses.replace(request, max_new_tokens=6 + 3 * (text % 4))])
    while loop.is_busy:
        loop.step()
    assert calls["_encode"] <= BATCH - 3
    assert calls["__init__"] <= 4, "one for each number of rows"


@pytest.mark.parametrize("num_beams", [1, BEAMS])
def test_tensors_that_are_copied_to_python(
    model: Model, sources: list[list[int]], num_beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, logits and a normaliser of a few candidates a row: nothing of the width of the vocabulary or the cache."""
    crossed: list[tuple[int, int]] = []
    name = "multi_step" if num_beams == 1 else "step"
    call = getattr(ContribBatch, name)

    def counted(batch: ContribBatch, target_ids: Ids, asked: int | GreedySteps) -> Candidates:
        found: Candidates = call(batch, target_ids, asked)
        steps = len(found.token_ids) if name == "multi_step" else 1
        size = found.token_ids.nbytes + found.logits.nbytes + found.log_normalizer.nbytes
        crossed.extend([(len(target_ids), size // steps)] * steps)
        return found

    monkeypatch.setattr(ContribBatch, name, counted)
    model.generate_ids(sources, num_beams=num_beams, **LENGTH)
    candidates = (2 * num_beams if num_beams > 1 else 1) + 1  # one more, for the end that is banned before its time
    assert len(crossed) == NEW_TOKENS
    assert all(size == rows * (candidates * 12 + 4) for rows, size in crossed)
    assert {rows for rows, _ in crossed} == {BATCH * num_beams}


def test_python_memory_of_a_greedy_step(model: Model, sources: list[list[int]]) -> None:
    """A step makes room for its candidates and no more: no cache is copied, no history built anew."""
    batch = model.session.batch()
    batch.add(tiny.sources(np.array(sources), np.ones((BATCH, 12), bool)), [[1]] * BATCH)
    token_ids = np.full(BATCH, 5)
    for _ in range(5):
        batch.step(token_ids, 2)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(20):
            batch.step(token_ids, 2)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4_000  # onnxruntime's own call keeps 124 bytes of each step in some runs
    assert peak - before < 8_000  # the keys of one layer alone have 131,072 bytes


def test_tokens_that_a_beam_search_copies(
    model: Model, sources: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only beams that branch are copied, from the first different token on."""
    counts: Counter[str] = Counter()
    copy, reorder = ContribBatch._copy_row, ContribBatch.reorder

    def counted_copy(batch: ContribBatch, to: int, of: int) -> None:
        length = int(batch.lengths[to])
        counts["rows"] += 1
        counts["tokens"] += length - batch._shared[of // BEAMS][to % BEAMS * BEAMS + of % BEAMS]
        counts["tokens held"] += length
        copy(batch, to, of)

    def counted_reorder(batch: ContribBatch, rows: Ids) -> None:
        counts["rows moved by a plain gather"] += int((rows != np.arange(rows.size)).sum())
        reorder(batch, rows)

    monkeypatch.setattr(ContribBatch, "_copy_row", counted_copy)
    monkeypatch.setattr(ContribBatch, "reorder", counted_reorder)
    model.generate_ids(sources, num_beams=BEAMS, **LENGTH)
    assert 0 < counts["rows"] < 0.75 * counts["rows moved by a plain gather"]
    assert counts["tokens"] < 0.25 * counts["tokens held"], counts


def test_bytes_that_a_step_reads(random_bundle: Path) -> None:
    parameters = dict(build_preset("tiny").named_parameters())
    unread = ("dec.embed.", "dec.pos", ".cross.k.", ".cross.v.")
    read = [
        p.numel() for n, p in parameters.items() if n.startswith(("dec.", "out.")) and not any(u in n for u in unread)
    ]
    assert step_weight_bytes(open_bundle(random_bundle)) == 4 * sum(read)
