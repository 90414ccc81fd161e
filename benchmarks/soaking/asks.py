"""What is asked in a soak, and what may come of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

# Options of generation that are mixed; those with `do_sample` get a seed.
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"max_new_tokens": 4},
    {"num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2},
    {"repetition_penalty": 1.3},
    {"return_alternatives": True, "num_return_sequences": 3},
    {"stop_strings": "-"},
)
# Who is answered, and who goes away, is too late, asks nonsense or asks for tokens alone.
WAYS = {"answer": 10, "stream": 4, "tokenise": 2, "leave": 2, "late": 1, "wrong": 2}
# What is no texts and may come of a way.
ENDS = {"leave": "left", "late": "late", "wrong": "refused"}

# Texts, or a word: one of `ENDS`, or how it failed.
Outcome = list[str] | str


@dataclass(frozen=True)
class Ask:
    """One thing that is asked.

    Attributes:
        way: one of `WAYS`.
        text: source.
        options: of generation.
        draw: 0 to 1, for what a way leaves open: when to leave, which nonsense.
    """

    way: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draw: float = 0.0

    @property
    def key(self) -> str:
        """The same for all that have to be answered alike."""
        return json.dumps([self.way == "tokenise", self.text, self.options], sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read JSON values."""
        return cls(**data)


def first_run(texts: Sequence[str]) -> list[Ask]:
    """Return everything that texts are compared with later."""
    asks = [Ask("answer", text, dict(kind)) for text in texts for kind in _seeded()]
    return [*asks, *(Ask("tokenise", text) for text in texts)]


def bursts(texts: Sequence[str], rng: random.Random, most: int) -> Iterator[list[Ask]]:
    """Draw what is asked at once, for ever.

    Args:
        texts: of the first run.
        rng: draws.
        most: asks of a burst.
    """
    kinds = _seeded()
    while True:
        ways = rng.choices(list(WAYS), list(WAYS.values()), k=rng.randint(1, most))
        yield [Ask(way, rng.choice(texts), _options(way, kinds, rng), rng.random()) for way in ways]


def is_expected(ask: Ask, outcome: Outcome, first: Mapping[str, Outcome]) -> bool:
    """Say whether this may come of what was asked: the texts of the first run, or the end of its way."""
    if isinstance(outcome, list) and ask.way != "wrong":
        return outcome == first[ask.key]
    return outcome == ENDS.get(ask.way)


def _seeded() -> list[dict[str, Any]]:
    return [{**kind, "seed": seed} if "do_sample" in kind else dict(kind) for kind in KINDS for seed in _seeds(kind)]


def _seeds(kind: Mapping[str, Any]) -> range:
    return range(3 if "do_sample" in kind else 1)


def _options(way: str, kinds: Sequence[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    # A stream hands out one greedy answer.
    return {} if way in ("stream", "tokenise", "wrong") else rng.choice(kinds)
