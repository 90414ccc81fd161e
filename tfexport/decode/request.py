"""What is asked of a decode: every source and prefix checked, then laid out in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tfexport.decode.config import DecodeConfig
from tfexport.errors import InputError, raise_all
from tfexport.runtime.session import Ids, Mask, pad_right
from tfexport.spec import ModelSpec


@dataclass(frozen=True)
class Request:
    """One text to decode.

    Attributes:
        text: its place in the call.
        source_ids: the source, at least one token.
        prompt: start token, prefix and forced first token: what the decoder reads first.
    """

    text: int
    source_ids: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Requests with equally long prompts, as arrays.

    Attributes:
        texts: place of each request in the call, int64 [batch].
        source_ids: int64 [batch, source_len], padded on the right.
        source_mask: bool [batch, source_len], True = token.
        prompts: int64 [batch, prompt_len].
        num_forced: how many tokens at the end of a prompt count as generated.
        max_new_tokens: how many to generate at most, the forced ones included.
    """

    texts: Ids
    source_ids: Ids
    source_mask: Mask
    prompts: Ids
    num_forced: int
    max_new_tokens: int

    @classmethod
    def of(cls, requests: Sequence[Request], config: DecodeConfig, spec: ModelSpec) -> Batch:
        """Pad the sources of `requests` and stack their prompts."""
        source_ids, mask = pad_right([request.source_ids for request in requests], spec.tokens.pad)
        num_forced = int(config.forced_bos_token_id is not None)
        prompts = np.array([request.prompt for request in requests], np.int64)
        return cls(
            texts=np.array([request.text for request in requests], np.int64),
            source_ids=source_ids,
            source_mask=mask,
            prompts=prompts,
            num_forced=num_forced,
            max_new_tokens=config.max_new_tokens or _room(spec, prompts.shape[1] - 1 - num_forced),
        )

    def repeat(self, times: int) -> Batch:
        """Return the batch with every request `times` times, side by side."""
        return Batch(
            texts=self.texts.repeat(times),
            source_ids=self.source_ids.repeat(times, axis=0),
            source_mask=self.source_mask.repeat(times, axis=0),
            prompts=self.prompts.repeat(times, axis=0),
            num_forced=self.num_forced,
            max_new_tokens=self.max_new_tokens,
        )


def batches(requests: Sequence[Request], batch_size: int) -> Iterator[list[Request]]:
    """Group requests whose prompts are equally long, longest sources first, `batch_size` at most in a group."""
    ordered = sorted(requests, key=lambda request: (len(request.prompt), -len(request.source_ids)))
    for _, group in groupby(ordered, key=lambda request: len(request.prompt)):
        same = list(group)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def check_requests(
    spec: ModelSpec,
    sources: Sequence[Sequence[int]],
    config: DecodeConfig,
    prefixes: Sequence[Sequence[int]] | None,
    *,
    has_engines: bool = False,
) -> list[Request]:
    """Check everything that is asked and return one request a source.

    Args:
        spec: of the session.
        sources: token ids of each text.
        config: how to generate.
        prefixes: token ids that each text's hypotheses begin with; None for none.
        has_engines: the lengths may be limits of engines, which others can be built without.

    Raises:
        InputError: lists what is wrong with the settings for this model, and with each text.
    """
    if not spec.has_decoder:
        raise InputError("decode: this model is an encoder alone and cannot generate; use its hidden states")
    if prefixes is not None and len(prefixes) != len(sources):
        raise InputError(f"decode: {len(prefixes)} prefixes for {len(sources)} texts; give one each, empty for none")
    # What no text could do is said once, not for each text.
    no_room = _room_problems(spec, 0, config, has_engines=has_engines)
    problems, requests = [*_setting_problems(spec, config), *no_room], []
    forced = () if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    for text, source in enumerate(sources):
        prefix = () if prefixes is None else prefixes[text]
        found = _source_problems(spec, source, has_engines=has_engines) + _prefix_problems(spec, prefix, config)
        if not no_room:
            found += _room_problems(spec, len(prefix), config, has_engines=has_engines)
        problems += [f"text {text + 1}: {problem}" for problem in found]
        if not problems:
            prompt = (spec.tokens.start, *map(int, prefix), *forced)
            requests.append(Request(text, tuple(map(int, source)), prompt))
    raise_all(InputError, "decode", problems)
    return requests


def _room(spec: ModelSpec, prefix_len: int) -> int:
    """Return how many tokens may be generated; the last one is never fed back."""
    return spec.max_target_length - prefix_len


def _setting_problems(spec: ModelSpec, config: DecodeConfig) -> list[str]:
    problems = [
        f"{name} has {token}, expected below the vocabulary of {spec.vocab}"
        for name, tokens in (
            ("forced_bos_token_id", [config.forced_bos_token_id]),
            ("suppress_tokens", config.suppress_tokens),
        )
        for token in tokens
        if token is not None and token >= spec.vocab
    ]
    if config.forced_bos_token_id == spec.tokens.eos:
        problems.append(f"forced_bos_token_id {spec.tokens.eos} ends the text before it begins; force another token")
    if config.num_beams > 1 and 2 * config.num_beams > spec.vocab:
        problems.append(
            f"num_beams {config.num_beams} needs a vocabulary of {2 * config.num_beams}, it has {spec.vocab}; "
            f"lower num_beams to {spec.vocab // 2}"
        )
    return problems


def _source_problems(spec: ModelSpec, source: Sequence[int], *, has_engines: bool) -> list[str]:
    problems = _id_problems("source", source, spec.source_vocab)
    if len(source) == 0:
        problems.append("the source is empty, expected one token or more")
    if len(source) > spec.max_source_length:
        larger = _larger_engines("source", len(source)) if has_engines else ""
        problems.append(
            f"the source has {len(source)} tokens, the limit is {spec.max_source_length}; shorten it{larger}"
        )
    return problems


def _prefix_problems(spec: ModelSpec, prefix: Sequence[int], config: DecodeConfig) -> list[str]:
    problems = _id_problems("prefix", prefix, spec.vocab)
    forced = config.forced_bos_token_id is not None
    if forced and len(prefix):
        problems.append("a prefix and forced_bos_token_id exclude one another; put the token into the prefix")
    return problems


def _larger_engines(side: str, length: int) -> str:
    return f", or build engines for more: tfexport trt BUNDLE --max-{side}-length {length} --force"


def _room_problems(spec: ModelSpec, prefix_len: int, config: DecodeConfig, *, has_engines: bool) -> list[str]:
    room = _room(spec, prefix_len)
    least = max(1 + (config.forced_bos_token_id is not None), config.min_new_tokens)
    if room < least:
        given = f"a prefix of {prefix_len} and " if prefix_len else ""
        remedy = "shorten the prefix or lower min_new_tokens" if prefix_len else "lower min_new_tokens"
        larger = _larger_engines("target", prefix_len + least) if has_engines else ""
        return [f"{given}{least} new tokens are above the limit of {spec.max_target_length}; {remedy}{larger}"]
    if config.max_new_tokens is not None and config.max_new_tokens > room:
        left = f"but a prefix of {prefix_len} leaves {room} of the limit" if prefix_len else "above the limit of"
        got = f"max_new_tokens is {config.max_new_tokens}, {left} {spec.max_target_length}"
        larger = _larger_engines("target", prefix_len + config.max_new_tokens) if has_engines else ""
        return [f"{got}; lower max_new_tokens to {room}{larger}"]
    return []


def _id_problems(name: str, ids: Sequence[int], vocab: int) -> list[str]:
    # Nearly always all are good, which is seen much sooner of all at once than of one after the other.
    if len(ids) == 0 or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return []
    wrong = [token for token in ids if not _is_id(token, vocab)]
    return [f"{name} has {wrong[0]}, expected ids 0 to {vocab - 1}"] if wrong else []


def _is_id(token: object, vocab: int) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool) and bool(0 <= token < vocab)
