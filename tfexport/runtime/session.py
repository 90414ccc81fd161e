"""Define the interface of all backends: sessions and batches.

Only NumPy arrays cross this interface; the caches stay in the session's memory. Threads may share a session, but not a
batch. Backends implement the interface on top of `tfexport.runtime.checked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ModelSpec
from tfexport.precision import Accuracy
from tfexport.runtime.sources import Sources

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]
# Adding an array to a few numbers, not in place, takes a fifth of the time of `+= 1`.
ONE = np.array(1)
# Token ids that the decoder reads first, one list per source: start token, prefix, forced token.
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Candidates:
    """The best next tokens of every row, best first; equal logits in order of id.

    log p(token) = logits - log_normalizer. If several tokens have the same logit as the last candidate, the CPU returns
    those with the lowest ids, and a GPU may return any of them. The caller owns the arrays.
    """

    token_ids: Ids  # [rows, num_candidates]
    logits: Floats  # [rows, num_candidates]
    log_normalizer: Floats  # [rows], log Σ exp(logits) over the vocabulary

    @property
    def log_probs(self) -> Floats:
        """Log-probabilities, float32 [rows, num_candidates]."""
        log_probs: Floats = self.logits - self.log_normalizer[:, None]
        return log_probs


@dataclass(frozen=True)
class Limit:
    """A maximum of a session, and how to raise it."""

    most: int | None = None  # None if memory is the only limit
    remedy: str = ""  # how to raise the limit, with "{number}" for the required number; "" if it cannot be raised

    def is_below(self, number: int) -> bool:
        """Return whether `number` is too large."""
        return self.most is not None and number > self.most

    def for_more(self, number: int) -> str:
        """Return the remedy for `number` after a comma; "" without a remedy."""
        return f", or {self.remedy.format(number=number)}" if self.remedy else ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The maxima of a session."""

    rows: Limit = Limit()  # of all sources of a batch together
    source_length: Limit
    target_length: Limit  # tokens that the decoder reads
    candidates: Limit  # per row of a step
    end_ids: frozenset[int] | None = None  # tokens that may end a text; None for all

    @classmethod
    def of(cls, spec: ModelSpec) -> Limits:
        """Return the limits of a model if the backend adds no others."""
        return cls(
            source_length=Limit(spec.max_source_length, LONGER.format("source")),
            target_length=Limit(spec.max_target_length, LONGER.format("target")),
            candidates=Limit(spec.vocab),
        )


NO_ALIGNMENT = (
    "this bundle was exported without alignment; export it again with --alignment LAYER, such as --alignment -1"
)
LONGER = "export with a larger --max-{}-length if the model allows it"


class Batch(Protocol):
    """Sources that are being decoded, `width` rows each, every row at its own length.

    Rows of source s are s · width … (s + 1) · width - 1. The n current sources are always numbered 0 … n - 1: new
    sources are appended, and removed ones are replaced as `close_up` describes. Threads must not share a batch. Methods
    raise `InputError` if shapes, ids or lengths are invalid or a row is full, and leave the batch unchanged.
    """

    width: int  # rows of each source: 1, or the number of beams
    can_join: bool  # whether sources may join others; if not, all are added together, with equally long prompts

    @property
    def lengths(self) -> Ids:
        """Number of tokens in the cache of every row, int64 [rows]; read-only."""

    def add(self, sources: Sources, prompts: Prompts) -> None:
        """Encode sources, give each `width` equal rows, and prefill their prompts.

        There is one prompt for each new source, of at least one token; the lengths may differ. The last token of a
        prompt is not read; the first `step` reads it.
        """

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read one token of every row, append it to the cache, and return the next tokens.

        `target_ids`, int64 [rows], is the last token of the prompt in the first step of a row. The result has the
        `num_candidates` best next tokens of each row, 1 … vocab.
        """

    def reorder(self, rows: Ids) -> None:
        """Continue row rows[r] as row r, within the same source."""

    def remove(self, sources: Ids) -> None:
        """Remove sources, each once; the last ones take the free places (`close_up`)."""


class GreedySteps(NamedTuple):
    """Greedy steps that a batch is asked to take in one call."""

    most: int  # steps, at least 1
    num_candidates: int  # 1 … vocab
    stop_ids: frozenset[int] = frozenset()  # a step whose best token is one of these, in any row, is the last
    banned_ids: frozenset[int] = frozenset()  # rows continue with their best token that is not one of these
    needs_scores: bool = True  # if not, the tokens are the same, but `log_normalizer` may be 0


@runtime_checkable
class MultiStep(Protocol):
    """A batch of one row per source that takes several greedy steps in one call."""

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        """Take greedy steps.

        There are fewer `banned_ids` than candidates. The tokens found in the last step are not read. The result has an
        additional first axis: [steps taken, rows, …].
        """


@dataclass(frozen=True, kw_only=True)
class Beams:
    """The beam searches of all sources of a batch.

    No option changes scores, except that short texts may not end. A step changes `running`, `scores`, `num_new` and
    `tokens`.
    """

    num_candidates: int  # of each row, 1 … vocab
    num_extensions: int  # of each source, among which `width` do not end; at most width · num_candidates
    end_ids: tuple[int, ...]
    divisors: Floats  # of log-probabilities, by number of new tokens
    early_stopping: bool | Literal["never"]  # "never": the best running beam counts as if it reached the limit
    limits: Ids  # most new tokens, [sources]
    shortest: Ids  # new tokens before which no text may end, [sources]
    num_new: Ids  # new tokens, [sources]
    tokens: Ids  # [rows, room]; the first lengths + 1 of each row are known, and more have room
    running: Floats  # Σ log p of each beam, [sources, width]; -inf for a missing beam
    scores: Floats  # of finished texts, best first, [sources, width]; -inf for a missing text


class FinishedBeam(NamedTuple):
    """A text that ended, better than the worst of the `width` best ones before."""

    source: int
    token_ids: list[int]  # without the first one
    score: float
    log_prob: float


@dataclass(frozen=True)
class BeamSteps:
    """The result of steps of beam searches."""

    steps: int  # taken
    finished: list[FinishedBeam]  # in the order in which they ended
    done: list[int]  # sources whose texts are final
    broken: list[int]  # sources with NaN or infinite numbers, which the last step left as they were


@runtime_checkable
class MultiBeam(Protocol):
    """A batch that takes several steps of beam searches in one call."""

    def beam_steps(self, beams: Beams, steps: int) -> BeamSteps:
        """Take 1 to `steps` steps, at most until a source is done or broken.

        Rows are reordered. The results are those of `step` and `tfexport.decode`.
        """


@runtime_checkable
class ScoresTokens(Protocol):
    """A batch that scores given next tokens without ranking the vocabulary."""

    def score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        """Read one token of each row; return `next_ids` as candidates [rows, 1]."""


@runtime_checkable
class Verifies(Protocol):
    """A batch that reads several tokens of its only row in one step and can undo them."""

    can_verify: bool  # whether the bundle was exported with `--speculation`

    def verify(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read several tokens of the only row and append them to the cache.

        `target_ids`, int64 [tokens], are the token that `step` would read, and drafted tokens. Returns the best
        candidates after each token, [tokens, num_candidates].
        """

    def rewind(self, length: int) -> None:
        """Remove the tokens of the only row from `length` on."""


@runtime_checkable
class Aligns(Protocol):
    """A session that aligns target tokens with source tokens."""

    has_alignment: bool  # whether the bundle was exported with an alignment

    def align(self, sources: Sources, target_ids: Ids) -> Floats:
        """Read whole targets and return the mean cross-attention of the alignment heads.

        `target_ids`, int64 [batch, target_len], are the start token and the target without its last token, padded on
        the right with any token. The result is float32 [batch, target_len, source_len]. Each row belongs to the token
        after the position and sums to 1; padding is 0.
        """


@runtime_checkable
class EncodesAhead(Protocol):
    """A session that encodes sources before they join a batch."""

    can_encode_ahead: bool  # whether the machine has cores for this while decoder steps run

    def encode_ahead(self, sources: Sources) -> Sources:
        """Encode sources, on any thread.

        The result has the same inputs, and batches of this session add it without encoding it again.
        """


class Session(Protocol):
    """A model on a backend."""

    spec: ModelSpec
    backend: str  # name in the registry
    accuracy: Accuracy  # only fp32 reproduces the eager model token by token
    limits: Limits

    def batch(self, width: int = 1) -> Batch:
        """Return an empty batch with `width` rows per source; several can exist at once."""

    def hidden_states(self, sources: Sources) -> Floats:
        """Return the output of an encoder-only model, [batch, source_len, d_model]."""

    def logits(self, sources: Sources) -> Floats:
        """Return the logits of the head, [batch, source_len, labels] or [batch, labels]."""

    def close(self) -> None:
        """Free the session's memory; it cannot be used afterwards."""


def in_order_of_id(candidates: Candidates) -> Candidates:
    """Sort equal logits by id, because some devices do not."""
    logits, token_ids = candidates.logits, candidates.token_ids
    differ = logits[..., 1:] != logits[..., :-1]
    if differ.all():
        return candidates
    rank = np.zeros(logits.shape, np.int64)
    np.cumsum(differ, axis=-1, out=rank[..., 1:])  # equal logits share a rank
    order = np.lexsort((token_ids, rank))
    return Candidates(
        np.take_along_axis(token_ids, order, -1), np.take_along_axis(logits, order, -1), candidates.log_normalizer
    )


def best_columns(token_ids: Ids, banned_ids: frozenset[int]) -> Ids:
    """Return the column of the first token that is not banned, [...].

    `token_ids` are [..., num_candidates].
    """
    is_banned: Mask = np.zeros(token_ids.shape, np.bool_)
    for token in banned_ids:  # for few of them ten times as fast as `isin`
        is_banned |= token_ids == token
    columns: Ids = is_banned.argmin(-1)
    return columns


def close_up(num_sources: int, removed: Ids) -> Ids:
    """Return the old place of each source that remains; the last ones fill free ones."""
    stays = np.ones(num_sources, np.bool_)
    stays[removed] = False
    left = num_sources - removed.size
    places = np.arange(left)
    places[~stays[:left]] = np.flatnonzero(stays[left:]) + left
    return places


def rows_of(sources: Ids, width: int) -> Ids:
    """Return the rows of sources, `width` each, in their order."""
    rows: Ids = (sources[:, None] * width + np.arange(width)).ravel()
    return rows


def prefilled(prompts: Prompts) -> Ids:
    """Return the tokens of prompts that a prefill reads, int64 [prompts, longest - 1]."""
    # Padding repeats the last token. Its cache entries are past the end of the row, where later tokens overwrite them.
    longest = max(map(len, prompts)) - 1
    rows = [[*prompt, *[prompt[-1]] * longest][:longest] for prompt in prompts]
    return np.array(rows, np.int64).reshape(len(rows), longest)


def prefill_pieces(prompts: Prompts, *, one_by_one: bool) -> list[tuple[Ids, Ids]]:
    """Return the runs of a prefill: tokens [prompts, len] and lengths [prompts].

    The lengths are those of the rows before a run. Decoders with states read tokens one by one. Rows of shorter
    prompts begin later: until then they read their first token at length 0, which leaves nothing in a state.
    """
    if not one_by_one:
        return [(prefilled(prompts), np.zeros(len(prompts), np.int64))]
    lengths = np.array([len(prompt) - 1 for prompt in prompts])
    longest = int(lengths.max())
    places = [(lengths - longest + step).clip(0) for step in range(longest)]
    return [(np.array([[p[at]] for p, at in zip(prompts, place, strict=True)]), place) for place in places]


def given_candidates(next_ids: Ids, logits: Floats, log_normalizer: Floats) -> Candidates:
    """Return the given tokens, [rows], as candidates from logits [rows, vocab]."""
    token_ids = next_ids[:, None]
    return Candidates(token_ids, np.take_along_axis(logits, token_ids, 1), log_normalizer)
