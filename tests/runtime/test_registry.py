"""The registry: which backend and which decoder variant open a bundle."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import tfexport
from tests.bundle.made import GRAPHS, make, make_contrib
from tests.runtime.toy import TOY
from tfexport.bench.config import BenchConfig, resolve
from tfexport.bench.run import check_parity, measure
from tfexport.bundle.bundle import open_bundle as read_bundle
from tfexport.contract import Device, Variant
from tfexport.errors import BackendError, BundleError, ConfigError
from tfexport.runtime import registry
from tfexport.runtime.ort import backend as ort
from tfexport.runtime.ort._providers import PlacementError
from tfexport.runtime.registry import Backend, Graphs, LoadOptions, open_session
from tfexport.verify import VerifyConfig, verify_bundle

ENCODER = {"encoder": GRAPHS["encoder"]}
CONCAT = ENCODER | {"decoder": GRAPHS["decoder"]}
TEXT, ISO = "le 14 juillet 1989", "1989-07-14"


# ---- a backend that is registered by a test


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setitem(registry.BACKENDS, "toy", TOY)
    return TOY


def test_one_registration_makes_a_backend(toy: Backend, dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle, backend="toy") as loaded:
        assert loaded.session.backend == "toy"
        assert loaded.generate([TEXT], num_beams=2)[0].text == ISO
    report = verify_bundle(dates_bundle, backend="toy", config=VerifyConfig(samples=2))
    assert report.passed
    assert {check.stage for check in report.decodes} == {"toy", "eager"}, "eager for recorded texts"


def test_bench_measures_a_registered_backend_and_verifies_it_first(toy: Backend, dates_bundle: Path) -> None:
    config = BenchConfig(backend="toy", duration=0.1, source_length=(5,), target_length=(3,))
    bundle = read_bundle(dates_bundle)
    manifest = dataclasses.replace(bundle.manifest, parity={"passed": True}, provenance=None)
    lines: list[str] = []
    found = check_parity(dataclasses.replace(bundle, manifest=manifest), config, lines.append)
    assert found["source"] == "checked before measuring", "its export was verified on another backend"
    assert "comparing logits: toy" in lines
    measured = measure(dates_bundle, resolve(config, bundle.manifest.spec, has_texts=False), None, 0)
    assert measured["backend"] == "toy"


# ---- which backend


def test_the_error_for_an_unknown_backend_lists_all(dates_bundle: Path) -> None:
    known = "'auto', 'ort', 'eager', 'trt', 'native'"
    with pytest.raises(ConfigError, match=f"backend is 'toy', expected one of {known}"):
        tfexport.load(dates_bundle, backend="toy")
    with pytest.raises(ConfigError, match=f"bench: backend is 'toy', expected one of {known}"):
        BenchConfig(backend="toy")
    with pytest.raises(ConfigError, match="verify: backend eager is the eager model itself, expected one of 'ort'"):
        verify_bundle(dates_bundle, backend="eager")


@pytest.mark.parametrize(
    ("name", "modules", "hint"),
    [
        ("ort", ["onnxruntime"], "onnxruntime is not installed; pip install 'tfexport[cpu]' (or [gpu], never both)"),
        ("eager", ["torch"], "torch is not installed; pip install 'tfexport[export]'"),
        (
            "trt",
            ["tensorrt", "tensorrt_rtx"],
            "tensorrt or tensorrt_rtx is not installed; pip install 'tfexport[trt]' or pip install 'tfexport[rtx]'",
        ),
    ],
)
def test_a_backend_that_is_not_installed_comes_with_the_hint(
    name: str, modules: list[str], hint: str, dates_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendError) as caught:
        tfexport.load(dates_bundle, backend=name)
    assert str(caught.value) == f"{name}: {hint}"


def test_auto_takes_the_first_that_is_installed_and_can_run_the_bundle(
    dates_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(dates_bundle)
    assert registry.choose(bundle, LoadOptions()).name == "ort"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert registry.choose(bundle, LoadOptions()).name == "eager"
    with pytest.raises(BackendError, match=r"ort: onnxruntime is not installed; .*; eager: has no device cuda; trt: "):
        registry.choose(bundle, LoadOptions(device="cuda"))
    # Options of one backend are never ignored by another.
    with pytest.raises(BackendError, match="auto: engine fast is for TensorRT; use it with --backend trt, or leave"):
        registry.choose(bundle, LoadOptions(engine="fast"))


# ---- which decoder variant ONNX Runtime opens: contrib on the CPU, never on a GPU


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Variant | None]:
    """Record the variants that are opened; the graphs of these bundles are placeholders."""
    variants: list[Variant | None] = []
    monkeypatch.setattr(ort, "OrtSession", lambda graphs, variant, *more, **options: variants.append(variant))
    return variants


@pytest.fixture
def without_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a GPU without kernels for the static variant."""

    def refuse_static(graphs: Any, variant: Variant | None, *more: Any, **options: Any) -> str:
        if variant == "static":
            raise PlacementError("ort: decoder_static.onnx: no kernel for Cast; update onnxruntime-gpu")
        return f"opened {variant}"

    monkeypatch.setattr(ort, "OrtSession", refuse_static)


@pytest.mark.parametrize(
    ("graphs", "device", "variant"),
    [
        (GRAPHS, "cpu", "contrib"),
        (GRAPHS, "cuda", "static"),
        (CONCAT, "cuda", "concat"),
        (ENCODER, "cpu", "contrib"),
    ],
)
def test_the_fastest_variant_of_bundle_and_device_is_opened(
    graphs: Any, device: Device, variant: Variant, tmp_path: Path, opened: list[Variant | None]
) -> None:
    bundle, options = make_contrib(tmp_path / "b", graphs), LoadOptions(backend="ort", threads=1, device=device)
    open_session(bundle, options)
    assert opened == [variant]
    if graphs is GRAPHS:
        variants = ("concat", "static", "contrib") if device == "cpu" else ("concat", "static")
        stages = [f"ort {variant}" + ("" if device == "cpu" else " cuda") for variant in variants]
        assert [stage for stage, _ in ort.parity_sessions(Graphs.of(bundle), options)] == stages
        assert opened == [variant, *variants]


@pytest.mark.usefixtures("without_static")
def test_concat_is_opened_with_a_warning_if_static_has_no_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, options = make(tmp_path / "b"), LoadOptions(backend="ort", threads=1, device="cuda")
    assert cast(object, open_session(bundle, options)) == "opened concat"
    assert [name for name, _ in ort.parity_sessions(Graphs.of(bundle), options)] == ["ort concat cuda"]
    loaded, verified = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert loaded == (
        "ort: decoder_static.onnx: no kernel for Cast; runs the concat decoder variant instead; "
        "update onnxruntime-gpu to 1.30 or newer for the static one"
    )
    assert verified == "ort: decoder_static.onnx: no kernel for Cast; does not verify the static decoder variant"
    # A requested variant is never replaced.
    with pytest.raises(PlacementError, match="no kernel for Cast"):
        open_session(bundle, dataclasses.replace(options, variant="static"))
    alone = make_contrib(tmp_path / "alone", ENCODER | {"decoder_static": GRAPHS["decoder_static"]})
    with pytest.raises(PlacementError, match="no kernel for Cast"):
        open_session(alone, options)
    with pytest.raises(PlacementError, match="no kernel for Cast"):
        list(ort.parity_sessions(Graphs.of(alone), options))


def test_a_bundle_without_contrib_runs_static(tmp_path: Path, opened: list[Variant | None]) -> None:
    bundle = make(tmp_path / "b")
    open_session(bundle, LoadOptions(backend="ort", threads=1))
    assert opened == ["static"]
    with pytest.raises(
        BundleError, match="has no decoder variant contrib; export it with --variants concat,static,contrib"
    ):
        open_session(bundle, LoadOptions(backend="ort", threads=1, variant="contrib"))


def test_a_bundle_with_only_contrib_is_refused_on_a_gpu(tmp_path: Path) -> None:
    bundle = make_contrib(tmp_path / "b", ENCODER)
    refusal = "has only the decoder variant contrib, which runs on the CPU; for device cuda export it with --variants"
    with pytest.raises(BundleError, match=refusal):
        open_session(bundle, LoadOptions(backend="ort", threads=1, device="cuda"))
    with pytest.raises(BundleError, match=refusal):
        list(ort.parity_sessions(Graphs.of(bundle), LoadOptions(device="cuda")))
    with pytest.raises(
        BackendError, match="decoder variant contrib runs on the CPU only; for device cuda leave it out"
    ):
        open_session(bundle, LoadOptions(backend="ort", threads=1, device="cuda", variant="contrib"))
