"""Byte-pair encoding as subword-nmt and fastBPE have it: codes beside a list whose tokens go on with "@@"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tfexport.errors import CheckpointError
from tfexport.text.vocabulary import BEYOND

_GOES_ON, _END = "@@", "</w>"
# As fairseq, its published models, subword-nmt's examples and JoeyNMT call them.
CODES = ("bpecodes", "code", "codes", "bpe.codes", "codes.bpe", "bpe_codes")

Merge = tuple[str, str]


def goes_on(tokens: Sequence[str]) -> bool:
    """Say whether tokens are pieces of words."""
    return any(token.endswith(_GOES_ON) for token in tokens)


def codes_beside(path: Path) -> Path | None:
    """Return the codes that lie beside a list."""
    return next((found for name in CODES if (found := path.with_name(name)).is_file()), None)


def read_codes(raw: bytes, path: Path) -> list[Merge]:
    """Read the merges of subword-nmt, or those of fastBPE with their counts.

    Raises:
        CheckpointError: a line is no merge, or they are of subword-nmt's first version.
    """
    try:
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"codes {path}: are no text in UTF-8 ({error})") from error
    merges: dict[Merge, None] = {}
    for number, line in enumerate(lines, 1):
        parts = line.strip("\r ").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) not in (2, 3) or not all(parts):
            raise CheckpointError(
                f"codes {path}: line {number} is {line[:60]!r}, expected two pieces, and a count or none"
            )
        merges.setdefault((parts[0], parts[1]))
    if lines[0].startswith("#version: 0.1") or any(right == _END for _, right in merges):
        raise CheckpointError(
            f"codes {path}: are of subword-nmt's version 0.1, whose words end in a piece of its own; "
            "give a tokenizer.json, or learn codes of version 0.2"
        )
    return list(merges)


def with_codes(tokens: Sequence[str], merges: Sequence[Merge], unk: int) -> Inner:
    """Return a tokenizer of words that splits by merges; pieces that are no token become unknown.

    Args:
        tokens: in order of their ids; "ab@@" goes on, "ab" ends a word.
        merges: the first is made first.
        unk: id of the token for what is unknown.
    """
    names = [token[: -len(_GOES_ON)] if token.endswith(_GOES_ON) else token + _END for token in tokens]
    ids = {name or _GOES_ON: i for i, name in enumerate(names)}
    pieces = dict.fromkeys(piece for left, right in merges for piece in (left, right, left + right))
    if beyond := [piece for piece in pieces if piece not in ids]:
        ids |= {piece: len(tokens) + i for i, piece in enumerate([BEYOND, *beyond])}
    inner = Inner(models.BPE(ids, list(merges), unk_token=names[unk], end_of_word_suffix=_END))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.BPEDecoder(suffix=_END)
    return inner
