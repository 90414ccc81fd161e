"""Features and images on every backend, compared with the author's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.runtime.exported import sense_graphs
from tests.runtime.joining import alone, differing, joining, random_requests
from tests.stranger import senses
from tests.tensorrt.session.trt_double import trt_session
from tfexport.decode.align import align
from tfexport.decode.offline import decode
from tfexport.decode.score import score
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Aligns, Session
from tfexport.runtime.sources import Sources, pad_sources, random_source

Once = Callable[[str, Callable[[Path], object]], Path]
ATOL = 2e-5
BACKENDS: dict[str, Callable[[Graphs], Session]] = {
    "ort concat": lambda graphs: OrtSession(graphs, "concat", threads=1),
    "ort static": lambda graphs: OrtSession(graphs, "static", threads=1),
    "ort static device": lambda graphs: OrtSession(graphs, "static", threads=1, host_caches=False),
    "ort contrib": lambda graphs: OrtSession(graphs, "contrib", threads=1),
    "trt concat": lambda graphs: trt_session(graphs.paths, graphs.spec, "concat"),
    "trt static": lambda graphs: trt_session(graphs.paths, graphs.spec, "static"),
}


class Opened(NamedTuple):
    session: Session
    model: torch.nn.Module  # the author's, in float64


@pytest.fixture(scope="module", params=senses.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["eager", *BACKENDS])
def opened(request: pytest.FixtureRequest, kind: str, once: Once) -> Opened:
    own = senses.make(kind)
    if request.param == "eager":
        session: Session = EagerSession(own.module, own.spec, alignment=senses.ALIGNMENT)
    else:
        session = BACKENDS[request.param](sense_graphs(kind, once))
    return Opened(session, senses.make(kind).module.double().eval())


def some_sources(session: Session, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [random_source(session.spec.source, rng, length) for length in (9, 4, 1, 12)]


def full_logits(model: Any, source: Any, target: list[int]) -> np.ndarray:
    """Return log-probabilities of all positions, of one source without padding, as in training."""
    x = torch.from_numpy(source)[None].double()
    mask = torch.ones(1, senses.LENGTH if model.sees else len(source), dtype=torch.bool)
    with torch.no_grad():
        return model(x, mask, torch.tensor([target]))[0].log_softmax(-1).numpy()


def targets(seed: int = 1) -> list[list[int]]:
    return [[1, *row] for row in np.random.default_rng(seed).integers(3, senses.VOCAB, (4, 6)).tolist()]


def test_steps_equal_the_forward_pass(opened: Opened) -> None:
    session, read = opened.session, targets()
    sources, batch = some_sources(session), session.batch()
    expected = [full_logits(opened.model, *pair) for pair in zip(sources, read, strict=True)]
    assert len({tuple(row.argmax(1)) for row in expected}) == 4, "the sources make no difference"
    batch.add(pad_sources(session.spec.source, sources), [row[:3] for row in read])
    for place in range(2, 6):
        found = batch.step(np.array([row[place] for row in read]), senses.VOCAB)
        wanted = np.stack([row[place] for row in expected])
        np.testing.assert_allclose(found.log_probs, np.take_along_axis(wanted, found.token_ids, 1), atol=ATOL)
        np.testing.assert_array_equal(found.token_ids[:, 0], wanted.argmax(1))


def test_scores_and_alignment_equal_the_forward_pass(opened: Opened) -> None:
    session, pairs = opened.session, list(zip(some_sources(opened.session), targets(2), strict=True))
    pairs = [(source, target[: 2 + number]) for number, (source, target) in enumerate(pairs)]
    sources, wanted = [source for source, _ in pairs], [target[1:] for _, target in pairs]
    for found, (source, target) in zip(score(session, sources, wanted, add_eos=False), pairs, strict=True):
        expected = full_logits(opened.model, source, target)[np.arange(len(target) - 1), target[1:]]
        np.testing.assert_allclose(found.log_probs, expected, atol=ATOL)
    if not isinstance(session, Aligns):
        return
    seen: list[torch.Tensor] = []
    layer: Any = opened.model.look[senses.ALIGNMENT.layer]
    parts = layer.parts
    layer.parts = lambda x, memory: seen.append(found := parts(x, memory)) or found  # type: ignore[func-returns-value]
    for aligned, (source, target) in zip(align(session, sources, wanted), pairs, strict=True):
        full_logits(opened.model, source, target[:-1])
        query, key, _ = (part[0, :, senses.ALIGNMENT.heads] for part in seen[-1])
        scores = torch.einsum("qhd,khd->hqk", query, key) / senses.WIDTH**0.5
        np.testing.assert_allclose(aligned.weights, scores.softmax(-1).mean(0).numpy(), atol=ATOL)
    layer.parts = parts


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_the_order_of_joining_does_not_change_the_output(opened: Opened, seed: int) -> None:
    requests = random_requests(opened.session, 50, seed)
    expected = alone(EagerSession(senses.make(kind_of(opened.session)).module, opened.session.spec), requests)
    assert not differing(joining(opened.session, requests, seed), expected)


def kind_of(session: Session) -> str:
    return next(name for name, kind in senses.KINDS.items() if kind == session.spec.source)


def bad_values(session: Session) -> dict[str, Any]:
    good = some_sources(session)[0]
    return {
        "text": "hello",
        "ids": [3, 4],
        "objects": [object()],
        "wrong feature dim or channels": good[..., :-1],
        "NaN": np.full_like(good, np.nan),
        "empty": good[:0],
        "too long": np.concatenate([good] * 9),
        "a batch": good[None],
        "complex": good.astype(complex),
        "unequal lengths": [[1.0], [1.0, 2.0]],
    }


def test_a_bad_value_is_named_and_others_are_decoded(opened: Opened) -> None:
    session, sources = opened.session, some_sources(opened.session)
    config = DecodeConfig(max_new_tokens=4, num_beams=2)
    expected = decode(session, sources, config)
    for name, value in bad_values(session).items():
        with pytest.raises(InputError) as caught:
            decode(session, [sources[0], value, sources[1], value], config)
        assert set(caught.value.indices) == {1, 3}, name
    for one in (sources[0], "hello", 7, None):  # instead of a list
        with pytest.raises(InputError):
            decode(session, one, config)
    assert decode(session, [source.tolist() for source in sources], config) == expected, "lists of numbers are arrays"
    wide = np.stack([sources[0].astype(np.float64)] * 2)
    found = [best.token_ids for best, *_ in decode(session, wide, config)]
    assert found == [expected[0][0].token_ids] * 2, "an array of sources is a list of them"


def bad_batches(session: Session) -> dict[str, Sources]:
    good = pad_sources(session.spec.source, some_sources(session))
    name, *masks = good.inputs
    values = good.inputs[name]

    def changed(**arrays: np.ndarray) -> Sources:
        return replace(good, inputs={**good.inputs, **arrays})

    broken = values.copy()
    broken[2, 0] = np.inf
    found = {
        "float64": changed(**{name: values.astype(np.float64)}),
        "ids": changed(**{name: values.astype(np.int64)}),
        "width": changed(**{name: values[..., :-1]}),
        "infinite": changed(**{name: broken}),
        "no rows": changed(**{each: array[:0] for each, array in good.inputs.items()}),
        "another input": replace(good, inputs={"source_ids": values}),
    }
    for mask in masks:
        full = good.inputs[mask]
        gap = full.copy()
        gap[:, 1] = False
        wrong = {"inverted": ~full, "gap": gap, "int64": full.astype(np.int64), "shorter": full[:, :-1]}
        found |= {f"mask {each}": changed(**{mask: array}) for each, array in wrong.items()}
        found["fewer rows"] = changed(**{name: values[:3]})
    return found


def test_bad_arrays_leave_a_batch_unchanged(opened: Opened) -> None:
    session, read = opened.session, targets()
    good = pad_sources(session.spec.source, some_sources(session))
    batch, undisturbed = session.batch(), session.batch()
    for each in (batch, undisturbed):
        each.add(good, [row[:2] for row in read])
    for name, sources in bad_batches(session).items():
        with pytest.raises(InputError):
            batch.add(sources, [[1]] * len(sources))
        with pytest.raises(InputError):
            session.batch().add(sources, [[1]] * len(sources))
        assert batch.lengths.tolist() == [1] * 4, name
    for place in (1, 2):
        pair = [each.step(np.array([row[place] for row in read]), 5) for each in (batch, undisturbed)]
        np.testing.assert_array_equal(pair[0].logits, pair[1].logits)


def test_engines_limit_positions(once: Once) -> None:
    graphs, config = sense_graphs("features", once), DecodeConfig(max_new_tokens=3)
    session = trt_session(graphs.paths, graphs.spec, "static", max_source_length=6)
    shorter, longer = (np.ones((frames, senses.DIM), np.float32) for frames in (24, 25))
    batch = session.batch()
    with pytest.raises(InputError, match="--max-source-length 7 --force"):
        batch.add(pad_sources(session.spec.source, [shorter, longer]), [[1], [1]])
    assert batch.lengths.size == 0
    with pytest.raises(InputError) as caught:
        decode(session, [longer, shorter], config)
    assert caught.value.indices == (0,)
    other = trt_session(graphs.paths, graphs.spec, "static")
    assert decode(session, [shorter], config) == decode(other, [shorter], config)


@pytest.mark.parametrize("backend", ["eager", "ort", "trt"])
def test_an_encoder_only_model_reads_features(backend: str, once: Once) -> None:
    own = senses.states()
    graphs = sense_graphs("states", once)
    make: dict[str, Callable[[], Session]] = {
        "eager": lambda: EagerSession(own.module, own.spec),
        "ort": lambda: OrtSession(graphs, None, threads=1),
        "trt": lambda: trt_session(graphs.paths, graphs.spec, None),
    }
    session, model = make[backend](), senses.states().module.double()
    values = some_sources(session)
    sources = pad_sources(session.spec.source, values)
    for row, value in enumerate(values):
        with torch.no_grad():
            x = torch.from_numpy(value)[None].double()
            (expected,) = model.states(x, torch.ones(1, len(value), dtype=torch.bool))
        np.testing.assert_allclose(session.hidden_states(sources)[row, sources.mask[row]], expected, atol=ATOL)
        alone = session.hidden_states(pad_sources(session.spec.source, [value]))
        np.testing.assert_allclose(alone[0], expected, atol=ATOL)
    for bad in bad_batches(session).values():
        with pytest.raises(InputError):
            session.hidden_states(bad)
