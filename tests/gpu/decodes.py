"""Compare and time decodes of random sources."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfexport.bench._loops import TimedSession, clock
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import ModelSpec
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.precision import FLOAT, ITEM_BYTES
from tfexport.runtime.registry import LoadOptions, open_session

NEW_TOKENS, SOURCE_LEN = 32, 32
MEASURED_S = 1.0
MODEL = ""  # before every setting
Setting = tuple[int, int]
SETTINGS: tuple[Setting, ...] = tuple((batch, beams) for batch in (1, 8, 32) for beams in (1, 4))
# Launches hardly depend on the batch, and reading them takes long.
LAUNCHES: tuple[Setting, ...] = ((1, 1), (1, 4))
Numbers = dict[str, float]


def random_sources(spec: ModelSpec, batch: int) -> list[list[int]]:
    """Draw sources of one length, without special tokens."""
    low, length = max(spec.tokens.pad, spec.tokens.eos, spec.tokens.start) + 1, min(SOURCE_LEN, spec.max_source_length)
    found: list[list[int]] = np.random.default_rng(0).integers(low, spec.source_vocab, (batch, length)).tolist()
    return found


def hypotheses(session: Any, batch: int = 8, beams: int = 4) -> list[tuple[int, ...]]:
    """Decode, to compare sessions token by token."""
    config = DecodeConfig(num_beams=beams, max_new_tokens=min(NEW_TOKENS, session.spec.max_target_length))
    found = decode(session, random_sources(session.spec, batch), config, batch_size=batch)
    return [each.token_ids for several in found for each in several]


def measure(session: Any, weight_bytes: float, setting: Setting) -> Numbers:
    """Time whole decodes; return `step_ms`, `steps` and `step_bytes`.

    `step_ms` is the time of a decode with its encoder divided by its steps, the median of at least five after three;
    `step_bytes` are the weights and caches that a step must read.
    """
    steps, run, times = num_steps(session, *setting, NEW_TOKENS), _call(session, *setting, NEW_TOKENS), list[float]()
    while len(times) < 8 or (sum(times[3:]) < MEASURED_S and len(times) < 53):
        times.append(clock(run)[0])
    read = weight_bytes + cache_bytes(session.spec, *setting, steps)
    return {"step_ms": round(1000 * statistics.median(times[3:]) / steps, 4), "steps": steps, "step_bytes": round(read)}


def num_steps(session: Any, batch: int, beams: int, new_tokens: int) -> int:
    counted = TimedSession(session)
    _call(counted, batch, beams, new_tokens)()
    return len(counted.step_s)


def cache_bytes(spec: ModelSpec, batch: int, beams: int, steps: int) -> float:
    """Return the bytes of keys and values that a step must read, the mean over the steps of a decode."""
    token = spec.layers * spec.cache_heads * (spec.head_dim + spec.value_dim) * ITEM_BYTES[FLOAT[spec.precision]]
    source_len = min(SOURCE_LEN, spec.max_source_length)
    return token * batch * (source_len + beams * (steps + 1) / 2)


def launches(session: Any, count: Callable[[Callable[[], object]], int], setting: Setting) -> float | None:
    """Count kernels, copies and fills of a step, after this setting was decoded; None if nothing was seen.

    The number comes from a long and a short decode, so that it excludes the encoder.
    """
    lengths = (NEW_TOKENS, NEW_TOKENS // 2)
    steps = [num_steps(session, *setting, length) for length in lengths]
    given = [count(_call(session, *setting, length)) for length in lengths]
    is_seen = given[0] and steps[0] > steps[1]
    return round((given[0] - given[1]) / (steps[0] - steps[1]), 1) if is_seen else None


def given_to_gpu(call: Callable[[], object]) -> int:
    """Run a call and count kernels, copies and fills on the GPU, of all libraries."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def spell(batch: int, beams: int) -> str:
    return f"{MODEL}batch {batch}, {'greedy' if beams == 1 else f'beam {beams}'}"


def _call(session: Any, batch: int, beams: int, new_tokens: int) -> Callable[[], object]:
    config = DecodeConfig(num_beams=beams, max_new_tokens=min(new_tokens, session.spec.max_target_length))
    return functools.partial(decode, session, random_sources(session.spec, batch), config, batch_size=batch)


def open_engine(bundle: Path, name: str) -> Any:
    return open_session(open_bundle(bundle), LoadOptions(backend="trt", engine=name))
