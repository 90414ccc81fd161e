"""Invalid sources, prefixes and options are refused together, before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.decode.scripted import ScriptedSession, drawn
from tfexport.decode.offline import decode
from tfexport.errors import ConfigError, InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Limit, Limits


@pytest.fixture
def session() -> ScriptedSession:
    return ScriptedSession(12, drawn(12, eos_bias=1))


def refusal(session: ScriptedSession, *args: object, **kwargs: object) -> str:
    with pytest.raises(InputError) as caught:
        decode(session, *args, **kwargs)  # type: ignore[arg-type]
    assert session.steps == [], "everything is checked before anything runs"
    return str(caught.value)


def test_every_bad_text_is_named(session: ScriptedSession) -> None:
    message = refusal(session, [[5], [], [5, 100], [-1], [1.5], [True], ["a"], [3] * 17], DecodeConfig())
    assert message == (
        "decode: text 2: the source is empty, expected one token or more; "
        "text 3: source has 100, expected ids 0 to 99; "
        "text 4: source has -1, expected ids 0 to 99; "
        "text 5: source has 1.5, expected ids 0 to 99; "
        "text 6: source has True, expected ids 0 to 99; "
        "text 7: source has 'a', expected ids 0 to 99; "
        "text 8: the source has 17 tokens, the limit is 16; shorten it, "
        "or export with a larger --max-source-length if the model allows it"
    )


def test_a_length_that_engines_limit_comes_with_the_command_for_larger_ones() -> None:
    session = limited(ScriptedSession(12, drawn(12)), 4)
    build = "or build engines for more: tfexport trt BUNDLE"
    assert refusal(session, [[3] * 18], DecodeConfig()) == (
        f"decode: the source has 18 tokens, the limit is 16; shorten it, {build} --max-source-length 18 --force"
    )
    too_many = refusal(session, [[3]], DecodeConfig(max_new_tokens=20))
    assert too_many.endswith(f"lower max_new_tokens to 16, {build} --max-target-length 20 --force")
    no_room = refusal(session, [[3]], DecodeConfig(min_new_tokens=3), prefixes=[[4] * 15])
    assert no_room.endswith(f"lower min_new_tokens, {build} --max-target-length 18 --force")


def test_errors_have_the_place_of_every_bad_text_once(session: ScriptedSession) -> None:
    message = refusal(session, [[]] * 1000, DecodeConfig())
    assert message.endswith("text 20: the source is empty, expected one token or more; and 980 more")
    sources = [[5] if index % 3 else [100] * 17 for index in range(100)]
    for given, options, prefixes, indices in (
        (sources, {}, None, range(0, 100, 3)),
        ([[5], [5]], {}, [[], [12]], (1,)),
        ([[5]], {"max_new_tokens": 17}, None, ()),
    ):
        with pytest.raises(InputError) as caught:
            decode(session, given, DecodeConfig(**options), prefixes=prefixes)
        assert caught.value.indices == tuple(indices)


def test_limits_count_the_prefix(session: ScriptedSession) -> None:
    config = DecodeConfig(max_new_tokens=14)
    message = refusal(session, [[5]] * 4, config, prefixes=[[], [3], [3, 4, 5], [3] * 16])
    longer = ", or export with a larger --max-target-length if the model allows it"
    assert message == (
        "decode: text 3: max_new_tokens is 14, but a prefix of 3 leaves 13 of the limit 16; "
        f"lower max_new_tokens to 13{longer}; text 4: a prefix of 16 and 1 new tokens are above the limit of 16; "
        f"shorten the prefix or lower min_new_tokens{longer}"
    )
    assert "prefix of 3 and 14 new tokens" in refusal(
        session, [[5]], DecodeConfig(min_new_tokens=14), prefixes=[[3, 4, 5]]
    )
    decode(session, [[5]], DecodeConfig(max_new_tokens=13, min_new_tokens=13), prefixes=[[3, 4, 5]])


def test_prefixes(session: ScriptedSession) -> None:
    assert "1 prefixes for 2 texts" in refusal(session, [[5], [6]], DecodeConfig(), prefixes=[[3]])
    assert "decode: prefix has 12, expected ids 0 to 11" in refusal(session, [[5]], DecodeConfig(), prefixes=[[12]])
    message = refusal(session, [[5], [6]], DecodeConfig(max_length=4), prefixes=[[3], [3, 4, 5]])
    assert message == "decode: text 2: max_length 4 leaves no token after a prefix of 3; raise max_length"


def test_options_that_do_not_fit_the_model(session: ScriptedSession) -> None:
    config = DecodeConfig(num_beams=7, suppress_tokens=(3, 12), bad_words_ids=((3, 13), (14,)), eos_token_id=15)
    message = refusal(session, [[5]], config)
    for name, token in (("suppress_tokens", 12), ("bad_words_ids", 13), ("bad_words_ids", 14), ("eos_token_id", 15)):
        assert f"{name} has {token}, expected below the vocabulary of 12" in message
    assert "num_beams is 7, which needs a vocabulary of 14, but it has 12; lower num_beams to 6" in message
    assert "batch_size is 0" in refusal(session, [[5]], DecodeConfig(), batch_size=0)


def test_order_progress_and_nothing_to_do(session: ScriptedSession) -> None:
    sources = [[3] * length for length in (2, 9, 4, 9, 1)]
    prefixes = [[3], [], [4, 5], [], [6]]
    done: list[int] = []
    found = decode(session, sources, DecodeConfig(), prefixes=prefixes, batch_size=2, on_progress=done.append)
    for text in range(5):
        alone = decode(session, [sources[text]], DecodeConfig(), prefixes=[prefixes[text]])
        assert found[text] == alone[0]
        assert list(found[text][0].token_ids[: len(prefixes[text])]) == prefixes[text]
    assert sum(done) == 5
    assert all(done), "reported when something is finished"
    assert decode(session, [], DecodeConfig()) == []


def test_texts_of_similar_length_are_decoded_together(session: ScriptedSession) -> None:
    decode(session, [[3] * length for length in (1, 9, 2, 8, 5)], DecodeConfig(), batch_size=2)
    assert session.encoded[0] == (2, 9)
    assert sorted(length for _, length in session.encoded[1:]) in ([1, 2, 5], [1, 5], [2, 5])


def test_a_batch_that_cannot_be_joined_has_equally_long_prompts() -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=1), can_join=False)
    sources, prefixes = [[3 + text] * 4 for text in range(9)], [[4] * (text % 3) for text in range(9)]
    together = decode(session, sources, DecodeConfig(), prefixes=prefixes, batch_size=2)
    assert sorted(shape[0] for shape in session.encoded) == [1, 1, 1, 2, 2, 2]
    free = ScriptedSession(12, drawn(12, eos_bias=1))
    assert together == decode(free, sources, DecodeConfig(), prefixes=prefixes, batch_size=2)
    assert len(free.steps) < len(session.steps), "free places are filled"


def test_numpy_ids_are_ids(session: ScriptedSession) -> None:
    found = decode(session, [np.array([5, 6])], DecodeConfig(), prefixes=[np.array([3], np.int32)])  # type: ignore[list-item]
    assert found == decode(session, [[5, 6]], DecodeConfig(), prefixes=[[3]])
    assert all(type(token) is int for token in found[0][0].token_ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_return_sequences": 3}, "num_return_sequences is 3 but num_beams is 1; set num_beams to 3 or do_sample"),
        ({"do_sample": True, "num_beams": 4}, "do_sample with num_beams 4; set num_beams to 1 or do_sample to false"),
        ({"temperature": 0.7}, "temperature is 0.7 but do_sample is false; set do_sample to true or leave temperature"),
        ({"top_k": 0}, "top_k is 0 but do_sample is false"),
        ({"top_p": 0.5}, "top_p is 0.5 but do_sample is false"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0 but num_beams is 1; set num_beams to 2 or more or leave"),
        ({"early_stopping": "never"}, "early_stopping is 'never' but num_beams is 1"),
        (
            {"min_new_tokens": 5, "max_new_tokens": 4},
            "min_new_tokens is 5 but max_new_tokens is 4; lower min_new_tokens",
        ),
        (
            {"forced_bos_token_id": 3, "suppress_tokens": [3]},
            "forced_bos_token_id 3 is in suppress_tokens; remove it there",
        ),
        (
            {"forced_eos_token_id": [2, 3], "suppress_tokens": [3]},
            "forced_eos_token_id 3 is in suppress_tokens; remove",
        ),
        ({"max_length": 9, "max_new_tokens": 8}, "max_length and max_new_tokens are both given; leave one of them out"),
        ({"min_length": 9, "min_new_tokens": 8}, "min_length and min_new_tokens are both given; leave one of them out"),
        ({"max_length": 1}, "max_length is 1, expected 2 or more"),
        ({"eos_token_id": []}, "eos_token_id is empty, expected an id or several; leave it out"),
        ({"bad_words_ids": [[3], []]}, "bad_words_ids has an empty word, expected one id or more in each; remove it"),
        ({"bad_words_ids": [3]}, "bad_words_ids is (3,), expected a list of a list of a whole number"),
        ({"num_beams": 65}, "num_beams is 65, expected 1 to 64"),
        ({"early_stopping": "always"}, "early_stopping is 'always', expected true or false or 'never'"),
        ({"temperature": 0.0, "do_sample": True}, "temperature is 0.0, expected 0.01 to 100"),
        ({"top_p": 0.0, "do_sample": True}, "top_p is 0.0, expected above 0 and up to 1"),
        ({"suppress_tokens": [3, -4]}, "suppress_tokens has -4, expected 0 or more"),
        *(({"prefix_bias_beta": beta}, "prefix_bias_beta is") for beta in (-0.1, 1.0, 1.5, float("nan"))),
        ({"return_alternatives": True, "do_sample": True}, "return_alternatives with do_sample; set one of them to"),
        ({"return_alternatives": True, "prefix_bias_beta": 0.5}, "return_alternatives with prefix_bias_beta; set one"),
    ],
)
def test_contradictions_and_ranges(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeConfig.from_dict(settings)
    assert message in str(caught.value)


def test_all_contradictions_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(num_return_sequences=3, top_k=5, early_stopping=True, max_new_tokens=0)
    assert str(caught.value).count(";") >= 4


def limited(session: ScriptedSession, rows: int) -> ScriptedSession:
    """Limit the rows of a session, as engines do."""
    build = "build engines for more: tfexport trt BUNDLE --max-"
    session.limits = Limits(
        rows=Limit(rows, build + "batch {number} --force"),
        source_length=Limit(16, build + "source-length {number} --force"),
        target_length=Limit(16, build + "target-length {number} --force"),
        candidates=Limit(12),
    )
    return session


@pytest.mark.parametrize(
    ("options", "most"), [({"num_beams": 4}, 8), ({"num_return_sequences": 4, "do_sample": True}, 9)]
)
def test_a_batch_never_has_more_rows_than_the_session_takes(options: dict[str, int], most: int) -> None:
    sources, config = [[3 + text] for text in range(7)], DecodeConfig(**options)  # type: ignore[arg-type]
    free = ScriptedSession(12, drawn(12, eos_bias=1))
    bound = limited(ScriptedSession(12, drawn(12, eos_bias=1)), 9)
    assert decode(bound, sources, config) == decode(free, sources, config)
    assert max(rows for rows, _ in bound.steps) == most < max(rows for rows, _ in free.steps)


def test_more_beams_than_rows_are_refused() -> None:
    narrow = limited(ScriptedSession(12, drawn(12)), 3)
    assert refusal(narrow, [[3]], DecodeConfig(num_beams=4)) == (
        "decode: num_beams is 4, but the session takes 3 rows at once; "
        "lower it, or build engines for more: tfexport trt BUNDLE --max-batch 4 --force"
    )
    assert len(decode(narrow, [[3]], DecodeConfig(do_sample=True, num_return_sequences=4))[0]) == 4
