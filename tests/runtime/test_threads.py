"""Threads: a number is for all, "auto" follows the size of a step and the cores that are available."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tfexport
from tfexport import ConfigError
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.bundle import open_bundle as read_bundle
from tfexport.contract import WEIGHTS, Variant
from tfexport.runtime.cpu import ONE_THREAD_BELOW, Threads, available_cores, choose_threads

CORES = available_cores()


def of_own_module(bundle: Bundle, num_bytes: int) -> Bundle:
    """Return a bundle as that of a user's own module would be, with weights of that size."""
    files = {**bundle.manifest.files}
    files[WEIGHTS] = dataclasses.replace(files[WEIGHTS], bytes=num_bytes)
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, config=None, files=files))


def test_a_small_decoder_uses_one_thread_and_the_encoder_all_cores(dates_bundle: Path) -> None:
    bundle = read_bundle(dates_bundle)
    assert choose_threads("auto", bundle) == Threads(CORES, 1)
    assert choose_threads("auto", of_own_module(bundle, ONE_THREAD_BELOW - 1)) == Threads(CORES, 1)
    assert choose_threads("auto", of_own_module(bundle, ONE_THREAD_BELOW)) == Threads(CORES, CORES)


def test_threads_none_uses_the_default_of_onnx_runtime(dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle, backend="eager") as model:
        assert model.threads is None, "only ONNX Runtime has the option"
    with tfexport.load(dates_bundle, threads=None) as model:
        assert model.threads is None
        assert model.session._graphs.decoder.get_session_options().intra_op_num_threads == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", ["concat", "static", "contrib"])
def test_every_variant_runs_with_the_chosen_threads(dates_bundle: Path, variant: Variant) -> None:
    for options, wanted in (({}, Threads(CORES, 1)), ({"threads": 3}, Threads(3, 3))):
        with tfexport.load(dates_bundle, variant=variant, **options) as model:  # type: ignore[arg-type]
            assert model.threads == wanted
            graphs: Any = model.session._graphs  # type: ignore[attr-defined]
            taken = [graph.get_session_options().intra_op_num_threads for graph in (graphs.encoder, graphs.decoder)]
            assert taken == [wanted.encoder, wanted.decoder]


@pytest.mark.parametrize("threads", [0, -1, "many", "2", 1.5, True, 1025])
def test_no_number_of_threads(dates_bundle: Path, threads: Any) -> None:
    with pytest.raises(ConfigError, match=r"load: threads is .*, expected 1 to 1024, or 'auto'"):
        tfexport.load(dates_bundle, threads=threads)
