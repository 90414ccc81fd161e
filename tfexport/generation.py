"""Decoding options, and the default options of a model."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from tfexport.config import Config, Count, Ge, Gt, Help, Le, Lt, TokenId
from tfexport.errors import ConfigError, shortened

# Limits that include the start token and the prefix, and the limits that do not.
LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
Bias = tuple[tuple[TokenId, ...] | Annotated[float, Ge(-10_000), Le(10_000)], ...]  # token ids and a number
EndIds = TokenId | tuple[TokenId, ...] | None
Task = Literal["transcribe", "translate"]
# In the order in which they apply.
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAM_OPTIONS = ("length_penalty", "early_stopping")
# Types whose values are equal only if they mean the same.
_PLAIN = frozenset((int, float, bool, str, type(None)))


class DecodeConfig(Config, subject="decoding"):
    """Decoding options; those of transformers have its names and defaults.

    Beams and sampling exclude each other. With `do_sample`, `num_return_sequences` samples are drawn independently.
    Each sample depends only on `seed`, the position of the text in the call and the sample's number.
    `replace_unknowns` changes texts, not their ids.
    """

    max_new_tokens: Annotated[int | None, Ge(1), Help("Most tokens to generate; by default the model's limit.")] = None
    max_length: Annotated[int | None, Ge(2), Help("Like max-new-tokens, but includes start token and prefix.")] = None
    min_new_tokens: Annotated[Count, Help("Fewest tokens before the text may end.")] = 0
    min_length: Annotated[Count, Help("Like min-new-tokens, but includes start token and prefix.")] = 0
    num_beams: Annotated[int, Ge(1), Le(64), Help("Beams of beam search; 1 is greedy.")] = 1
    length_penalty: Annotated[float, Ge(-10), Le(10), Help("Exponent of beam lengths; above 0 favors long texts.")] = (
        1.0
    )
    early_stopping: Annotated[
        bool | Literal["never"],
        Help("End the search at num-beams texts (true), or if better ones are unlikely (false) or impossible (never)."),
    ] = False
    no_repeat_ngram_size: Annotated[Count, Help("Never repeat a sequence of this many tokens; 0 allows it.")] = 0
    encoder_no_repeat_ngram_size: Annotated[Count, Help("Never copy this many tokens in a row from the source.")] = 0
    repetition_penalty: Annotated[float, Ge(0.01), Le(100), Help("Divide the score of tokens in the text so far.")] = (
        1.0
    )
    sequence_bias: Annotated[tuple[Bias, ...], Help("Add to the score of 17 after 3: 3,17=-2; repeatable.")] = ()
    exponential_decay_length_penalty: Annotated[
        tuple[float, ...] | None, Ge(0), Help("Favor the end after 20 new tokens, by this factor for each: 20,1.1.")
    ] = None
    renormalize_logits: Annotated[bool, Help("Normalize the probabilities again after the filters.")] = False
    do_sample: Annotated[bool, Help("Draw tokens at random instead of taking the best.")] = False
    temperature: Annotated[float, Ge(0.01), Le(100), Help("Flatten (above 1) or sharpen the distribution.")] = 1.0
    top_k: Annotated[Count, Help("Draw from this many best tokens; 0 from all.")] = 50
    top_p: Annotated[float, Gt(0), Le(1), Help("Draw from the fewest best tokens with this total probability.")] = 1.0
    min_p: Annotated[float, Ge(0), Le(1), Help("Least probability of a token, as a share of the best one's.")] = 0.0
    typical_p: Annotated[float, Gt(0), Le(1), Help("Draw from the most typical tokens with this probability.")] = 1.0
    epsilon_cutoff: Annotated[float, Ge(0), Lt(1), Help("Least probability of a token.")] = 0.0
    eta_cutoff: Annotated[float, Ge(0), Lt(1), Help("Least probability of a token, less if many are likely.")] = 0.0
    num_return_sequences: Annotated[int, Ge(1), Le(64), Help("Texts to return for each input, best first.")] = 1
    return_scores: Annotated[bool, Help("Return scores; greedy search without them is faster.")] = True
    return_alternatives: Annotated[bool, Help("Continue each of the num-return-sequences best next tokens.")] = False
    forced_bos_token_id: Annotated[TokenId | None, Help("Id, or token such as fra_Latn, that texts begin with.")] = None
    forced_eos_token_id: Annotated[EndIds, Help("Id, or several, that a text at its limit ends with.")] = None
    suppress_tokens: Annotated[tuple[TokenId, ...], Help("Ids never to generate, such as 3,17.")] = ()
    begin_suppress_tokens: Annotated[tuple[TokenId, ...], Help("Ids never to generate first, such as 3,17.")] = ()
    bad_words_ids: Annotated[
        tuple[tuple[TokenId, ...], ...], Help("Ids never in a row, such as 3,17; repeatable.")
    ] = ()
    prefix_bias_beta: Annotated[float, Ge(0), Lt(1), Help("Bias texts towards --prefix, up to 1; 0 forces it.")] = 0.0
    eos_token_id: Annotated[EndIds, Help("Ids that end a text, such as 2,17; by default the model's own.")] = None
    decoder_start_token_id: Annotated[TokenId | None, Help("Id, or token, that the decoder reads first.")] = None
    language: Annotated[str | None, Help("Language of speech, such as de; by default it is detected.")] = None
    task: Annotated[Task | None, Help("Write speech in its language, or translate it into English.")] = None
    return_timestamps: Annotated[bool, Help("Generate the times of speech, in steps of 0.02 s.")] = False
    max_initial_timestamp_index: Annotated[Count | None, Help("Most steps before the first timestamp.")] = None
    max_time: Annotated[float | None, Gt(0), Help("Seconds per text, counted from when it joins the batch.")] = None
    stop_strings: Annotated[str | tuple[str, ...], Help("String that ends a text; repeatable.")] = ()
    replace_unknowns: Annotated[bool, Help("Replace unknown tokens by those of the source; needs --alignment.")] = False
    prompt_lookup_num_tokens: Annotated[int | None, Ge(1), Help("Most tokens to draft; needs --speculation.")] = None
    seed: Annotated[Count, Help("Seed of sampling; the same seed draws the same texts.")] = 0

    def ends(self, eos: int) -> tuple[int, ...]:
        """Return the tokens that end a text; `eos` is the model's own end token."""
        return _several(eos if self.eos_token_id is None else self.eos_token_id)

    @property
    def forced_ends(self) -> tuple[int, ...]:
        """Tokens of which one must come last at the length limit; empty for any token."""
        return _several(self.forced_eos_token_id)

    @property
    def strings(self) -> tuple[str, ...]:
        """Strings that end a text."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings

    @property
    def bans_ends(self) -> bool:
        """Whether a text has a minimum length."""
        return self.min_new_tokens > 0 or self.min_length > 0

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """All token ids of the options, by the option's name."""
        return {
            "forced_bos_token_id": _several(self.forced_bos_token_id),
            "forced_eos_token_id": self.forced_ends,
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "sequence_bias": tuple(token for ids, _ in self.sequence_bias for token in ids),  # type: ignore[union-attr]
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "eos_token_id": _several(self.eos_token_id),
            "decoder_start_token_id": _several(self.decoder_start_token_id),
        }

    def token_problems(self, vocab: int) -> list[str]:
        """List ids that are not below the vocabulary size `vocab`."""
        return [
            f"{name} has {token}, expected below the vocabulary of {vocab}"
            for name, tokens in self.tokens.items()
            for token in tokens
            if token >= vocab
        ]

    def _problems(self) -> Iterable[str]:
        for name in ("eos_token_id", "forced_eos_token_id"):
            if getattr(self, name) == ():
                yield f"{name} is empty, expected an id or several; leave it out"
        if "" in self.strings:
            yield "stop_strings has an empty text, which every text contains; remove it"
        if () in self.bad_words_ids:
            yield "bad_words_ids has an empty word, expected one id or more in each; remove it"
        decay = self.exponential_decay_length_penalty
        if decay is not None and (len(decay) != 2 or decay[0] % 1):
            yield f"exponential_decay_length_penalty is {shortened(decay)}, expected whole tokens and a factor"
        wrong = [one for one in self.sequence_bias if () in one or [isinstance(x, tuple) for x in one] != [True, False]]
        yield from (f"sequence_bias has {shortened(one)}, expected a list of ids and a number" for one in wrong)
        if not wrong:
            yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        for name in () if self.do_sample else SAMPLING_OPTIONS:
            if (value := getattr(self, name)) != getattr(DecodeConfig, name):
                yield f"{name} is {value} but do_sample is false; set do_sample to true or leave {name} out"
        for name in _BEAM_OPTIONS if self.num_beams == 1 else ():
            if (value := getattr(self, name)) != getattr(DecodeConfig, name):
                yield f"{name} is {value!r} but num_beams is 1; set num_beams to 2 or more or leave {name} out"
        if self.do_sample and self.num_beams > 1:
            yield f"do_sample with num_beams {self.num_beams}; set num_beams to 1 or do_sample to false"
        if self.do_sample and self.return_alternatives:
            yield "return_alternatives with do_sample; set one of them to false"
        if self.prefix_bias_beta and self.return_alternatives:
            yield "return_alternatives with prefix_bias_beta; set one of them to false or 0"
        if not (self.do_sample or self.return_alternatives) and self.num_return_sequences > self.num_beams > 0:
            problem = f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams}"
            yield f"{problem}; set num_beams to {self.num_return_sequences} or do_sample to true"
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problem = f"min_new_tokens is {self.min_new_tokens} but max_new_tokens is {self.max_new_tokens}"
            yield f"{problem}; lower min_new_tokens or raise max_new_tokens"
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            repeated = [token for token in _several(getattr(self, name)) if token in self.suppress_tokens]
            yield from (f"{name} {token} is in suppress_tokens; remove it there" for token in repeated)
        both = [names for names in LENGTHS.items() if all(getattr(self, name) for name in names)]
        yield from (f"{total} and {new} are both given; leave one of them out" for total, new in both)


class GenerationDefaults(DecodeConfig, subject="generation"):
    """Default decoding options of a model directory or a bundle.

    An option may depend on another that is not set: `length_penalty` takes effect if a caller asks for beams.
    """

    def given(self) -> dict[str, Any]:
        """Return the options that differ from the library's defaults, as JSON values."""
        return {name: value for name, value in vars(self).items() if value != getattr(DecodeConfig, name)}

    def within(self, max_target_length: int) -> Self:
        """Return the defaults for a model with this limit of target tokens."""
        limit = self.max_new_tokens and min(self.max_new_tokens, max_target_length)
        return dataclasses.replace(self, max_new_tokens=limit)

    def overridden(self, options: Mapping[str, Any]) -> DecodeConfig:
        """Combine the defaults with the options of a call, which take precedence.

        A default that does not fit the options is dropped: sampling or beam options without sampling or beams, or a
        limit if another one is given.
        """
        if _PLAIN.issuperset(map(type, options.values())):
            return _overridden(self, **options)
        return self._overridden(options)

    def _overridden(self, options: Mapping[str, Any]) -> DecodeConfig:
        defaults = self._effective(options)
        try:
            return DecodeConfig.from_dict({**defaults, **options}, subject="decoding")
        except ConfigError as error:
            causes = []
            for name in [name for name in defaults if name not in options]:
                others = {other: value for other, value in defaults.items() if other != name}
                if not set(error.problems) <= set(_decoding_problems({**others, **options})):
                    causes.append(name)
            remedy = f"the model's own defaults set {', '.join(causes)}" if causes else ""
            raise ConfigError(*error.problems, subject=error.subject, remedy=remedy) from error

    def _effective(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that have an effect together with the options of a call."""
        defaults = self.given()
        for names in LENGTHS.items():
            if any(name in options for name in names):
                defaults = {name: value for name, value in defaults.items() if name not in names}
        combined = {**defaults, **options}
        # Values of a wrong type are rejected later.
        idle = [] if combined.get("do_sample") is True else [*SAMPLING_OPTIONS]
        idle += _BEAM_OPTIONS if type(beams := combined.get("num_beams", 1)) is int and beams == 1 else []
        defaults = {name: value for name, value in defaults.items() if name not in idle}
        limit = combined.get("max_new_tokens")
        if isinstance(limit, int) and defaults.get("min_new_tokens", 0) > limit:
            defaults["min_new_tokens"] = limit  # cap the default minimum at the caller's limit
        return defaults

    def _problems(self) -> list[str]:
        return _decoding_problems(self._effective({}))


@functools.lru_cache(256, typed=True)  # of most calls, which take options that an earlier call had
def _overridden(defaults: GenerationDefaults, /, **options: Any) -> DecodeConfig:
    return defaults._overridden(options)


def _decoding_problems(options: Mapping[str, Any]) -> list[str]:
    try:
        DecodeConfig.from_dict(options, subject="decoding")
    except ConfigError as error:
        return list(error.problems)
    return []


def _several(tokens: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if tokens is None else tokens if isinstance(tokens, tuple) else (tokens,)
