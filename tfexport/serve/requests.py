"""What a caller asks, checked: whether an engine can take it, and for how long."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable

from tfexport.decode.request import Request, check_requests
from tfexport.errors import InputError, raise_all, shortened
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.serve.config import MAX_S, ServingConfig
from tfexport.serve.job import Job, num_rows


def new_request(
    model: Model,
    source: Iterable[int],
    prefix: Iterable[int],
    decoding: DecodeConfig,
    config: ServingConfig,
    slots: int,
    *,
    num_fixed: int = 0,
    stream: object,
) -> Request:
    """Return what is decoded for a source.

    Args:
        model: that decodes it.
        source: token ids, special tokens included.
        prefix: token ids that each answer begins with.
        decoding: how to decode.
        config: limits of the engine.
        slots: that the engine has.
        num_fixed: tokens of the prefix that every target of the bundle begins with.
        stream: whether tokens are handed out as they come.

    Raises:
        InputError: lists what the engine, or the model, cannot take.
    """
    problems = []
    if not isinstance(stream, bool):
        problems.append(f"stream is {shortened(stream)}, expected True or False")
    if decoding.num_beams > config.max_num_beams:
        problems.append(f"num_beams is {decoding.num_beams}, the limit is {config.max_num_beams}; lower it")
    if (rows := num_rows(decoding)) > slots:
        problems.append(f"the request takes {rows} slots of {slots}; lower num_beams or num_return_sequences")
    if stream:
        problems += [
            f"{name} is {getattr(decoding, name)}, but a stream hands out one answer as it comes; set it to 1"
            for name in ("num_beams", "num_return_sequences")
            if getattr(decoding, name) > 1
        ]
    raise_all(InputError, "request", problems)
    text_of = model.tokenizer.decode if model.tokenizer else None
    (request,) = check_requests(model.session, [source], decoding, [prefix], text_of, num_fixed)
    return dataclasses.replace(request, stream=bool(stream))


def new_job(request: Request, config: ServingConfig, priority: float, timeout_s: float | None) -> Job:
    """Return a request that arrives now.

    Raises:
        InputError: priority or time are none.
    """
    problems = []
    if not (_is_number(priority) and abs(priority) <= MAX_S):
        problems.append(f"priority is {shortened(priority)}, expected seconds from -{MAX_S} to {MAX_S}")
    problems += _time_problems(timeout_s)
    raise_all(InputError, "request", problems)
    now = time.monotonic()
    return Job(request, now, priority, deadline=now + allowed_s(config, timeout_s))


def allowed_s(config: ServingConfig, timeout_s: float | None) -> float:
    """Return the seconds that a request may take, inf for any number.

    Raises:
        InputError: the time that it asks for is none.
    """
    raise_all(InputError, "request", _time_problems(timeout_s))
    return min((limit for limit in (timeout_s, config.timeout_s) if limit is not None), default=math.inf)


def _time_problems(timeout_s: float | None) -> list[str]:
    if timeout_s is None or (_is_number(timeout_s) and 0 < timeout_s <= MAX_S):
        return []
    return [f"timeout_s is {shortened(timeout_s)}, expected None or above 0 and up to {MAX_S}"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
