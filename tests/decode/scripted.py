"""A session with scripted or random logits, so that results can be computed by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tfexport.contract import ModelSpec, TokenIds
from tfexport.precision import Accuracy
from tfexport.runtime.checked import CheckedBatch
from tfexport.runtime.session import Candidates, Floats, Ids, Limits, Prompts, close_up
from tfexport.runtime.sources import Sources

PAD, START, EOS = 0, 1, 2
Script = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]


@dataclass
class ScriptedSession:
    """Returns the logits `script(source, history)` [vocab]; the history begins with the start token."""

    vocab: int
    script: Script
    max_target_length: int = 16
    encoded: list[tuple[int, ...]] = field(default_factory=list)  # shape of each source batch
    steps: list[tuple[int, int]] = field(default_factory=list)  # number of rows and of candidates
    removed: list[list[int]] = field(default_factory=list)  # sources of each `remove`
    backend: str = "scripted"
    accuracy: Accuracy = "fp32"
    can_join: bool = True
    limits: Limits = field(init=False)

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
        self.limits = Limits.of(self.spec)

    def batch(self, width: int = 1) -> ScriptedBatch:
        return ScriptedBatch(self, width)

    def hidden_states(self, sources: Sources) -> Floats:
        raise AssertionError("decoding needs no hidden states")

    def close(self) -> None:
        pass


class ScriptedBatch(CheckedBatch):
    """Sources and histories, instead of caches."""

    def __init__(self, session: ScriptedSession, width: int) -> None:
        super().__init__(session.spec, width)
        self.session, self.can_join = session, session.can_join
        self.sources: list[tuple[int, ...]] = []
        self.histories: list[tuple[int, ...]] = []

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        if not self.can_join:
            assert not self.sources, "sources joined a batch that cannot be joined"
            assert len({len(prompt) for prompt in prompts}) == 1
        self.session.encoded.append(sources.mask.shape)
        self.sources += [tuple(ids[mask].tolist()) for ids, mask in zip(*sources.inputs.values(), strict=True)]
        self._measure([*self.histories, *(tuple(prompt[:-1]) for prompt in prompts for _ in range(self.width))])

    def _measure(self, histories: list[tuple[int, ...]]) -> None:
        self.histories, self.lengths = histories, np.array([len(history) for history in histories], np.int64)

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        self.session.steps.append((len(target_ids), num_candidates))
        self._measure([(*history, new) for history, new in zip(self.histories, target_ids.tolist(), strict=True)])
        pairs = [(self.sources[row // self.width], history) for row, history in enumerate(self.histories)]
        logits = np.stack([self.session.script(*pair) for pair in pairs])
        token_ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
        return Candidates(
            token_ids,
            np.take_along_axis(logits, token_ids, 1).astype(np.float32),
            np.array([np.log(np.exp(row).sum()) for row in logits], np.float32),
        )

    def _reorder(self, rows: Ids) -> None:
        self.histories = [self.histories[row] for row in rows]

    def _remove(self, sources: Ids) -> None:
        self.session.removed.append(sorted(sources.tolist()))
        kept = close_up(len(self.sources), sources)
        self._measure([self.histories[source * self.width + row] for source in kept for row in range(self.width)])
        self.sources = [self.sources[source] for source in kept]


def table(vocab: int, rows: dict[tuple[int, ...], dict[int, float]]) -> Script:
    """Give probabilities after each history without the start token; the other tokens share the rest."""

    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        given = rows[history[1:]]
        rest = (1 - sum(given.values())) / (vocab - len(given))
        return np.log(np.array([given.get(token, rest) for token in range(vocab)]))

    return script


def drawn(vocab: int, *, eos_bias: float = 0.0, seed: int = 0) -> Script:
    """Draw logits that depend only on source and history."""

    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(repr((seed, source, history)).encode()))
        logits = rng.normal(size=vocab) * 1.5
        logits[EOS] += eos_bias
        return logits

    return script
