"""Read lexical shortlists of Marian, Bergamot and Firefox.

Formats and rules are those of `src/data/shortlist.cpp` in Marian. A binary file has a header, the offset of the ids of
each source token, and the ids. A text file has lines "target source probability", and may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport._io.strict_json import plain_problem
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, shortened
from tfexport.text.tokenizer import Tokenizer

# Of a text file, as students are usually run: the number of first ids that every text may have, and of translations.
FIRST, BEST = 50, 50
_MAGIC = struct.pack("<Q", 0xF11A48D5013417F5)
_HEADER = struct.Struct("<6Q")  # magic, checksum, first, best, number of offsets, number of ids
_MOST_BYTES = 2**30  # unpacked
_MOST_LINE_BYTES = 10_000


class Translations(NamedTuple):
    """The target ids of each source token.

    Every text may have the ids below `first`.
    """

    first: int
    rows: Sequence[NDArray[Any]]


def read_shortlist(path: Path, spec: ModelSpec, tokenizer: Tokenizer | None) -> Translations:
    """Read a shortlist for a model.

    The tokenizer has the tokens of a text file.

    Raises CheckpointError if the file is damaged or does not fit the model.
    """
    try:
        if problem := plain_problem(path):
            raise CheckpointError(f"{path}: {problem}; give a file such as lex.50.50.s2t.bin or lex.s2t.gz")
        with path.open("rb") as file:
            is_binary = file.read(len(_MAGIC)) == _MAGIC
        return _read_binary(path, spec) if is_binary else _read_text(path, spec, tokenizer)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CheckpointError(f"{path}: is not a shortlist of this model ({error}); copy it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error


def _read_binary(path: Path, spec: ModelSpec) -> Translations:
    num_bytes = path.stat().st_size
    if not _HEADER.size <= num_bytes <= _MOST_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes, expected at most {_MOST_BYTES:,} and a header")
    raw = path.read_bytes()
    _, checksum, first, _, num_offsets, num_ids = _HEADER.unpack_from(raw)
    # Imports add a token to the vocabulary of Marian.
    if num_offsets - 1 not in (spec.source_vocab - 1, spec.source_vocab):
        raise ValueError(f"it has {num_offsets - 1:,} source tokens, the model {spec.source_vocab:,}")
    if _HEADER.size + 8 * num_offsets + 4 * num_ids != len(raw):
        raise ValueError(f"it has {len(raw):,} bytes, which are not those of {num_ids:,} ids")
    if _checksum(raw[16:]) != checksum:
        raise ValueError("its checksum differs")
    offsets = np.frombuffer(raw, "<u8", num_offsets, _HEADER.size)
    ids = np.frombuffer(raw, "<u4", num_ids, _HEADER.size + offsets.nbytes)
    if offsets[-1] != num_ids or (offsets[1:] < offsets[:-1]).any() or max(ids, default=0) >= spec.vocab:
        raise ValueError("its offsets or ids are out of range")
    return Translations(first, [ids[begin:end] for begin, end in pairwise(offsets.tolist())])


def _checksum(raw: bytes) -> int:
    seed, mask = 0, 2**64 - 1
    for word in np.frombuffer(raw, "<u8", len(raw) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & mask
    return seed


def _read_text(path: Path, spec: ModelSpec, tokenizer: Tokenizer | None) -> Translations:
    if tokenizer is None:
        raise ValueError("its tokens are text, and the model has no tokenizer")
    sources, targets, probabilities = array("q"), array("q"), array("f")
    num_known, unknowns = 0, (tokenizer.source_unknown, tokenizer.unknown)
    for target, source, probability in _lines(path):
        known = tokenizer.pair_ids(source, target)
        num_known += None not in known
        source_id, target_id = (unknown if i is None else i for i, unknown in zip(known, unknowns, strict=True))
        if source_id is not None and target_id is not None:
            sources.append(source_id)
            targets.append(target_id)
            probabilities.append(probability)
    if not num_known:
        raise ValueError("no line has two tokens of the tokenizer")
    return Translations(FIRST, _best(np.array(sources), np.array(targets), np.array(probabilities), spec))


def _lines(path: Path) -> Iterator[tuple[str, str, float]]:
    num_bytes = 0
    with path.open("rb") as raw, gzip.open(raw) if raw.read(2) == b"\x1f\x8b" else raw as file:
        raw.seek(0)
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
            num_bytes += len(line)
            parts = line.split()  # at ASCII spaces only, as Marian
            if len(parts) != 3 or not 0 <= (probability := float(parts[2])) <= 1:
                raise ValueError(f"line {number} is {shortened(line)}, expected target source probability")
            if num_bytes > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            if b"NULL" not in parts[:2]:
                yield parts[0].decode(), parts[1].decode(), probability


def _best(
    sources: NDArray[np.int64], targets: NDArray[np.int64], probabilities: NDArray[np.float32], spec: ModelSpec
) -> list[NDArray[np.int64]]:
    """Return the best targets of each source; of equal pairs, the last one counts."""
    _, last = np.unique((sources * spec.vocab + targets)[::-1], return_index=True)
    some = sources.size - 1 - last
    some = some[probabilities[some] > 0]
    some = some[np.lexsort((-targets[some], -probabilities[some], sources[some]))]
    firsts = np.searchsorted(sources[some], np.arange(spec.source_vocab + 1))
    return [targets[some[begin : min(begin + BEST, end)]] for begin, end in pairwise(firsts.tolist())]
