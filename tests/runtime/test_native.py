"""The backend `native`: every set of kernels, what it refuses, 8-bit weights, and how it is chosen."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import tfexport
from tests import tiny
from tests.command import ran
from tests.conftest import DATES, exported
from tests.runtime import compiled
from tests.runtime.compiled import native_session
from tests.runtime.exported import Once, sources
from tests.runtime.native_configs import CONFIGS, PRE
from tests.runtime.test_contract import assert_candidates, begun, full_logits, targets
from tfexport._io.extras import repair_command
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import WEIGHTS
from tfexport.errors import BackendError
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.runtime import registry
from tfexport.runtime.native import _library, _plan
from tfexport.runtime.native import backend as native
from tfexport.runtime.native._library import KERNELS, Library
from tfexport.runtime.native.backend import NativeSession, probe
from tfexport.runtime.probes import run_probe
from tfexport.runtime.registry import LoadOptions
from tfexport.runtime.session import Session
from tfexport.verify import VerifyConfig, verify_bundle

TEXT, ISO = "le 14 juillet 1989", "1989-07-14"


@pytest.fixture(params=KERNELS)
def library(request: pytest.FixtureRequest, once: Once) -> Library:
    return compiled.library(request.param, once)


@pytest.fixture
def installed(once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the distribution for a test."""
    package = tmp_path / "installed" / _library.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    path = compiled.fastest(once).path
    (package / path.name).symlink_to(path)
    monkeypatch.syspath_prepend(str(package.parent))
    _library.find_library.cache_clear()
    yield
    sys.modules.pop(_library.MODULE, None)
    _library.find_library.cache_clear()


# ---- what it computes


@pytest.mark.parametrize("name", CONFIGS)
def test_every_set_of_kernels_computes_the_model(name: str, library: Library, tmp_path: Path) -> None:
    model = tiny.model(CONFIGS[name], dtype=torch.float32)
    save_file(parameters(model.config), tmp_path / WEIGHTS)
    session = NativeSession(model.config, tmp_path / WEIGHTS, library=library)
    # Lengths around whole blocks of tokens, and as many beams as are read at once and one more.
    source_ids, source_mask = sources(model.config, (16, 24, 1, 17))
    target_ids = targets(model.config, 4, 20).repeat(5, 0)
    target_ids[:, 3:] = targets(model.config, 20, 17, seed=2)
    batch = begun(session, (source_ids, source_mask), target_ids[::5, :3].tolist(), width=5)
    expected = full_logits(model, source_ids.repeat(5, 0), source_mask.repeat(5, 0), target_ids)
    for position in range(2, 20):
        assert_candidates(batch.step(target_ids[:, position], 3), expected[:, position], 3)


def test_the_configurations_of_these_tests_have_every_value() -> None:
    used = [{**config.switches(), **config.to_dict()} for config in CONFIGS.values()]
    for name, values in _plan.SUPPORTED.items():
        for value in values or ():
            keys = (name, f"enc.{name}", f"dec.{name}")
            sides = [stack for one in used for stack in (one["encoder"], one["decoder"])]
            assert any(value in [one.get(key, ...) for key in keys] for one in (*used, *sides)), (name, value)


def test_more_candidates_than_are_selected_by_insertion(once: Once) -> None:
    model = tiny.model(tiny.config(target_vocab=200), dtype=torch.float32)
    source_ids, source_mask = sources(model.config)
    first = targets(model.config, 4, 1)
    expected = full_logits(model, source_ids, source_mask, first)[:, 0]
    for count in (64, 65, 200):
        batch = begun(native_session(model, once), (source_ids, source_mask), first.tolist())
        assert_candidates(batch.step(first[:, 0], count), expected, count)


def test_a_closed_session_keeps_its_weights_for_open_batches(once: Once) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    session, source, first = native_session(model, once), sources(model.config), targets(model.config, 4, 1)
    batch = begun(session, source, first.tolist())
    session.close()
    assert_candidates(batch.step(first[:, 0], 3), full_logits(model, *source, first)[:, 0], 3)


# ---- memory


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(5))
def test_random_calls_leave_memory_alone(seed: int, kernels: str, once: Once, tmp_path: Path) -> None:
    path, environment = compiled.sanitized(kernels, once)
    compiled.library(kernels, once)  # or skip
    files = []
    for name, config in CONFIGS.items():
        files.append(tmp_path / f"{name}.safetensors")
        tensors = parameters(config)
        if name == "post":
            tensors |= random_bytes("enc.embed.weight", tensors.pop("enc.embed.weight"))
            tensors |= random_bytes("dec.layers.1.ffn.fc1.weight", tensors.pop("dec.layers.1.ffn.fc1.weight"))
        save_file(tensors, files[-1])
    program = [sys.executable, "-m", "tests.runtime.native_fuzz", path, str(seed), "60", *files]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = ast.literal_eval(done.stdout)
    assert min(counts.values()) > 100, counts


def parameters(config: TransformerConfig) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in tiny.model(config, dtype=torch.float32).named_parameters()}


def random_bytes(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    rng, (outputs, inputs) = np.random.default_rng(0), weight.shape
    blocks = -(-inputs // 16)
    parts = {
        "values": rng.integers(0, 256, (outputs, blocks, 16), np.uint8),
        "scales": rng.uniform(0, 0.01, (outputs, blocks)).astype(np.float32),
        "zero_points": rng.integers(0, 256, (outputs, blocks), np.uint8),
    }
    return {f"{name}.int8_blocks.{part}": array for part, array in parts.items()}


# ---- what it refuses


REFUSED: dict[str, TransformerConfig] = {
    "norm_place": tiny.config(encoder={"norm_place": "sandwich"}),
    "num_kv_heads": tiny.config(decoder={"num_kv_heads": 2}),
    "d_v": tiny.config(decoder={"d_k": 6, "d_v": 10}),
    "parallel": tiny.config(encoder=PRE, decoder={**PRE, "parallel": "cross"}),
    "qk_norm": tiny.config(qk_norm="head"),
    "relative_bias": tiny.config(relative_bias="alibi"),
    "positions": tiny.config(positions="rotary"),
    "attention_softcap": tiny.config(attention_softcap=2.0),
    "logit_softcap": tiny.config(logit_softcap=2.0),
    "d_model": tiny.config(d_model=40),
    "encoder-only": tiny.ENCODER_ALONE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError) as caught:
        NativeSession(REFUSED[name], tmp_path / "missing")
    assert any(name in problem for problem in caught.value.problems)
    assert caught.value.remedy == "use --backend ort"


def test_a_new_field_of_a_configuration_is_refused_until_it_is_added() -> None:
    made = dataclasses.make_dataclass("New", [("d_ff", int), ("new", str, "none")], bases=(), frozen=True)
    assert list(_plan._field_problems("decoder.", made(d_ff=3))) == []
    assert list(_plan._field_problems("decoder.", made(d_ff=3, new="switch"))) == ["decoder.new is switch"]
    known = {field.name for config in (TransformerConfig, StackConfig) for field in dataclasses.fields(config)}
    assert set(_plan.SUPPORTED) <= known, "no field that is gone"


# ---- 8-bit weights


@pytest.fixture(scope="session")
def dates_int8(once: Once) -> Path:
    return exported(once, "dates-int8-native", str(DATES), precision="int8", variants=("contrib",))


def product_session(
    folder: Path, x: np.ndarray, values: np.ndarray, zeros: np.ndarray, scales: np.ndarray, library: Library
) -> Session:
    """Open a model whose logits are the product of `x` with an 8-bit matrix."""
    config = tiny.config(d_model=x.size, decoder=PRE, target_vocab=len(values), output_bias=False)
    tensors = parameters(config)
    del tensors["out.weight"]
    # The last norm returns its bias, whatever it reads.
    tensors |= {"dec.norm.weight": np.zeros_like(x), "dec.norm.bias": x}
    parts = {"values": values.reshape(len(values), zeros.shape[1], -1), "scales": scales, "zero_points": zeros}
    tensors |= {f"out.weight.int8_blocks.{part}": array for part, array in parts.items()}
    save_file(tensors, folder / WEIGHTS)
    return NativeSession(config, folder / WEIGHTS, "int8", library=library)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ends", [True, False])
def test_products_of_bytes_are_exact(ends: bool, rows: int, library: Library, tmp_path: Path) -> None:
    rng, inputs, outputs, block = np.random.default_rng(0), 256, 100, 128
    x = np.where(rng.random(inputs) < 0.5, -1, 1) if ends else rng.standard_normal(inputs)
    x = x.astype(np.float32)
    values = rng.choice([0, 255], (outputs, inputs)) if ends else rng.integers(0, 256, (outputs, inputs))
    if ends:
        values[0], values[1] = np.where(x > 0, 255, 0), np.where(x > 0, 0, 255)  # the largest sums
    values = values.astype(np.uint8)
    zeros = rng.choice([0, 255] if ends else range(256), (outputs, inputs // block)).astype(np.uint8)
    scales = rng.uniform(0.001, 0.01, zeros.shape).astype(np.float32)
    session = product_session(tmp_path, x, values, zeros, scales, library)
    batch = begun(session, sources(session_config(session), (3,) * rows), [[1]] * rows)
    found = batch.step(np.ones(rows, np.int64), outputs)
    expected = np.zeros(outputs)
    for b in range(inputs // block):
        own = slice(b * block, (b + 1) * block)
        step = abs(x[own]).max() / 127
        whole = np.rint(x[own] / step).astype(np.int64)
        expected += scales[:, b] * step * ((values[:, own].astype(np.int64) - zeros[:, [b]]) @ whole)
    by_id = np.empty((rows, outputs))
    np.put_along_axis(by_id, found.token_ids, found.logits, 1)
    np.testing.assert_allclose(by_id, np.broadcast_to(expected, by_id.shape), rtol=1e-5, atol=1e-4)


def session_config(session: Session) -> TransformerConfig:
    return tiny.config(max_source_length=session.spec.max_source_length)


def test_rows_with_nan_are_found_by_products_of_bytes(library: Library, tmp_path: Path) -> None:
    x = np.ones(32, np.float32)
    x[5] = np.nan
    zeros, scales = np.zeros((100, 1), np.uint8), np.ones((100, 1), np.float32)
    session = product_session(tmp_path, x, np.ones((100, 32), np.uint8), zeros, scales, library)
    found = begun(session, sources(session_config(session), (3,)), [[1]]).step(np.ones(1, np.int64), 1)
    assert np.isnan(found.log_normalizer).all()


def test_a_quantized_bundle_gives_the_same_text(installed: None, dates_int8: Path) -> None:
    with tfexport.load(dates_int8, backend="native") as model:
        assert model.generate([TEXT], num_beams=2)[0].text == ISO
    assert verify_bundle(dates_int8, backend="native", against=DATES, config=VerifyConfig(samples=3)).passed


def test_integers_of_columns_and_of_blocks_restore_the_weights(dates_bundle: Path, dates_int8: Path) -> None:
    exact = load_file(dates_bundle / WEIGHTS)
    config = open_bundle(dates_int8).manifest.config
    assert config is not None
    stored = _plan.tensors(config, dates_int8 / WEIGHTS)
    plain = _plan.tensors(config, dates_bundle / WEIGHTS)
    assert len(exact) > 0
    quantized = 0
    for one, other in zip(stored, plain, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None or one.scales is None or one.zeros is None:
            continue
        quantized += 1
        blocks = one.values.reshape(*one.scales.shape, one.block).astype(np.float32)
        restored = ((blocks - one.zeros[..., None]) * one.scales[..., None]).reshape(len(blocks), -1)
        rounding = one.scales.max(1, keepdims=True)
        assert (abs(restored[:, : one.columns] - other.values) <= 0.51 * rounding).all()
    assert quantized > 20


# ---- how it is chosen


def test_a_bundle_is_loaded_verified_and_run_by_name(
    installed: None, dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tfexport.load(dates_bundle, backend="native") as model:
        assert model.session.backend == "native"
        assert model.generate([TEXT, TEXT], num_beams=4)[1].text == ISO
        assert "".join(model.stream(TEXT)) == ISO
    report = verify_bundle(dates_bundle, backend="native", config=VerifyConfig(samples=3))
    assert report.passed
    assert {check.stage for check in report.decodes} == {"native", "eager"}
    assert ISO in ran("generate", dates_bundle, TEXT, "--backend", "native").output
    with pytest.raises(BackendError, match="native: decoder variant contrib is a graph"):
        tfexport.load(dates_bundle, backend="native", variant="contrib")


@pytest.mark.usefixtures("installed")
def test_auto_takes_it_for_small_models_that_need_nothing_else(
    dates_bundle: Path,
    dates_aligned: Path,
    dates_int8: Path,
    variant: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(path: Path, **options: Any) -> str:
        return registry.choose(open_bundle(path), LoadOptions(**options)).name

    assert chosen(dates_bundle) == chosen(dates_bundle, threads=1) == chosen(dates_int8) == "native"
    assert chosen(dates_bundle, threads=2) == chosen(dates_bundle, threads=None) == "ort", "it has one thread"
    assert chosen(dates_bundle, variant="contrib") == "ort"
    assert chosen(dates_aligned) == "ort", "it does not align"
    assert chosen(variant("t5")) == "ort"
    monkeypatch.setattr(native, "MOST_STEP_BYTES", 100_000)
    assert chosen(dates_bundle) == "ort", "a large model"


@pytest.mark.usefixtures("installed")
def test_bundles_that_it_does_not_compute_have_a_reason(
    dates_fp16: Path, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, options = registry.get("native"), LoadOptions()
    assert "precision is fp16" in backend.cannot_run(open_bundle(dates_fp16), options)
    assert "relative_bias is t5" in backend.cannot_run(open_bundle(variant("t5")), options)
    with pytest.raises(BackendError, match="relative_bias is t5"):
        tfexport.load(variant("t5"), backend="native")


def test_the_doctor_tries_it(installed: None) -> None:
    library = registry.get("native").requirements[0]
    problem = run_probe(registry.get("native"), library)["cpu"]
    assert "No module named 'tfexport_native'" in problem, "it is installed for this process only"
    assert probe(library.name, "") == {"cpu": ""}
    assert "--force-reinstall tfexport-native" in repair_command(library.module, library.name)


def test_without_the_distribution_nothing_changes(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _library.MODULE, None)
    assert registry.choose(open_bundle(dates_bundle), LoadOptions()).name == "ort"
    with pytest.raises(BackendError, match="tfexport_native is not installed; pip install tfexport-native"):
        tfexport.load(dates_bundle, backend="native")


def test_a_library_of_another_version_is_refused(once: Once, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = compiled.fastest(once).path
    monkeypatch.setattr(_library, "VERSION", 2)
    with pytest.raises(BackendError, match="has version 1, expected 2"):
        Library(path)
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(BackendError, match="cannot be loaded"):
        Library(tmp_path / "broken.so")
