"""Long prefixes are read in pieces and give the outputs of PyTorch, on doubles of engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.runtime.exported import LONG, Once, exported
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import DoubleSession, trt_session
from tfexport.contract import DECODER, Variant
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.session import Session
from tfexport.runtime.sources import pad_right
from tfexport.tensorrt.build._profiles import PREFIX_PIECE

# Around one piece and two of them, and many.
LENGTHS = (1, 15, 16, 17, 33, 100)
SOURCE_LENGTHS = (7, 3, 1, 12, 5, 9)


@pytest.fixture(scope="module")
def eager() -> EagerSession:
    return EagerSession(tiny.model(LONG, dtype=torch.float32))


@pytest.fixture(scope="module")
def prefixes() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, LONG.target_vocab, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def sources() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, LONG.source_vocab, length).tolist() for length in SOURCE_LENGTHS]


def on_doubles(once: Once, variant: Variant = "static", **options: Any) -> DoubleSession:
    graphs, spec = exported(tiny.model(LONG, dtype=torch.float32), once)
    return trt_session(graphs, spec, variant, **options)


def tokens_of(
    session: Session, sources: list[list[int]], prefixes: list[list[int]], beams: int = 1, batch_size: int = 8
) -> list[list[int]]:
    config = DecodeConfig(max_new_tokens=6, min_new_tokens=6, num_beams=beams)
    found = decode(session, sources, config, prefixes=prefixes, batch_size=batch_size)
    return [text[0].token_ids for text in found]


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_of_unequal_prefixes_equal_pytorch(
    once: Once, eager: EagerSession, sources: list[list[int]], prefixes: list[list[int]], beams: int
) -> None:
    """All in one batch, then few at a time, so that long prefixes join rows that are being decoded."""
    expected = tokens_of(eager, sources, prefixes, beams)
    pieces_of_5, only_steps = (
        {"max_shapes": f"target_ids:32x{most},num_candidates:{LONG.target_vocab}"} for most in (5, 1)
    )
    for options in ({}, {"capacities": (24, 64)}, pieces_of_5, only_steps):
        for batch_size in (8, 3):
            session = on_doubles(once, **options)
            assert tokens_of(session, sources, prefixes, beams, batch_size) == expected


@pytest.mark.parametrize("length", LENGTHS)
def test_the_concat_variant_reads_pieces_after_its_past(
    once: Once, eager: EagerSession, sources: list[list[int]], prefixes: list[list[int]], length: int
) -> None:
    rng, among = np.random.default_rng(length), sources[:3]
    equal = [*rng.integers(3, LONG.target_vocab, (2, length)).tolist(), prefixes[LENGTHS.index(length)]]
    assert tokens_of(on_doubles(once, "concat"), among, equal) == tokens_of(eager, among, equal)


@pytest.mark.parametrize("variant", ["static", "concat"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_piece_is_as_long_as_its_profile(once: Once, sources: list[list[int]], variant: Variant, length: int) -> None:
    """Sixteen tokens, or more if the profile of the engine allows it; one if it has no such profile."""
    default, whole = ("", -(-length // PREFIX_PIECE)), (f"target_ids:32x{LONG.max_target_length}", 1)
    for shapes, runs in (default, whole, ("target_ids:32x1", length)):
        cuda = CudaDouble()
        batch = on_doubles(once, variant, cuda=cuda, max_shapes=shapes).batch()
        batch.add(tiny.sources(*pad_right(sources[:2], LONG.tokens.pad)), [[LONG.tokens.start] + [5] * length] * 2)
        assert cuda.counts[f"enqueue {DECODER[variant]}"] == runs
        assert batch.lengths.tolist() == [length] * 2
