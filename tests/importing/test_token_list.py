"""Lists with counts and codes, as fairseq, subword-nmt, fastBPE, OpenNMT-py and JoeyNMT write them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from tests import tiny
from tests.importing.huggingface.odd_texts import LINES, odd_texts
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, InputError
from tfexport.importing.vocabulary import tokenizer_json
from tfexport.nn.config import model_spec
from tfexport.text.tokenizer import Tokenizer

FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]
Merge = tuple[str, str]


def spec(size: int, **tokens: int) -> ModelSpec:
    made = replace(tiny.config(), source_vocab=size, target_vocab=size, max_source_length=2000, max_target_length=2000)
    return model_spec(replace(made, tokens=replace(made.tokens, **tokens)), "fp32")


def learnt() -> list[Merge]:
    inner = Inner(models.BPE(end_of_word_suffix="</w>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>", show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    return [(left, right) for left, right in json.loads(inner.to_str())["model"]["merges"]]


def segment(word: str, merges: list[Merge]) -> list[str]:
    """Split one word as the paper of subword-nmt has it: all places of the best pair at once, until none is left."""
    ranks = {merge: i for i, merge in reversed(list(enumerate(merges)))}
    pieces = [*word[:-1], word[-1] + "</w>"]
    while pairs := [pair for pair in pairwise(pieces) if pair in ranks]:
        best, made = min(pairs, key=ranks.__getitem__), []
        while pieces:
            step = 2 if tuple(pieces[:2]) == best else 1
            made.append("".join(pieces[:step]))
            pieces = pieces[step:]
        pieces = made
    return [*(piece + "@@" for piece in pieces[:-1]), pieces[-1].removesuffix("</w>")]


def load(path: Path, folder: Path, found: ModelSpec) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes(tokenizer_json(path, found))
    return Tokenizer.load(folder / "tokenizer.json", found)


@pytest.mark.parametrize("kind", ["subword-nmt", "fastBPE"])
def test_a_dictionary_of_fairseq_with_codes(kind: str, tmp_path: Path) -> None:
    merges = learnt()
    said = sorted({piece for line in LINES for word in line.split() for piece in segment(word, merges)})
    kept = said[::2]  # the others are pieces that the dictionary lacks, as rare ones are
    (tmp_path / "dict.en.txt").write_text("".join(f"{token} {i % 7}\n" for i, token in enumerate(kept)))
    count = " 12" if kind == "fastBPE" else ""
    head = "" if kind == "fastBPE" else "#version: 0.2\n"
    (tmp_path / "bpecodes").write_text(head + "".join(f"{a} {b}{count}\n" for a, b in merges))
    ids = {token: i for i, token in enumerate([*FAIRSEQ, *kept])}
    ours = load(tmp_path / "dict.en.txt", tmp_path, spec(len(ids), pad=1, start=2, eos=2, unk=3))
    texts = odd_texts()
    compared = 0
    for text in texts:
        wanted = [ids.get(piece, 3) for word in text.split() for piece in segment(word, merges)]
        try:
            found = ours.encode([text])[0]
        except InputError:
            assert set(wanted) <= {3}
            continue
        assert found == wanted, text
        compared += 1
        if 3 not in wanted:
            assert ours.decode([2, *wanted, 2]) == " ".join(text.split())
    assert compared > 150


def test_a_dictionary_of_fairseq_with_sentencepiece(tmp_path: Path) -> None:
    """Against SentencePiece itself, whose pieces the dictionary numbers anew, and lacks some of."""
    spm = spm_model(tmp_path)
    kept = [spm.id_to_piece(i) for i in range(3, spm.get_piece_size()) if i % 9]
    (tmp_path / "dict.txt").write_text("".join(f"{piece} {i}\n" for i, piece in enumerate(reversed(kept))))
    ids = {token: i for i, token in enumerate([*FAIRSEQ, *reversed(kept)])}
    ours = load(tmp_path / "dict.txt", tmp_path, spec(len(ids), pad=1, start=2, eos=2, unk=3))
    for text in odd_texts():
        wanted = [ids.get(piece, 3) for piece in spm.encode(text, out_type=str)]
        if set(wanted) > {3}:
            assert ours.encode([text]) == [wanted], text
    (tmp_path / "sentencepiece.bpe.model").unlink()
    with pytest.raises(CheckpointError, match="has pieces of SentencePiece"):
        tokenizer_json(tmp_path / "dict.txt", spec(len(ids), pad=1, start=2, eos=2, unk=3))


@pytest.mark.parametrize("is_opennmt", [True, False])
def test_lists_of_opennmt_and_joeynmt_with_sentencepiece(is_opennmt: bool, tmp_path: Path) -> None:
    """Pieces are numbered by the list, and texts split by the model that lies beside it."""
    spm = spm_model(tmp_path)
    kept = [spm.id_to_piece(i) for i in reversed(range(3, spm.get_piece_size())) if i % 9]
    special = ["<unk>", "<blank>" if is_opennmt else "<pad>", "<s>", "</s>"]
    lines = [f"{piece}\t7" for piece in kept] if is_opennmt else [*special, *kept]
    (tmp_path / "vocab").write_text("".join(f"{line}\n" for line in lines))
    ids = {token: i for i, token in enumerate([*special, *kept])}
    ours = load(tmp_path / "vocab", tmp_path, spec(len(ids), pad=1, start=2, eos=3, unk=0))
    for text in odd_texts():
        wanted = [ids.get(piece, 0) for piece in spm.encode(text, out_type=str)]
        if set(wanted) > {0}:
            assert ours.encode([text]) == [wanted], text
            assert 0 in wanted or ours.decode([2, *wanted, 3]) == spm.decode(spm.encode(text))


def spm_model(folder: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "sentencepiece.bpe"),
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))


def test_a_vocabulary_of_opennmt(tmp_path: Path) -> None:
    """Its special tokens come first and are not in the file; a list that has them is as it is."""
    words = ["the", "cat", ",", "▁sat", "x￭"]
    for special, lines in (
        (["<unk>", "<blank>", "<s>", "</s>"], words),
        ([], ["<unk>", "<blank>", "<s>", "</s>", *words]),
    ):
        (tmp_path / "vocab").write_text("".join(f"{word}\t{9 - i}\n" for i, word in enumerate(lines)))
        ours = load(tmp_path / "vocab", tmp_path, spec(16, pad=1, start=2, eos=3, unk=0))
        ids = {token: i for i, token in enumerate([*special, *lines])}
        text = "the  dog , x￭ ▁sat <unk>"
        assert ours.encode([text]) == [[ids.get(word, 0) for word in text.split()]]
        assert ours.decode([2, 4, 5, 3]) == "the cat"


def test_a_list_of_joeynmt_with_codes(tmp_path: Path) -> None:
    words = ["<unk>", "<pad>", "<s>", "</s>", "th@@", "e", "c@@", "at"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    found = spec(8, pad=1, start=2, eos=3, unk=0)
    plain = load(tmp_path / "vocab.txt", tmp_path, found)
    assert plain.encode(["th@@ e c@@ at"]) == [[4, 5, 6, 7]], "without codes texts are split already"
    (tmp_path / "codes").write_text("#version: 0.2\nt h\na t</w>\n")
    ours = load(tmp_path / "vocab.txt", tmp_path, found)
    assert ours.encode(["the cat"]) == [[4, 5, 6, 7]]
    assert ours.decode([4, 5, 6, 7, 3]) == "the cat"


@pytest.mark.parametrize(
    ("listed", "codes", "problem"),
    [
        ("th@@ 5\ne 3\n", None, "has pieces of words, and there are no codes next to it; name them bpecodes"),
        ("the 5\na 3\nthe 1\n", None, "line 3 repeats line 1"),
        ("the 5\n<pad> 3\n", None, "line 2 repeats a special token"),
        ("th@@ 5\ne 3\n", "t h\ne </w>\n", "version 0.1"),
        ("th@@ 5\ne 3\n", "#version: 0.2\nt\n", "line 2 is 't', expected two pieces"),
    ],
)
def test_what_cannot_be_read(listed: str, codes: str | None, problem: str, tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text(listed)
    if codes is not None:
        (tmp_path / "bpecodes").write_text(codes)
    with pytest.raises(CheckpointError, match=problem):
        tokenizer_json(tmp_path / "dict.txt", spec(9, pad=1, start=2, eos=2, unk=3))
