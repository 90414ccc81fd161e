"""Graphs on PyTorch compute what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from tests import tiny
from tests.gpu.torch_graph import TorchGraph
from tests.runtime.exported import Once, exported
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import DECODER, ENCODER, GraphSpec, ModelSpec, Variant, decoder_graph, encoder_graph

Arrays = dict[str, np.ndarray]
Graphs = tuple[dict[str, Path], ModelSpec]
VARIANTS: tuple[Variant, ...] = ("static", "concat")
# Slots, rows of each, tokens of the target, tokens in the cache, candidates.
PREFILL, STEP, BEAMS = (3, 1, 4, 0, 1), (3, 1, 1, 5, 4), (2, 3, 1, 7, 8)
ATOL = {"fp32": 5e-5, "fp16": 2e-2}
RTOL = 1e-6  # eight steps of float32: some keys and values are about 100


def compare(graph: Path, contract: GraphSpec, feed: Arrays, atol: float) -> Arrays:
    """Run a graph in ONNX Runtime and here, compare all outputs but ids, and return what was found."""
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in contract.outputs]
    expected = dict(zip(names, session.run(names, feed), strict=True))
    given = {name: torch.from_numpy(array.copy()) for name, array in feed.items()}
    found = {name: tensor.numpy() for name, tensor in TorchGraph(graph, "cpu").run(given).items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        if name != "candidate_ids":  # equal logits may come in another order
            np.testing.assert_allclose(found[name], array, atol=atol, rtol=RTOL, err_msg=name)
    return found


def random_source(spec: ModelSpec, batch: int, rng: np.random.Generator) -> Arrays:
    mask = np.arange(9) < np.array([9, 4, 1])[:batch, None]
    return {"source_ids": np.where(mask, rng.integers(3, spec.source_vocab, mask.shape), 0), "source_mask": mask}


def random_step(
    spec: ModelSpec, variant: Variant, cross: Arrays, mask: np.ndarray, sizes: tuple[int, ...], rng: np.random.Generator
) -> Arrays:
    """Draw a step; in the static variant, rows have different lengths and random values after them."""
    batch, width, target_len, past_len, num_candidates = sizes
    rows, capacity = batch * width, spec.max_target_length
    feed: Arrays = {
        "target_ids": rng.integers(3, spec.vocab, (rows, target_len)),
        "source_mask": mask,
        "num_candidates": np.array([num_candidates]),
        **cross,
    }
    for name, value in cross.items():
        shape = (rows, spec.cache_heads, past_len if variant == "concat" else capacity, value.shape[-1])
        feed[name.replace("cross", "past")] = rng.normal(size=shape).astype(value.dtype)
    if variant == "static":
        feed["cache_lengths"] = np.arange(rows) % (past_len + 1)
    return feed


def check_model(graphs: dict[str, Path], spec: ModelSpec, variant: Variant) -> None:
    """Compare the encoder, and a decoder in all kinds of steps."""
    rng, atol = np.random.default_rng(0), ATOL[spec.precision]
    for sizes in (PREFILL, STEP, BEAMS):
        source = random_source(spec, sizes[0], rng)
        cross = compare(graphs[ENCODER], encoder_graph(spec), source, atol)
        feed = random_step(spec, variant, cross, source["source_mask"], sizes, rng)
        found = compare(graphs[DECODER[variant]], decoder_graph(spec, variant), feed, atol)
        taken = np.take_along_axis(found["logits"], found["candidate_ids"], 1)
        np.testing.assert_array_equal(taken, found["candidate_logits"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["mixed", "t5"])  # "mixed" is the one that runs on a GPU
def test_graphs_of_random_models(name: str, variant: Variant, once: Once) -> None:
    graphs, spec = exported(tiny.model(tiny.VARIANTS[name], dtype=torch.float32), once)
    check_model(graphs, spec, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fixture", ["dates_bundle", "dates_fp16"])
def test_graphs_of_the_trained_model(request: pytest.FixtureRequest, fixture: str, variant: Variant) -> None:
    bundle = open_bundle(request.getfixturevalue(fixture))
    graphs = {name: bundle.file(graph.file) for name, graph in bundle.manifest.graphs.items()}
    check_model(graphs, bundle.manifest.spec, variant)


def test_shapes_stay_on_the_host(once: Callable[[str, Callable[[Path], object]], Path]) -> None:
    """On the device `meta` no value can be read, as in a capture: whatever the host needs must come from shapes."""
    graphs, spec = exported(tiny.model(tiny.VARIANTS["t5"], dtype=torch.float32), once)
    rng = np.random.default_rng(0)
    source = random_source(spec, 3, rng)

    def on_meta(feed: Arrays) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
        return {name: t if name == "num_candidates" else t.to("meta") for name, t in tensors.items()}

    cross = TorchGraph(graphs[ENCODER], "meta").run(on_meta(source))
    shapes = {name: np.zeros(value.shape, np.float32) for name, value in cross.items()}
    for variant in VARIANTS:
        for sizes in (PREFILL, STEP):
            feed = random_step(spec, variant, shapes, source["source_mask"], sizes, rng)
            found = TorchGraph(graphs[DECODER[variant]], "meta").run(on_meta(feed))
            assert all(tensor.is_meta for tensor in found.values())
            assert found["candidate_ids"].shape == (3, sizes[-1])
