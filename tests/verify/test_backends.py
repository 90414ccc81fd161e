"""Parity checks of other backends: engines with their own limits and precision, and CUDA."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests import tiny
from tests.command import ran
from tests.tensorrt.session.trt_double import trt_session
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.errors import BackendError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.export.quantize.qdq import quantize_graphs
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.precision import FORMATS
from tfexport.runtime.eager import EagerBatch, EagerSession, load_eager_model
from tfexport.runtime.registry import BACKENDS, Graphs, LoadOptions, get
from tfexport.runtime.session import Candidates, Floats, Limit, Session
from tfexport.tensorrt.session import session as backend
from tfexport.tensorrt.session._batch import TrtBatch
from tfexport.verify import VerifyConfig, verify_bundle
from tfexport.verify._numbers import compare, random_batches, step_logits

Once = Callable[[str, Callable[[Path], object]], Path]
FEW = VerifyConfig(samples=8)


@pytest.fixture(scope="session")
def bundle(variant: Callable[[str], Path]) -> Path:
    return variant("post")


@pytest.fixture(autouse=True)
def _no_library() -> Iterator[None]:
    """Let engines be opened where TensorRT is not installed: all here are doubles."""
    with patch.dict(BACKENDS, trt=dataclasses.replace(get("trt"), requirements=())):
        yield


def engines(**changes: Any) -> Callable[..., Session]:
    """Stand in for opening an engine with doubles; reading and refusing real ones is tested elsewhere."""

    def open_bundle(bundle: Bundle, options: LoadOptions) -> Session:
        assert options == LoadOptions()
        variant = "static" if bundle.manifest.spec.has_decoder else None
        return trt_session(dict(Graphs.of(bundle).paths), bundle.manifest.spec, variant, **changes)

    return open_bundle


def test_engines_are_compared(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "open_bundle", engines())
    report = json.loads(ran("verify", bundle, "--backend", "trt", "--samples", 8, "--json").stdout)
    assert [number["stage"] for number in report["numbers"]] == ["eager float64", "eager cached", "trt fp32"]
    assert [(check["stage"], check["method"]) for check in report["decodes"]] == [
        ("trt fp32", "greedy"),
        ("trt fp32", "beam 4"),
        ("trt fp32", "batch invariance"),
        ("trt fp32", "full length"),
    ]
    assert all(check["exact"] == check["sequences"] and check["must_be_exact"] for check in report["decodes"])


def test_smaller_engines_are_compared_within_their_limits(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"max_batch": 5, "max_source_length": 7, "max_target_length": 6, "max_shapes": "num_candidates:9"}
    monkeypatch.setattr(backend, "open_bundle", engines(**limits))
    assert verify_bundle(bundle, config=FEW, backend="trt").passed


def test_beams_are_not_compared_if_an_engine_takes_too_few_rows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "open_bundle", engines(max_batch=3))
    reported: list[str] = []
    report = verify_bundle(bundle, config=FEW, backend="trt", report=reported.append)
    assert report.passed
    assert {check.method for check in report.decodes} == {"greedy", "batch invariance", "full length"}
    assert "trt fp32 takes 3 rows, too few for beam 4" in reported


def test_an_encoder_only_engine_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(tiny.ENCODER_ALONE, head="token", labels=("a", "b"))
    save_model(tiny.model(config, dtype=torch.float32), tmp_path / "m")
    export_bundle(str(tmp_path / "m"), tmp_path / "b", ExportConfig(), verify=False)
    monkeypatch.setattr(backend, "open_bundle", engines())
    report = verify_bundle(tmp_path / "b", config=FEW, backend="trt")
    assert report.passed
    assert [(one.stage, one.quantity) for one in report.numbers] == [("trt fp32", "states"), ("trt fp32", "logits")]


def test_narrow_weights_are_judged_by_their_own_tolerance(
    dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = open_bundle(dates_bundle).manifest.graphs
    graphs = {name: entries[name] for name in ("encoder", "decoder_static")}
    quantize_graphs(dates_bundle, graphs, tmp_path, "int8")

    def open_double(bundle: Bundle, options: LoadOptions) -> Session:
        paths = {name: tmp_path / graph.file for name, graph in graphs.items()}
        return trt_session(paths, bundle.manifest.spec, "static", weights="int8")

    monkeypatch.setattr(backend, "open_bundle", open_double)
    report = verify_bundle(dates_bundle, config=FEW, backend="trt")
    assert report.passed
    numbers = report.numbers[-1]
    assert (numbers.stage, numbers.tolerance) == ("trt int8", FORMATS["int8"].tolerance)
    assert numbers.error > FORMATS["fp32"].tolerance, "the weights are narrow indeed"
    assert not any(check.must_be_exact for check in report.decodes if check.stage != "eager")


def test_wrong_engines_fail(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrtBatch._step

    def wrong(*arguments: Any) -> Candidates:
        found = step(*arguments)
        return dataclasses.replace(found, logits=found.logits[:, ::-1].copy())

    monkeypatch.setattr(backend, "open_bundle", engines(max_shapes="num_candidates:9"))
    monkeypatch.setattr(TrtBatch, "_step", wrong)
    report = verify_bundle(bundle, config=FEW, backend="trt")
    assert not report.passed
    assert "trt fp32 differs by" in report.problems()[0]


class Limited(EagerSession):
    """The eager model, returning five candidates at most, some of them wrong."""

    raised, hidden = 0.0, False

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.limits = dataclasses.replace(self.limits, candidates=Limit(5))

    def batch(self, width: int = 1) -> EagerBatch:
        return LimitedBatch(self, width)


class LimitedBatch(EagerBatch):
    def step(self, target_ids: Any, num_candidates: int) -> Candidates:
        assert num_candidates <= 5
        found, session = super().step(target_ids, 6), self._session
        assert isinstance(session, Limited)
        kept = slice(1, 6) if session.hidden else slice(0, 5)
        return Candidates(found.token_ids[:, kept], found.logits[:, kept] + session.raised, found.log_normalizer)


@pytest.mark.parametrize(("raised", "hidden"), [(0.0, False), (0.5, False), (0.0, True)])
def test_few_candidates_are_compared_as_far_as_they_reach(bundle: Path, raised: float, hidden: bool) -> None:
    """A logit that is off shows, and so does a best token that is missing."""
    model = load_eager_model(open_bundle(bundle))
    limited = Limited(model)
    limited.raised, limited.hidden = raised, hidden
    batches = random_batches(limited.spec, 8, np.random.default_rng(0))
    whole = EagerSession(model)
    expected: list[Floats] = []
    for batch in batches:
        shape = (len(batch.target_ids), batch.target_ids.shape[1] - batch.prefill + 1, whole.spec.vocab)
        expected.append(step_logits(whole, batch, np.zeros(shape, np.float32)))
    got = [step_logits(limited, batch, logits) for batch, logits in zip(batches, expected, strict=True)]
    found = compare("limited", expected, got, 1e-6)
    assert found.passed == (not raised and not hidden)
    if raised:
        assert found.worst == pytest.approx(0.5, abs=1e-5)


def test_cuda_is_never_replaced_by_the_cpu(bundle: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    with pytest.raises(BackendError, match="has no CUDA"):
        verify_bundle(bundle, config=FEW, device="cuda")
    with pytest.raises(BackendError, match="ort: engine tensorrt-static is for TensorRT; use it with --backend trt"):
        verify_bundle(bundle, config=FEW, engine="tensorrt-static")
