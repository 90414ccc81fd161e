"""What is looked up in a source and a text: always tokens that stand there, and a copy goes on where it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfexport.decode.speculation import GOES_ON, IN_SOURCE, SIZES, PromptLookup

TOKENS = st.lists(st.integers(0, 6), max_size=30)


def drafts(source: list[int], text: list[int], count: int) -> list[tuple[int, list[int]]]:
    """Return every draft behind a text, with the number of equal tokens."""
    lookup = PromptLookup(source)
    lookup.extend(text)
    return [(size, lookup.copy(place, count)) for size, place in list(lookup.places())]


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_a_draft_follows_the_same_tokens_somewhere(source: list[int], text: list[int], count: int) -> None:
    for size, draft in drafts(source, text, count):
        assert 1 <= len(draft) <= count
        # The text goes on with the draft itself where it comes to its end.
        known = [[*source, -1, *text, *draft]] if size > IN_SOURCE else [source]
        begun = [*text[-size:], draft[0]]
        assert any(
            begun == tokens[place : place + size + 1]
            for tokens in known
            for place in range(len(tokens) - len(draft) if size > IN_SOURCE else len(tokens))
        )
        assert set(draft) <= {*source, *text}


@given(TOKENS, TOKENS)
def test_the_same_tokens_are_found_whenever_they_are_there(source: list[int], text: list[int]) -> None:
    found = {size for size, _ in drafts(source, text, 1)}
    for size in (*SIZES, IN_SOURCE):
        newest = text[-size:]
        places = [source, *([text[:-1]] if size > IN_SOURCE else [])]
        is_there = len(text) >= size and any(
            newest == tokens[place : place + size] and place + size < len(tokens) + (tokens is not source)
            for tokens in places
            for place in range(len(tokens) - size + 1)
        )
        assert (size in found) == is_there


@given(TOKENS, st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=6))
def test_pieces_are_as_the_whole(source: list[int], pieces: list[list[int]]) -> None:
    whole, parts = PromptLookup(source), PromptLookup(source)
    whole.extend([token for piece in pieces for token in piece])
    for piece in pieces:
        parts.extend(piece)
    assert list(whole.places()) == list(parts.places())


def test_a_copy_goes_on_behind_a_changed_token() -> None:
    lookup = PromptLookup([10, 11, 12, 13, 14, 15])
    lookup.extend([10, 11])
    ((size, place),) = [found for found in lookup.places() if found[0] > IN_SOURCE]
    assert (size, lookup.copy(place, 2)) == (2, [12, 13])
    lookup.extend([99])  # in place of 12
    assert [(size, lookup.copy(place, 9)) for size, place in list(lookup.places())] == [(GOES_ON, [13, 14, 15])]


def test_the_source_is_copied_onwards() -> None:
    """Of equal places the one behind the newest copy counts, not the first."""
    source = [5, 6, 1, 5, 6, 2, 5, 6, 3]
    lookup, said = PromptLookup(source), []
    for token in source:
        found = list(lookup.places())
        said.append(lookup.copy(found[0][1], 1) == [token] if found else None)
        lookup.extend([token])
    assert said == [None, True, True, True, True, True, True, True, True]


def test_a_text_repeats_itself_beyond_its_end() -> None:
    lookup = PromptLookup([])
    lookup.extend([1, 2, 3, 1, 2])
    size, place = next(lookup.places())
    assert (size, lookup.copy(place, 8)) == (2, [3, 1, 2, 3, 1, 2, 3, 1])


def test_nothing_is_drafted_of_nothing() -> None:
    assert drafts([], [], 3) == drafts([1, 2], [3, 4], 3) == drafts([1, 2], [2], 3) == []
