"""Two tasks whose texts repeat what is there: correcting sentences, and writing code from lists of fields.

A text is made of words by their ids: TASKS of their own, WORDS, of each word a misspelling, and what code is made of.
"""

from __future__ import annotations

import numpy as np

from tfexport.spec import TokenIds

TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)
CORRECTION, CODE = 4, 5
NUM_WORDS = 160
FIRST_WORD = 6
FIRST_MISSPELT = FIRST_WORD + NUM_WORDS
# Of the code: what is written of every field, with "N" for its name and "T" for its type.
_TEMPLATE = (
    "@property def N ( self ) -> T : return self . _ N "
    "@ N . setter def N ( self , value : T ) : self . _ N = check ( value , T )"
).split()
_SYMBOLS = sorted({*_TEMPLATE} - {"N", "T"})
_FIRST_SYMBOL = FIRST_MISSPELT + NUM_WORDS
_ID_OF = {symbol: _FIRST_SYMBOL + place for place, symbol in enumerate(_SYMBOLS)}
NUM_TYPES = 8
_FIRST_TYPE = _FIRST_SYMBOL + len(_SYMBOLS)
VOCAB = _FIRST_TYPE + NUM_TYPES
# Of the words of a sentence.
MISSPELT, DOUBLED = 0.06, 0.03
# The k-th most frequent word has the share 1/k.
_SHARES = 1 / np.arange(1, NUM_WORDS + 1)
_SHARES /= _SHARES.sum()

Pair = tuple[list[int], list[int]]


def draw(task: int, rng: np.random.Generator, least: int, most: int) -> Pair:
    """Draw a source and its target without their ends: of `least` to `most` words, or an eighth as many fields."""
    size = int(rng.integers(least, most + 1))
    return _sentence(rng, size) if task == CORRECTION else _code(rng, max(1, size // 8))


def _sentence(rng: np.random.Generator, size: int) -> Pair:
    words = (FIRST_WORD + rng.choice(NUM_WORDS, size, p=_SHARES)).tolist()
    source = [CORRECTION]
    for word, luck in zip(words, rng.random(size).tolist(), strict=True):
        if luck < MISSPELT:
            source.append(word + NUM_WORDS)
        else:
            source += [word] * (1 + (luck < MISSPELT + DOUBLED))
    # A word that is there twice is said once, and so it is where chance has put it there twice.
    return source, [word for i, word in enumerate(words) if i == 0 or word != words[i - 1]]


def _code(rng: np.random.Generator, fields: int) -> Pair:
    names = rng.choice(NUM_WORDS, fields, replace=False) + FIRST_WORD
    source, target = [CODE], []
    for name, kind in zip(names.tolist(), rng.integers(0, NUM_TYPES, fields).tolist(), strict=True):
        said = {**_ID_OF, "N": name, "T": _FIRST_TYPE + kind}
        source += [said["N"], said["T"]]
        target += [said[word] for word in _TEMPLATE]
    return source, target
