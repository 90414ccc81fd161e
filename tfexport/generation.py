"""How text is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport.fields import Config


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Config, subject="decoding"):
    """How text is generated; names, meaning and defaults are those of Hugging Face `generate`.

    `max_new_tokens` None means as many as the model takes. Beams and samples
    exclude one another. With `do_sample`, `num_return_sequences` samples are
    drawn independently; `seed`, the place of the text in the call and the number
    of the sample determine each.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    num_return_sequences: int = 1
    forced_bos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    seed: int = 0

    def _problems(self) -> list[str]:
        return [*self._range_problems(), *self._contradictions()]

    def _range_problems(self) -> list[str]:
        lowest = {
            "max_new_tokens": 1,
            "min_new_tokens": 0,
            "no_repeat_ngram_size": 0,
            "top_k": 0,
            "forced_bos_token_id": 0,
            "seed": 0,
        }
        between = {
            "num_beams": (1, 64),
            "num_return_sequences": (1, 64),
            "length_penalty": (-10, 10),
            "repetition_penalty": (0.01, 100),
            "temperature": (0.01, 100),
        }
        problems = [
            f"{name} is {value}, expected {low} or more"
            for name, low in lowest.items()
            if (value := getattr(self, name)) is not None and value < low
        ]
        problems += [
            f"{name} is {value}, expected {low} to {high}"
            for name, (low, high) in between.items()
            if not low <= (value := getattr(self, name)) <= high
        ]
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}, expected above 0 and up to 1")
        problems += [f"suppress_tokens has {token}, expected 0 or more" for token in self.suppress_tokens if token < 0]
        return problems

    def _contradictions(self) -> list[str]:
        problems = [
            f"{name} is {getattr(self, name)} but do_sample is false; set do_sample to true or leave {name} out"
            for name in ("temperature", "top_k", "top_p")
            if not self.do_sample and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        problems += [
            f"{name} is {getattr(self, name)!r} but num_beams is 1; set num_beams to 2 or more or leave {name} out"
            for name in ("length_penalty", "early_stopping")
            if self.num_beams == 1 and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        if self.do_sample and self.num_beams > 1:
            problems.append(f"do_sample with num_beams {self.num_beams}; set num_beams to 1 or do_sample to false")
        elif not self.do_sample and self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams}; "
                f"set num_beams to {self.num_return_sequences} or do_sample to true"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problems.append(
                f"min_new_tokens is {self.min_new_tokens} but max_new_tokens is {self.max_new_tokens}; "
                "lower the one or raise the other"
            )
        if self.forced_bos_token_id is not None:
            if self.forced_bos_token_id in self.suppress_tokens:
                problems.append(f"forced_bos_token_id {self.forced_bos_token_id} is in suppress_tokens; take it out")
            if self.max_new_tokens == 1:
                problems.append("forced_bos_token_id takes the only new token; set max_new_tokens to 2 or more")
        return problems
