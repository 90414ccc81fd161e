"""Directories of six families, in the files that were published: text in, ids and text out as transformers does."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import ByteLevelBPETokenizer, models, pre_tokenizers
from tokenizers import Tokenizer as Inner
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from tests import tiny
from tests.importing.huggingface.odd_texts import LINES, odd_texts
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, InputError
from tfexport.importing.text import Tokenizers, import_text
from tfexport.nn.config import model_spec
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")


def train(path: Path, kind: str = "unigram", lines: list[str] = LINES, **options: Any) -> list[str]:
    """Train a SentencePiece model and return its pieces."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(path),
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 300, **options},
    )
    path.with_name(path.name + ".model").rename(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


VISION = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}, "decoder": {"model_type": "trocr"}}


def write(folder: Path, **files: Any) -> None:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


def spec(size: int, **tokens: int) -> ModelSpec:
    made = replace(tiny.config(), source_vocab=size, target_vocab=size, max_source_length=2000, max_target_length=2000)
    return model_spec(replace(made, tokens=replace(made.tokens, **tokens)), "fp32")


def marian(folder: Path, *, kind: str = "unigram", separate: bool = False) -> tuple[Any, ModelSpec]:
    """A shared vocabulary has the pieces of both sides, but those that are rare, as Marian's vocabularies have."""
    source = train(folder / "source.spm", kind)
    target = train(folder / "target.spm", kind, [line.upper().replace("J", "Ä") for line in LINES])
    ours = [piece for piece in [*source[3::2], *source[4::2]] if piece not in source[50:60]]
    theirs = [piece for piece in target[3:] if separate or piece not in ours]
    sides = [["</s>", "<unk>", *ours, "<pad>"], ["</s>", "<unk>", *theirs, "<pad>"]]
    if not separate:
        sides = [["</s>", "<unk>", ">>fra<<", *ours, *theirs, "<pad>"]]
    ids = [{piece: i for i, piece in enumerate(side)} for side in sides]
    write(folder, vocab=ids[0], config={"model_type": "marian"}, tokenizer_config={"separate_vocabs": separate})
    if separate:
        write(folder, target_vocab=ids[1])
    found = spec(len(ids[0]), pad=len(ids[0]) - 1, eos=0, unk=1, start=len(ids[0]) - 1)
    if separate:
        found = replace(found, vocab=len(ids[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
        more = {"target_vocab_file": str(folder / "target_vocab.json"), "separate_vocabs": True} if separate else {}
        return transformers.MarianTokenizer(*files, **more), found


def bart(folder: Path) -> tuple[Any, ModelSpec]:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        LINES, 400, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False
    )
    trained.save_model(str(folder))
    write(folder, config={"model_type": "bart"})
    return transformers.BartTokenizer.from_pretrained(folder), spec(400, pad=1, start=2, eos=2, unk=3)


def t5(folder: Path) -> tuple[Any, ModelSpec]:
    count = len(train(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    write(folder, config={"model_type": "t5"})
    return transformers.T5Tokenizer.from_pretrained(folder), spec(count + 128, pad=0, start=0, eos=1, unk=2)


def m2m100(folder: Path) -> tuple[Any, ModelSpec]:
    pieces = train(folder / "sentencepiece.bpe.model", "bpe")
    ids = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces[:40:-1]])}
    write(folder, vocab=ids, config={"model_type": "m2m_100"}, tokenizer_config={"src_lang": "de"})
    languages = [f"__{language}__" for language in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    theirs = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"),
        str(folder / "sentencepiece.bpe.model"),
        src_lang="de",
        tgt_lang="fr",
        additional_special_tokens=languages,
    )
    return theirs, spec(len(ids) + 108, pad=1, start=2, eos=2, unk=3)


def trocr(folder: Path) -> tuple[Any, ModelSpec]:
    bart(folder)
    write(folder, config=VISION, tokenizer_config={"tokenizer_class": "RobertaTokenizer"})
    return transformers.RobertaTokenizer.from_pretrained(folder), spec(400, pad=1, start=2, eos=2, unk=3)


def trocr_small(folder: Path) -> tuple[Any, ModelSpec]:
    count = len(train(folder / "sentencepiece.bpe.model"))
    write(folder, config=VISION, tokenizer_config={"tokenizer_class": "XLMRobertaTokenizer"})
    return transformers.XLMRobertaTokenizer.from_pretrained(folder), spec(count + 2, pad=1, start=2, eos=2, unk=3)


FAMILIES: dict[str, Callable[[Path], tuple[Any, ModelSpec]]] = {
    "marian": marian,
    "marian of BPE": lambda folder: marian(folder, kind="bpe"),
    "marian, separate": lambda folder: marian(folder, separate=True),
    "bart": bart,
    "t5": t5,
    "m2m100": m2m100,
    "trocr": trocr,
    "trocr-small": trocr_small,
}
WITH_SETTINGS = [name for name in FAMILIES if name not in ("bart", "t5")]


def imported(folder: Path, found: ModelSpec, output: Path) -> Tokenizer:
    text = import_text(Tokenizers(folder), TextConfig(), None, found, has_own_weights=False)
    output.mkdir()
    for name, raw in text.files.items():
        (output / name).write_bytes(raw)
    target = output / "target_tokenizer.json"
    return Tokenizer.load(
        output / "tokenizer.json",
        found,
        target=target if target.exists() else None,
        text=TextConfig.from_dict(json.loads(text.files["text.json"])),
    )


def is_of_the_other_side(theirs: Any, text: str) -> bool:
    """Say whether a text has characters that the source's model does not know, and that the target alone has."""
    if not isinstance(theirs, transformers.MarianTokenizer):
        return False
    spm = theirs.spm_source
    return any(
        spm.piece_to_id(piece) == spm.unk_id() and piece in theirs.encoder for piece in spm.encode(text, out_type=str)
    )


def encoded(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return its ids, None where it has nothing that the vocabulary knows, which is refused."""
    try:
        return tokenizer.encode([text])[0]
    except InputError:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_decoded_text_equal_transformers(family: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    theirs, found = FAMILIES[family](tmp_path / "hf")
    ours = imported(tmp_path / "hf", found, tmp_path / "ours")
    texts = [text for text in odd_texts() if not is_of_the_other_side(theirs, text)]
    assert len(texts) > 195
    pairs = [(text, theirs(text).input_ids, encoded(ours, text)) for text in texts]
    different = [pair for pair in pairs if pair[2] is not None and pair[1] != pair[2]]
    assert not different, (len(different), different[:3])
    assert sum(ids is not None for _, _, ids in pairs) > 190
    rows = [theirs(text_target=text).input_ids for text in [*texts, *(text.upper() for text in texts)]]
    assert family in ("bart", "trocr") or sum(theirs.unk_token_id in ids for ids in rows) > 100
    assert [ours.decode(ids) for ids in rows] == [theirs.decode(ids, skip_special_tokens=True) for ids in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_spaces_before_punctuation_are_removed_if_the_settings_say_so(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    theirs, found = FAMILIES[family](folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) if family in WITH_SETTINGS else {}
    write(folder, tokenizer_config={**settings, "clean_up_tokenization_spaces": True})
    theirs.clean_up_tokenization_spaces = True
    ours, texts = imported(folder, found, tmp_path / "ours"), ["the ? the ! the , don ' t the n't", *odd_texts()]
    rows = [theirs(text_target=text).input_ids for text in texts]
    assert [ours.decode(ids) for ids in rows] == [theirs.decode(ids, skip_special_tokens=True) for ids in rows]


@pytest.mark.parametrize(
    "settings",
    [
        {"unk_token": "<unk>", "extra_special_tokens": ["the"]},
        {"additional_special_tokens": ["of"], "added_tokens_decoder": {}},
        {"clean_up_tokenization_spaces": True},
    ],
)
def test_special_tokens_that_only_the_settings_name(settings: dict[str, Any], tmp_path: Path) -> None:
    words = ["<pad>", "<s>", "</s>", "<unk>", "<x>", *sorted({word for line in LINES for word in line.split()})]
    inner = Inner(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, config={"model_type": "odd"}, special_tokens_map={"mask_token": {"content": "<x>"}})
    write(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = imported(tmp_path, spec(len(words), pad=0, start=1, eos=2, unk=3), tmp_path / "ours")
    rows = [[i for i in theirs(f"{text} of . , the <x> x").input_ids if i > 2] for text in odd_texts()]
    assert [ours.decode(ids) for ids in rows] == [theirs.decode(ids, skip_special_tokens=True) for ids in rows]


def test_a_text_for_marian_begins_with_its_target_language(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    theirs, found = marian(tmp_path / "hf")
    ours = imported(tmp_path / "hf", found, tmp_path / "ours")
    for text in (">>fra<< the tokenizer", ">>fra<<the  tokenizer "):
        assert ours.encode([text]) == [theirs(text).input_ids], text
    assert ours.encode([">>fra<< the"])[0][0] == 2


def is_plain(text: str) -> bool:
    """Return whether transformers 5 reads a text as SentencePiece does: it keeps white space at the ends."""
    return text.strip(" \t\n\r\u200b\ufeff\u2581") == text and "\u200b" not in text and "\ufeff" not in text


def assert_ids_of_sentencepiece(
    folder: Path, name: str, found: ModelSpec, wanted: Callable[[list[int]], list[int]]
) -> None:
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
    ours = imported(folder, found, folder / "ours")
    plain = [text for text in odd_texts() if is_plain(text) and encoded(ours, text) is not None]
    assert len(plain) > 170
    assert [encoded(ours, text) for text in plain] == [wanted(spm.encode(text)) for text in plain]


@pytest.mark.parametrize("version", ["", "50"])
def test_languages_of_mbart(version: str, tmp_path: Path) -> None:
    """Against SentencePiece itself, whose ids are one larger in the model."""
    count = len(train(tmp_path / "sentencepiece.bpe.model"))
    write(tmp_path, config={"model_type": "mbart"}, tokenizer_config={"src_lang": "de_DE"})
    if version:
        write(tmp_path, config={"model_type": "mbart", "tokenizer_class": "MBart50Tokenizer"})
    german = count + 1 + 2
    prefix, suffix = ([german], [2]) if version else ([], [2, german])
    found = spec(count + (54 if version else 27), pad=1, start=2, eos=2, unk=3)
    assert_ids_of_sentencepiece(
        tmp_path, "sentencepiece.bpe.model", found, lambda ids: [*prefix, *(i + 1 if i else 3 for i in ids), *suffix]
    )


def test_ids_of_pegasus(tmp_path: Path) -> None:
    """Against SentencePiece itself, whose ids are 103 larger in the model, but those of padding and end."""
    count = len(train(tmp_path / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    write(tmp_path, config={"model_type": "pegasus"})
    found = spec(count + 103, pad=0, start=0, eos=1, unk=105)
    assert_ids_of_sentencepiece(tmp_path, "spiece.model", found, lambda ids: [*(i + 103 for i in ids), 1])


def test_blenderbot_ends_its_sources(tmp_path: Path) -> None:
    """transformers 5 leaves the end out if it makes the tokenizer of vocab.json and merges.txt."""
    theirs, found = bart(tmp_path)
    write(tmp_path, config={"model_type": "blenderbot"})
    ours = imported(tmp_path, found, tmp_path / "ours")
    assert ours.encode(["the tokenizer"]) == [[*theirs(" the tokenizer").input_ids[1:-1], 2]]


@pytest.mark.parametrize(
    ("model_type", "settings", "problem"),
    [
        ("odd", {}, "no config.json with a known model_type"),
        ("mbart", {"tokenizer_class": "OddTokenizer"}, "cannot be read"),
        ("mbart", {"src_lang": ["de_DE"]}, "cannot be read"),
        ("mbart", {"src_lang": "de"}, "src_lang is 'de', expected one of its languages"),
        ("m2m_100", {"src_lang": "de"}, "src_lang is 'de', expected one of"),
    ],
)
def test_an_unknown_family_or_language_is_refused(
    model_type: str, settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    train(tmp_path / "sentencepiece.bpe.model")
    write(tmp_path, config={"model_type": model_type}, tokenizer_config=settings)
    with pytest.raises(CheckpointError, match=problem):
        imported(tmp_path, spec(300, pad=1, start=2, eos=2, unk=3), tmp_path / "ours")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["vocab.json"], "has vocab.json, but no config.json"),
        (["source.spm", "vocab.json"], "has source.spm, vocab.json, but no config.json"),
        (["spiece.model"], "has spiece.model, but no config.json"),
        (["vocab.json", "merges.txt"], "has vocab.json, merges.txt, but no config.json"),
        ([], "has no tokenizer file"),
    ],
)
def test_a_path_without_a_directory_is_refused(files: list[str], problem: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text(json.dumps({"<unk>": 0, "a": 1}))
    with pytest.raises(CheckpointError, match=problem):
        imported(tmp_path, spec(300), tmp_path / "ours")
