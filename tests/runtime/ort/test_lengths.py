"""Sources of unequal length: which are encoded together, and that it changes nothing but the work."""

from __future__ import annotations

import resource
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.runtime.exported import LONG, Once, exported, ort_session, sources
from tfexport.contract import Variant
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.nn.transformer import Transformer
from tfexport.runtime.ort import _contrib as contrib
from tfexport.runtime.ort._cache import RowBuffers, _HostBuffers
from tfexport.runtime.ort._concat import ConcatBatch
from tfexport.runtime.ort._device import MAX_SCORES, RUN_TOKENS, encoder_runs
from tfexport.runtime.ort._static import StaticBatch
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Ids
from tfexport.runtime.sources import Sources

LONGEST = LONG.max_source_length
MIXED = (13, 180, 20, 9, 200, 2, 31, 1, 150)


def cost(lengths: Ids, divided: list[Ids]) -> int:
    return sum(rows.size * int(lengths[rows].max()) + RUN_TOKENS for rows in divided)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_no_division_costs_less(drawn: list[int]) -> None:
    """Against all ways to cut the sources in order of length."""
    lengths = np.array(drawn)
    divided, order = encoder_runs(lengths), np.argsort(-lengths, kind="stable")
    assert sorted(np.concatenate(divided).tolist()) == list(range(lengths.size))
    assert all(lengths[rows[0]] == lengths[rows].max() for rows in divided)
    cuts = (c for count in range(lengths.size) for c in combinations(range(1, lengths.size), count))
    assert cost(lengths, divided) == min(cost(lengths, np.split(order, list(cut))) for cut in cuts)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=40))
def test_no_run_has_many_scores(drawn: list[int]) -> None:
    """What a run keeps in memory is bounded, however many long sources come together; a source is never cut."""
    lengths = np.array(drawn)
    divided = encoder_runs(lengths)
    assert sorted(np.concatenate(divided).tolist()) == list(range(lengths.size))
    assert all(rows.size == 1 or rows.size * int(lengths[rows].max()) ** 2 <= MAX_SCORES for rows in divided)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.model(LONG, dtype=torch.float32)


def test_each_source_is_encoded_as_if_alone(model: Transformer, once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = sources(model.config, MIXED)
    session, computed = ort_session(model, "static", once), list[int]()

    def begun(batch: StaticBatch | ConcatBatch, rows: list[int], length: int) -> list[np.ndarray]:
        assert isinstance(batch, StaticBatch)
        batch.add(tiny.sources(ids[rows, :length], mask[rows, :length]), [[1]] * len(rows))
        assert isinstance(batch._cross, _HostBuffers)
        return batch._cross._arrays

    alone = [begun(session.batch(), [row], length) for row, length in enumerate(MIXED)]
    encode = StaticBatch._run_encoder

    def counted(batch: StaticBatch, sources: Sources) -> RowBuffers:
        computed.append(sources.mask.size)
        return encode(batch, sources)

    monkeypatch.setattr(StaticBatch, "_run_encoder", counted)
    together = begun(session.batch(), list(range(len(MIXED))), LONGEST)
    assert len(computed) > 1
    assert sum(computed) < 1.3 * sum(MIXED) < 0.5 * ids.size
    for place, whole in enumerate(together):
        for row, length in enumerate(MIXED):
            np.testing.assert_allclose(whole[row, :, :length], alone[row][place][0], atol=2e-6)
            assert np.isfinite(whole[row]).all()


@pytest.mark.parametrize("variant", ["static", "contrib"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_do_not_depend_on_the_split_of_batches(
    num_beams: int, variant: Variant, model: Transformer, once: Once
) -> None:
    graphs, spec = exported(model, once)
    session = OrtSession(Graphs(graphs, spec), variant, threads=1)
    ids, _ = sources(model.config, MIXED, seed=3)
    texts = [ids[row, :length].tolist() for row, length in enumerate(MIXED)]
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=12)
    together, single = (decode(session, texts, config, batch_size=size) for size in (len(texts), 1))
    assert [[best.token_ids for best in found] for found in together] == [
        [best.token_ids for best in found] for found in single
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_cut", [True, False])
def test_scores_do_not_stay(is_cut: bool, model: Transformer, once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 400 sources of 200 tokens are 256 MB a layer: they are never there at once, or they are given back."""
    graphs, spec = exported(model, once)
    session = OrtSession(Graphs(graphs, spec), "contrib", threads=1)
    ids, mask = sources(model.config, (200,) * 400)
    if not is_cut:
        monkeypatch.setattr(contrib, "encoder_runs", lambda lengths: [np.arange(lengths.size)])
    batch, before = session.batch(), resident_mb()
    batch.add(tiny.sources(ids, mask), [[1]] * len(ids))
    assert resident_mb() - before < 180


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 1e6
