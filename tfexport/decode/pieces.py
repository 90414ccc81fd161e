"""Text that comes token by token: the pieces that may be handed out already."""

from __future__ import annotations

from collections.abc import Sequence

from tfexport.decode.stops import TextOf, stop_end

# What a byte-level tokenizer decodes the first bytes of a character to.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """Decodes one text as its tokens come; the pieces together are the text.

    Attributes:
        text: all that was decoded so far, what is not handed out yet included.
    """

    def __init__(self, text_of: TextOf, prefix_len: int = 0, strings: Sequence[str] = ()) -> None:
        """Begin with no token.

        Args:
            text_of: decodes token ids.
            prefix_len: how many of the first tokens were given, and end nothing.
            strings: the text ends with the first of these.
        """
        self._text_of, self._prefix_len, self._strings = text_of, prefix_len, strings
        self._seen: list[int] = []
        self._given = self.text = ""

    def push(self, token: int) -> str:
        """Take a token; return what may be handed out, empty while a character or word is incomplete."""
        self._seen.append(token)
        asked = self._strings and len(self._seen) > self._prefix_len
        end = stop_end(self._seen, self._strings, self._text_of) if asked else None
        self.text = self._text_of(self._seen)[:end]
        if self.text.endswith(INCOMPLETE) or not self.text.startswith(self._given):
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return what was not handed out yet."""
        piece = self.text[len(self._given) :]
        self._given = self.text
        return piece
