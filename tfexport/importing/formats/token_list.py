"""Lists of tokens: one a line, or with counts as fairseq and OpenNMT-py write them, which number them differently."""

from __future__ import annotations

import re

_FAIRSEQ = re.compile(r"(.+) \d+")
_FAIRSEQ_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_OPENNMT = re.compile(r"(.+)\t\d+")
_OPENNMT_SPECIAL = ("<unk>", "<blank>", "<s>", "</s>")


def read_tokens(text: str) -> tuple[list[str], int]:
    """Return the tokens of a list in the order of their ids, and how many of them stand before its first line.

    A fairseq dict.txt has "token count" on each line, and <s>, <pad>, </s>, <unk> before them; a vocabulary of
    OpenNMT-py a tab between, and <unk>, <blank>, <s>, </s> before them unless they are there.
    """
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    for form, special in ((_FAIRSEQ, _FAIRSEQ_SPECIAL), (_OPENNMT, _OPENNMT_SPECIAL)):
        found = [form.fullmatch(line) for line in lines]
        if not all(found):
            continue
        tokens = [match[1] for match in found if match]
        is_whole = special[0] in tokens and form is _OPENNMT
        return (tokens, 0) if is_whole else ([*special, *tokens], len(special))
    return text.splitlines(), 0
