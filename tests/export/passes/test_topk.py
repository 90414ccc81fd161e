"""Selection in the graph: the best tokens and log Σ exp of the logits, whatever the logits are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tfexport.export.passes import append_selection

VOCAB = 32_000
RNG = np.random.default_rng(0)
ROWS = {
    "usual": RNG.normal(size=VOCAB) * 4,
    "all equal": np.full(VOCAB, 3.0),
    "all 10,000": np.full(VOCAB, 1e4),
    "all -10,000": np.full(VOCAB, -1e4),
    "from -10,000 to 10,000": np.linspace(-1e4, 1e4, VOCAB),
    "one of 10,000": np.where(np.arange(VOCAB) == 17, 1e4, 0.0),
    "one that is impossible": np.where(np.arange(VOCAB) == 17, -1e4, 0.0),
    "the last of the float range": np.where(np.arange(VOCAB) == 17, 3e38, -3e38),
    "hardly apart": 1e-7 * np.arange(VOCAB),
}


@pytest.fixture(scope="module")
def selection() -> ort.InferenceSession:
    """Return the selection alone, behind logits that are given."""
    given = ir.val("given", ir.DataType.FLOAT, ["rows", VOCAB])
    node = ir.Node("", "Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.type, logits.shape = "logits", given.type, given.shape
    model = ir.Model(ir.Graph([given], [logits], nodes=[node], opset_imports={"": 18}, name="g"), ir_version=10)
    append_selection(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString())


def select(session: ort.InferenceSession, logits: np.ndarray, count: int) -> list[np.ndarray]:
    names = ["candidate_ids", "candidate_logits", "log_normalizer"]
    found: list[np.ndarray] = session.run(names, {"given": logits, "num_candidates": np.array([count])})
    return found


@pytest.mark.parametrize("count", [1, 8, VOCAB])
def test_selection_is_that_of_numpy_in_float64(selection: ort.InferenceSession, count: int) -> None:
    logits = np.stack(list(ROWS.values())).astype(np.float32)
    ids, best, normalizer = select(selection, logits, count)
    wide = logits.astype(np.float64)
    np.testing.assert_array_equal(ids, np.argsort(-wide, axis=1, kind="stable")[:, :count])
    np.testing.assert_array_equal(best, np.take_along_axis(logits, ids, 1))
    most = wide.max(1, keepdims=True)
    expected = most + np.log(np.exp(wide - most).sum(1, keepdims=True))
    np.testing.assert_allclose(normalizer, expected, rtol=3e-7, atol=2e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 17, VOCAB - 1])
def test_what_is_not_finite_shows_in_its_row_alone(wrong: float, place: int, selection: ort.InferenceSession) -> None:
    """A decode that goes on from NaN would look like any other."""
    logits = np.stack([ROWS["usual"]] * 3).astype(np.float32)
    logits[1, place] = wrong
    normalizer = select(selection, logits, 4)[2][:, 0]
    assert np.isfinite(normalizer).tolist() == [True, False, True]
