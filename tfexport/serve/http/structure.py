"""The structure of a JSON body, bounded before it is read: one text is read in a moment, as many parts are not."""

from __future__ import annotations

from itertools import accumulate

from tfexport.serve.http.errors import RequestError

MAX_DEPTH = 100
# Lists, objects, strings with keys, and fractions, which are read one by one; a request has some hundreds, one with
# long lists of words some thousands.
MAX_PARTS = 10_000
# As many token ids as 64 texts of 2,000 tokens have.
MAX_VALUES = 150_000
# Python takes a time for digits that grows with their square.
MAX_DIGITS = 400
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS = bytes.maketrans(b"012345678", b"9" * 9)


def strings_and_rest(raw: bytes) -> tuple[list[bytes], bytes]:
    """Divide JSON into what stands in its strings, with blanks for escaped quotes and backslashes, and all else.

    Of what has too many strings the end is left out, and of what is no JSON nothing is promised.
    """
    # A backslash stands in strings alone. Without escaped quotes, each second piece between quotes is a string.
    pieces = raw.replace(rb"\\", b" ").replace(rb"\"", b" ").split(b'"', 2 * MAX_PARTS + 1)
    return pieces[1::2], b"".join(pieces[::2])


def check_structure(strings: list[bytes], rest: bytes) -> None:
    """Refuse what has too many parts, or too large ones, in a time that hardly depends on what it holds.

    Raises:
        RequestError: it has.
    """
    brackets = rest.translate(None, _NO_BRACKETS)
    # What opens more often than there may be parts has too many of them, wherever it closes.
    if max(accumulate(1 if one in b"[{" else -1 for one in brackets[: 2 * MAX_PARTS]), default=0) > MAX_DEPTH:
        raise RequestError(400, f"the body is nested more than {MAX_DEPTH} deep")
    if len(strings) + brackets.count(b"[") + brackets.count(b"{") + _num_fractions(rest) > MAX_PARTS:
        what = "lists, objects, strings and fractions"
        raise RequestError(400, f"the body has more than {MAX_PARTS} {what}; send fewer")
    if rest.count(b",") > MAX_VALUES:
        raise RequestError(400, f"the body has more than {MAX_VALUES} values; send fewer, or tensors as bytes")
    if b"9" * (MAX_DIGITS + 1) in rest.translate(_DIGITS):
        raise RequestError(400, f"the body has a number of more than {MAX_DIGITS} digits; send smaller ones")


def _num_fractions(rest: bytes) -> int:
    """Count numbers with a point or an exponent, those with both twice."""
    exponents = rest.count(b"e") + rest.count(b"E") - rest.count(b"true") - rest.count(b"false")
    return rest.count(b".") + exponents
