"""Stop strings and time limits, also in batches of requests with different options, and streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import EOS, ScriptedSession, drawn
from tfexport.decode.loop import Loop
from tfexport.decode.offline import decode, stream
from tfexport.decode.request import TextOf, check_requests
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import stop_end
from tfexport.errors import BackendError, InputError
from tfexport.generation import DecodeConfig

PIECES = ["", "", "", "a", "b", "ab", "ba", "bab", "é", " a", "-", "aa"]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in token_ids)


def plain_stop_end(token_ids: list[int], strings: list[str], text_of: TextOf) -> int | None:
    """Search every position that the last token may have changed."""
    before, after = text_of(token_ids[:-1]), text_of(token_ids)
    known = max(length for length in range(len(before) + 1) if after.startswith(before[:length]))
    ends = [end for end in range(len(after) + 1) for string in strings if after[:end].endswith(string) and end > known]
    return min(ends, default=None)


PARTS = [b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b" "]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=8),
    st.lists(st.text("ab\u00e9\ufffd ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_end_equals_a_search_of_every_position(ids: list[int], strings: list[str], strips: bool) -> None:
    """Also with parts of characters, and with spaces that are lost at the end of a text."""
    decoded = []

    def text_of(token_ids: Sequence[int]) -> str:
        decoded.append(list(token_ids))
        text = b"".join(PARTS[token] for token in token_ids).decode("utf-8", "replace")
        return text.strip() if strips else text

    found = stop_end(ids, strings, text_of)
    num_decoded, text = len(decoded), text_of(ids)
    assert num_decoded == 1 + any(string in text for string in strings), "decode twice only if there is a stop string"
    assert found == plain_stop_end(ids, strings, text_of)


CONFIGS = [
    DecodeConfig(stop_strings="ab"),
    DecodeConfig(stop_strings=("ba", "-")),
    DecodeConfig(max_time=1000.0),
    DecodeConfig(eos_token_id=(EOS, 9), forced_eos_token_id=9, max_length=7),
    DecodeConfig(bad_words_ids=((5,), (3, 4)), min_length=6, decoder_start_token_id=4),
    DecodeConfig(encoder_no_repeat_ngram_size=1),
    DecodeConfig(forced_bos_token_id=EOS),
    DecodeConfig(forced_bos_token_id=7, max_new_tokens=1),
    DecodeConfig(prefix_bias_beta=0.4),
    DecodeConfig(prefix_bias_beta=0.4, stop_strings="ab"),
    DecodeConfig(),
]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_requests_with_different_options_share_a_batch(num_beams: int) -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=-1))
    rng = np.random.default_rng(0)
    loop, alone = Loop(session, 6), {}
    for number in range(48):
        config = DecodeConfig(**{**CONFIGS[number % len(CONFIGS)].to_dict(), "num_beams": num_beams})
        source = rng.integers(3, 12, rng.integers(1, 9)).tolist()
        prefix = [] if number % 3 else [5, 4]
        alone[number] = decode(session, [source], config, prefixes=[prefix], text_of=text_of)[0]
        (request,) = check_requests(session, [source], config, [prefix], text_of)
        loop.submit([replace(request, text=number)])
    found = {}
    while loop.is_busy:
        for update in loop.step():
            assert isinstance(update.outcome, list)
            found[update.request.text] = update.outcome
    assert found == alone
    reasons = {one.finish_reason for hypotheses in found.values() for one in hypotheses}
    assert reasons == {"eos", "stop", "length"}


@pytest.mark.parametrize("config", [*CONFIGS, DecodeConfig(do_sample=True)], ids=repr)
def test_a_stream_yields_the_tokens_of_decode(config: DecodeConfig) -> None:
    session = ScriptedSession(12, drawn(12))
    for source, prefix in (([3, 4], []), ([7], [4, 6]), ([9, 9, 5], []), ([11, 3], [5])):
        ((expected,),) = decode(session, [source], config, prefixes=[prefix], text_of=text_of)
        assert tuple(stream(session, source, config, prefix=prefix, text_of=text_of)) == expected.token_ids


@pytest.mark.parametrize("num_beams", [1, 2])
def test_each_text_has_its_own_time_limit(num_beams: int) -> None:
    """The slow first text exceeds its time; the time of the next begins when it joins the batch."""

    def slow(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        if source == (9, 9):
            time.sleep(0.05)
        return drawn(12, eos_bias=-9)(source, history)

    session = ScriptedSession(12, slow)
    config = DecodeConfig(num_beams=num_beams, max_time=0.12)
    (first,), (second,) = decode(session, [[9, 9], [5]], config, batch_size=1)
    assert first.finish_reason == "time"
    assert 1 <= len(first.token_ids) <= 4
    assert (second.finish_reason, len(second.token_ids)) == ("length", 16)


def test_strings_need_a_tokenizer() -> None:
    with pytest.raises(InputError, match="stop_strings need a tokenizer, but this bundle has none; use eos_token_id"):
        decode(ScriptedSession(12, drawn(12)), [[3]], DecodeConfig(stop_strings="a"))


def test_a_stopped_text_is_scored_like_one_that_ends() -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=-9))
    ((found,),) = decode(session, [[3, 4]], DecodeConfig(stop_strings=tuple(filter(None, PIECES))), text_of=text_of)
    ((short,),) = decode(session, [[3, 4]], DecodeConfig(max_new_tokens=len(found.token_ids)))
    assert found == Hypothesis(short.token_ids, short.score, short.log_prob, "stop")


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"forced_bos_token_id": 7, "max_new_tokens": 1}, {"return_alternatives": True}],
)
def test_an_error_of_the_tokenizer_names_the_text(options: dict[str, Any]) -> None:
    def broken(token_ids: Sequence[int]) -> str:
        raise KeyError("no such token")

    session = ScriptedSession(12, drawn(12))
    config = DecodeConfig(stop_strings="a", **options)
    with pytest.raises(BackendError, match="decode: the tokens of text 1 cannot be decoded to find stop") as caught:
        decode(session, [[3], [4]], config, text_of=broken, batch_size=1)
    assert caught.value.indices == (0,)
    assert isinstance(caught.value.__cause__, KeyError)
