"""Decode tokens to pieces of text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from tfexport.decode.request import TextOf
from tfexport.decode.stops import stop_end

# Byte-level tokenizers decode an incomplete character to this.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """Decoder of one text whose tokens arrive one by one.

    Attributes:
        text: the text so far, including the part that has not been returned.
    """

    def __init__(self, text_of: TextOf, prefix_len: int = 0, strings: Sequence[str] = ()) -> None:
        """Create a decoder without tokens.

        Args:
            text_of: decodes token ids.
            prefix_len: number of given tokens at the start, which cannot complete a stop string.
            strings: stop strings.
        """
        self._text_of, self._prefix_len, self._strings = text_of, prefix_len, strings
        self._seen: list[int] = []
        self._given = self.text = ""

    def push(self, token: int) -> str:
        """Add a token; return the next piece, empty while a character is incomplete."""
        self._seen.append(token)
        asked = self._strings and len(self._seen) > self._prefix_len
        end = stop_end(self._seen, self._strings, self._text_of) if asked else None
        self.text = self._text_of(self._seen)[:end]
        if self.text.endswith(INCOMPLETE) or not self.text.startswith(self._given):
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return the part of the text that has not been returned."""
        piece = self.text[len(self._given) :]
        self._given = self.text
        return piece
