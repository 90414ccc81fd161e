"""Tokenizers of Hugging Face directories with languages: M2M100, mBART and mBART-50."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tfexport.checkpoint.formats.languages import M2M100, MBART, MBART_50
from tfexport.checkpoint.formats.spm import read_sentencepiece, with_ids
from tfexport.checkpoint.formats.tokenizer_parts import TokenizerFiles, as_json, family_of, read_ids, read_settings
from tfexport.checkpoint.formats.vocabulary import read_vocabulary
from tfexport.errors import CheckpointError
from tfexport.files.names import TOKENIZER
from tfexport.models.config import TransformerConfig

SPM_BPE = "sentencepiece.bpe.model"


def m2m100(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """A SentencePiece model whose pieces have the ids of vocab.json, and languages behind them."""
    ids = read_ids(directory / "vocab.json")
    if (codes := read_settings(directory).get("language_codes", "m2m100")) != "m2m100":
        raise CheckpointError(
            f"tokenizer {directory}: language_codes is {codes!r}, expected 'm2m100'; give {TOKENIZER}"
        )
    languages = {f"__{language}__": len(ids) + i for i, language in enumerate(M2M100)}
    files = _multilingual(directory, {**ids, **languages}, tuple(languages))
    language = read_settings(directory).get("src_lang") or "en"
    prefix = _language(directory, f"__{language}__", languages)
    note = f"the source language is {language}: --source-prefix {prefix} says so, give the id of another"
    return TokenizerFiles(
        files, (SPM_BPE, "vocab.json"), source_prefix=(prefix,), source_suffix=(config.tokens.eos,), notes=(note,)
    )


def mbart(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """A SentencePiece model whose ids are one larger in the model, as fairseq has them, and languages behind them."""
    if (kind := family_of(directory)) != "mbart":
        raise CheckpointError(
            f"tokenizer {directory}: the languages of {SPM_BPE} for {kind or 'an unknown family'} are in no file; "
            f"give the {TOKENIZER} that AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
        )
    proto = read_sentencepiece(read_vocabulary(directory / SPM_BPE), directory / SPM_BPE)
    count = len(proto.pieces)
    is_later = config.source_vocab >= count + 2 + len(MBART_50)
    known = MBART_50 if is_later else MBART
    languages = {language: count + 1 + i for i, language in enumerate(known)}
    ids = {piece.piece: i + 1 for i, piece in enumerate(proto.pieces) if i > 2}
    ids |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **languages, "<mask>": count + 1 + len(known)}
    files = _multilingual(directory, ids, (*languages, "<mask>"))
    language = read_settings(directory).get("src_lang") or "en_XX"
    own, eos = _language(directory, language, languages), config.tokens.eos
    prefix, suffix = ((own,), (eos,)) if is_later else ((), (eos, own))
    option = f"--source-prefix {own}" if is_later else f"--source-suffix {eos},{own}"
    note = f"the source language is {language}: {option} says so, give the id of another"
    return TokenizerFiles(files, (SPM_BPE,), source_prefix=prefix, source_suffix=suffix, notes=(note,))


def _multilingual(directory: Path, ids: Mapping[str, int], special: tuple[str, ...]) -> dict[str, bytes]:
    path = directory / SPM_BPE
    proto = read_sentencepiece(read_vocabulary(path), path)
    return {TOKENIZER: as_json(with_ids(proto, ids, ("<s>", "<pad>", "</s>", *special), "<unk>"))}


def _language(directory: Path, token: str, ids: Mapping[str, int]) -> int:
    if token not in ids:
        raise CheckpointError(f"tokenizer {directory}: src_lang {token} is none of {', '.join(ids)}")
    return ids[token]
