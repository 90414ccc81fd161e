"""What every backend offers: encode a source, step the decoder, reorder the rows.

Only numpy arrays cross this line; the cache stays in the session's memory. A
session may be shared between threads, a state belongs to one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import InputError
from tfexport.spec import Accuracy, ModelSpec

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """The best next tokens of every row, best first; equal logits in order of id.

    log p(token) = logits - log_normalizer. The arrays belong to the caller.

    Attributes:
        token_ids: int64 [rows, num_candidates].
        logits: float32 [rows, num_candidates].
        log_normalizer: float32 [rows], log Σ exp(logits) over the vocabulary.
    """

    token_ids: Ids
    logits: Floats
    log_normalizer: Floats


class State(Protocol):
    """One batch being decoded, owned by the session that made it.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
    """

    batch: int
    rows: int
    past_len: int


S = TypeVar("S", bound=State)
S_contra = TypeVar("S_contra", bound=State, contravariant=True)


class Session(Protocol[S]):
    """A model on a backend.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "eager", "ort" or "trt".
        max_rows: hypotheses that it takes at once; None where memory is the only limit.
        accuracy: what bounds how exactly it computes; token for token only for fp32.
        max_candidates: best tokens that a step returns at most; None for the whole vocabulary.
    """

    spec: ModelSpec
    backend: str
    max_rows: int | None
    accuracy: Accuracy
    max_candidates: int | None

    def encode(self, source_ids: Ids, source_mask: Mask) -> S:
        """Encode a batch and make room for one row a source.

        Args:
            source_ids: int64 [batch, source_len], padded on the right.
            source_mask: bool [batch, source_len], True = token.

        Raises:
            InputError: shapes, ids or lengths that the model cannot take.
        """
        ...

    def step(self, state: S, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens and grow the cache in place.

        Args:
            state: from `encode`; past_len grows by target_len.
            target_ids: int64 [rows, target_len]; more than one for a prefix.
            num_candidates: best tokens wanted a row, 1 … vocab.

        Raises:
            InputError: past_len + target_len is above the model's limit.
        """
        ...

    def reorder(self, state: S, rows: Ids) -> None:
        """Let row r continue what row rows[r] was, in place.

        Args:
            state: changed in place.
            rows: int64 [new_rows]. Rows of one source stay side by side and
                every source that stays has equally many; a source that no row
                continues leaves the batch.

        Raises:
            InputError: rows that are out of range or mix sources.
        """
        ...

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone.

        Args:
            source_ids: int64 [batch, source_len], padded on the right.
            source_mask: bool [batch, source_len], True = token.

        Returns:
            float32 [batch, source_len, d_model].
        """
        ...

    def close(self) -> None:
        """Free what the session holds; it cannot be used afterwards."""
        ...


@runtime_checkable
class RunsAhead(Protocol[S_contra]):
    """A session that can take several greedy steps at once, with little between them."""

    def ahead(self, state: S_contra, target_ids: Ids, num_candidates: int, steps: int, stop_id: int) -> Candidates:
        """Step, and go on with the best token of each row until that of some row is `stop_id`.

        Args:
            state: from `encode`; past_len grows by target_len and one for each further step.
            target_ids: int64 [rows, target_len], as for `step`.
            num_candidates: best tokens wanted a row and step.
            steps: at most, 1 or more; the last step's tokens are not read.
            stop_id: ends the steps; its own are the last.

        Returns:
            The candidates of each step, with one axis more in front of all: [steps taken, rows, …].

        Raises:
            InputError: the steps would go beyond the model's limit.
        """
        ...


def pad_right(sources: Sequence[Sequence[int]], pad_id: int) -> tuple[Ids, Mask]:
    """Lay sources out as a batch.

    Args:
        sources: token ids of each, at least one token.
        pad_id: fills the short rows.

    Returns:
        source_ids int64 and source_mask bool, both [batch, source_len].
    """
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate([np.asarray(source, np.int64) for source in sources])
    return ids, mask


def check_source(spec: ModelSpec, source_ids: Ids, source_mask: Mask) -> None:
    """Refuse a source batch that would be computed wrongly or not at all.

    Raises:
        InputError: names the first of shape, length, padding or id that is wrong.
    """
    if source_ids.ndim != 2 or source_ids.dtype != np.int64 or source_ids.size == 0:
        raise InputError(f"source_ids is {source_ids.dtype} {source_ids.shape}, expected int64 [batch, source_len]")
    if source_mask.shape != source_ids.shape or source_mask.dtype != np.bool_:
        raise InputError(
            f"source_mask is {source_mask.dtype} {source_mask.shape}, expected bool {source_ids.shape} like source_ids"
        )
    if source_ids.shape[1] > spec.max_source_length:
        raise InputError(
            f"source has {source_ids.shape[1]} tokens, the limit is {spec.max_source_length}; "
            "shorten it, or export with a larger --max-source-length if the model allows it"
        )
    if not source_mask[:, 0].all() or (source_mask[:, 1:] & ~source_mask[:, :-1]).any():
        raise InputError("source_mask must begin with True in every row and be padded on the right only")
    if source_ids.min() < 0 or source_ids.max() >= spec.source_vocab:
        raise InputError(
            f"source_ids reach from {source_ids.min()} to {source_ids.max()}, expected 0 … {spec.source_vocab - 1}"
        )


def check_target(spec: ModelSpec, state: State, target_ids: Ids, num_candidates: int) -> None:
    """Refuse a step that would be computed wrongly or not at all.

    Raises:
        InputError: names the first of shape, length, id or count that is wrong.
    """
    if target_ids.ndim != 2 or target_ids.shape[0] != state.rows or target_ids.shape[1] < 1:
        raise InputError(f"target_ids is {target_ids.shape}, expected [{state.rows}, target_len]")
    if state.past_len + target_ids.shape[1] > spec.max_target_length:
        raise InputError(
            f"target has {state.past_len + target_ids.shape[1]} tokens, the limit is {spec.max_target_length}; "
            "lower max_new_tokens, or export with a larger --max-target-length if the model allows it"
        )
    if target_ids.view(np.uint64).max() >= spec.vocab:  # what is negative counts as very large
        raise InputError(
            f"target_ids reach from {target_ids.min()} to {target_ids.max()}, expected 0 … {spec.vocab - 1}"
        )
    if not 1 <= num_candidates <= spec.vocab:
        raise InputError(f"num_candidates is {num_candidates}, expected 1 … {spec.vocab}")


def check_rows(state: State, rows: Ids) -> Ids:
    """Refuse an order of rows that breaks the layout, and return the sources that stay.

    Returns:
        int64 [new_batch], indices into the old batch, one for each group of rows.

    Raises:
        InputError: rows out of range, mixed sources or unequal numbers of beams.
    """
    beams = state.rows // state.batch
    if rows.shape == (state.rows,) and (rows // beams).tobytes() == np.arange(state.batch).repeat(beams).tobytes():
        return np.arange(state.batch)  # what most steps of a beam search do
    if rows.ndim != 1 or rows.size == 0 or rows.min() < 0 or rows.max() >= state.rows:
        raise InputError(f"rows is {rows.tolist()}, expected indices 0 … {state.rows - 1}")
    sources = rows // beams
    starts = np.flatnonzero(np.diff(sources, prepend=-1))
    kept: Ids = sources[starts]
    beams = rows.size // kept.size
    if rows.size % kept.size or (starts != np.arange(kept.size) * beams).any() or np.unique(kept).size != kept.size:
        raise InputError(f"rows {rows.tolist()} do not keep the beams of each source side by side and equally many")
    return kept
