"""Decodes of random sources, for the parts of the acceptance that compare or time them."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tfexport.bench.timing import Effort, repeat, stopwatch
from tfexport.bundle.bundle import open_bundle
from tfexport.decode.config import DecodeConfig
from tfexport.decode.offline import decode
from tfexport.runtime.registry import OpenOptions, open_session
from tfexport.spec import ModelSpec

NEW_TOKENS, SOURCE_LEN = 32, 32
Setting = tuple[int, int]
SETTINGS: tuple[Setting, ...] = tuple((batch, beams) for batch in (1, 8, 32) for beams in (1, 4))


def random_sources(spec: ModelSpec, batch: int) -> list[list[int]]:
    """Draw sources of one length, without special tokens."""
    rng = np.random.default_rng(0)
    low = max(spec.tokens.pad, spec.tokens.eos, spec.tokens.start) + 1
    found: list[list[int]] = rng.integers(
        low, spec.source_vocab, (batch, min(SOURCE_LEN, spec.max_source_length))
    ).tolist()
    return found


def hypotheses(session: Any, batch: int = 8, beams: int = 4) -> list[tuple[int, ...]]:
    """Decode, to compare sessions token by token."""
    config = DecodeConfig(num_beams=beams, max_new_tokens=min(NEW_TOKENS, session.spec.max_target_length))
    found = decode(session, random_sources(session.spec, batch), config, batch_size=batch)
    return [each.token_ids for several in found for each in several]


def measure(session: Any, settings: tuple[Setting, ...] = SETTINGS) -> dict[str, float]:
    """Time whole decodes that all go on to the last token.

    Returns:
        Milliseconds of a call, the median of at least five after three, by setting.
    """
    return {
        f"batch {batch}, {'greedy' if beams == 1 else f'beam {beams}'}": _milliseconds(session, batch, beams)
        for batch, beams in settings
    }


def _milliseconds(session: Any, batch: int, beams: int) -> float:
    length = min(NEW_TOKENS, session.spec.max_target_length)
    config = DecodeConfig(num_beams=beams, max_new_tokens=length, min_new_tokens=length)
    call = functools.partial(decode, session, random_sources(session.spec, batch), config, batch_size=batch)
    effort = Effort(warm_up=3, least_runs=5, least_s=1, most_runs=50)
    return round(1000 * statistics.median(repeat(stopwatch(call), effort)), 3)


def open_engine(bundle: Path, name: str) -> Any:
    """Open a session on an engine of a bundle."""
    return open_session(open_bundle(bundle), "trt", OpenOptions(engine=name))
