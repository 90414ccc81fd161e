"""Decode many texts in one call: check, let all wait, step until nothing is left."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tfexport._arguments import check_call, listed_ids
from tfexport.decode.alternatives import alternatives
from tfexport.decode.cancel import updates
from tfexport.decode.loop import Loop
from tfexport.decode.request import check_requests
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import TextOf
from tfexport.errors import TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session


def decode(
    session: Session,
    sources: Iterable[Iterable[int]],
    config: DecodeConfig,
    *,
    prefixes: Iterable[Iterable[int]] | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
    text_of: TextOf | None = None,
    num_fixed: int = 0,
    cancel: threading.Event | None = None,
    places: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Generate for every source; no result depends on the others or on `batch_size`.

    Args:
        session: any backend.
        sources: token ids of each text.
        config: how to generate.
        prefixes: token ids that each text's hypotheses begin with, or with
            prefix_bias_beta are biased towards, without the start token; empty for none.
        batch_size: texts decoded at once; each takes num_beams or
            num_return_sequences rows. Fewer where the session takes fewer rows.
        on_progress: called with the number of texts that a step has finished.
        text_of: decodes token ids; stop strings need it.
        num_fixed: tokens that hypotheses begin with even where they are biased towards the rest of their prefix.
        cancel: set by another thread to give the call up; None for a call that nobody cancels.
        places: that seeds are counted by, one a source; None for 0, 1, ….

    Returns:
        For each source its hypotheses: one, the num_return_sequences best beams,
        or as many samples or alternatives.

    Raises:
        InputError: lists every text or setting that the model cannot take.
        BackendError: the backend failed, or the model gave numbers that are none.
        Cancelled: the event was set, which is seen before the next step.
    """
    check_call("decode", batch_size=batch_size, on_progress=on_progress, cancel=cancel)
    sources = listed_ids("decode", "sources", sources)
    requests = check_requests(session, sources, config, prefixes, text_of, num_fixed)
    if places is not None:
        requests = [dataclasses.replace(one, place=place) for one, place in zip(requests, places, strict=True)]
    samples = config.num_return_sequences if config.do_sample or config.return_alternatives else 1
    loop = Loop(session, batch_size * samples)
    if config.return_alternatives:
        requests = alternatives(session, requests, batch_size, cancel)
    elif samples > 1:
        requests = [dataclasses.replace(request, sample=sample) for request in requests for sample in range(samples)]
    wanted = Counter(request.text for request in requests)
    # Longest first: what is decoded together is about equally long, and the shortest are left for the end.
    requests.sort(key=lambda request: -len(request.source_ids))
    loop.submit(requests)
    results: list[dict[int, list[Hypothesis]]] = [{} for _ in sources]
    for some in updates(loop, cancel):
        finished = 0
        for update in some:
            if isinstance(update.outcome, TfexportError):
                raise update.outcome
            assert update.outcome is not None
            found = results[update.request.text]
            found[update.request.sample] = update.outcome
            finished += len(found) == wanted[update.request.text]
        if finished and on_progress:
            on_progress(finished)
    return [[best for sample in sorted(found) for best in found[sample]] for found in results]
