"""Steps for their own sake, so that the first text that somebody waits for does not pay for what is done once."""

from __future__ import annotations

import numpy as np

from tfexport.errors import InputError
from tfexport.runtime.session import Session

# Enough for the graphs of a greedy step on a GPU: run once, captured for both of its buffers, replayed.
WARM_UP_STEPS = 4


def warm_up(session: Session, rows: int, source_len: int) -> None:
    """Run a batch of sources and a few greedy steps, whose results nobody reads.

    Args:
        session: any backend; an encoder alone encodes.
        rows: sources at once; where the session takes fewer, so many.
        source_len: tokens of each.

    Raises:
        InputError: the model takes no source of so many tokens.
        BackendError: the backend failed.
    """
    spec, most = session.spec, session.limits.rows.most
    if source_len > spec.max_source_length:
        raise InputError(f"warm-up: {source_len} source tokens, the limit is {spec.max_source_length}; ask for less")
    token = spec.tokens.eos if spec.tokens.eos < spec.source_vocab else 0
    shape = (rows if most is None else min(rows, most), source_len)
    source_ids, source_mask = np.full(shape, token), np.ones(shape, np.bool_)
    if not spec.has_decoder:
        session.hidden_states(source_ids, source_mask)
        return
    batch, newest = session.batch(), np.full(shape[0], spec.tokens.start)
    batch.add(source_ids, source_mask, [[spec.tokens.start]] * shape[0])
    for _ in range(min(WARM_UP_STEPS, spec.max_target_length)):
        newest = batch.step(newest, 1).token_ids[:, 0]
