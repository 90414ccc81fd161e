"""Threads: a number is for all, "auto" follows the size of a step and the cores that are available."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tfexport
from tfexport import ConfigError
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.bundle import open_bundle as read_bundle
from tfexport.contract import WEIGHTS, Variant
from tfexport.runtime import cpu
from tfexport.runtime.cpu import ONE_THREAD_BELOW, Threads, choose_threads
from tfexport.runtime.sources import pad_sources


def of_own_module(bundle: Bundle, num_bytes: int) -> Bundle:
    """Return a bundle as that of a user's own module would be, with weights of that size."""
    files = {**bundle.manifest.files}
    files[WEIGHTS] = dataclasses.replace(files[WEIGHTS], bytes=num_bytes)
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, config=None, files=files))


def test_small_runs_of_small_models_use_one_thread(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = read_bundle(dates_bundle)
    for cores in (1, 2, 8):
        monkeypatch.setattr(cpu, "available_cores", lambda cores=cores: cores)
        found: Any = choose_threads("auto", bundle)
        large: Any = choose_threads("auto", of_own_module(bundle, ONE_THREAD_BELOW))
        small: Any = choose_threads("auto", of_own_module(bundle, ONE_THREAD_BELOW - 1))
        if cores == 1:
            assert found == large == small == Threads(1, 1)
        else:
            assert (found.encoder, found.decoder, large.decoder, small.decoder) == (cores, 2, cores, 2)
            assert 8 <= found.encoder_alone <= 64
            assert 4 <= found.decoder_alone <= 32
            assert (large.decoder_alone, small.decoder_alone) == (0, 3)
    assert choose_threads("auto", bundle, is_shared=True) == Threads(1, 1)
    assert choose_threads("auto", of_own_module(bundle, ONE_THREAD_BELOW), is_shared=True) == Threads(8, 8)


def test_threads_none_uses_the_default_of_onnx_runtime(dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle, backend="eager") as model:
        assert model.threads is None, "only ONNX Runtime has the option"
    with tfexport.load(dates_bundle, threads=None) as model:
        assert model.threads is None
        assert model.session._graphs.decoder.get_session_options().intra_op_num_threads == 0  # type: ignore[attr-defined]


def threads_of(graph: Any) -> int:
    count: int = graph.get_session_options().intra_op_num_threads
    return count


@pytest.mark.parametrize("variant", ["concat", "static", "contrib"])
def test_every_variant_runs_with_the_chosen_threads(
    dates_bundle: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available_cores", lambda: 3)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    sources = [[5 + text % 9, *range(20, 32)] for text in range(32)]
    found = []
    for options in ({}, {"threads": 3}, {"threads": 1}):
        with tfexport.load(dates_bundle, variant=variant, **options) as model:  # type: ignore[arg-type]
            found.append(model.generate_ids(sources, num_beams=2, max_new_tokens=8))
            graphs: Any = model.session._graphs  # type: ignore[attr-defined]
            one = pad_sources(model.spec.source, sources[:1])
            several = pad_sources(model.spec.source, sources)
            used = [threads_of(graphs.encoder_for(batch)) for batch in (one, several)]
            used += [threads_of(graphs.decoder_for(rows)) for rows in (1, 64)]
            assert used == ([options["threads"]] * 4 if options else [1, 3, 1, 2])
    assert found[0] == found[1] == found[2]


def test_a_small_model_of_a_server_uses_one_thread(dates_bundle: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pool.submit(tfexport.load, dates_bundle).result() as model:
        assert model.threads == Threads(1, 1)


@pytest.mark.parametrize("threads", [0, -1, "many", "2", 1.5, True, 1025])
def test_no_number_of_threads(dates_bundle: Path, threads: Any) -> None:
    with pytest.raises(ConfigError, match=r"load: threads is .*, expected 1 to 1024, or 'auto'"):
        tfexport.load(dates_bundle, threads=threads)
