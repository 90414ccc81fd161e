"""Vocabulary files: SentencePiece models and lists of tokens give the ids of their own tools, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from tests.importing.huggingface.odd_texts import LINES, odd_texts
from tests.importing.huggingface.test_tokenizer_directories import encoded, spec, train
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError
from tfexport.importing.text import Tokenizers, check_coverage, import_text
from tfexport.importing.vocabulary import Side, read_sentencepiece, tokenizer_json
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import Vocabulary

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
SPM = "sentencepiece.bpe.model"
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]
FAIRSEQ_IDS = {"pad": 1, "start": 2, "eos": 2, "unk": 3}
OPENNMT_IDS = {"pad": 1, "start": 2, "eos": 3, "unk": 0}
Merge = tuple[str, str]


# SentencePiece models


EDGES = [
    "  indented",
    "\ttab first",
    "behind \t",
    "def f(x):\n    return x",
    "line\nline",
    "trailing  ",
    "a  b   c",
    "\u3000wide\u3000",
    "soft\u00adhyphen",
    "\u2003em space",
    "the \u2581 ",
]
ALL_SPACES = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
KINDS: dict[str, dict[str, Any]] = {
    "as trained by default": {},
    "BPE": {"kind": "bpe"},
    "nfkc, which leaves tabs": {"normalization_rule_name": "nfkc"},
    "all spaces kept": ALL_SPACES,
    "BPE, all spaces kept": {"kind": "bpe", **ALL_SPACES, "byte_fallback": True},
    "no space before": {"add_dummy_prefix": False},
    "lower case": {"normalization_rule_name": "nmt_nfkc_cf"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_ids_are_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spm.model"
    train(path, **{"vocab_size": 600, **options})
    spm = sentencepiece.SentencePieceProcessor(model_file=str(path))
    eos = spm.eos_id()
    raw = tokenizer_json(path, spec(spm.get_piece_size(), eos=eos, start=eos, pad=eos, unk=spm.unk_id()))
    ours = Vocabulary(raw, "tokenizer.json", {spm.bos_id(), eos}, spm.unk_id())
    # A text that begins with the sign for a space: where no rule makes it one, a single one comes of both.
    texts = [text for text in [*odd_texts(), *EDGES] if not text.startswith("\u2581")]
    known = [text for text in texts if set(spm.encode(text)) - {spm.unk_id()}]
    assert len(known) > 190
    different = [(text, a, b) for text in known if (a := spm.encode(text)) != (b := ours.encode(text, special=False))]
    assert not different, (len(different), different[:3])
    whole = [ids for text in known if spm.unk_id() not in (ids := spm.encode(text))]
    assert [ours.decode(ids).strip() for ids in whole] == [spm.decode(ids).strip() for ids in whole]


def enlarge_charsmap(proto: Any) -> None:
    charsmap = proto.normalizer_spec.precompiled_charsmap
    proto.normalizer_spec.precompiled_charsmap = b"\xfc\xff\xff\xff" + charsmap[4:]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda proto: setattr(proto.pieces[9], "piece", "a" * 300), "has a piece of 300 characters"),
        (lambda proto: setattr(proto.trainer_spec, "unk_piece", "<gone>"), r"cannot be read \('<gone>'\); save it"),
        (enlarge_charsmap, "has a damaged character map"),
    ],
)
def test_a_malicious_sentencepiece_model_is_refused(
    change: Callable[[Any], None], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "spm.model"
    train(path)
    proto = read_sentencepiece(path)
    change(proto)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match=problem):
        tokenizer_json(path, spec(400, eos=2, unk=0))


def test_a_model_whose_ids_are_not_the_models(tmp_path: Path) -> None:
    path = tmp_path / "spm.model"
    train(path)
    problem = (
        "its unknown token is 0, that of the model is 1; the model has other ids: give the directory whose vocab.json"
    )
    with pytest.raises(CheckpointError, match=problem):
        tokenizer_json(path, spec(300, eos=2, unk=1))
    with pytest.raises(CheckpointError, match=r"end token 7 is the ordinary piece .*the model has other ids"):
        tokenizer_json(path, spec(300, eos=7, unk=0))
    tokenizer_json(path, spec(300, eos=2, unk=0))
    tokenizer_json(path, spec(300, eos=7, unk=0), "source")  # only the target needs the end token


# Lists with counts and codes, as fairseq, subword-nmt, fastBPE, OpenNMT-py and JoeyNMT write them


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
    pieces = sorted({piece for line in LINES for word in line.split() for piece in segment(word, merges)})
    kept = pieces[::2]  # the others are pieces that the dictionary lacks, as rare ones are
    (tmp_path / "dict.en.txt").write_text("".join(f"{token} {i % 7}\n" for i, token in enumerate(kept)))
    count = " 12" if kind == "fastBPE" else ""
    head = "" if kind == "fastBPE" else "#version: 0.2\n"
    (tmp_path / "bpecodes").write_text(head + "".join(f"{a} {b}{count}\n" for a, b in merges))
    ids = {token: i for i, token in enumerate([*FAIRSEQ, *kept])}
    ours = load(tmp_path / "dict.en.txt", tmp_path, spec(len(ids), **FAIRSEQ_IDS))
    compared = 0
    for text in odd_texts():
        wanted = [ids.get(piece, 3) for word in text.split() for piece in segment(word, merges)]
        if (found := encoded(ours, text)) is None:
            assert set(wanted) <= {3}
            continue
        assert found == wanted, text
        compared += 1
        if 3 not in wanted:
            assert ours.decode([2, *wanted, 2]) == " ".join(text.split())
    assert compared > 150


@pytest.mark.parametrize(
    ("special", "row", "tokens"),
    [
        (FAIRSEQ, "{} 7", FAIRSEQ_IDS),
        (["<unk>", "<blank>", "<s>", "</s>"], "{}\t7", OPENNMT_IDS),
        (["<unk>", "<pad>", "<s>", "</s>"], "{}", OPENNMT_IDS),
    ],
    ids=["fairseq", "opennmt", "joeynmt"],
)
def test_lists_with_a_sentencepiece_model(special: list[str], row: str, tokens: dict[str, int], tmp_path: Path) -> None:
    """The list numbers the pieces and lacks some; the model next to it splits texts."""
    train(tmp_path / SPM)
    spm = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / SPM))
    kept = [spm.id_to_piece(i) for i in reversed(range(3, spm.get_piece_size())) if i % 9]
    listed = [*special, *kept] if row == "{}" else kept
    (tmp_path / "dict.txt").write_text("".join(f"{row.format(piece)}\n" for piece in listed))
    ids = {token: i for i, token in enumerate([*special, *kept])}
    found, unk = spec(len(ids), **tokens), tokens["unk"]
    ours = load(tmp_path / "dict.txt", tmp_path, found)
    for text in odd_texts():
        wanted = [ids.get(piece, unk) for piece in spm.encode(text, out_type=str)]
        if set(wanted) > {unk}:
            assert ours.encode([text]) == [wanted], text
            assert unk in wanted or ours.decode([2, *wanted, tokens["eos"]]) == spm.decode(spm.encode(text))
    if special == FAIRSEQ:
        (tmp_path / SPM).unlink()
        with pytest.raises(CheckpointError, match="has pieces of SentencePiece"):
            tokenizer_json(tmp_path / "dict.txt", found)


def test_a_vocabulary_of_opennmt(tmp_path: Path) -> None:
    """Its special tokens come first and are not in the file; a list that has them is as it is."""
    words = ["the", "cat", ",", "▁sat", "x￭"]
    special = ["<unk>", "<blank>", "<s>", "</s>"]
    for listed in (words, [*special, *words]):
        (tmp_path / "vocab").write_text("".join(f"{word}\t{9 - i}\n" for i, word in enumerate(listed)))
        ours = load(tmp_path / "vocab", tmp_path, spec(16, **OPENNMT_IDS))
        ids = {token: i for i, token in enumerate([*special, *words])}
        text = "the  dog , x￭ ▁sat <unk>"
        assert ours.encode([text]) == [[ids.get(word, 0) for word in text.split()]]
        assert ours.decode([2, 4, 5, 3]) == "the cat"


def test_a_list_of_joeynmt_with_codes(tmp_path: Path) -> None:
    words = ["<unk>", "<pad>", "<s>", "</s>", "th@@", "e", "c@@", "at"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    found = spec(8, **OPENNMT_IDS)
    plain = load(tmp_path / "vocab.txt", tmp_path, found)
    assert plain.encode(["th@@ e c@@ at"]) == [[4, 5, 6, 7]], "without codes texts are split already"
    (tmp_path / "codes").write_text("#version: 0.2\nt h\na t</w>\n")
    ours = load(tmp_path / "vocab.txt", tmp_path, found)
    assert ours.encode(["the cat"]) == [[4, 5, 6, 7]]
    assert ours.decode([4, 5, 6, 7, 3]) == "the cat"


@pytest.mark.parametrize(
    ("listed", "codes", "problem"),
    [
        ("th@@ 5\ne 3\n", None, "has pieces of words, but no codes next to it; copy them there as bpecodes"),
        ("the 5\na 3\nthe 1\n", None, "'the' and id 4"),
        ("the 5\n<pad> 3\n", None, "'<pad>' and id 1"),
        ("th@@ 5\ne 3\n", "t h\ne </w>\n", "version 0.1"),
        ("th@@ 5\ne 3\n", "#version: 0.2\nt\n", "line 2 is 't', expected two pieces"),
        ("a\n\nb\na\n", None, "line 2 is empty; 'a' and id 0 are not unique"),
        ("a\nb\n", None, "has 2 tokens, tokens.unk is 3"),
        ("", None, "has 0 tokens"),
    ],
)
def test_a_list_that_cannot_be_read(listed: str, codes: str | None, problem: str, tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text(listed)
    if codes is not None:
        (tmp_path / "bpecodes").write_text(codes)
    with pytest.raises(CheckpointError, match=problem):
        tokenizer_json(tmp_path / "dict.txt", spec(9, **FAIRSEQ_IDS))


# Parts of a tokenizer, and tokenizers of other models


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("merges.txt", "#version: 0.2\nt h\nth e\n", "has only merges, as a merges.txt.*give the directory"),
        ("merges.txt", "t h\nth e\nĠ the\n", "has only merges, as a merges.txt"),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE"}}), "is not a valid tokenizer.json"),
        ("tokenizer.json", '{"model": {"ty', "cannot be read"),
    ],
)
def test_a_part_of_a_tokenizer_is_refused(name: str, content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        import_text(Tokenizers(tmp_path / name), TextConfig(), None, spec(10), has_own_weights=False)


def word_level(count: int) -> Inner:
    return Inner(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w3"))


@pytest.mark.parametrize(
    ("count", "size", "result"),
    [
        (32_100, 32_128, None),  # padded to a multiple, as T5
        (10, 200, None),
        (9_500, 10_000, None),
        (8_000, 10_000, "warning"),
        (4_999, 10_000, "refused"),
    ],
)
@pytest.mark.parametrize("side", [None, "source", "target"])
def test_too_few_ids(count: int, size: int, result: str | None, side: Side | None) -> None:
    raw = word_level(count).to_str().encode()
    if result == "refused":
        with pytest.raises(CheckpointError, match=f"has {count} ids, the model's {side or 'source'}_vocab is {size}"):
            check_coverage(raw, Path("t"), spec(size), side)
        return
    found = check_coverage(raw, Path("t"), spec(size), side)
    assert found.startswith("warning: tokenizer t: has") == (result == "warning")
    assert bool(found) == (result is not None)


def test_an_import_passes_the_warning_on(tmp_path: Path) -> None:
    word_level(800).save(str(tmp_path / "t.json"))
    found = import_text(Tokenizers(tmp_path / "t.json"), TextConfig(), None, spec(1200, unk=3), has_own_weights=False)
    assert any("has 800 ids, the model's source_vocab is 1200" in note for note in found.notes)
