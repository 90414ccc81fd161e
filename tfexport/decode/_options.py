"""Define logits processors, options that change which tokens may come next.

They do the same as those of Hugging Face transformers, but on the best candidates instead of the whole vocabulary: if a
processor can lower at most n tokens of a row, the best k of the row are among its k + n best candidates. Options that
may differ between the rows of a kind are arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.decode._history import History, Tokens
from tfexport.decode.request import Request
from tfexport.decode.result import Ends
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Ids, Mask
from tfexport.runtime.sources import pad_right

# Most suppressed tokens with which several steps are taken at once: each adds a candidate to every step.
FEW = 16
ALL = 2**31  # more candidates than any vocabulary has


class Rows(NamedTuple):
    """The rows of a step."""

    history: History | Tokens
    num_new: Ids  # tokens that each source has generated, [sources]
    limits: Ids  # most tokens that each source may generate, [sources]
    width: int  # rows of a source


class Processor:
    """One decoding option for the rows of one search; by default without effect."""

    takes_logits: ClassVar[bool] = True  # if there are no beams; otherwise always log-probabilities
    leaves_best: bool = False  # whether the best token stays the best, unless it is one of `stop_ids`
    stop_ids: frozenset[int] = frozenset()  # tokens that end steps taken at once if they are the best
    requests: tuple[Request, ...] = ()  # of each row

    def add(self, requests: Sequence[Request]) -> None:
        """Append a row for each request."""
        self.requests = (*self.requests, *requests)
        self._read()

    def keep(self, rows: Ids) -> None:
        """Remove all rows except `rows`, int64 [new rows]."""
        self.requests = tuple(self.requests[row] for row in rows.tolist())
        self._read()

    def _read(self) -> None:
        """Read the options of the rows, which have changed."""

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        """Return how many candidates `apply` needs to return the `wanted` best."""
        return wanted

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        """Change the scores of candidates, [rows, num_candidates], and sort them again.

        Scores are logits or log-probabilities, best first, equal ones in order of id. Banned tokens get -inf.
        """
        return token_ids, scores


class _Membership:
    def __init__(self, vocab: int) -> None:
        # The table [rows, vocab] is large, so it is reused and only the marks are cleared.
        self._marks: NDArray[np.bool_] = np.zeros((0, vocab + 1), np.bool_)

    def __call__(self, members: Ids, token_ids: Ids) -> Mask:
        """Return which of `token_ids` [rows, k] are among `members` [rows, n]."""
        if len(self._marks) < len(members):
            self._marks = np.zeros((len(members), self._marks.shape[1]), np.bool_)
        rows = np.arange(len(members))[:, None]
        self._marks[rows, members] = True
        found: Mask = self._marks[rows, token_ids]
        self._marks[rows, members] = False
        return found


def _sorted(token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
    order, rows = np.lexsort((token_ids, -scores)), np.arange(len(scores))[:, None]
    return token_ids[rows, order], scores[rows, order]


def _ban(banned: Mask, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
    if not np.count_nonzero(banned):  # the candidates are in order already
        return token_ids, scores
    order, rows = banned.argsort(1, kind="stable"), np.arange(len(banned))[:, None]
    return token_ids[rows, order], np.where(banned, -np.inf, scores)[rows, order]


class SequenceBias(Processor):
    """Adds a bias to tokens that complete a sequence."""

    def __init__(self, biases: Mapping[tuple[int, ...], float], vocab: int) -> None:
        self._single: Floats = np.zeros(vocab, np.float32)
        self._followers: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self._found: list[tuple[int, int, float]] = []  # row, token and bias, after the last `num_candidates`
        for (*begun, last), bias in biases.items():
            if begun:
                self._followers.setdefault(tuple(begun), []).append((last, bias))
            else:
                self._single[last] = bias
        self._sizes = sorted(set(map(len, self._followers)))
        self._num_single = ALL if (self._single > 0).any() else int(np.count_nonzero(self._single))

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        self._found, lengths = [], history.lengths.tolist()
        for size in self._sizes:
            for row, begun in enumerate(_newest(history, size).tolist()):
                if lengths[row] >= size and (followers := self._followers.get(tuple(begun))):
                    self._found += [(row, *follower) for follower in followers]
        if any(bias > 0 for _, _, bias in self._found):
            return ALL  # any token may become the best
        return wanted + self._num_single + max(Counter(row for row, _, _ in self._found).values(), default=0)

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        if not (self._num_single or self._found):
            return token_ids, scores
        scores = scores + self._single[token_ids]
        for row, token, bias in self._found:
            scores[row, token_ids[row] == token] += bias
        return _sorted(token_ids, scores)


class RepetitionPenalty(Processor):
    def __init__(self, vocab: int) -> None:
        self._contains = _Membership(vocab)

    def _read(self) -> None:
        penalties = [request.config.repetition_penalty for request in self.requests]
        self._penalties = np.array(penalties, np.float32)[:, None]
        self._raises = min(penalties, default=1) < 1  # then any token may become the best

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return ALL if self._raises else wanted + history.longest

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        penalized = np.where(scores < 0, scores * self._penalties, scores / self._penalties)
        return _sorted(token_ids, np.where(self._contains(rows.history.tokens, token_ids), penalized, scores))


class NoRepeatNgram(Processor):
    """Bans the last tokens of the n-grams that the history has begun."""

    option = "no_repeat_ngram_size"

    def __init__(self, vocab: int) -> None:
        self._vocab, self._contains = vocab, _Membership(vocab)
        self._found: Ids | None = None  # after the last `num_candidates`, [rows, n], padded with `vocab`

    def _read(self) -> None:
        self._sizes = np.array([getattr(request.config, self.option) for request in self.requests])[:, None]
        self._largest = max(self._sizes.ravel().tolist(), default=0)

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        (tokens, lengths), sizes, self._found = self._texts(history), self._sizes, None
        places, every = np.arange(tokens.shape[1]), np.arange(len(tokens))
        # Where an n-gram ends that begins like the one that comes next.
        ends = (places >= sizes - 1) & (places < lengths[:, None]) & (history.lengths[:, None] >= sizes - 1)
        for back in range(1, min(self._largest, tokens.shape[1])):
            newest = history.tokens[every, np.maximum(history.lengths - back, 0)]
            ends[:, back:] &= (tokens[:, :-back] == newest[:, None]) | (back >= sizes)
        if 1 not in ends.tobytes():
            return wanted
        self._found = np.where(ends, tokens, self._vocab)
        return wanted + int((self._found < self._vocab).sum(1).max())

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        if self._found is None:
            return token_ids, scores
        return _ban(self._contains(self._found, token_ids), token_ids, scores)

    def _texts(self, history: History | Tokens) -> tuple[Ids, Ids]:
        return history.tokens, history.lengths


class EncoderNoRepeatNgram(NoRepeatNgram):
    option = "encoder_no_repeat_ngram_size"

    def _texts(self, history: History | Tokens) -> tuple[Ids, Ids]:
        tokens, is_token = pad_right([request.source for request in self.requests], self._vocab)
        # If the source has a larger vocabulary, its other ids ban nothing.
        return tokens.clip(max=self._vocab), is_token.sum(1)


def _newest(history: History | Tokens, count: int) -> Ids:
    """Return the last `count` tokens of each row; undefined for shorter rows."""
    places = history.lengths[:, None] - np.arange(count, 0, -1)
    return np.take_along_axis(history.tokens, places.clip(min=0), 1)


class MinLength(Processor):
    leaves_best = True

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def _read(self) -> None:
        configs = [request.config for request in self.requests]
        self._least = np.array([config.min_length or config.min_new_tokens for config in configs])
        self._is_whole = np.array([config.min_length > 0 for config in configs])  # with start token and prefix

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return wanted + len(self._ends.ids)

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        is_short = self.steps_before_end(rows.history.lengths, rows.num_new) > 0
        if 1 not in is_short.tobytes():
            return token_ids, scores
        return _ban(self._ends.among(token_ids) & is_short[:, None], token_ids, scores)

    def steps_before_end(self, lengths: Ids, num_new: Ids) -> Ids:
        """Return in how many next steps each row may not end; at most 0 for none."""
        width = lengths.size // num_new.size
        generated = num_new if width == 1 else num_new.repeat(width)
        left: Ids = self._least - np.where(self._is_whole, lengths, generated)
        return left


class FavoredEnd(Processor):
    """Raises the scores of end tokens, as `exponential_decay_length_penalty`."""

    def __init__(self, penalty: Sequence[float], ends: Ends) -> None:
        self._start, self._factor, self._ends = *penalty, ends
        self._growth: Floats = np.empty(0, np.float32)  # of each row, after the last `num_candidates`

    def _read(self) -> None:
        self._begins = np.array([len(request.prompt) - request.num_forced for request in self.requests])

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        late = (history.lengths - self._begins - self._start).clip(min=0)
        with np.errstate(over="ignore"):  # a larger factor than 1e30 could overflow later
            self._growth = (np.minimum(self._factor**late, 1e30) - 1).astype(np.float32)
        return ALL if (self._growth > 0).any() else wanted + len(self._ends.ids)

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        is_end = self._ends.among(token_ids) & (scores > -np.inf)
        raised = np.abs(scores, out=np.zeros_like(scores), where=is_end) * self._growth[:, None]
        return _sorted(token_ids, scores + raised)


class Suppress(Processor):
    """Bans `suppress_tokens` and the words of one token in `bad_words_ids`."""

    def __init__(self, ends: Ends, vocab: int) -> None:
        self._ends, self._vocab = ends, vocab
        self._tables: dict[frozenset[int], int] = {}  # row of `_banned` for each set of tokens
        self._read()

    def _read(self) -> None:
        newest, tokens = None, frozenset[int]()
        sets: list[frozenset[int]] = []
        for request in self.requests:
            if request.config is not newest:
                newest, tokens = request.config, self._tokens(request.config)
            sets.append(tokens)
        if not self._tables.keys() >= set(sets) or len(self._tables) > len(sets):
            self._tables = {tokens: number for number, tokens in enumerate(dict.fromkeys(sets))}
            self._banned = np.zeros((len(self._tables), self._vocab), np.bool_)
            for tokens, number in self._tables.items():
                self._banned[number, list(tokens)] = True
            self.stop_ids = frozenset().union(*self._tables)
            self._most = max(map(len, self._tables), default=0)
            self.leaves_best = self._most <= FEW
        self._table = np.array([self._tables[tokens] for tokens in sets], np.int64)[:, None]
        self._begins = np.array([len(request.prompt) for request in self.requests])

    def _tokens(self, config: DecodeConfig) -> frozenset[int]:
        # As in transformers, an end token is not banned as a bad word.
        single = {word[0] for word in config.bad_words_ids if len(word) == 1 and word[0] not in self._ends.ids}
        return frozenset({*config.suppress_tokens, *single})

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return wanted + self._most

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        return _ban(self._banned[self._table, token_ids], token_ids, scores)


class SuppressFirst(Suppress):
    """Bans `begin_suppress_tokens` as the first token after the prompt."""

    def _tokens(self, config: DecodeConfig) -> frozenset[int]:
        return frozenset(config.begin_suppress_tokens)

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        is_first = rows.history.lengths == self._begins
        if 1 not in is_first.tobytes():
            return token_ids, scores
        return _ban(self._banned[self._table, token_ids] & is_first[:, None], token_ids, scores)


class Timestamps(Processor):
    """Rules of Whisper for timestamps, which are the ids from `first`.

    A text begins with one, they come in pairs except before the end, and do not decrease. A row continues with a
    timestamp if all of them together are likelier than any other token.
    """

    def __init__(self, first: int, max_initial: int | None, end: int) -> None:
        self._first, self._end = first, end
        self._last_initial = ALL if max_initial is None else first + max_initial

    def _read(self) -> None:
        self._begins = np.array([len(request.prompt) for request in self.requests])

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return ALL  # the probability of all timestamps counts

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        tokens, lengths = rows.history.tokens, rows.history.lengths
        begins = self._begins
        every, places = np.arange(lengths.size), np.arange(tokens.shape[1])
        was_time = (tokens >= self._first) & (begins[:, None] <= places) & (places < lengths[:, None])
        latest = np.where(was_time, places, -1).max(1)
        is_last = latest == lengths - 1
        is_second = is_last & (was_time[every, lengths - 2] | (lengths - begins < 2))
        is_first = is_last & ~is_second
        least = np.where(latest < 0, self._first, tokens[every, latest] + ~is_first)
        is_time = token_ids >= self._first
        banned = token_ids == self._first - 1  # `no_timestamps`
        banned |= is_time & (is_second[:, None] | (token_ids < least[:, None]))
        banned |= is_first[:, None] & (token_ids < self._end)
        banned |= (lengths == begins)[:, None] & (~is_time | (token_ids > self._last_initial))
        allowed = np.where(banned, np.float32(-np.inf), scores)
        best = allowed.max(1, keepdims=True)
        shares = np.exp(allowed - np.where(best > -np.inf, best, 0))
        times, text = np.where(is_time, shares, 0), np.where(is_time, 0, shares)
        return _ban(banned | ((times.sum(1) > text.max(1))[:, None] & ~is_time), token_ids, scores)


class PrefixBias(Processor):
    """Bias towards the prefix, as `prefix_bias_beta` of CTranslate2.

    While a row equals its prefix, p becomes (1 - beta) · p, and beta is added for the next token of the prefix.
    """

    takes_logits = False

    def __init__(self, beta: float, vocab: int) -> None:
        self._beta, self._vocab, self._num_candidates = beta, vocab, 0
        self._next_ids: Ids = np.empty(0, np.int64)
        self.leaves_best = True  # unless a row of the last `num_candidates` follows its prefix

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        self.leaves_best = True
        if min(history.lengths.tolist()) < max(len(request.biased_prefix) for request in self.requests):
            self._next_ids, self._num_candidates = self._find_next(history), wanted + 1
            self.leaves_best = not (self._next_ids >= 0).any()
        # The token of the prefix may be the worst of all.
        return wanted if self.leaves_best else ALL

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        if self.leaves_best:
            return token_ids, scores
        follows = self._next_ids >= 0
        # The token of the prefix counts even if it is banned.
        order = (token_ids != self._next_ids[:, None]).argsort(1, kind="stable")[:, : self._num_candidates]
        token_ids, log_probs = np.take_along_axis(token_ids, order, 1), np.take_along_axis(scores, order, 1)
        log_probs[follows] += np.float32(math.log1p(-self._beta))
        log_probs[follows, 0] = np.logaddexp(log_probs[follows, 0], np.float32(math.log(self._beta)))
        return _sorted(token_ids, log_probs)

    def _find_next(self, history: History | Tokens) -> Ids:
        """Return the next token of each row's prefix; -1 if the row does not follow it."""
        prefixes, is_token = pad_right([request.biased_prefix for request in self.requests], self._vocab)
        width, lengths = min(prefixes.shape[1], history.longest), history.lengths
        is_generated = np.arange(width) < lengths[:, None]
        is_equal = (prefixes[:, :width] == history.tokens[:, :width]) | ~is_generated
        places = lengths.clip(max=prefixes.shape[1] - 1)
        follows = (lengths < is_token.sum(1)) & is_equal.all(1)
        return np.where(follows, prefixes[np.arange(lengths.size), places], -1)


class ForcedEnd(Processor):
    """Forces `forced_eos_token_id` with log p = 0 if a row has one token left."""

    takes_logits = False
    leaves_best = True

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = sorted(set(tokens))

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return max(wanted, len(self._tokens))

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        last = rows.limits - rows.num_new == 1
        if not last.any():
            return token_ids, scores
        count, last = len(self._tokens), last.repeat(rows.width)
        token_ids, scores = token_ids.copy(), np.where(last[:, None], np.float32(-np.inf), scores)
        token_ids[last, :count] = self._tokens
        scores[last, :count] = 0
        return token_ids, scores


class Renormalize(Processor):
    takes_logits = False

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        return ALL

    def apply(self, rows: Rows, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        shifted = scores - np.where(scores[:, :1] > -np.inf, scores[:, :1], 0)
        # The best token adds 1, unless every token is banned.
        return token_ids, shifted - np.log(np.exp(shifted).sum(1, keepdims=True).clip(min=1))
