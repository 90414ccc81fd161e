"""Define what greedy search and beam search have in common."""

from __future__ import annotations

import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode._history import History
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.stops import Deadlines, is_stopped
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Beams, BeamSteps, Candidates, Ids, Mask, rows_of

Outcome = list[Hypothesis] | TfexportError


class Search(ABC):
    """Sources that are decoded together, each of its own length."""

    width: int  # rows of a source
    banned_ids: frozenset[int] = frozenset()  # tokens that no row takes in the steps of the last `steps_ahead`

    def __init__(self, spec: ModelSpec) -> None:
        self.requests: list[Request] = []  # the sources, by place
        self.history = History(spec.vocab)
        self._spec, self._deadlines = spec, Deadlines()
        self._has_stops = False  # whether any source has stop strings or a time limit
        self._num_new: Ids = np.empty(0, np.int64)
        self._limits: Ids = np.empty(0, np.int64)

    def add(self, requests: Sequence[Request]) -> None:
        """Append sources."""
        self.requests += requests
        self.history.add(request.prompt for request in requests for _ in range(self.width))
        self._deadlines.add(requests)
        self._has_stops = self._has_stops or _have_stops(requests)
        self._num_new = np.concatenate((self._num_new, [request.num_forced for request in requests]))
        self._limits = np.concatenate((self._limits, [request.max_new_tokens for request in requests]))

    def keep(self, sources: Ids) -> None:
        """Remove all other sources; `sources` are places, in their new order."""
        self.requests = [self.requests[place] for place in sources.tolist()]
        self.history.keep(rows_of(sources, self.width))
        self._deadlines.keep(sources)
        self._has_stops = self._has_stops and _have_stops(self.requests)
        self._num_new, self._limits = self._num_new[sources], self._limits[sources]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end steps taken at once if they are the best."""
        return frozenset()

    @property
    def follows_best(self) -> bool:
        """Whether rows continue with the best token, unless it is one of `stop_ids`."""
        return False

    @property
    def needs_scores(self) -> bool:
        """Whether any text needs log-probabilities."""
        return True

    @abstractmethod
    def num_candidates(self) -> int:
        """Return how many of the best next tokens of each row `take` needs, 1 … vocab."""

    @abstractmethod
    def take(self, found: Candidates) -> tuple[Ids | None, dict[int, Outcome]]:
        """Extend the rows, given at least `num_candidates` candidates of each.

        Return the row that each row continues, int64 [rows], or None if every row continues itself; and the outcomes of
        the finished sources by place, which the caller has to remove.
        """

    def steps_ahead(self) -> int:
        """Return how many steps may be taken at once, at least 1."""
        return 1

    def beams(self, steps: int) -> Beams | None:
        """Return the state of beam searches for several steps at once.

        It is None if `take` has to take each step.
        """
        return None

    def follow_beams(self, found: BeamSteps) -> dict[int, Outcome]:
        """Take steps that changed the state of `beams`; return outcomes by place."""
        raise NotImplementedError

    def follow(self, found: Candidates) -> None:
        """Take steps [steps, rows, …] of best tokens, in which no text ended."""
        raise NotImplementedError


# Options of beams that may differ between the requests of one search.
_OWN = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "forced_bos_token_id",
    "decoder_start_token_id",
    "language",
    "task",
    "prompt_lookup_num_tokens",
    "seed",
    "replace_unknowns",
}
_settings = operator.attrgetter(*(field.name for field in dataclasses.fields(DecodeConfig) if field.name not in _OWN))


def search_key(config: DecodeConfig) -> object:
    """Return what has to be equal for requests of one width to share a search."""
    return _settings(config) if config.num_beams > 1 else None


def _have_stops(requests: Iterable[Request]) -> bool:
    return any(request.config.stop_strings or request.config.max_time is not None for request in requests)


def is_any(mask: Mask) -> bool:
    """Return whether any place is true; for a few places ten times as fast as `any`."""
    return 1 in mask.tobytes()


def is_broken(found: Candidates) -> Mask | None:
    """Return which rows have NaN or infinite numbers; None if no row does."""
    is_nan, is_infinite = np.isnan(found.logits), ~np.isfinite(found.log_normalizer)
    if not is_any(is_nan) and not is_any(is_infinite):
        return None
    broken: Mask = is_nan.any(-1) | is_infinite
    return broken


def repaired(found: Candidates, broken: Mask) -> Candidates:
    """Replace the numbers of broken rows by zeros."""
    return Candidates(
        found.token_ids,
        np.where(broken[:, None], np.float32(0), found.logits),
        np.where(broken, np.float32(0), found.log_normalizer),
    )


def nan_error(request: Request, num_new: int) -> BackendError:
    """Return the error for a text with NaN or infinite logits."""
    return BackendError(
        f"decode: the model returned NaN or infinite logits for {request.name} at new token {num_new + 1}; "
        "check its weights, or export with --precision fp32",
        indices=[request.text],
    )


def no_token_error(request: Request, num_new: int) -> InputError:
    """Return the error for a text whose every next token is banned."""
    return InputError(
        f"decode: {request.name} has no token to choose from after {num_new} new ones; "
        "relax suppress_tokens, bad_words_ids, the sizes of n-grams, min_new_tokens or min_length",
        indices=[request.text],
    )


def forced_outcome(request: Request, spec: ModelSpec) -> Outcome:
    """Return the outcome of a text that consists of its forced tokens."""
    ends, ids = request.config.ends(spec.tokens.eos), request.prompt[1:]
    try:
        at_stop = is_stopped(request, ids)
    except BackendError as error:
        return error
    reason = finish_reason(ids[-1], ends, is_stopped=at_stop, is_full=True)
    score = request.log_prob / request.num_forced**request.config.length_penalty
    return [Hypothesis(token_ids=ids, score=score, log_prob=request.log_prob, finish_reason=reason)]
