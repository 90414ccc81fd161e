"""The backend `native`: every set of kernels, what it refuses, 8-bit weights, and how it is chosen."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tfexport.decode.loop import Loop
from tfexport.decode.offline import decode
from tfexport.decode.request import check_requests
from tfexport.errors import BackendError, BundleError, Cancelled, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.directory import load_model, save_model
from tfexport.runtime import cpu, registry
from tfexport.runtime.native import _library, _plan
from tfexport.runtime.native import backend as native
from tfexport.runtime.native._library import KERNELS, Library
from tfexport.runtime.native.backend import NativeBatch, NativeSession, probe
from tfexport.runtime.probes import run_probe
from tfexport.runtime.registry import LoadOptions
from tfexport.runtime.session import Beams, BeamSteps, Session
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


def test_more_candidates_than_are_selected_by_insertion(once: Once, tmp_path: Path) -> None:
    model = tiny.model(tiny.config(target_vocab=200), dtype=torch.float32)
    source_ids, source_mask = sources(model.config)
    first = targets(model.config, 4, 1)
    expected = full_logits(model, source_ids, source_mask, first)[:, 0]
    session = saved_session(model.config, parameters(model.config), tmp_path / "model", once)
    for count in (64, 65, 200):
        batch = begun(session, (source_ids, source_mask), first.tolist())
        assert_candidates(batch.step(first[:, 0], count), expected, count)


def test_a_damaged_file_is_an_error(once: Once, tmp_path: Path) -> None:
    weights = parameters(CONFIGS["post"])
    name = "dec.layers.1.self.k.weight"
    with pytest.raises(BundleError, match=re.escape(name)):
        saved_session(CONFIGS["post"], {key: weights[key] for key in weights.keys() - {name}}, tmp_path / "none", once)
    with pytest.raises(ValueError, match="dimension"):  # raised while the library asks for a tensor
        saved_session(CONFIGS["post"], weights | {name: weights[name][:, :-1].copy()}, tmp_path / "narrow", once)
    saved_session(CONFIGS["post"], weights, tmp_path / "cut", once).close()
    path = tmp_path / "cut" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TfexportError):
        NativeSession(CONFIGS["post"], path, library=compiled.fastest(once))


def test_a_closed_session_keeps_its_weights_for_open_batches(once: Once) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    session, source, first = native_session(model, once), sources(model.config), targets(model.config, 4, 1)
    batch = begun(session, source, first.tolist())
    session.close()
    assert_candidates(batch.step(first[:, 0], 3), full_logits(model, *source, first)[:, 0], 3)


# ---- beam search

SEARCHES = st.builds(
    DecodeConfig,
    num_beams=st.integers(2, 6),
    num_return_sequences=st.integers(1, 2),
    max_new_tokens=st.integers(1, 20),
    length_penalty=st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    min_new_tokens=st.integers(0, 1),
    eos_token_id=st.one_of(st.none(), st.lists(st.integers(2, 11), min_size=1, max_size=4, unique=True).map(tuple)),
    forced_bos_token_id=st.sampled_from([None, None, 12]),
)


def saved_session(
    config: TransformerConfig, weights: dict[str, np.ndarray], folder: Path, once: Once, threads: int = 1
) -> NativeSession:
    folder.mkdir()
    save_file(weights, folder / WEIGHTS)
    return NativeSession(config, folder / WEIGHTS, threads=threads, library=compiled.fastest(once))


def both_searches(session: Session, sources: Sequence[Sequence[int]], **options: Any) -> tuple[Any, Any, int]:
    """Decode with beam searches in the library and in Python; also return how often the library searched."""
    calls: list[int] = []
    found: list[Any] = []
    search = NativeBatch.beam_steps

    def counted(self: NativeBatch, beams: Beams, steps: int) -> BeamSteps:
        calls.append(steps)
        return search(self, beams, steps)

    with pytest.MonkeyPatch.context() as patch:
        for inside in (True, False):
            if inside:
                patch.setattr(NativeBatch, "beam_steps", counted)
            else:
                patch.delattr(NativeBatch, "beam_steps")
            try:
                found.append(decode(session, sources, **options))
            except TfexportError as error:
                found.append((type(error), str(error), error.indices))
    return found[0], found[1], len(calls)


@pytest.mark.parametrize("name", ["std", "ssru", "average", "scaled"])
def test_beam_searches_are_those_of_python(name: str, once: Once, tmp_path: Path) -> None:
    weights = parameters(CONFIGS[name])
    sessions = [saved_session(CONFIGS[name], weights, tmp_path / "good", once)]
    weights["enc.embed.weight"][7] = np.nan  # sources with this token fail
    sessions.append(saved_session(CONFIGS[name], weights, tmp_path / "broken", once))
    sources = st.lists(st.lists(st.integers(3, 19), min_size=1, max_size=18), min_size=1, max_size=9)
    reasons, num_calls = set[str](), 0

    @given(
        sources=sources,
        config=SEARCHES,
        short=st.booleans(),
        batch_size=st.sampled_from([2, 32]),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=60, deadline=None, derandomize=True)
    def check(sources: list[list[int]], config: DecodeConfig, short: bool, batch_size: int, seed: int) -> None:
        nonlocal num_calls
        rng = np.random.default_rng(seed)
        if short:  # counts the start token and the prefix
            config = replace(config, min_new_tokens=0, min_length=min(7, config.max_new_tokens))
        prefixes = [rng.integers(12, 19, rng.integers(0, 4)).tolist() for _ in sources]
        for session in sessions:
            inside, outside, count = both_searches(
                session, sources, config=config, prefixes=prefixes, batch_size=batch_size
            )
            num_calls += count
            assert inside == outside
            if isinstance(inside, list):
                reasons.update(best.finish_reason for hypotheses in inside for best in hypotheses)
            else:
                reasons.add(inside[0].__name__)

    check()
    assert num_calls >= 100
    assert reasons >= {"length", "BackendError"}
    assert "eos" in reasons or name == "average"


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"stop_strings": ("a",)}, {"suppress_tokens": (5,)}])
def test_beam_searches_with_other_options_stay_in_python(options: dict[str, Any], once: Once, tmp_path: Path) -> None:
    session = saved_session(CONFIGS["std"], parameters(CONFIGS["std"]), tmp_path / "model", once)
    config = DecodeConfig(num_beams=3, max_new_tokens=5, **options)
    assert both_searches(session, [[5, 6]], config=config, text_of=lambda ids: "b" * len(ids))[2] == 0


def test_beam_searches_continue_in_the_library_after_steps_in_python(once: Once, tmp_path: Path) -> None:
    session = saved_session(CONFIGS["std"], parameters(CONFIGS["std"]), tmp_path / "model", once)
    short = DecodeConfig(num_beams=3, max_new_tokens=4, length_penalty=0.5)
    long = DecodeConfig(num_beams=3, max_new_tokens=15, min_new_tokens=15)

    def search(steps: list[int]) -> list[Any]:
        requests = [*check_requests(session, [[5, 6]], short), *check_requests(session, [[5, 6], [7]], long)]
        loop, found = Loop(session, 8), dict[int, Any]()
        loop.submit(requests)
        while loop.is_busy:  # both searches share a batch until the short one ends
            found |= {update.request.id: update.outcome for update in loop.step()}
            steps.append(loop.num_steps)
        return [found[request.id] for request in requests]

    inside, outside = list[int](), list[int]()
    found = search(inside)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(NativeBatch, "beam_steps")
        assert search(outside) == found
    assert (inside, outside) == ([1, 2, 3, 4, 15], list(range(1, 16)))


def test_cancelled_beam_searches_stop(once: Once, tmp_path: Path) -> None:
    cancel = threading.Event()
    config = DecodeConfig(num_beams=3, max_new_tokens=20, min_new_tokens=20)
    session = saved_session(CONFIGS["std"], parameters(CONFIGS["std"]), tmp_path / "model", once)
    assert decode(session, [[5, 6]], config, cancel=cancel) == decode(session, [[5, 6]], config)
    cancel.set()
    with pytest.raises(Cancelled):
        decode(session, [[5, 6]], config, cancel=cancel)


# ---- threads


@pytest.mark.parametrize("name", ["post", "scaled", "ssru", "average"])
def test_several_threads_compute_what_one_does(name: str, once: Once, tmp_path: Path) -> None:
    weights = parameters(CONFIGS[name])
    sessions = [saved_session(CONFIGS[name], weights, tmp_path / str(threads), once, threads) for threads in (1, 2, 5)]
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 19, rng.integers(1, 24)).tolist() for _ in range(23)]
    prefixes = [rng.integers(12, 19, rng.integers(0, 4)).tolist() for _ in sources]
    greedy = DecodeConfig(max_new_tokens=18)
    for config in (greedy, replace(greedy, num_beams=3), replace(greedy, num_beams=2, repetition_penalty=1.5)):
        for batch_size in (5, 32):
            one, *several = (
                decode(each, sources, config, prefixes=prefixes, batch_size=batch_size) for each in sessions
            )
            assert several == [one, one]


@pytest.mark.parametrize("rows", [1, 3])
def test_threads_share_a_large_projection(rows: int, once: Once, tmp_path: Path) -> None:
    rng, outputs = np.random.default_rng(0), 50_001
    x = rng.standard_normal(256).astype(np.float32)
    values = rng.integers(0, 256, (outputs, 256), np.uint8)
    zeros, scales = np.full((outputs, 1), 128, np.uint8), rng.uniform(0.001, 0.01, (outputs, 1)).astype(np.float32)
    found = []
    for threads in (1, 2):
        folder = tmp_path / str(threads)  # an open batch reads the file of its session
        folder.mkdir()
        session = product_session(folder, x, values, zeros, scales, compiled.fastest(once), threads)
        batch = begun(session, sources(session_config(session), (3,) * rows), [[1]] * rows)
        found.append(batch.step(np.ones(rows, np.int64), 8))
    one, two = found
    np.testing.assert_array_equal(one.token_ids, two.token_ids)
    np.testing.assert_array_equal(one.logits, two.logits)
    np.testing.assert_array_equal(one.log_normalizer, two.log_normalizer)


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
    "encoder.d_model": tiny.config(encoder={"d_model": 48}),
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


def product_session(
    folder: Path,
    x: np.ndarray,
    values: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    library: Library,
    threads: int = 1,
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
    return NativeSession(config, folder / WEIGHTS, "int8", threads=threads, library=library)


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
    assert chosen(dates_bundle, threads=2) == chosen(dates_bundle, threads=None) == "ort", (
        "small models have one thread"
    )
    assert chosen(dates_bundle, variant="contrib") == "ort"
    assert chosen(dates_aligned) == "ort", "it does not align"
    assert chosen(variant("t5")) == "ort"
    monkeypatch.setattr(native, "SMALL_STEP_BYTES", 100_000)
    for cores, larger in ((1, "native"), (2, "native"), (3, "ort")):
        monkeypatch.setattr(cpu, "available_cores", lambda cores=cores: cores)
        monkeypatch.setattr(cpu, "ONE_THREAD_BELOW", 100_000)
        assert (chosen(dates_bundle), chosen(dates_int8)) == ("ort", larger), cores
        with tfexport.load(dates_int8, backend="native") as model:
            assert model.threads == cpu.Threads(cores, cores)
    assert chosen(dates_int8, threads=1) == chosen(dates_int8, threads=2) == "native"
    assert chosen(dates_int8, threads=3) == chosen(dates_int8, threads=None) == "ort", "three were not measured"
    monkeypatch.setattr(native, "QUANTIZED_STEP_BYTES", 100_000)
    assert chosen(dates_int8) == "ort", "a large model"


@pytest.mark.usefixtures("installed")
def test_bundles_that_it_does_not_compute_have_a_reason(
    dates_fp16: Path, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, options = registry.get("native"), LoadOptions()
    assert "precision is fp16" in backend.cannot_run(open_bundle(dates_fp16), options)
    assert "relative_bias is t5" in backend.cannot_run(open_bundle(variant("t5")), options)
    with pytest.raises(BackendError, match="relative_bias is t5"):
        tfexport.load(variant("t5"), backend="native")


@pytest.mark.usefixtures("installed")
def test_a_bundle_that_stores_equal_tensors_once_is_left_to_others(once: Once) -> None:
    def save(path: Path) -> None:
        model = load_model(DATES)
        assert model.dec is not None
        layers = model.dec.layers
        layers[1].norm1.load_state_dict(layers[0].norm1.state_dict())
        save_model(model, path)

    source = once("dates-equal", save)
    path = exported(once, "dates-equal-int8", str(source), precision="int8", variants=("contrib",))
    bundle = open_bundle(path)
    (problem,) = _plan.problems(bundle)
    assert "dec.layers.1.norm1.weight" in problem
    assert not native.is_fastest(bundle, LoadOptions())
    with pytest.raises(BackendError):
        tfexport.load(path, backend="native")


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
    monkeypatch.setattr(_library, "VERSION", 1)
    with pytest.raises(BackendError, match="has version 3, expected 1"):
        Library(path)
    (tmp_path / path.name).write_bytes(b"no library")
    with pytest.raises(BackendError, match="cannot be loaded"):
        Library(tmp_path / path.name)
