"""The loop graph beside the eager model: whole greedy decodes, by the settings that the graph was written with."""

from __future__ import annotations

import functools

from tfexport.contract import LoopSettings
from tfexport.decode.offline import decode
from tfexport.decode.result import FinishReason, Hypothesis
from tfexport.generation import DecodeConfig
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Session, pad_right
from tfexport.verify.divergence import measure_divergence
from tfexport.verify.report import Decodes
from tfexport.verify.texts import NEW_TOKENS, Sources, compare_decodes

STAGE = "ort loop"
_BATCH = 8


def loop_decodes(graphs: Graphs, settings: LoopSettings, eager: Session, sources: Sources, noise: float) -> Decodes:
    """Decode sources in padded batches, each in one run of the graph, and compare.

    Args:
        graphs: with the loop graph.
        settings: what it generates.
        eager: the reference.
        sources: to decode.
        noise: worst error of a logit that was measured for the form that the graph is made of.
    """
    limit = min(NEW_TOKENS, settings.room(graphs.spec))
    by_settings = functools.partial(_decode, settings=settings, limit=limit)
    expected, got = by_settings(eager, sources, _BATCH), _run(graphs, settings, sources, limit)
    is_exact = (graphs.weights or graphs.spec.precision) == "fp32"
    return compare_decodes(
        STAGE,
        "greedy",
        eager,
        sources,
        expected,
        got,
        num_beams=1,
        noise=noise,
        must_be_exact=is_exact,
        divergence=None if is_exact else measure_divergence(eager, sources, expected, got),
        decode_as=by_settings,
    )


def _decode(
    session: Session, sources: Sources, batch_size: int, *, settings: LoopSettings, limit: int
) -> list[Hypothesis]:
    """Decode as the graph does, step by step."""
    start, *prefix = settings.prompt
    config = DecodeConfig(
        decoder_start_token_id=start,
        eos_token_id=settings.ends,
        max_new_tokens=limit,
        min_new_tokens=min(settings.min_new_tokens, limit),
        forced_bos_token_id=settings.forced_first,
        forced_eos_token_id=settings.forced_last,
        suppress_tokens=settings.suppressed,
    )
    found = decode(session, sources, config, prefixes=[prefix] * len(sources), batch_size=batch_size)
    return [best[0] for best in found]


def _run(graphs: Graphs, settings: LoopSettings, sources: Sources, limit: int) -> list[Hypothesis]:
    """Let the graph decode padded batches, each in one run."""
    from tfexport.runtime.ort.loop import OrtLoop

    loop, found = OrtLoop(graphs.paths, graphs.spec), []
    for first in range(0, len(sources), _BATCH):
        batch = loop.generate(*pad_right(sources[first : first + _BATCH], graphs.spec.tokens.pad), limit)
        for ids, length, log_prob in zip(
            batch.ids.tolist(), batch.lengths.tolist(), batch.log_probs.tolist(), strict=True
        ):
            reason: FinishReason = "eos" if ids[length - 1] in settings.ends else "length"
            found.append(Hypothesis(tuple(ids[:length]), log_prob / length, log_prob, reason))
    return found
