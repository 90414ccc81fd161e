"""What a search is to the loop: it says how many candidates it wants, and takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode.ends import Ends
from tfexport.decode.history import History
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.stops import Stops
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, Floats, Ids, Mask

Outcome = list[Hypothesis] | TfexportError


class Taken(NamedTuple):
    """What a search has made of the candidates of a step.

    Attributes:
        rows: row that each row continues, int64 [rows]; None where every row goes on with itself.
        done: what came of the sources that are finished, by their place in the search; they have to be removed.
    """

    rows: Ids | None
    done: dict[int, Outcome]


class Search(Protocol):
    """Sources that are searched alike, `width` rows each, every source at its own length.

    Attributes:
        width: rows of a source.
        requests: what is searched, by place.
        history: start token, prefix and generated tokens of each row.
        ends: the tokens that end a text.
        stop_ids: best tokens with which steps that are taken at once have to end.
    """

    width: int
    requests: list[Request]
    history: History
    ends: Ends
    stop_ids: frozenset[int]

    @property
    def follows_best(self) -> bool:
        """Whether each row goes on with its best token, unless that is one of `stop_ids`."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Begin to search for more, behind those that there are."""
        ...

    def num_candidates(self) -> int:
        """Say how many of the best next tokens of each row it wants, 1 … vocab."""
        ...

    def take(self, found: Candidates) -> Taken:
        """Choose among candidates, lengthen the rows, and say what is finished.

        Args:
            found: num_candidates of each row or more.
        """
        ...

    def steps_ahead(self) -> int:
        """Say how many steps may be taken at once, each row going on with its best token: at least 1."""
        ...

    def follow(self, found: Candidates) -> None:
        """Take steps in which each row went on with its best token, none of which ends a text.

        Args:
            found: of each step, with one axis more in front of all: [steps, rows, …].
        """
        ...

    def remove(self, kept: Ids) -> None:
        """Go on with the sources `kept` alone, in this order, int64 [new sources]."""
        ...


# What each request may ask for by itself: all other settings are those of its search.
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
    """Return what has to be equal for two requests to be searched together."""
    return tuple(getattr(config, name) for name in _SHARED)


def is_broken(found: Candidates) -> Mask | None:
    """Say which rows hold numbers that are none, bool [rows]; None where all are right."""
    # Counting is the fastest question to a few numbers: `any` and `all` cost three times as much.
    log_normalizer = found.log_normalizer
    if np.count_nonzero(np.isfinite(log_normalizer)) == log_normalizer.size and not np.count_nonzero(
        np.isnan(found.logits)
    ):
        return None
    broken: Mask = np.isnan(found.logits).any(-1) | ~np.isfinite(log_normalizer)
    return broken


def repaired(found: Candidates, broken: Mask) -> Candidates:
    """Put harmless numbers for those of broken rows, whose sources have failed anyway."""
    return Candidates(
        found.token_ids,
        np.where(broken[:, None], np.float32(0), found.logits),
        np.where(broken, np.float32(0), found.log_normalizer),
    )


def not_a_number(request: Request, num_new: int) -> BackendError:
    """Say that the model gave no numbers for a text."""
    return BackendError(
        f"decode: the model gave NaN or infinite logits for {request.name} at new token {num_new + 1}; "
        "check its weights, or export with --precision fp32",
        indices=[request.text],
    )


def nothing_left(request: Request, num_new: int) -> InputError:
    """Say that every token is banned for a text."""
    return InputError(
        f"decode: {request.name} has no token to choose from after {num_new} new ones; "
        "relax suppress_tokens, bad_words_ids, the sizes of n-grams, min_new_tokens or min_length",
        indices=[request.text],
    )


def is_stopped(stops: Stops, request: Request, token_ids: Sequence[int]) -> bool:
    """Say whether the last token of a text, the start token left out, has completed a stop string.

    Raises:
        BackendError: what decodes the tokens has failed, which is a matter of this text alone.
    """
    try:
        return stops.are_said(token_ids, request.text_of)
    except Exception as error:  # of a tokenizer, or of a function of the caller
        raise BackendError(
            f"decode: {request.name} could not be put into words to look for stop strings: {error!r}; "
            "check the tokenizer, or leave stop_strings out",
            indices=[request.text],
        ) from error


def forced_alone(request: Request, spec: ModelSpec) -> Outcome:
    """Return what comes of a text that its forced tokens are all of."""
    ends = Ends(request.config.ends(spec.tokens.eos))
    ids = request.prompt[1:]
    try:
        at_stop = is_stopped(Stops(request.config), request, ids)
    except BackendError as error:
        return error
    reason = finish_reason(ids[-1], ends, is_stopped=at_stop, is_full=True)
    score = request.log_prob / request.num_forced**request.config.length_penalty
    return [Hypothesis(token_ids=ids, score=score, log_prob=request.log_prob, finish_reason=reason)]


def log_probs_of(found: Candidates) -> Floats:
    """Return the log-probabilities of candidates, float32 [rows, num_candidates]."""
    log_probs: Floats = found.logits - found.log_normalizer[:, None]
    return log_probs
