"""Decode many texts: check, sort into batches, search, put back in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfexport.decode.beam import beam_search
from tfexport.decode.config import DecodeConfig
from tfexport.decode.greedy import greedy_search
from tfexport.decode.request import Batch, batches, check_requests
from tfexport.decode.result import Hypothesis
from tfexport.errors import InputError
from tfexport.runtime.session import S, Session


def decode(
    session: Session[S],
    sources: Sequence[Sequence[int]],
    config: DecodeConfig,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
) -> list[list[Hypothesis]]:
    """Generate for every source; no result depends on the others or on `batch_size`.

    Args:
        session: any backend.
        sources: token ids of each text.
        config: how to generate.
        prefixes: token ids that each text's hypotheses begin with, without the
            start token; empty for none.
        batch_size: texts decoded at once; each takes num_beams or
            num_return_sequences rows. Fewer where the session takes fewer rows.
        on_progress: called after each batch with the number of texts it had.

    Returns:
        For each source its hypotheses: one, the num_return_sequences best beams,
        or as many samples.

    Raises:
        InputError: lists every text or setting that the model cannot take.
        BackendError: the backend failed, or the model gave numbers that are none.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, expected 1 or more")
    batch_size = min(batch_size, _most_texts(session.max_rows, config) or batch_size)
    search = beam_search if config.num_beams > 1 else greedy_search
    results: list[list[Hypothesis]] = [[] for _ in sources]
    requests = check_requests(session.spec, sources, config, prefixes, has_engines=session.max_rows is not None)
    for group in batches(requests, batch_size):
        found = search(session, Batch.of(group, config, session.spec), config)
        for request, hypotheses in zip(group, found, strict=True):
            results[request.text] = hypotheses
        if on_progress:
            on_progress(len(group))
    return results


def _most_texts(max_rows: int | None, config: DecodeConfig) -> int | None:
    """Return how many texts fit into the rows that a session takes, None where any number does.

    Raises:
        InputError: not even one does.
    """
    if max_rows is None:
        return None
    name = "num_beams" if config.num_beams > 1 else "num_return_sequences"
    rows = getattr(config, name)
    if rows > max_rows:
        raise InputError(
            f"decode: {name} is {rows}, but the session takes {max_rows} rows at once; "
            f"lower it, or build engines for more: tfexport trt BUNDLE --max-batch {rows} --force"
        )
    return max_rows // int(rows)
