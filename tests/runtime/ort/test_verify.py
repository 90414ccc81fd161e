"""Several tokens in one step of the contrib variant, compared with the full forward pass in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfexport
from tests import tiny
from tests.runtime.exported import Once
from tfexport.errors import GraphError, InputError
from tfexport.export.write import write_graphs
from tfexport.nn.config import model_spec
from tfexport.nn.transformer import Transformer
from tfexport.runtime.ort._cache import FIRST_CAPACITY
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Ids, Verifies

# Buffers grow once; positions are a bias of the scores, or turned in with heads that share keys.
LENGTH = FIRST_CAPACITY + 30
VARIANTS = {
    "alibi": tiny.config(relative_bias="alibi", max_target_length=LENGTH),
    "rotary": tiny.config(positions="rotary", decoder={"num_kv_heads": 2}, max_target_length=LENGTH),
}


OPTIONS: dict[str, Any] = {"variants": ("contrib",), "opset": 18, "speculation": True, "report": lambda line: None}


def batch_of(name: str, once: Once) -> tuple[ContribBatch, Transformer]:
    """Return an empty batch of a variant with speculation, and the model in float64."""
    model = tiny.model(VARIANTS[name], dtype=torch.float32)
    spec = model_spec(model.config, "fp32")

    def make(path: Path) -> None:
        path.mkdir()
        write_graphs(model, spec, path, **OPTIONS)

    folder = once(f"verifies-{name}", make)
    session = OrtSession(Graphs({path.stem: path for path in folder.glob("*.onnx")}, spec), "contrib", threads=1)
    batch = session.batch()
    assert isinstance(batch, ContribBatch)
    assert batch.can_verify
    return batch, tiny.model(model.config, dtype=torch.float64)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_token_has_its_logits_and_rejected_tokens_leave_no_trace(name: str, once: Once) -> None:
    batch, wide = batch_of(name, once)
    rng = np.random.default_rng(3)
    vocab, prefix = wide.config.target_vocab or 0, 3
    source, target = rng.integers(4, 20, (1, 9)), rng.integers(0, vocab, (1, LENGTH - 8))
    with torch.no_grad():
        full = wide(torch.tensor(source), torch.ones(1, 9, dtype=torch.bool), torch.tensor(target))[0].numpy()
    batch.add(tiny.sources(source, np.ones((1, 9), bool)), [target[0, : prefix + 1].tolist()])
    place = prefix
    while place < target.shape[1]:
        count = int(rng.integers(1, 9))
        if count == 1:  # a plain step between
            found = batch.step(target[:, place], vocab)
        else:
            batch.verify(rng.integers(0, vocab, count), 1)
            batch.rewind(place)
            found = batch.verify(target[0, place : place + count], vocab)
        expected = full[place : place + len(found.token_ids)]
        np.testing.assert_allclose(found.logits, -np.sort(-expected, axis=1), atol=2e-5, rtol=0)
        np.testing.assert_allclose(found.log_normalizer, np.log(np.exp(expected).sum(1)), atol=2e-5, rtol=0)
        place += len(found.token_ids)
        assert batch.lengths.tolist() == [place]


def test_invalid_calls_are_refused(once: Once) -> None:
    batch, _ = batch_of("alibi", once)

    def verify(*token_ids: int, num_candidates: int = 1) -> None:
        batch.verify(np.array(token_ids, np.int64), num_candidates)

    with pytest.raises(InputError, match=r"target_ids is \(2,\) for 0 rows, expected \[tokens\] of one row"):
        verify(1, 2)
    batch.add(tiny.sources(np.array([[5, 6]]), np.ones((1, 2), bool)), [[1]])
    for refused, message in (
        (verify, "one or more"),
        (lambda: verify(1, -1), "target_ids reach from -1 to 1"),
        (lambda: verify(*[1] * (LENGTH + 1)), f"target has {LENGTH + 1} tokens, the limit is {LENGTH}"),
        (lambda: verify(1, num_candidates=0), "num_candidates is 0"),
        (lambda: batch.verify(np.ones((1, 2), np.int64), 1), r"target_ids is \(1, 2\) for 1 rows"),
        (lambda: batch.rewind(1), r"length is 1 for rows of \[0\], expected 0 up to that of one row"),
        (lambda: batch.rewind(-1), "length is -1"),
    ):
        with pytest.raises(InputError, match=message):
            refused()
    assert batch.lengths.tolist() == [0], "the batch is as it was"
    batch.add(tiny.sources(np.array([[5, 6]]), np.ones((1, 2), bool)), [[1]])
    for refused in (lambda: verify(1, 2), lambda: batch.rewind(0)):
        with pytest.raises(InputError, match="one row"):
            refused()


def test_a_graph_without_speculation_cannot_verify(random_bundle: Path) -> None:
    with tfexport.load(random_bundle, threads=1) as model:
        batch = model.session.batch()
        assert isinstance(batch, Verifies)
        assert not batch.can_verify


class _TakesLastTwice(nn.Module):
    """A model of the user's own whose last position is not taken in one place."""

    def __init__(self, inner: Transformer) -> None:
        super().__init__()
        self.inner = inner
        self.encode = inner.encode

    def decode_step(self, target_ids: Ids, cross: object, cache: object) -> object:
        hidden = self.inner._decode(target_ids, cross, cache).unflatten(0, target_ids.shape)  # type: ignore[arg-type]
        return self.inner._project(hidden[:, -1] + 0 * hidden[:, -1:].sum(1) + hidden.flip(1)[:, -1] * 0)


def test_a_module_whose_last_position_is_not_found(tmp_path: Path) -> None:
    inner = tiny.model(VARIANTS["alibi"], dtype=torch.float32)
    with pytest.raises(GraphError, match=r"speculation: the decoder selects the last position in 2 places"):
        write_graphs(_TakesLastTwice(inner), model_spec(inner.config, "fp32"), tmp_path, **OPTIONS)
