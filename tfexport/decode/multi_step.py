"""Greedy search takes many steps in one call where nothing but the end of a text can change what is best."""

from __future__ import annotations

import numpy as np

from tfexport.decode.search import Search
from tfexport.runtime.session import Batch, Candidates, MultiStep


def take_steps(batch: Batch, together: MultiStep | None, search: Search, most: int | None) -> tuple[Candidates, int]:
    """Take as many steps as the search leaves to the batch, where the batch can: those of `multi_step`.

    Args:
        batch: whose rows are those of the search, in order.
        together: the same batch where it can take several steps in one call, else None.
        search: told of all steps but the last; what follows on one of its `stop_ids` is for it to decide.
        most: how many steps; None for as many as the search leaves.

    Returns:
        The candidates of the last step, which the search has to take, and how many steps were taken.
    """
    token_ids, num_candidates, steps = search.history.newest, search.num_candidates(), search.steps_ahead()
    if most is not None:
        steps = min(steps, most)
    if steps == 1 or together is None:
        return batch.step(token_ids, num_candidates), 1
    found = together.multi_step(token_ids, num_candidates, steps, search.stop_ids)
    if len(found.token_ids) > 1:
        search.follow(_steps(found, np.s_[:-1]))
    return _steps(found, -1), len(found.token_ids)


def _steps(found: Candidates, steps: slice | int) -> Candidates:
    return Candidates(found.token_ids[steps], found.logits[steps], found.log_normalizer[steps])
