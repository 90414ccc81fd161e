"""Which form of the decoder runs where: contrib on the CPU, never on a GPU, and a bundle without it as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bundle.test_bundle import GRAPHS, make, make_contrib
from tfexport import model
from tfexport.errors import BackendError, BundleError
from tfexport.inspect import describe, inspect_path
from tfexport.runtime import open as opening
from tfexport.runtime.ort.contrib import ContribSession
from tfexport.spec import Device, Form
from tfexport.verify import ladder

ENCODER = {"encoder": GRAPHS["encoder"]}
CONCAT = ENCODER | {"decoder": GRAPHS["decoder"]}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Form | None]:
    """Note the forms that are opened; the graphs of these bundles are none."""
    forms: list[Form | None] = []

    def note(graphs: Any, spec: Any, form: Form | None, *more: Any, **settings: Any) -> None:
        forms.append(form)

    monkeypatch.setattr(opening, "open_ort", note)
    monkeypatch.setattr(ladder, "open_ort", note)
    return forms


@pytest.mark.parametrize(
    ("graphs", "device", "form"),
    [
        (GRAPHS, "cpu", "contrib"),
        (GRAPHS, "cuda", "static"),
        (CONCAT, "cuda", "concat"),
        (ENCODER, "cpu", "contrib"),
    ],
)
def test_the_form_is_the_fastest_that_bundle_and_device_have(
    graphs: Any, device: Device, form: Form, tmp_path: Path, opened: list[Form | None]
) -> None:
    bundle = make_contrib(tmp_path / "b", graphs)
    opening.open_session(bundle, "ort", form=None, threads=None, device=device)
    assert opened == [form]


def test_a_bundle_without_the_contrib_form_runs_as_before(tmp_path: Path, opened: list[Form | None]) -> None:
    bundle = make(tmp_path / "b")
    opening.open_session(bundle, "ort", form=None, threads=None)
    assert opened == ["static"]
    with pytest.raises(BundleError, match="has no contrib form; export it with --forms concat,static,contrib"):
        opening.open_session(bundle, "ort", form="contrib", threads=None)


def test_the_contrib_form_alone_is_refused_on_a_gpu(tmp_path: Path) -> None:
    bundle = make_contrib(tmp_path / "b", ENCODER)
    refusal = "has the contrib form alone, which runs on the CPU; for device cuda export it with --forms concat,static"
    with pytest.raises(BundleError, match=refusal):
        opening.open_session(bundle, "ort", form=None, threads=None, device="cuda")
    graphs = {name: bundle.file(graph.file) for name, graph in bundle.manifest.graphs.items()}
    with pytest.raises(BundleError, match=refusal):
        list(ladder._ort_sessions(ladder.Stages(None, graphs, bundle.manifest.spec), "cuda"))  # type: ignore[arg-type]


def test_the_contrib_form_is_refused_on_a_gpu_by_name(dates_bundle: Path) -> None:
    with pytest.raises(BackendError, match="the contrib form runs on the CPU; for device cuda leave the form out"):
        model.load(dates_bundle, form="contrib", device="cuda")


@pytest.mark.parametrize(
    ("device", "forms"), [("cpu", ["concat", "static", "contrib"]), ("cuda", ["concat", "static"])]
)
def test_the_ladder_has_the_forms_of_the_device(
    device: Device, forms: list[str], tmp_path: Path, opened: list[Form | None]
) -> None:
    bundle = make_contrib(tmp_path / "b", GRAPHS)
    graphs = {name: bundle.file(graph.file) for name, graph in bundle.manifest.graphs.items()}
    stages = ladder.Stages(None, graphs, bundle.manifest.spec)  # type: ignore[arg-type]
    where = "" if device == "cpu" else f" {device}"
    assert [name for name, _ in ladder._ort_sessions(stages, device)] == [f"ort {form}{where}" for form in forms]
    assert opened == forms


def test_a_bundle_of_the_trained_model_runs_contrib_and_shows_it(dates_bundle: Path) -> None:
    with model.load(dates_bundle, threads=1) as loaded:
        assert isinstance(loaded.session, ContribSession)
        assert loaded.generate(["le 14 juillet 1989"])[0].text == "1989-07-14"
    shown = "\n".join(describe(inspect_path(dates_bundle)))
    assert "Graph decoder_contrib: decoder_contrib.onnx, opset 18" in shown
    assert "com.microsoft.GroupQueryAttention" in "\n".join(
        describe(inspect_path(dates_bundle / "decoder_contrib.onnx"))
    )
