"""What every backend keeps to, against the full forward pass of the model in PyTorch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import tiny
from tests.runtime.trt.trt_double import trt_session
from tests.trt.cuda_double import CudaDouble
from tfexport.errors import BackendError, InputError
from tfexport.graph.forms.contrib import CONTRIB
from tfexport.graph.write import write_graphs
from tfexport.models.config import TransformerConfig, model_spec
from tfexport.models.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import open_graphs
from tfexport.runtime.ort.session import OrtSession
from tfexport.runtime.session import Candidates, Ids, Mask, Session
from tfexport.spec import DECODER, Form, ModelSpec

MakeSession = Callable[[Transformer], Session]  # type: ignore[type-arg]
Once = Callable[[str, Callable[[Path], object]], Path]


def exported(model: Transformer, once: Once) -> tuple[dict[str, Path], ModelSpec]:
    """Export a model once for all workers and tests."""
    spec = model_spec(model.config, "fp32")
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    weights.update(json.dumps(model.config.to_dict()).encode())

    def make(path: Path) -> None:
        path.mkdir()
        write_graphs(model, spec, path, forms=("concat", "static", "contrib"), opset=18, report=lambda line: None)

    return {path.stem: path for path in once(f"graphs-{weights.hexdigest()[:16]}", make).glob("*.onnx")}, spec


def ort_session(model: Transformer, form: Form, once: Once, *, host_caches: bool = True) -> Session:  # type: ignore[type-arg]
    graphs, spec = exported(model, once)
    return OrtSession(graphs, spec, form if spec.has_decoder else None, threads=1, host_caches=host_caches)


def contrib_session(model: Transformer, once: Once) -> Session:  # type: ignore[type-arg]
    graphs, spec = exported(model, once)
    if spec.has_decoder and DECODER["contrib"] not in graphs:
        pytest.skip(f"no contrib form: {' and '.join(CONTRIB.supports(model.config, 'fp32'))}")
    return open_graphs(graphs, spec, "contrib" if spec.has_decoder else None, threads=1)


def engine_session(model: Transformer, form: Form, once: Once, *, prompt: bool = False) -> Session:  # type: ignore[type-arg]
    graphs, spec = exported(model, once)
    return trt_session(graphs, spec, form if spec.has_decoder else None, cuda=CudaDouble(prompt=prompt))


# A new backend is one line here: its name, and how a model becomes a session.
BACKENDS: dict[str, Callable[[Transformer, Once], Session]] = {  # type: ignore[type-arg]
    "eager": lambda model, once: EagerSession(model),
    "ort concat": lambda model, once: ort_session(model, "concat", once),
    "ort static": lambda model, once: ort_session(model, "static", once),
    # What a GPU runs: no buffer is shared with numpy, caches are moved by graphs. The concat form runs so everywhere.
    "ort static device": lambda model, once: ort_session(model, "static", once, host_caches=False),
    "ort contrib": contrib_session,
    # The session that drives TensorRT, on doubles of engines and CUDA: once the device is late, once it is at once.
    "trt concat": lambda model, once: engine_session(model, "concat", once),
    "trt static": lambda model, once: engine_session(model, "static", once),
    "trt static prompt": lambda model, once: engine_session(model, "static", once, prompt=True),
}
ATOL = 2e-5
CONFIGS = {
    **tiny.VARIANTS,
    "limits differ": tiny.config(max_source_length=11, max_target_length=6, target_vocab=40),
}


@pytest.fixture(params=BACKENDS)
def make_session(request: pytest.FixtureRequest, once: Once) -> MakeSession:
    return lambda model: BACKENDS[request.param](model, once)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.model(CONFIGS[request.param], dtype=torch.float32)


@pytest.fixture
def session(make_session: MakeSession, model: Transformer) -> Session:  # type: ignore[type-arg]
    return make_session(model)


@pytest.fixture
def one(make_session: MakeSession) -> tuple[Session, Transformer]:  # type: ignore[type-arg]
    """Return a session for what does not depend on the kind of model."""
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    return make_session(model), model


def sources(config: TransformerConfig, lengths: tuple[int, ...] = (9, 4, 1, 6), seed: int = 0) -> tuple[Ids, Mask]:
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(0, config.source_vocab, mask.shape)
    return np.where(mask, ids, config.tokens.pad), mask


def targets(config: TransformerConfig, rows: int, length: int = 5, seed: int = 1) -> Ids:
    return np.random.default_rng(seed).integers(0, config.target_vocab or 0, (rows, length))


def full_logits(model: Transformer, source_ids: Ids, source_mask: Mask, target_ids: Ids) -> np.ndarray:
    """Return the logits of every position without a cache, in float64, one row at a time and without padding."""
    wide = tiny.model(model.config, dtype=torch.float64)
    with torch.no_grad():
        return np.concatenate(
            [
                wide(
                    torch.tensor(ids[mask])[None], torch.ones(1, mask.sum(), dtype=torch.bool), torch.tensor(new)[None]
                )
                for ids, mask, new in zip(source_ids, source_mask, target_ids, strict=True)
            ]
        )


def assert_candidates(found: Candidates, logits: np.ndarray, k: int) -> None:
    """Compare with numpy's top k and log Σ exp of `logits` [rows, vocab]."""
    assert found.token_ids.dtype == np.int64
    assert found.logits.dtype == found.log_normalizer.dtype == np.float32
    assert found.token_ids.shape == found.logits.shape == (len(logits), k)
    assert found.log_normalizer.shape == (len(logits),)
    assert (np.diff(found.logits) <= 0).all(), "best first"
    assert all(len(set(row)) == k for row in found.token_ids.tolist())
    np.testing.assert_allclose(found.logits, -np.sort(-logits, axis=1)[:, :k], atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.logits, np.take_along_axis(logits, found.token_ids, 1), atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.log_normalizer, np.log(np.exp(logits).sum(1)), atol=ATOL, rtol=0)


@pytest.mark.parametrize("k", [1, 4, None])
def test_steps_equal_the_full_forward(session: Session, model: Transformer, k: int | None) -> None:  # type: ignore[type-arg]
    source_ids, source_mask = sources(model.config)
    target_ids = targets(model.config, 4)
    expected = full_logits(model, source_ids, source_mask, target_ids)
    k = k or session.spec.vocab
    state = session.encode(source_ids, source_mask)
    assert (state.batch, state.rows, state.past_len) == (4, 4, 0)
    for position in range(target_ids.shape[1]):
        found = session.step(state, target_ids[:, position : position + 1], k)
        assert state.past_len == position + 1
        assert_candidates(found, expected[:, position], k)


@pytest.mark.parametrize("prefix_len", [2, 5])
def test_a_prefix_equals_its_steps(session: Session, model: Transformer, prefix_len: int) -> None:  # type: ignore[type-arg]
    source_ids, source_mask = sources(model.config)
    target_ids = targets(model.config, 4)
    expected = full_logits(model, source_ids, source_mask, target_ids)
    state = session.encode(source_ids, source_mask)
    assert_candidates(session.step(state, target_ids[:, :prefix_len], 3), expected[:, prefix_len - 1], 3)
    for position in range(prefix_len, target_ids.shape[1]):
        assert_candidates(session.step(state, target_ids[:, position : position + 1], 3), expected[:, position], 3)


def test_several_tokens_may_follow_a_past(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    source_ids, source_mask = sources(model.config)
    target_ids = targets(model.config, 4)
    expected = full_logits(model, source_ids, source_mask, target_ids)
    state = session.encode(source_ids, source_mask)
    session.step(state, target_ids[:, :2], 1)
    assert_candidates(session.step(state, target_ids[:, 2:], 3), expected[:, -1], 3)


ORDERS = {
    # rows before → (order, rows per source after)
    "same": (1, [0, 1, 2, 3]),
    "permute sources": (1, [3, 0, 2, 1]),
    "drop sources": (1, [1, 3]),
    "drop and permute": (1, [2, 0]),
    "expand": (1, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    "expand and drop": (1, [0, 0, 3, 3]),
    "swap beams": (2, [1, 0, 2, 2, 5, 4, 7, 6]),
    "swap beams and drop": (2, [1, 1, 7, 6]),
    "more beams": (2, [1, 0, 0, 6, 7, 7]),
    "one beam each": (2, [1, 2, 5, 6]),
    "one beam, some": (2, [6, 1]),
}


@pytest.mark.parametrize(("beams", "order"), ORDERS.values(), ids=ORDERS.keys())
def test_reorder(session: Session, model: Transformer, beams: int, order: list[int]) -> None:  # type: ignore[type-arg]
    source_ids, source_mask = sources(model.config)
    state = session.encode(source_ids, source_mask)
    started = targets(model.config, 4, 2).repeat(beams, axis=0)
    session.step(state, started[::beams], 1)
    session.reorder(state, np.arange(4).repeat(beams))
    middle = targets(model.config, 4 * beams, 1, seed=2)  # rows of one source part here
    session.step(state, middle, 1)
    session.reorder(state, np.array(order))
    assert (state.rows, state.batch, state.past_len) == (len(order), len({row // beams for row in order}), 3)
    ends = targets(model.config, len(order), 2, seed=3)
    history = np.concatenate((np.concatenate((started, middle), 1)[order], ends), 1)
    owners = np.array(order) // beams
    expected = full_logits(model, source_ids[owners], source_mask[owners], history)
    for position in range(2):
        found = session.step(state, ends[:, position : position + 1], 3)
        assert_candidates(found, expected[:, 3 + position], 3)


def test_reorder_before_the_first_step(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    source_ids, source_mask = sources(model.config)
    state = session.encode(source_ids, source_mask)
    session.reorder(state, np.array([3, 3, 1, 1]))
    target_ids = targets(model.config, 4, 2)
    owners = np.array([3, 3, 1, 1])
    expected = full_logits(model, source_ids[owners], source_mask[owners], target_ids)
    assert_candidates(session.step(state, target_ids, 3), expected[:, -1], 3)


def test_padding_changes_nothing(session: Session, model: Transformer) -> None:  # type: ignore[type-arg]
    source_ids, source_mask = sources(model.config, (5, 2))
    target_ids = targets(model.config, 2, 3)
    plain = session.step(session.encode(source_ids, source_mask), target_ids, 4)
    wide = np.pad(source_ids, ((0, 0), (0, 6)), constant_values=3)
    padded = session.step(session.encode(wide, np.pad(source_mask, ((0, 0), (0, 6)))), target_ids, 4)
    np.testing.assert_array_equal(padded.token_ids, plain.token_ids)
    np.testing.assert_allclose(padded.logits, plain.logits, atol=ATOL)
    assert np.isfinite(padded.logits).all()
    assert np.isfinite(padded.log_normalizer).all()


def test_candidates_belong_to_the_caller(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    state = session.encode(*sources(model.config))
    first = session.step(state, targets(model.config, 4, 1), 3)
    kept = [array.copy() for array in (first.token_ids, first.logits, first.log_normalizer)]
    session.step(state, targets(model.config, 4, 1, seed=5), 3)
    for array, copy in zip((first.token_ids, first.logits, first.log_normalizer), kept, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_equal_logits_come_in_order_of_id(make_session: MakeSession) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    assert model.out is not None
    levels = torch.tensor([0.0, 2.0, 1.0])[torch.arange(tiny.VOCAB) % 3]
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.copy_(levels)
    session = make_session(model)
    expected = sorted(range(tiny.VOCAB), key=lambda token: (-levels[token].item(), token))
    for k in (1, 5, 13, tiny.VOCAB):
        state = session.encode(*sources(model.config))
        found = session.step(state, targets(model.config, 4, 1), k)
        assert found.token_ids.tolist() == [expected[:k]] * 4


def test_threads_share_a_session(session: Session, model: Transformer) -> None:  # type: ignore[type-arg]
    def run(seed: int) -> list[Candidates]:
        state = session.encode(*sources(model.config, seed=seed))
        session.reorder(state, np.arange(4).repeat(2))
        found = []
        for position in range(5):
            found.append(session.step(state, targets(model.config, 8, 1, seed=seed + position), 4))
            session.reorder(state, np.array([1, 0, 2, 3, 5, 5, 7, 6]))
        return found

    alone = [run(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(8)))
    for steps, expected in zip(together, alone, strict=True):
        for found, reference in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(found.token_ids, reference.token_ids)
            np.testing.assert_array_equal(found.logits, reference.logits)
            np.testing.assert_array_equal(found.log_normalizer, reference.log_normalizer)


def test_states_do_not_mix(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    first, second = sources(model.config, seed=1), sources(model.config, (3, 8), seed=2)
    new = targets(model.config, 4, 2), targets(model.config, 2, 2, seed=3)
    states = session.encode(*first), session.encode(*second)
    session.step(states[0], new[0][:, :1], 1)
    session.step(states[1], new[1][:, :1], 1)
    found = session.step(states[0], new[0][:, 1:], 2), session.step(states[1], new[1][:, 1:], 2)
    assert_candidates(found[0], full_logits(model, *first, new[0])[:, -1], 2)
    assert_candidates(found[1], full_logits(model, *second, new[1])[:, -1], 2)


def test_limits(session: Session, model: Transformer) -> None:  # type: ignore[type-arg]
    config = model.config
    limit = config.max_target_length or 0
    longest = sources(config, (config.max_source_length,))
    state = session.encode(*longest)
    target_ids = targets(config, 1, limit)
    session.step(state, target_ids[:, :-1], 1)
    expected = full_logits(model, *longest, target_ids)
    assert_candidates(session.step(state, target_ids[:, -1:], 2), expected[:, -1], 2)
    with pytest.raises(InputError, match=f"target has {limit + 1} tokens, the limit is {limit}"):
        session.step(state, target_ids[:, :1], 1)
    with pytest.raises(InputError, match=f"the limit is {config.max_source_length}"):
        session.encode(*sources(config, (config.max_source_length + 1,)))


def test_bad_arguments(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    ids, mask = sources(model.config)
    for source in (
        (ids.astype(np.int32), mask),
        (ids, mask.astype(np.int64)),
        (ids, mask[:, :-1]),
        (ids, ~mask),
        (ids[:0], mask[:0]),
        (np.where(mask, tiny.VOCAB, ids), mask),
        (np.where(mask, -1, ids), mask),
    ):
        with pytest.raises(InputError):
            session.encode(*source)
    state = session.encode(ids, mask)
    new = targets(model.config, 4, 1)
    for target_ids, k in ((new[:3], 1), (new[:, :0], 1), (new * 0 - 1, 1), (new, 0), (new, tiny.VOCAB + 1)):
        with pytest.raises(InputError):
            session.step(state, target_ids, k)
    session.reorder(state, np.arange(4).repeat(2))
    for rows in ([], [8], [-1], [0, 2, 1, 3], [0, 1, 2], [0, 1, 2, 3, 0, 1]):
        with pytest.raises(InputError):
            session.reorder(state, np.array(rows, np.int64))
    found = session.step(state, new.repeat(2, axis=0), 2)
    assert_candidates(found, full_logits(model, ids, mask, new)[:, -1].repeat(2, axis=0), 2)


def test_an_encoder_alone_gives_hidden_states(make_session: MakeSession) -> None:
    base = tiny.VARIANTS["pre-std"].to_dict()
    config = TransformerConfig.from_dict({**base, "decoder": None, "target_vocab": None, "max_target_length": None})
    model = tiny.model(config, dtype=torch.float32)
    session = make_session(model)
    ids, mask = sources(config)
    hidden = session.hidden_states(ids, mask)
    assert hidden.dtype == np.float32
    assert hidden.shape == (*ids.shape, config.d_model)
    assert np.isfinite(hidden).all()
    wide = tiny.model(config, dtype=torch.float64)
    for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
        with torch.no_grad():
            alone = wide.hidden_states(
                torch.tensor(row_ids[row_mask])[None], torch.ones(1, row_mask.sum(), dtype=torch.bool)
            )
        np.testing.assert_allclose(hidden[row, row_mask], alone[0], atol=ATOL)
    with pytest.raises(BackendError, match="encoder alone"):
        session.encode(ids, mask)
    with pytest.raises(InputError):
        session.hidden_states(ids + tiny.VOCAB, mask)


def test_a_decoder_gives_no_hidden_states(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    with pytest.raises(BackendError, match="has a decoder"):
        session.hidden_states(*sources(model.config))


def test_a_closed_session_says_so(one: tuple[Session, Transformer]) -> None:  # type: ignore[type-arg]
    session, model = one
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.encode(*sources(model.config))
