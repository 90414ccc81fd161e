"""Two hundred odd texts: scripts, spaces, controls, accents, emoji, and lines of the license."""

from __future__ import annotations

import random

from tests.conftest import ROOT

_HAND = [
    "the tokenizer of a directory",
    "  two  spaces ",
    "naïve ﬁne ½ ² ™",
    "日本語のテキスト",
    "Ｆｕｌｌｗｉｄｔｈ",
    "e\u0301 a\u0308 \u212b",
    "emoji 😀👩‍👩‍👧‍👦 🇩🇪",
    "tab\tand\nnew line",
    "non\u00a0breaking\u2009thin\u3000wide",
    "zero\u200bwidth\u200djoiner\ufeff",
    "Straße İstanbul ǅ",
    "ελληνικά русский العربية עברית हिन्दी ไทย",
    "don't you're it's I'll",
    "1234567890 3.14 1,000 -5e-10",
    "a@@ b@@ c ▁ ▁▁ _ Ġ",
    "x",
    "!",
    ".,;:?!…—–-",
    "((( [[[ {{{ <<< >>>",
    "UPPER lower MiXeD",
    "a" * 300,
    "https://example.org/?q=1&r=2#top",
    "\u0007bell \u001b[31mred",
    "ß" * 20 + " " + "é" * 20,
]
# Without (iii), which two splits of equal probability make.
LINES = [line.strip() for line in (ROOT / "LICENSE").read_text().splitlines() if line.strip() and "(iii)" not in line]


def odd_texts() -> list[str]:
    """Return 200 texts, the same each time."""
    draw = random.Random(0)
    letters = "".join(_HAND).replace("<", "").replace(">", "")
    made = ["".join(draw.choices(letters, k=draw.randint(3, 40))).strip() for _ in range(100)]
    return [*_HAND, *[text for text in made if text], *LINES][:200]
