"""What is asked of a decode: every source and prefix checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfexport.decode.stops import TextOf
from tfexport.errors import InputError, raise_all, shortened
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Limits, Session
from tfexport.spec import ModelSpec


@dataclass(frozen=True)
class Request:
    """One text to decode, or one sample of it.

    Attributes:
        text: its place in the call.
        source_ids: the source, at least one token.
        prompt: start token, prefix, forced first token, alternative: what the decoder reads first.
        config: how to generate.
        max_new_tokens: how many to generate at most, a forced one included.
        num_forced: how many tokens at the end of the prompt count as generated.
        log_prob: Σ log p of these.
        is_answered: whether these are all that the text is.
        text_of: decodes token ids, where stop strings are looked for.
        sample: number of the sample, where samples are drawn, or rank of the alternative.
        stream: whether each token is told as it comes; it has one row then.
        biased_prefix: start token and what the text is drawn towards, where `prefix_bias_beta` says so.
    """

    text: int
    source_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    config: DecodeConfig
    max_new_tokens: int
    num_forced: int = 0
    log_prob: float = 0.0
    is_answered: bool = False
    text_of: TextOf | None = None
    sample: int = 0
    stream: bool = False
    biased_prefix: tuple[int, ...] = ()


def check_requests(
    session: Session,
    sources: Sequence[Sequence[int]],
    config: DecodeConfig,
    prefixes: Sequence[Sequence[int]] | None = None,
    text_of: TextOf | None = None,
    num_fixed: int = 0,
) -> list[Request]:
    """Check everything that is asked and return one request a source.

    Args:
        session: that will decode.
        sources: token ids of each text.
        config: how to generate.
        prefixes: token ids that each text's hypotheses begin with, or are biased towards; None for none.
        text_of: decodes token ids, for stop strings.
        num_fixed: tokens that hypotheses begin with even where they are biased towards the rest of their prefix.

    Raises:
        InputError: lists what is wrong with the settings for this session, and with each text; `indices` has the
            places of these.
    """
    spec, limits = session.spec, session.limits
    if not spec.has_decoder:
        raise InputError("decode: this model is an encoder alone and cannot generate; use its hidden states")
    if prefixes is not None and len(prefixes) != len(sources):
        raise InputError(f"decode: {len(prefixes)} prefixes for {len(sources)} texts; give one each, empty for none")
    if config.strings and text_of is None:
        raise InputError("decode: stop_strings need a tokenizer, and there is none; use eos_token_id")
    # What no text could do is said once, not for each text.
    no_room = _room_problems(spec, limits, 0, config)
    problems, indices, requests = [*_setting_problems(spec, limits, config), *no_room], [], []
    for text, source in enumerate(sources):
        prefix = () if prefixes is None else prefixes[text]
        found = _list_problems(source=source, prefix=prefix)
        is_list = not found
        if is_list:
            found = _source_problems(spec, limits, source) + _id_problems("prefix", prefix, spec.vocab)
        if is_list and not no_room:
            found += _room_problems(spec, limits, len(_begun(prefix, config, num_fixed)), config)
        problems += [f"text {text + 1}: {problem}" for problem in found]
        indices += [text] * len(found)
        if not problems:
            request = _request(spec, text, tuple(map(int, source)), tuple(map(int, prefix)), config, num_fixed)
            requests.append(dataclasses.replace(request, text_of=text_of) if config.strings else request)
    raise_all(InputError, "decode", problems, indices=indices)
    return requests


def check_pairs(
    session: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    prefixes: Sequence[Sequence[int]] | None,
    start: int | None,
    *,
    add_eos: bool,
    subject: str,
) -> None:
    """Check everything that is asked of `score` or `align`, whose arguments these are.

    Args:
        session: that will read them.
        sources: token ids of each source.
        targets: token ids of each target.
        prefixes: token ids that each target comes behind; None for none.
        start: id that the decoder reads first; None for the model's own.
        add_eos: whether each target is ended where it does not end yet.
        subject: named at the start of the error.

    Raises:
        InputError: lists what is wrong with each pair; `indices` has their places.
    """
    spec, limits = session.spec, session.limits
    if not spec.has_decoder:
        raise InputError(f"{subject}: this model is an encoder alone and reads no target; use its hidden states")
    for name, given in (("targets", targets), ("prefixes", prefixes)):
        if given is not None and len(given) != len(sources):
            raise InputError(f"{subject}: {len(given)} {name} for {len(sources)} sources; give one each")
    problems, indices = [] if start is None else _id_problems("start", [start], spec.vocab), []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        prefix = () if prefixes is None else prefixes[number]
        found = _source_problems(spec, limits, source) + _id_problems("prefix", prefix, spec.vocab)
        found += _target_problems(spec, limits, len(prefix), target, add_eos=add_eos)
        problems += [f"pair {number + 1}: {problem}" for problem in found]
        indices += [number] * len(found)
    raise_all(InputError, subject, problems, indices=indices)


def _request(
    spec: ModelSpec,
    text: int,
    source_ids: tuple[int, ...],
    prefix: tuple[int, ...],
    config: DecodeConfig,
    num_fixed: int,
) -> Request:
    start = spec.tokens.start if config.decoder_start_token_id is None else config.decoder_start_token_id
    begun = _begun(prefix, config, num_fixed)
    limit, first = _limit(spec, len(begun), config), config.forced_bos_token_id
    # As in transformers: behind a prefix nothing is forced, and the only token is forced to be the last.
    is_free = prefix or (limit == 1 and config.forced_ends)
    forced = () if is_free or first is None else (first,)
    return Request(
        text=text,
        source_ids=source_ids,
        prompt=(start, *begun, *forced),
        config=config,
        max_new_tokens=limit,
        num_forced=len(forced),
        is_answered=bool(forced) and (limit == 1 or first in config.ends(spec.tokens.eos)),
        biased_prefix=(start, *prefix) if config.prefix_bias_beta else (),
    )


def _begun(prefix: Sequence[int], config: DecodeConfig, num_fixed: int) -> Sequence[int]:
    """Return what of a prefix a text has to begin with."""
    return prefix[:num_fixed] if config.prefix_bias_beta else prefix


def _room(spec: ModelSpec, prefix_len: int) -> int:
    """Return how many tokens may be generated; the last one is never fed back."""
    return spec.max_target_length - prefix_len


def _limit(spec: ModelSpec, prefix_len: int, config: DecodeConfig) -> int:
    """Return how many tokens are generated at most."""
    room = _room(spec, prefix_len)
    if config.max_length is not None:
        return min(config.max_length - 1 - prefix_len, room)
    return config.max_new_tokens or room


def _setting_problems(spec: ModelSpec, limits: Limits, config: DecodeConfig) -> list[str]:
    problems = config.token_problems(spec.vocab)
    # Where every beam ends in each way there is, as many others go on.
    each = 1 + len(set(config.ends(spec.tokens.eos)))
    if config.num_beams > 1 and each * config.num_beams > spec.vocab:
        problems.append(
            f"num_beams {config.num_beams} needs a vocabulary of {each * config.num_beams}, it has {spec.vocab}; "
            f"lower num_beams to {spec.vocab // each}"
        )
    if limits.rows.is_below(config.num_beams):
        problems.append(
            f"num_beams is {config.num_beams}, but the session takes {limits.rows.most} rows at once; "
            f"lower it{limits.rows.for_more(config.num_beams)}"
        )
    return problems


def _source_problems(spec: ModelSpec, limits: Limits, source: Sequence[int]) -> list[str]:
    problems = _id_problems("source", source, spec.source_vocab)
    if len(source) == 0:
        problems.append("the source is empty, expected one token or more")
    if len(source) > spec.max_source_length:
        more = limits.source_length.for_more(len(source))
        problems.append(f"the source has {len(source)} tokens, the limit is {spec.max_source_length}; shorten it{more}")
    return problems


def _target_problems(
    spec: ModelSpec, limits: Limits, prefix_len: int, target: Sequence[int], *, add_eos: bool
) -> list[str]:
    problems = _id_problems("target", target, spec.vocab)
    is_ended = add_eos and (len(target) == 0 or target[-1] != spec.tokens.eos)
    length = len(target) + is_ended
    if not length:
        problems.append("the target is empty, expected one token or more")
    room = _room(spec, prefix_len)
    if length > room:
        got = f"{length} tokens" + f" behind a prefix of {prefix_len}" * bool(prefix_len) + " with its end" * is_ended
        more = limits.target_length.for_more(prefix_len + length)
        problems.append(f"the target has {got}, the limit is {room}; shorten it{more}")
    return problems


def _room_problems(spec: ModelSpec, limits: Limits, prefix_len: int, config: DecodeConfig) -> list[str]:
    room = _room(spec, prefix_len)
    least = max(1, config.min_new_tokens)
    if room < least:
        given = f"a prefix of {prefix_len} and " if prefix_len else ""
        remedy = "shorten the prefix or lower min_new_tokens" if prefix_len else "lower min_new_tokens"
        larger = limits.target_length.for_more(prefix_len + least)
        return [f"{given}{least} new tokens are above the limit of {spec.max_target_length}; {remedy}{larger}"]
    if config.max_length is not None and config.max_length < prefix_len + 2:
        return [f"max_length {config.max_length} leaves no token behind a prefix of {prefix_len}; raise max_length"]
    if config.max_new_tokens is not None and config.max_new_tokens > room:
        left = f"but a prefix of {prefix_len} leaves {room} of the limit" if prefix_len else "above the limit of"
        got = f"max_new_tokens is {config.max_new_tokens}, {left} {spec.max_target_length}"
        larger = limits.target_length.for_more(prefix_len + config.max_new_tokens)
        return [f"{got}; lower max_new_tokens to {room}{larger}"]
    return []


def _list_problems(**lists: object) -> list[str]:
    """Say what is no list of anything; whether it is one of token ids is asked next."""
    return [
        f"{name} is {shortened(value)}, expected a list of token ids"
        for name, value in lists.items()
        if isinstance(value, str | bytes | bytearray)
        or not (isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1))
    ]


def _id_problems(name: str, ids: Sequence[int], vocab: int) -> list[str]:
    # Nearly always all are good, which is seen much sooner of all at once than of one after the other.
    if len(ids) == 0 or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return []
    wrong = [token for token in ids if not _is_id(token, vocab)]
    return [f"{name} has {wrong[0]}, expected ids 0 to {vocab - 1}"] if wrong else []


def _is_id(token: object, vocab: int) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool) and bool(0 <= token < vocab)
