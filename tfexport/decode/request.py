"""Check sources, prefixes and options, and turn them into requests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby
from typing import Any

from tfexport._arguments import ID_LISTS, as_list, listed, listed_ids
from tfexport.contract import ModelSpec, SpeechTokens
from tfexport.errors import InputError, nth, raise_all, shortened
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Limits, Session
from tfexport.runtime.sources import Source, id_problems, is_id, listed_sources, read_sources


class Status(Enum):
    """State of a request in a loop."""

    WAITING = auto()
    RUNNING = auto()
    DONE = auto()
    CANCELLED = auto()


TextOf = Callable[[Sequence[int]], str]


@dataclass(eq=False)
class Request:
    """One text to decode, or one sample of it. A loop changes only `status`."""

    text: int  # place of the text in the call
    source: Source  # as `read_source` returns it
    source_length: int  # positions that the encoder returns
    prompt: tuple[int, ...]  # read first: start token, tokens of speech, prefix, forced first token, alternative
    config: DecodeConfig
    max_new_tokens: int  # including forced tokens
    num_forced: int = 0  # tokens at the end of the prompt that count as generated
    log_prob: float = 0.0  # Σ log p of the forced tokens
    is_answered: bool = False  # whether the text consists of the forced tokens
    text_of: TextOf | None = None  # decodes token ids, for stop strings
    sample: int = 0  # number of the sample, or rank of the alternative
    stream: bool = False  # report each token immediately; such a request has one row
    biased_prefix: tuple[int, ...] = ()  # start token and prefix, with `prefix_bias_beta`
    num_texts: int = 1  # in the call
    place: int | None = None  # for the seed of a sample; None for `text`
    lacks_language: bool = False  # whether a language has to be detected and inserted after the start token
    id: int = field(init=False, default_factory=itertools.count().__next__)  # `dataclasses.replace` gives a new one
    status: Status = field(init=False, default=Status.WAITING)

    @property
    def name(self) -> str:
        """Name of the text in errors."""
        return nth("text", self.text, self.num_texts)


@dataclass(frozen=True)
class Pair:
    """A source and its target."""

    number: int  # place of the pair in the call
    num_pairs: int
    source: Source
    source_length: int
    prompt: tuple[int, ...]  # start token and prefix, which the decoder reads first
    target_ids: tuple[int, ...]  # the tokens after the prompt, at least one

    @property
    def name(self) -> str:
        """Name of the pair in errors."""
        return nth("pair", self.number, self.num_pairs)


def check_requests(
    session: Session,
    sources: Iterable[Source],
    config: DecodeConfig,
    prefixes: Iterable[Iterable[int]] | None = None,
    text_of: TextOf | None = None,
    num_fixed: int = 0,
) -> list[Request]:
    """Check the arguments of `decode`, all at once, and return one request per source."""
    spec, limits = session.spec, session.limits
    if not spec.has_decoder:
        raise InputError("decode: this model has no decoder and cannot generate; use embed or classify")
    sources = listed_sources(spec.source, "decode", sources)
    if prefixes is not None:
        prefixes = listed("decode", "prefixes", prefixes, ID_LISTS)
        if len(prefixes) != len(sources):
            each = "give one each, [] for none"
            raise InputError(f"decode: got {len(prefixes)} prefixes for {len(sources)} texts; {each}")
    if config.strings and text_of is None:
        raise InputError("decode: stop_strings need a tokenizer, but this bundle has none; use eos_token_id")
    num_read = num_fixed if config.prefix_bias_beta else None  # the others are only biased towards
    options = _checked_options(spec, limits, config)
    problems, indices, requests = [*options.problems, *options.no_room], [], []
    used = text_of if config.strings else None
    for text, (source, length, of_source) in enumerate(_read(spec, limits, sources)):
        found, begin = [*of_source], options.begin
        if prefixes is not None:
            (prefix,), wrong = _lists(prefix=prefixes[text])
            found += wrong or _prefix_problems(spec, limits, config, options, prefix, num_read)
            if prefix and not found:
                begin = _begin(spec, config, prefix, num_read)
        if found:
            problems += _named("text", text, len(sources), found)
            indices += [text] * len(found)
        if not problems:
            requests.append(Request(text, source, length, config=config, text_of=used, num_texts=len(sources), **begin))
    raise_all(InputError, "decode", problems, indices=indices)
    return requests


@dataclass(frozen=True)
class _Options:
    """What the options of a call mean for every text."""

    problems: list[str]  # reported once
    no_room: list[str]  # for a text without a prefix
    num_speech: int
    begin: dict[str, Any]  # fields of a request without a prefix


@functools.lru_cache(64)
def _checked_options(spec: ModelSpec, limits: Limits, config: DecodeConfig) -> _Options:
    num_speech = num_speech_tokens(spec, config)
    no_room = _room_problems(spec, limits, num_speech, config)
    return _Options(_option_problems(spec, limits, config), no_room, num_speech, _begin(spec, config, [], None))


def _prefix_problems(
    spec: ModelSpec,
    limits: Limits,
    config: DecodeConfig,
    options: _Options,
    prefix: Sequence[int],
    num_read: int | None,
) -> list[str]:
    problems = id_problems("prefix", prefix, spec.vocab)
    if prefix and not options.no_room:
        problems += _room_problems(spec, limits, options.num_speech + len(prefix[:num_read]), config)
    return problems


def num_speech_tokens(spec: ModelSpec, config: DecodeConfig) -> int:
    """Return the number of tokens between the start token and the prefix."""
    return len(_speech_tokens(spec, config))


def _speech_tokens(spec: ModelSpec, config: DecodeConfig) -> list[int | None]:
    """Return language, None if it is to be detected, task and `no_timestamps`."""
    speech, found = spec.speech, list[int | None]()
    if speech is None:
        return found
    if speech.languages:
        found.append(dict(zip(speech.languages, speech.language_ids, strict=True)).get(config.language or ""))
    task = config.task or (config.language and "transcribe")
    if task:
        found.append(getattr(speech, task))
    if not config.return_timestamps and speech.no_timestamps is not None:
        found.append(speech.no_timestamps)
    return found


def _speech_problems(spec: ModelSpec, config: DecodeConfig) -> Iterator[str]:
    speech = spec.speech or SpeechTokens()
    if config.language is not None and config.language not in speech.languages:
        languages = ", ".join(speech.languages)
        expected = f"expected one of {languages}" if languages else "but the model has no languages; leave it out"
        yield f"language is {shortened(config.language)}, {expected}"
    if config.task is not None and getattr(speech, config.task) is None:
        yield f"task is {config.task}, but the model does not have this task; leave it out"
    if config.return_timestamps and speech.no_timestamps is None:
        yield "return_timestamps is true, but the model has no timestamps; set it to false"


def check_sources(spec: ModelSpec, limits: Limits, subject: str, sources: Iterable[Source]) -> list[Source]:
    """Check sources without a target, as `check_requests`."""
    problems, indices, found = list[str](), list[int](), list[Source]()
    values = listed_sources(spec.source, subject, sources)
    for index, (source, _, wrong) in enumerate(_read(spec, limits, values)):
        problems += _named("text", index, len(values), wrong)
        indices += [index] * len(wrong)
        found.append(source)
    raise_all(InputError, subject, problems, indices=indices)
    return found


def check_pairs(
    session: Session,
    sources: Iterable[Source],
    targets: Iterable[Iterable[int]],
    prefixes: Iterable[Iterable[int]] | None,
    start: int | None,
    *,
    add_eos: bool,
    subject: str,
) -> list[Pair]:
    """Check the arguments of `score` or `align`, all at once, and return their pairs."""
    spec, limits = session.spec, session.limits
    if not spec.has_decoder:
        raise InputError(f"{subject}: this model has no decoder and cannot read targets; use embed or classify")
    lists = {
        "sources": listed_sources(spec.source, subject, sources),
        "targets": listed_ids(subject, "targets", targets),
    }
    count = len(lists["sources"])
    lists["prefixes"] = [()] * count if prefixes is None else listed_ids(subject, "prefixes", prefixes)
    for name, side in lists.items():
        if len(side) != count:
            raise InputError(f"{subject}: got {len(side)} {name} for {count} sources; give one each")
    problems, indices = [] if start is None else id_problems("start", [start], spec.vocab), []
    first, eos, pairs = spec.tokens.start if start is None else start, spec.tokens.eos, list[Pair]()
    read = _read(spec, limits, lists.pop("sources"))
    for number, ((source, length, of_source), *values) in enumerate(zip(read, *lists.values(), strict=True)):
        (target, prefix), wrong = _lists(target=values[0], prefix=values[1])
        found = [*of_source, *wrong]
        if not wrong:
            found += id_problems("prefix", prefix, spec.vocab)
            found += _target_problems(spec, limits, len(prefix), target, add_eos=add_eos)
        if not problems and not found:
            ended = [*target, eos] if add_eos and target[-1:] != [eos] else target
            ids = (tuple(map(int, part)) for part in ([first, *prefix], ended))
            pairs.append(Pair(number, count, source, length, *ids))
        problems += _named("pair", number, count, found)
        indices += [number] * len(found)
    raise_all(InputError, subject, problems, indices=indices)
    return pairs


def batches(pairs: Sequence[Pair], size: int, *, can_join: bool) -> Iterator[Sequence[Pair]]:
    """Divide pairs into batches of similar length, the longest first."""
    by_length = sorted(pairs, key=lambda pair: (-len(pair.prompt), -len(pair.target_ids), -pair.source_length))
    groups = [by_length]
    if not can_join:  # such batches need equally long prompts
        groups = [list(group) for _, group in groupby(by_length, lambda pair: len(pair.prompt))]
    for group in groups:
        yield from (group[first : first + size] for first in range(0, len(group), size))


def _named(what: str, index: int, count: int, problems: list[str]) -> list[str]:
    return problems if count == 1 else [f"{nth(what, index, count)}: {problem}" for problem in problems]


def _begin(spec: ModelSpec, config: DecodeConfig, prefix: list[int], num_read: int | None) -> dict[str, Any]:
    """Return the fields of a request that depend on its prefix."""
    start = spec.tokens.start if config.decoder_start_token_id is None else config.decoder_start_token_id
    speech, first = _speech_tokens(spec, config), config.forced_bos_token_id
    known = [token for token in speech if token is not None]
    read, prefix = [*known, *prefix[:num_read]], [*known, *prefix]
    num_before = len(read) + len(speech) - len(known)
    limit = config.max_new_tokens or _room(spec, num_before)
    if config.max_length is not None:
        limit = min(config.max_length - 1 - num_before, limit)
    # As in transformers: nothing is forced after a prefix, and the only token is forced to be the last.
    is_free = speech or prefix or (limit == 1 and config.forced_ends)
    forced = () if is_free or first is None else (first,)
    return {
        "prompt": tuple(map(int, (start, *read, *forced))),
        "max_new_tokens": limit,
        "num_forced": len(forced),
        "is_answered": bool(forced) and (limit == 1 or first in config.ends(spec.tokens.eos)),
        "biased_prefix": tuple(map(int, (start, *prefix))) if config.prefix_bias_beta else (),
        "lacks_language": None in speech,
    }


def _room(spec: ModelSpec, prefix_len: int) -> int:
    return spec.max_target_length - prefix_len  # the decoder reads a start token, but not the last token


def _option_problems(spec: ModelSpec, limits: Limits, config: DecodeConfig) -> list[str]:
    problems = [*config.token_problems(spec.vocab), *_speech_problems(spec, config)]
    if not spec.source_vocab and config.encoder_no_repeat_ngram_size:
        problems.append("encoder_no_repeat_ngram_size needs a source of token ids, which this model does not read")
    # `num_beams` beams continue even if every beam ends with each of the end tokens.
    each = 1 + len(set(config.ends(spec.tokens.eos)))
    if config.num_beams > 1 and each * config.num_beams > spec.vocab:
        problems.append(
            f"num_beams is {config.num_beams}, which needs a vocabulary of {each * config.num_beams}, but it has "
            f"{spec.vocab}; lower num_beams to {spec.vocab // each}"
        )
    if limits.end_ids is not None and (others := sorted({*config.ends(spec.tokens.eos)} - limits.end_ids)):
        allowed = "use a token that the shortlist of every text has, or export the bundle without --shortlist"
        problems.append(f"eos_token_id is {others[0]}, which shortlists exclude; {allowed}")
    if limits.rows.is_below(config.num_beams):
        problems.append(
            f"num_beams is {config.num_beams}, but the session takes {limits.rows.most} rows at once; "
            f"lower it{limits.rows.for_more(config.num_beams)}"
        )
    return problems


def _read(spec: ModelSpec, limits: Limits, values: Sequence[object]) -> list[tuple[Source, int, list[str]]]:
    """Return each source with its length and its problems."""
    read = read_sources(spec.source, values)
    for _, length, problems in read:
        if length > spec.max_source_length:
            more, got = limits.source_length.for_more(length), f"{length} {spec.source.unit}"
            problems.append(f"the source has {got}, the limit is {spec.max_source_length}; shorten it{more}")
    return read


def _target_problems(
    spec: ModelSpec, limits: Limits, prefix_len: int, target: Sequence[int], *, add_eos: bool
) -> list[str]:
    problems = id_problems("target", target, spec.vocab)
    ends = bool(target) and is_id(target[-1], spec.vocab) and target[-1] == spec.tokens.eos
    is_ended = add_eos and not ends
    length = len(target) + is_ended
    if not length:
        problems.append("the target is empty, expected one token or more")
    room = _room(spec, prefix_len)
    if length > room:
        after = f" after a prefix of {prefix_len}" if prefix_len else ""
        got = f"{length} tokens{after}{' including the end token' if is_ended else ''}"
        more = limits.target_length.for_more(prefix_len + length)
        problems.append(f"the target has {got}, the limit is {room}; shorten it{more}")
    return problems


def _room_problems(spec: ModelSpec, limits: Limits, prefix_len: int, config: DecodeConfig) -> list[str]:
    room = _room(spec, prefix_len)
    least = max(1, config.min_new_tokens)
    if room < least:
        before = f"a prefix of {prefix_len} and " if prefix_len else ""
        remedy = "shorten the prefix or lower min_new_tokens" if prefix_len else "lower min_new_tokens"
        larger = limits.target_length.for_more(prefix_len + least)
        return [f"{before}{least} new tokens are above the limit of {spec.max_target_length}; {remedy}{larger}"]
    if config.max_length is not None and config.max_length < prefix_len + 2:
        return [f"max_length {config.max_length} leaves no token after a prefix of {prefix_len}; raise max_length"]
    if config.max_new_tokens is not None and config.max_new_tokens > room:
        left = f"but a prefix of {prefix_len} leaves {room} of the limit" if prefix_len else "above the limit of"
        got = f"max_new_tokens is {config.max_new_tokens}, {left} {spec.max_target_length}"
        larger = limits.target_length.for_more(prefix_len + config.max_new_tokens)
        return [f"{got}; lower max_new_tokens to {room}{larger}"]
    return []


def _lists(**values: object) -> tuple[list[list[Any]], list[str]]:
    """Convert values to lists; also return the problems of those that are no lists."""
    found = {name: as_list(value) for name, value in values.items()}
    wrong = [name for name, ids in found.items() if ids is None]
    problems = [f"{name} is {shortened(values[name])}, expected a list of token ids" for name in wrong]
    return [ids or [] for ids in found.values()], problems
