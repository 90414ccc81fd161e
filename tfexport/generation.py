"""How text is generated, and what a model generates with unless told otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tfexport.errors import ConfigError
from tfexport.fields import Config

# What counts start token and prefix, and the same limit without them.
LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
_OF_SAMPLES = ("temperature", "top_k", "top_p")
_OF_BEAMS = ("length_penalty", "early_stopping")


class DecodeConfig(Config, subject="decoding"):
    """How text is generated; names, meaning and defaults are those of Hugging Face `generate`.

    `max_new_tokens` and `max_length` None mean as many as the model takes;
    `max_length` and `min_length` count start token and prefix too. Beams and
    samples exclude one another. With `do_sample`, `num_return_sequences` samples
    are drawn independently; `seed`, the place of the text in the call and the
    number of the sample determine each. With `return_alternatives`, the
    `num_return_sequences` best next tokens are each continued. With `prefix_bias_beta`
    above 0 a text is drawn towards its prefix and may leave it. `eos_token_id` and
    `decoder_start_token_id` None are the model's own. `max_time` counts seconds
    from when a text joins the batch. With `replace_unknowns` what the model has no
    token for is copied from the source, in texts; ids stay. `prompt_lookup_num_tokens`
    are drafted at most for one step, where a bundle was exported with speculation;
    None drafts none.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int = 0
    min_length: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    num_return_sequences: int = 1
    return_alternatives: bool = False
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prefix_bias_beta: float = 0.0
    eos_token_id: int | tuple[int, ...] | None = None
    decoder_start_token_id: int | None = None
    max_time: float | None = None
    stop_strings: str | tuple[str, ...] = ()
    replace_unknowns: bool = False
    prompt_lookup_num_tokens: int | None = None
    seed: int = 0

    def ends(self, eos: int) -> tuple[int, ...]:
        """Return the tokens that end a text of a model whose own is `eos`."""
        return _several(eos if self.eos_token_id is None else self.eos_token_id)

    @property
    def forced_ends(self) -> tuple[int, ...]:
        """What the last token at the limit must be one of; empty for anything."""
        return _several(self.forced_eos_token_id)

    @property
    def strings(self) -> tuple[str, ...]:
        """Any of which ends a text that says it."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings

    @property
    def bans_ends(self) -> bool:
        """Whether a text may be too short to end."""
        return self.min_new_tokens > 0 or self.min_length > 0

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Return all token ids that are given, by the option's name."""
        return {
            "forced_bos_token_id": _several(self.forced_bos_token_id),
            "forced_eos_token_id": self.forced_ends,
            "suppress_tokens": self.suppress_tokens,
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "eos_token_id": _several(self.eos_token_id),
            "decoder_start_token_id": _several(self.decoder_start_token_id),
        }

    def token_problems(self, vocab: int) -> list[str]:
        """Say which ids a model with so many tokens lacks."""
        return [
            f"{name} has {token}, expected below the vocabulary of {vocab}"
            for name, tokens in self.tokens.items()
            for token in tokens
            if token >= vocab
        ]

    def _problems(self) -> list[str]:
        return [*self._range_problems(), *self._contradictions()]

    def _range_problems(self) -> list[str]:
        lowest = {
            "max_new_tokens": 1,
            "max_length": 2,
            "min_new_tokens": 0,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "encoder_no_repeat_ngram_size": 0,
            "top_k": 0,
            "prompt_lookup_num_tokens": 1,
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
        if not 0 <= self.prefix_bias_beta < 1:
            problems.append(f"prefix_bias_beta is {self.prefix_bias_beta}, expected 0 or more and below 1")
        problems += [
            f"{name} has {token}, expected 0 or more"
            for name, tokens in self.tokens.items()
            for token in tokens
            if token < 0
        ]
        empty = [name for name in ("eos_token_id", "forced_eos_token_id") if getattr(self, name) == ()]
        problems += [f"{name} is empty, expected an id or several; leave it out" for name in empty]
        if self.max_time is not None and self.max_time <= 0:
            problems.append(f"max_time is {self.max_time}, expected above 0")
        if "" in self.strings:
            problems.append("stop_strings has an empty text, which every text says; take it out")
        if () in self.bad_words_ids:
            problems.append("bad_words_ids has an empty word, expected one id or more in each; take it out")
        return problems

    def _contradictions(self) -> list[str]:
        problems = [
            f"{name} is {getattr(self, name)} but do_sample is false; set do_sample to true or leave {name} out"
            for name in _OF_SAMPLES
            if not self.do_sample and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        problems += [
            f"{name} is {getattr(self, name)!r} but num_beams is 1; set num_beams to 2 or more or leave {name} out"
            for name in _OF_BEAMS
            if self.num_beams == 1 and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        if self.do_sample and self.num_beams > 1:
            problems.append(f"do_sample with num_beams {self.num_beams}; set num_beams to 1 or do_sample to false")
        if self.do_sample and self.return_alternatives:
            problems.append("return_alternatives with do_sample; set one of them to false")
        if self.prefix_bias_beta and self.return_alternatives:
            problems.append("return_alternatives with prefix_bias_beta; set the one to false or the other to 0")
        if not (self.do_sample or self.return_alternatives) and self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams}; "
                f"set num_beams to {self.num_return_sequences} or do_sample to true"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problems.append(
                f"min_new_tokens is {self.min_new_tokens} but max_new_tokens is {self.max_new_tokens}; "
                "lower the one or raise the other"
            )
        problems += [
            f"{name} {token} is in suppress_tokens; take it out"
            for name in ("forced_bos_token_id", "forced_eos_token_id")
            for token in self.tokens[name]
            if token in self.suppress_tokens
        ]
        problems += [
            f"{with_prompt} and {new_tokens} are both given; leave one of them out"
            for with_prompt, new_tokens in LENGTHS.items()
            if getattr(self, with_prompt) and getattr(self, new_tokens)
        ]
        return problems


class GenerationDefaults(DecodeConfig, subject="generation"):
    """What a model generates with unless told otherwise: the options that a model directory or a bundle brings.

    An option may be there that counts only beside another, such as
    `length_penalty` without beams: it waits for a caller who asks for beams.
    """

    def given(self) -> dict[str, Any]:
        """Return the options that change something, as JSON values."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def within(self, max_target_length: int) -> GenerationDefaults:
        """Return them for a model that takes no more target tokens than this."""
        limit = self.max_new_tokens and min(self.max_new_tokens, max_target_length)
        return dataclasses.replace(self, max_new_tokens=limit)

    def overridden(self, options: Mapping[str, Any]) -> DecodeConfig:
        """Return what is decoded with: what a caller gives goes before the defaults, as in transformers.

        A default that does not fit what is given has no effect there: one of sampling or of beams where there
        are none, a limit where another one is given.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
        """
        given = self._beside(options)
        try:
            return DecodeConfig.from_dict({**given, **options}, subject="decoding")
        except ConfigError as error:
            own = [name for name in given if name in str(error) and name not in options]
            told = f" ({', '.join(own)}: by the model's own defaults)" if own else ""
            raise ConfigError(f"{error}{told}") from error

    def _beside(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that have an effect beside what a caller gives."""
        given = self.given()
        for names in LENGTHS.items():
            if any(name in options for name in names):
                given = {name: value for name, value in given.items() if name not in names}
        asked = {**given, **options}
        # What is of another type is refused afterwards.
        idle = [] if asked.get("do_sample") is True else [*_OF_SAMPLES]
        idle += _OF_BEAMS if type(beams := asked.get("num_beams", 1)) is int and beams == 1 else []
        given = {name: value for name, value in given.items() if name not in idle}
        limit = asked.get("max_new_tokens")
        if isinstance(limit, int) and given.get("min_new_tokens", 0) > limit:
            given["min_new_tokens"] = limit  # no end before the limit, as they say
        return given

    def _problems(self) -> list[str]:
        if problems := self._range_problems():
            return problems
        try:
            DecodeConfig.from_dict(self._beside({}), subject="decoding")
        except ConfigError as error:
            return [str(error).removeprefix("decoding: ")]
        return []


def _several(tokens: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if tokens is None else tokens if isinstance(tokens, tuple) else (tokens,)
