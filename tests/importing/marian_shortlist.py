"""Lexical shortlists as Marian writes and applies them, after `src/data/shortlist.h` and `.cpp` in its sources."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

MAGIC = 0xF11A48D5013417F5
Rows = Sequence[Sequence[int]]  # target ids of each source token


def checksum(body: bytes) -> int:
    """Return `hashMem` of all whole 64-bit words."""
    seed = 0
    for (word,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8]):
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64
    return seed


def binary(rows: Rows, first: int, best: int = 50) -> bytes:
    """Return the content of lex.FIRST.BEST.s2t.bin."""
    offsets, ids = [0], list[int]()
    for row in rows:
        ids += sorted(row)
        offsets.append(len(ids))
    numbers = struct.pack(f"<{4 + len(offsets)}Q", first, best, len(offsets), len(ids), *offsets)
    return sealed(numbers + struct.pack(f"<{len(ids)}I", *ids))


def sealed(body: bytes) -> bytes:
    """Return magic, checksum and what they belong to."""
    return struct.pack("<2Q", MAGIC, checksum(body)) + body


def write_shortlist(path: Path, rows: Rows, first: int) -> Path:
    path.write_bytes(binary(rows, first))
    return path


def best_of(lines: Iterable[tuple[int, int, float]], vocab: int, best: int) -> list[list[int]]:
    """Return what `load` and `prune` leave of lines of target, source and probability."""
    table: list[dict[int, float]] = [{} for _ in range(vocab)]
    for target, source, probability in lines:
        table[source][target] = probability
    ranked = [sorted(((p, token) for token, p in row.items()), reverse=True) for row in table]
    return [[token for p, token in row[:best] if p > 0] for row in ranked]


def allowed(rows: Rows, source_ids: Sequence[int], first: int, vocab: int, *, is_shared: bool) -> set[int]:
    """Return what `generate` allows for a batch of one text."""
    found = set(range(min(first, vocab)))
    for token in set(source_ids):
        found |= {token} if is_shared else set()
        found |= set(rows[token])
    token = first
    while len(found) % 8:
        found.add(token)
        token += 1
    return found
