"""Validate the arguments of sessions and batches once for all backends.

A backend inherits from these classes and implements the methods of the same name with an underscore. The protocols in
`tfexport.runtime.session` document arguments, results and errors.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike

from tfexport.contract import HIDDEN_STATES, LOGITS, ModelSpec
from tfexport.errors import BackendError, InputError, raise_all
from tfexport.precision import Accuracy
from tfexport.runtime.session import LONGER, NO_ALIGNMENT, Batch, Candidates, Floats, Ids, Limits, Prompts
from tfexport.runtime.sources import Sources, batch_problems


class CheckedSession(ABC):
    """A `Session` that checks the arguments of its calls."""

    backend: str
    spec: ModelSpec
    accuracy: Accuracy
    limits: Limits

    def batch(self, width: int = 1) -> Batch:
        """Return an empty batch with `width` rows per source."""
        self._check_open()
        if not self.spec.has_decoder:
            raise BackendError(f"{self.backend}: this model is encoder-only and cannot generate; use embed")
        if width < 1:
            raise InputError(f"width is {width}, expected 1 or more")
        return self._batch(width)

    def hidden_states(self, sources: Sources) -> Floats:
        """Return the encoder's output, float32 [batch, source_len, d_model]."""
        self._check_open()
        if self.spec.has_decoder:
            raise BackendError(f"{self.backend}: this model has a decoder and returns no hidden states; use generate")
        return self._checked(sources, HIDDEN_STATES)

    def logits(self, sources: Sources) -> Floats:
        """Return the head's logits, [batch, source_len, labels] or [batch, labels]."""
        self._check_open()
        if self.spec.head == "none":
            raise BackendError(f"{self.backend}: this model has no head; use its hidden states")
        return self._checked(sources, LOGITS)

    def _checked(self, sources: Sources, output: str) -> Floats:
        check_sources(self.spec, sources)
        return self._encode(sources, output)

    @abstractmethod
    def close(self) -> None:
        """Free the session's memory."""

    @property
    @abstractmethod
    def _is_open(self) -> bool: ...

    @abstractmethod
    def _batch(self, width: int) -> Batch: ...

    @abstractmethod
    def _encode(self, sources: Sources, output: str) -> Floats: ...

    def _check_open(self) -> None:
        if not self._is_open:
            raise BackendError(f"{self.backend}: this session is closed; load the bundle again")


class CheckedAligner(CheckedSession):
    """A session that implements `Aligns`."""

    has_alignment: bool

    def align(self, sources: Sources, target_ids: Ids) -> Floats:
        """Return the cross-attention of whole targets."""
        self._check_open()
        if not self.has_alignment:
            raise BackendError(NO_ALIGNMENT)
        check_sources(self.spec, sources)
        count, shape = len(sources), target_ids.shape
        if len(shape) != 2 or target_ids.dtype != np.int64 or shape[0] != count or target_ids.size == 0:
            raise InputError(f"target_ids is {target_ids.dtype} {shape}, expected int64 [{count}, target_len]")
        _check_prompts(self.spec, count, target_ids.tolist())
        return self._align(sources, target_ids)

    @abstractmethod
    def _align(self, sources: Sources, target_ids: Ids) -> Floats: ...


class CheckedBatch(ABC):
    """A `Batch` that checks the arguments of its calls."""

    can_join = True

    def __init__(self, spec: ModelSpec, width: int) -> None:
        self.width = width
        self._width = np.array(width)  # division by an array is faster
        self.lengths: Ids = np.zeros(0, np.int64)
        self._spec = spec

    def add(self, sources: Sources, prompts: Prompts) -> None:
        """Encode sources and read every prompt except its last token."""
        check_sources(self._spec, sources)
        _check_prompts(self._spec, len(sources), prompts)
        self._add(sources, prompts)

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read one token of every row and return its best next tokens."""
        check_step(self._spec, self.lengths, target_ids, num_candidates)
        return self._step(target_ids, num_candidates)

    def reorder(self, rows: Ids) -> None:
        """Continue row rows[r] as row r."""
        lengths, width = self.lengths, self.width
        if rows.shape != lengths.shape or (rows // self._width).tobytes() != _owners(lengths.size, width):
            raise InputError(f"rows is {rows.tolist()}, expected {lengths.size} rows, each of its own source")
        self._reorder(rows)

    def remove(self, sources: Ids) -> None:
        """Remove sources."""
        num_sources, listed = self.lengths.size // self.width, sources.tolist()
        if sources.ndim != 1 or len(set(listed)) < len(listed) or not set(listed) <= set(range(num_sources)):
            raise InputError(f"sources is {listed}, expected some of 0 … {num_sources - 1}, each once")
        self._remove(sources)

    @abstractmethod
    def _add(self, sources: Sources, prompts: Prompts) -> None: ...

    @abstractmethod
    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates: ...

    @abstractmethod
    def _reorder(self, rows: Ids) -> None: ...

    @abstractmethod
    def _remove(self, sources: Ids) -> None: ...


class CheckedScoring(CheckedBatch):
    """A batch that implements `ScoresTokens`."""

    def score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        """Read one token of every row and score the given next tokens."""
        check_step(self._spec, self.lengths, target_ids, 1)
        vocab = self._spec.vocab
        if next_ids.shape != self.lengths.shape or next_ids.min() < 0 or next_ids.max() >= vocab:
            raise InputError(f"next_ids is {next_ids.tolist()}, expected {self.lengths.size} of 0 … {vocab - 1}")
        return self._score_step(target_ids, next_ids)

    @abstractmethod
    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates: ...


def check_sources(spec: ModelSpec, sources: Sources) -> None:
    """Raise `InputError` if sources do not fit the model."""
    raise_all(InputError, "", batch_problems(spec.source, sources))
    if (length := sources.source_len) > spec.max_source_length:
        remedy = f"shorten it, or {LONGER.format('source')}"
        raise InputError(f"source has {length} {spec.source.unit}, the limit is {spec.max_source_length}; {remedy}")


def _check_prompts(spec: ModelSpec, sources: int, prompts: Prompts) -> None:
    if len(prompts) != sources:
        raise InputError(f"there are {len(prompts)} prompts, expected one for each of {sources} sources")
    for prompt in prompts:
        if not 1 <= len(prompt) <= spec.max_target_length:
            raise InputError(f"a prompt has {len(prompt)} tokens, expected 1 to {spec.max_target_length}")
        if min(prompt) < 0 or max(prompt) >= spec.vocab:
            raise _out_of_range("tokens of a prompt", prompt, spec.vocab)


def check_step(spec: ModelSpec, lengths: Ids, target_ids: Ids, num_candidates: int, steps: int = 1) -> None:
    """Raise `InputError` for the first invalid argument of a step."""
    if target_ids.shape != lengths.shape or lengths.size == 0:
        raise InputError(f"target_ids is {target_ids.shape}, expected [{lengths.size}], one or more rows")
    longest, ids = max(lengths.tolist()) + steps, target_ids.tolist()  # faster than NumPy for the few rows of a batch
    if longest > spec.max_target_length:
        remedy = f"lower max_new_tokens, or {LONGER.format('target')}"
        raise InputError(f"target has {longest} tokens, the limit is {spec.max_target_length}; {remedy}")
    if min(ids) < 0 or max(ids) >= spec.vocab:
        raise _out_of_range("target_ids", target_ids, spec.vocab)
    if not 1 <= num_candidates <= spec.vocab:
        raise InputError(f"num_candidates is {num_candidates}, expected 1 … {spec.vocab}")


def _out_of_range(name: str, ids: ArrayLike, vocab: int) -> InputError:
    return InputError(f"{name} reach from {np.min(ids)} to {np.max(ids)}, expected 0 … {vocab - 1}")


# Cached because a batch keeps its size for many steps.
@functools.lru_cache(16)
def _owners(rows: int, width: int) -> bytes:
    return (np.arange(rows) // width).tobytes()
