"""Tokenizers: tokenizer.json of several kinds, SentencePiece models and lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import tiny
from tests.conftest import DATES
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tests.importing.huggingface.odd_texts import LINES
from tests.text.test_tokenizer import TOKENS, byte_pairs, spec_of
from tfexport.errors import InputError
from tfexport.importing.vocabulary import tokenizer_json
from tfexport.nn.config import model_spec
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import try_tokenizer

TEXTS = ["the quick brown fox", "3 May 1999", "naïve café 🙂 ٣ مارس", "a" * 300, "e" + "\u0301" * 40]


def prepare(folder: Path) -> None:
    """Write one of each."""
    byte_pairs().save(str(folder / "byte_pairs.json"))
    (folder / "characters.json").write_bytes((DATES / "tokenizer.json").read_bytes())
    pieces = _train(folder / "spm.model")
    config = replace(tiny.config(), source_vocab=2000, target_vocab=2000, tokens=TOKENS)
    (folder / "unigram.json").write_bytes(tokenizer_json(folder / "spm.model", model_spec(config, "fp32")))
    (folder / "tokens.txt").write_text("\n".join(["<pad>", "<s>", "</s>", "<unk>", *pieces[4:60]]) + "\n", "utf-8")


def _train(path: Path) -> list[str]:
    """Train a SentencePiece model; return its pieces."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(path),
        vocab_size=200,
        pad_id=TOKENS.pad,
        bos_id=TOKENS.start,
        eos_id=TOKENS.eos,
        unk_id=TOKENS.unk,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.with_name(path.name + ".model").rename(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def _used(path: Path, size: int) -> list[Any]:
    """Try it in a subprocess, as imports and exports do, then encode and decode; a text may be refused by itself."""
    try_tokenizer(path.read_bytes(), path.name)
    tokenizer = Tokenizer.load(path, replace(_SPEC, source_vocab=size, vocab=size, max_source_length=4000))
    found: list[Any] = []
    for text in TEXTS:
        try:
            (ids,) = tokenizer.encode([text])
            found += [ids, tokenizer.decode(ids)]
        except InputError:
            found.append("refused")
    return found


_SPEC = spec_of(byte_pairs())


def json_of(name: str) -> Callable[[Path, Path], Kind]:
    """Return the kind of tokenizer.json that was made of this one."""

    def make(folder: Path, scratch: Path) -> Kind:
        original = (folder / name).read_bytes()
        document = json.loads(original)
        path = scratch / "tokenizer.json"

        def use(raw: bytes) -> list[Any]:
            path.write_bytes(raw)
            return _used(path, 2000)

        return Kind(mutated_json(document) | mutated(original), use, use(original))

    return make


def read_as(name: str) -> Callable[[Path, Path], Kind]:
    """Return the kind of vocabularies that an import reads and writes as tokenizer.json."""

    def make(folder: Path, scratch: Path) -> Kind:
        original = (folder / name).read_bytes()
        path, made = scratch / name, scratch / "tokenizer.json"
        config = replace(tiny.config(), source_vocab=2000, target_vocab=2000, tokens=TOKENS)

        def use(raw: bytes) -> list[Any]:
            path.write_bytes(raw)
            made.write_bytes(tokenizer_json(path, model_spec(config, "fp32")))
            return _used(made, 2000)

        return Kind(mutated(original), use, use(original))

    return make
