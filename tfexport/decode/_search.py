"""Define the interface between a search and the decoding loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode._history import History
from tfexport.decode.request import Request
from tfexport.decode.result import Ends, Hypothesis, finish_reason
from tfexport.decode.stops import Stops
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, Ids, Mask

Outcome = list[Hypothesis] | TfexportError


class Taken(NamedTuple):
    """The result of a step of a search.

    Attributes:
        rows: for each row the row that it continues, int64 [rows]; None if every row continues itself.
        done: outcomes of the finished sources by their place in the search; the caller has to remove them.
    """

    rows: Ids | None
    done: dict[int, Outcome]


class Search(Protocol):
    """Sources with the same options, each of its own length.

    Attributes:
        width: rows of a source.
        requests: the sources, by place.
        history: start token, prefix and generated tokens of each row.
        stop_ids: tokens that end steps taken at once if they are the best.
    """

    width: int
    requests: list[Request]
    history: History
    stop_ids: frozenset[int]

    @property
    def follows_best(self) -> bool:
        """Whether rows continue with the best token, unless it is one of `stop_ids`."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Append sources."""
        ...

    def num_candidates(self) -> int:
        """Return how many of the best next tokens of each row `take` needs, 1 … vocab."""
        ...

    def take(self, found: Candidates) -> Taken:
        """Extend the rows, given at least `num_candidates` candidates of each."""
        ...

    def steps_ahead(self) -> int:
        """Return how many greedy steps may be taken at once, at least 1."""
        ...

    def follow(self, found: Candidates) -> None:
        """Take steps in which each row continued with its best token and no text ended.

        Args:
            found: candidates with an additional first axis: [steps, rows, …].
        """
        ...

    def remove(self, kept: Ids) -> None:
        """Remove all sources except `kept`, in this order, int64 [new sources]."""
        ...


# Options that may differ between the requests of one search.
_OWN = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "forced_bos_token_id",
    "decoder_start_token_id",
    "prompt_lookup_num_tokens",
    "seed",
    "replace_unknowns",
}
_SHARED = tuple(field.name for field in dataclasses.fields(DecodeConfig) if field.name not in _OWN)


def settings(config: DecodeConfig) -> tuple[object, ...]:
    """Return the options that have to be equal for two requests to share a search."""
    return tuple(getattr(config, name) for name in _SHARED)


def is_broken(found: Candidates) -> Mask | None:
    """Return which rows have NaN or infinite numbers; None if no row does."""
    # For a few numbers, `any` and `all` take three times as long as counting.
    log_normalizer = found.log_normalizer
    if np.count_nonzero(np.isfinite(log_normalizer)) == log_normalizer.size and not np.count_nonzero(
        np.isnan(found.logits)
    ):
        return None
    broken: Mask = np.isnan(found.logits).any(-1) | ~np.isfinite(log_normalizer)
    return broken


def repaired(found: Candidates, broken: Mask) -> Candidates:
    """Replace the numbers of broken rows by zeros."""
    return Candidates(
        found.token_ids,
        np.where(broken[:, None], np.float32(0), found.logits),
        np.where(broken, np.float32(0), found.log_normalizer),
    )


def not_a_number(request: Request, num_new: int) -> BackendError:
    """Return the error for a text with NaN or infinite logits."""
    return BackendError(
        f"decode: the model gave NaN or infinite logits for {request.name} at new token {num_new + 1}; "
        "check its weights, or export with --precision fp32",
        indices=[request.text],
    )


def nothing_left(request: Request, num_new: int) -> InputError:
    """Return the error for a text whose every next token is banned."""
    return InputError(
        f"decode: {request.name} has no token to choose from after {num_new} new ones; "
        "relax suppress_tokens, bad_words_ids, the sizes of n-grams, min_new_tokens or min_length",
        indices=[request.text],
    )


def forced_alone(request: Request, spec: ModelSpec) -> Outcome:
    """Return the outcome of a text that consists of its forced tokens."""
    ends, ids = Ends(request.config.ends(spec.tokens.eos)), request.prompt[1:]
    try:
        at_stop = Stops(request.config).is_stopped(request, ids)
    except BackendError as error:
        return error
    reason = finish_reason(ids[-1], ends, is_stopped=at_stop, is_full=True)
    score = request.log_prob / request.num_forced**request.config.length_penalty
    return [Hypothesis(token_ids=ids, score=score, log_prob=request.log_prob, finish_reason=reason)]
