"""A session whose logits are written down or drawn from what was read, so that answers can be worked out by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.spec import ModelSpec, TokenIds

PAD, START, EOS = 0, 1, 2
Script = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


@dataclass
class ScriptedState:
    """Sources and histories, instead of caches."""

    batch: int
    rows: int
    past_len: int
    sources: list[tuple[int, ...]]
    histories: list[tuple[int, ...]]


@dataclass
class ScriptedSession:
    """Answers with `script(source, history)` [vocab], where the history begins with the start token.

    Attributes:
        encoded: shape of each source batch.
        steps: for each step the number of rows and of candidates asked for.
    """

    vocab: int
    script: Script
    max_target_length: int = 16
    encoded: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    backend: str = "scripted"
    max_rows: int | None = None
    accuracy: str = "fp32"
    max_candidates: int | None = None

    def __post_init__(self) -> None:
        self.spec = ModelSpec(
            d_model=1,
            source_vocab=100,
            max_source_length=16,
            tokens=TokenIds(pad=PAD, start=START, eos=EOS),
            precision="fp32",
            vocab=self.vocab,
            layers=1,
            heads=1,
            head_dim=1,
            value_dim=1,
            max_target_length=self.max_target_length,
        )

    def encode(self, source_ids: Ids, source_mask: Mask) -> ScriptedState:
        check_source(self.spec, source_ids, source_mask)
        self.encoded.append(source_ids.shape)
        sources = [tuple(ids[mask].tolist()) for ids, mask in zip(source_ids, source_mask, strict=True)]
        return ScriptedState(len(sources), len(sources), 0, sources, [()] * len(sources))

    def step(self, state: ScriptedState, target_ids: Ids, num_candidates: int) -> Candidates:
        check_target(self.spec, state, target_ids, num_candidates)
        self.steps.append((state.rows, num_candidates))
        state.past_len += target_ids.shape[1]
        state.histories = [(*history, *new) for history, new in zip(state.histories, target_ids.tolist(), strict=True)]
        beams = state.rows // state.batch
        logits = np.stack(
            [self.script(state.sources[row // beams], history) for row, history in enumerate(state.histories)]
        )
        token_ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
        return Candidates(
            token_ids,
            np.take_along_axis(logits, token_ids, 1).astype(np.float32),
            np.array([np.log(np.exp(row).sum()) for row in logits], np.float32),
        )

    def reorder(self, state: ScriptedState, rows: Ids) -> None:
        kept = check_rows(state, rows)
        state.sources = [state.sources[source] for source in kept]
        state.histories = [state.histories[row] for row in rows]
        state.batch, state.rows = kept.size, rows.size

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        raise AssertionError("decoding never asks for hidden states")

    def close(self) -> None:
        pass


def table(vocab: int, rows: dict[tuple[int, ...], dict[int, float]]) -> Script:
    """Write down probabilities after each history, without the start token; the rest of a row shares what is left."""

    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        given = rows[history[1:]]
        rest = (1 - sum(given.values())) / (vocab - len(given))
        return np.log(np.array([given.get(token, rest) for token in range(vocab)]))

    return script


def drawn(vocab: int, *, eos_bias: float = 0.0, seed: int = 0) -> Script:
    """Draw logits from source and history alone: the same whatever else is in the batch."""

    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(repr((seed, source, history)).encode()))
        logits = rng.normal(size=vocab) * 1.5
        logits[EOS] += eos_bias
        return logits

    return script
