"""Lexical shortlists: files of Marian, and the texts that it allows (`tests/importing/marian_shortlist.py`)."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tests.importing.marian import OPTIONS, SSRU, VOCAB, Marian, random_weights, write_npz
from tests.importing.marian_shortlist import allowed, best_of, binary, sealed, write_shortlist
from tests.importing.test_marian import TEXTS, WORDS, write_yaml
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import CheckpointError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.importing import shortlist as reader
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.model.load import load_tokenizer

FIRST, HEADER_BYTES = 4, 48
SEPARATE = {"tied-embeddings-all": False, "tied-embeddings": True}
SOURCES = [[5, 9, 31, 0], [12, 0], [7, 7, 20, 3, 38, 15, 26, 0], [2, 6, 0]]


def random_rows(seed: int = 0, most: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(VOCAB, rng.integers(0, most), replace=False).tolist() for _ in range(VOCAB)]


def marian_directory(folder: Path, options: dict[str, Any], *, words: bool = False) -> tuple[Path, Marian]:
    """Import a random model of Marian; with `words` also a vocabulary."""
    weights = random_weights(options, seed=4)
    path = write_npz(folder / "model.npz", options, weights)
    vocabulary = {"tokenizer": write_yaml(folder / "v.yml")} if words else {}
    settings = ImportConfig(tokenize="words") if words else ImportConfig()
    import_checkpoint(path, folder / "model", settings, **vocabulary)
    return folder / "model", Marian(options, weights)


def generated(bundle: Path, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    with tfexport.load(bundle, threads=1) as model:
        return [list(best[0].token_ids) for best in model.generate_ids(sources, max_new_tokens=8)]


@pytest.mark.parametrize(("decoder", "is_shared"), [({}, True), (SSRU, True), (SEPARATE, False)])
def test_texts_are_those_of_marian_with_a_shortlist(decoder: dict[str, Any], is_shared: bool, tmp_path: Path) -> None:
    """Each text is decoded as Marian decodes it in a batch of its own."""
    directory, marian = marian_directory(tmp_path, {**OPTIONS, **decoder})
    rows = random_rows()
    config = ExportConfig(shortlist=write_shortlist(tmp_path / "lex.bin", rows, FIRST))
    export_bundle(str(directory), tmp_path / "bundle", config)
    tokens = [allowed(rows, source, FIRST, VOCAB, is_shared=is_shared) for source in SOURCES]
    expected = [marian.translate(source, 8, some) for source, some in zip(SOURCES, tokens, strict=True)]
    assert generated(tmp_path / "bundle", SOURCES) == expected
    others = [allowed(rows, source, FIRST, VOCAB, is_shared=not is_shared) for source in SOURCES]
    assert expected != [marian.translate(source, 8, some) for source, some in zip(SOURCES, others, strict=True)]


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_text_table_is_pruned_as_marian_does(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, repeated pairs, NULL, unknown words and probabilities of 0 count as in Marian."""
    monkeypatch.setattr(reader, "FIRST", FIRST)
    monkeypatch.setattr(reader, "BEST", 3)
    directory, marian = marian_directory(tmp_path, OPTIONS, words=True)
    rng, names = np.random.default_rng(1), [*WORDS[2:], "elsewhere", "NULL", "</s>"]
    lines = [
        (*rng.choice(names, 2).tolist(), float(rng.choice([0.0, 0.125, 0.25, 0.5, 0.75])))
        for _ in range(15 * len(names))
    ]
    raw = "".join(f"{target} {source}\t{probability}\n" for target, source, probability in lines).encode()
    path = tmp_path / "lex.s2t"
    path.write_bytes(gzip.compress(raw) if is_packed else raw)
    export_bundle(str(directory), tmp_path / "bundle", ExportConfig(shortlist=path), verify=False)
    ids = {word: number for number, word in enumerate(WORDS)}
    known = [(ids.get(t, 1), ids.get(s, 1), p) for t, s, p in lines if "NULL" not in (t, s)]
    rows = best_of(known, VOCAB, 3)
    sources = [[*map(WORDS.index, text.split()), 0] for text in TEXTS]
    expected = [marian.translate(source, 8, allowed(rows, source, FIRST, VOCAB, is_shared=True)) for source in sources]
    assert generated(tmp_path / "bundle", sources) == expected


WHOLE = binary(random_rows(), FIRST)
COUNTS = struct.unpack_from("<4Q", WHOLE, 16)


def with_counts(*counts: int) -> bytes:
    return sealed(struct.pack("<4Q", *counts) + WHOLE[HEADER_BYTES:])


DAMAGED = {
    "a shorter file": WHOLE[:-4],
    "a longer file": WHOLE + b"\0" * 8,
    "only a header": WHOLE[:HEADER_BYTES],
    "half a header": WHOLE[:20],
    "another magic": b"\0" + WHOLE[1:],
    "another checksum": WHOLE[:8] + b"\0" * 8 + WHOLE[16:],
    "a flipped bit": WHOLE[:60] + bytes([WHOLE[60] ^ 1]) + WHOLE[61:],
    "an id out of range": binary([*random_rows()[:-1], [VOCAB + 1]], FIRST),
    "more source tokens": binary(random_rows() * 2, FIRST),
    "fewer source tokens": binary(random_rows()[:-1], FIRST),
    "offsets that decrease": sealed(WHOLE[16:56] + struct.pack("<2Q", 9, 1) + WHOLE[72:]),
    "a huge number of ids": with_counts(*COUNTS[:3], 2**62),
    "a huge number of offsets": with_counts(*COUNTS[:2], 2**61, COUNTS[3]),
    "numbers that overflow": with_counts(*COUNTS[:2], COUNTS[2], 2**62 + COUNTS[3]),
    "nothing": b"",
    "a table without probabilities": b"the a\n",
    "words as probabilities": b"the a much\n",
    "probabilities that are not numbers": b"the a nan\n",
    "a line without an end": b"a" * 20_000,
    "only unknown words": b"here there 0.5\n",
    "bytes that are not text": b"\xff\xfe a 0.5\n",
    "half of a gzip file": gzip.compress(b"the a 0.5\n" * 1000)[:30],
}


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marian_directory(tmp_path_factory.mktemp("marian"), OPTIONS, words=True)[0]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, with_words: Path, tmp_path: Path) -> None:
    path = tmp_path / "lex"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(CheckpointError):
        export_bundle(str(with_words), tmp_path / "bundle", ExportConfig(shortlist=path))
    assert not (tmp_path / "bundle").exists()


def test_a_missing_file_and_a_table_of_words_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    directory, _ = marian_directory(tmp_path, OPTIONS)
    (tmp_path / "lex.s2t").write_bytes(b"the a 0.5\n")
    for path in (tmp_path / "lex.s2t", tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError):
            export_bundle(str(directory), tmp_path / "bundle", ExportConfig(shortlist=path))


def test_unpacking_is_limited(with_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_BYTES", 5000)
    (tmp_path / "lex.gz").write_bytes(gzip.compress(b"the a 0.5\n" * 1000))
    with pytest.raises(CheckpointError):
        export_bundle(str(with_words), tmp_path / "bundle", ExportConfig(shortlist=tmp_path / "lex.gz"))
    (tmp_path / "lex.gz").write_bytes(gzip.compress(b"the a 0.5\n" * 400))
    export_bundle(str(with_words), tmp_path / "bundle", ExportConfig(shortlist=tmp_path / "lex.gz"), verify=False)
    assert load_tokenizer(open_bundle(tmp_path / "bundle"))
