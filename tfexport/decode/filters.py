"""What may be generated next: penalties and bans on the candidates of a step.

They work as the logits processors of Hugging Face transformers, in the same
order, but on the best candidates instead of the whole vocabulary: a filter that
can only lower n tokens of a row leaves the best k of it among the k + n best.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ModelSpec
from tfexport.decode.bans import BannedSequences, SourceNgrams, repeats
from tfexport.decode.ends import Ends
from tfexport.decode.history import History
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Ids, Mask

# Each suppressed token makes every step return one candidate more, which steps taken at once keep all.
FEW = 16


class Filters:
    """The penalties and bans of one configuration for one model, for the rows of one search.

    Attributes:
        ends: the tokens that end a text.
        are_set: whether there is one that could change anything.
        suppressed: tokens that are never said.
        leave_best: whether the best token stays the best wherever it is not suppressed and does not end the text.
        forced: what the last token of a text at its limit must be one of, ascending; empty for anything.
    """

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        """Prepare what stays the same from step to step."""
        self._config, self._vocab = config, spec.vocab
        self.ends = Ends(config.ends(spec.tokens.eos))
        self.forced = tuple(sorted(set(config.forced_ends)))
        # An end that is a bad word by itself is none, as in transformers.
        words = [word for word in config.bad_words_ids if len(word) > 1 or word[0] not in self.ends.ids]
        suppressed = frozenset({*config.suppress_tokens, *(word[0] for word in words if len(word) == 1)})
        sequences = [word for word in words if len(word) > 1]
        self._bans_sequences = max(config.no_repeat_ngram_size, config.encoder_no_repeat_ngram_size, len(sequences)) > 0
        self._penalises, self._sequences = config.repetition_penalty != 1, BannedSequences(sequences, spec.vocab)
        self._source_ngrams = SourceNgrams(config.encoder_no_repeat_ngram_size, spec.vocab)
        self.suppressed = suppressed
        self._num_banned = len(suppressed) + len(self.ends.ids) * config.bans_ends
        self.are_set = self._penalises or self._bans_sequences or self._num_banned > 0
        self.leave_best = not (self._penalises or self._bans_sequences or len(suppressed) > FEW)
        self._suppressed: NDArray[np.bool_] | None = None
        if suppressed:
            self._suppressed = np.zeros(spec.vocab, np.bool_)
            self._suppressed[list(suppressed)] = True
        self._completions: Ids | None = None  # of the history that was asked with last
        self._marks: NDArray[np.bool_] = np.zeros((0, spec.vocab + 1), np.bool_)

    def add(self, sources: Iterable[Sequence[int]]) -> None:
        """Begin a row with each source."""
        self._source_ngrams.add(sources)

    def keep(self, rows: Ids) -> None:
        """Forget all rows but `rows`, int64 [new rows]."""
        self._source_ngrams.keep(rows)

    def num_candidates(self, wanted: int, history: History) -> int:
        """Return how many candidates to ask for, so that the `wanted` best are among them after filtering."""
        if self._bans_sequences:
            self._completions = self._find_completions(history)
        if self._config.repetition_penalty < 1:
            return self._vocab  # it raises scores: any token may become the best
        lowered = self._num_banned
        if self._config.repetition_penalty > 1:
            lowered += history.longest
        if self._completions is not None:
            lowered += int((self._completions < self._vocab).sum(1).max())
        return min(max(wanted + lowered, len(self.forced)), self._vocab)

    def apply(self, history: History, num_new: Ids, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        """Penalise and ban, then sort again.

        Args:
            history: the one that `num_candidates` was asked with.
            num_new: tokens that each row has generated so far, int64 [rows].
            token_ids: candidates, int64 [rows, num_candidates].
            scores: logits or log-probabilities, float32 [rows, num_candidates].

        Returns:
            Ids and scores, best first, equal scores in order of id; -inf is a ban.
        """
        if self._penalises:
            penalty = self._config.repetition_penalty
            penalised = np.where(scores < 0, scores * penalty, scores / penalty)
            scores = np.where(self._contains(history.tokens, token_ids), penalised, scores)
        banned = self._banned(history, num_new, token_ids)
        if banned is not None:
            scores = np.where(banned, -np.inf, scores)
        if self._penalises:
            order = np.lexsort((token_ids, -scores))
        elif banned is not None:
            order = banned.argsort(1, kind="stable")  # the others are in order already
        else:
            return token_ids, scores
        rows = np.arange(len(order))[:, None]
        return token_ids[rows, order], scores[rows, order]

    def force(self, num_left: Ids, token_ids: Ids, log_probs: Floats) -> tuple[Ids, Floats]:
        """Leave nothing but the forced tokens to rows that have one token left.

        Args:
            num_left: tokens that each row may still generate, int64 [rows].
            token_ids: candidates, int64 [rows, num_candidates], as many as are forced or more.
            log_probs: float32 [rows, num_candidates].

        Returns:
            Ids and log-probabilities: 0 for what is forced, -inf for everything else.
        """
        last = num_left == 1
        if not last.any():
            return token_ids, log_probs
        count = len(self.forced)
        token_ids, log_probs = token_ids.copy(), np.where(last[:, None], np.float32(-np.inf), log_probs)
        token_ids[last, :count] = self.forced
        log_probs[last, :count] = 0
        return token_ids, log_probs

    def _find_completions(self, history: History) -> Ids | None:
        """Find the tokens that would complete what may not be said, [rows, …] as `repeats` does; None for none."""
        size = self._config.no_repeat_ngram_size
        found = self._sequences.completions(history) + self._source_ngrams.completions(history)
        if size:
            found += repeats(history, size, self._vocab)
        return np.concatenate(found, 1) if found else None

    def _banned(self, history: History, num_new: Ids, token_ids: Ids) -> Mask | None:
        """Say which candidates may not come next, None where all may."""
        masks: list[Mask] = []
        if self._completions is not None:
            masks.append(self._contains(self._completions, token_ids))
        config = self._config
        counted, least = (history.lengths, config.min_length) if config.min_length else (num_new, config.min_new_tokens)
        if least and min(lengths := counted.tolist()) < least:  # sooner than numpy's for the rows of a batch
            ends = self.ends.among(token_ids)
            masks.append(ends if max(lengths) < least else ends & (counted < least)[:, None])
        if self._suppressed is not None:
            masks.append(self._suppressed[token_ids])
        if not masks:
            return None
        banned = functools.reduce(np.logical_or, masks)
        return banned if np.count_nonzero(banned) else None

    def _contains(self, members: Ids, token_ids: Ids) -> Mask:
        """Say which of `token_ids` [rows, k] are among the `members` [rows, n] of their row."""
        # A table of the vocabulary a row is large: it is kept, and only what was marked is cleared.
        if len(self._marks) < len(members):
            self._marks = np.zeros((len(members), self._vocab + 1), np.bool_)
        rows = np.arange(len(members))[:, None]
        self._marks[rows, members] = True
        found: Mask = self._marks[rows, token_ids]
        self._marks[rows, members] = False
        return found
