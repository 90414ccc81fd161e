"""Tokenizers of Hugging Face directories with languages: M2M100, mBART, mBART-50 and NLLB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tfexport._io.names import TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, shortened
from tfexport.importing.formats.languages import M2M100, MBART, MBART_50, NLLB
from tfexport.importing.formats.spm import read_sentencepiece, with_ids
from tfexport.importing.formats.tokenizer_parts import (
    Ids,
    TokenizerFiles,
    as_json,
    family_of,
    read_ids,
    read_settings,
    tokenizer_class,
)
from tfexport.importing.formats.vocabulary import read_vocabulary

SPM_BPE = "sentencepiece.bpe.model"
# Tokenizers of transformers whose ids are those of fairseq; without a name the family tells.
_FAIRSEQ = ("", "mbart", "mbart50", "nllb", "tokenizersbackend", "pretrained")


def m2m100(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    """A SentencePiece model whose pieces have the ids of vocab.json, and languages behind them."""
    ids = read_ids(directory / "vocab.json")
    if (codes := read_settings(directory).get("language_codes", "m2m100")) != "m2m100":
        raise CheckpointError(
            f"tokenizer {directory}: language_codes is {codes!r}, expected 'm2m100'; give {TOKENIZER}"
        )
    languages = {f"__{language}__": len(ids) + i for i, language in enumerate(M2M100)}
    files = _multilingual(directory, {**ids, **languages}, tuple(languages))
    language = read_settings(directory).get("src_lang") or "en"
    own = _language(directory, f"__{language}__", languages)
    return TokenizerFiles(files, (SPM_BPE, "vocab.json"), source_prefix=(own,), source_suffix=(spec.tokens.eos,))


def fairseq(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    """A SentencePiece model whose ids are one larger in the model, languages behind them, and what was added later."""
    family, kind = family_of(directory), tokenizer_class(directory)
    if family not in ("mbart", "m2m_100", "nllb") or kind not in _FAIRSEQ:
        raise CheckpointError(
            f"tokenizer {directory}: the ids of {SPM_BPE} for {kind or family or 'an unknown family'} are not known; "
            f"give the {TOKENIZER} that AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
        )
    proto = read_sentencepiece(read_vocabulary(directory / SPM_BPE), directory / SPM_BPE)
    count = len(proto.pieces)
    is_mbart = family == "mbart"
    is_later = spec.source_vocab >= count + 2 + len(MBART_50)
    known: Sequence[str] = NLLB if not is_mbart else MBART_50 if is_later else MBART
    languages = {language: count + 1 + i for i, language in enumerate(known)}
    added = {**languages, "<mask>": count + 1 + len(known), **_added(directory, count + 1, spec.source_vocab)}
    ids = {piece.piece: i + 1 for i, piece in enumerate(proto.pieces) if i > 2}
    ids |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **added}
    settings = read_settings(directory)
    own = _language(directory, settings.get("src_lang") or ("en_XX" if is_mbart else "eng_Latn"), added)
    is_behind = not is_later if is_mbart else bool(settings.get("legacy_behaviour"))
    prefix, suffix = _around(own, spec.tokens.eos, is_behind=is_behind)
    return TokenizerFiles(
        _multilingual(directory, ids, tuple(added)), (SPM_BPE,), source_prefix=prefix, source_suffix=suffix
    )


def _around(language: int, eos: int, *, is_behind: bool) -> tuple[Ids, Ids]:
    return ((), (eos, language)) if is_behind else ((language,), (eos,))


def _added(directory: Path, first: int, limit: int) -> dict[str, int]:
    """Read the tokens that somebody added behind the pieces; those of ids that the model lacks are left out."""
    decoder = read_settings(directory).get("added_tokens_decoder") or {}
    try:
        found = {str(token): int(i) for token, i in read_settings(directory, "added_tokens.json").items()}
        found |= {str(token["content"]): int(i) for i, token in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer {directory}: added tokens are damaged, expected ids and contents; save the tokenizer again"
        ) from error
    return {token: i for token, i in found.items() if first <= i < limit}


def _multilingual(directory: Path, ids: Mapping[str, int], special: tuple[str, ...]) -> dict[str, bytes]:
    path = directory / SPM_BPE
    proto = read_sentencepiece(read_vocabulary(path), path)
    return {TOKENIZER: as_json(with_ids(proto, ids, ("<s>", "<pad>", "</s>", *special), "<unk>"))}


def _language(directory: Path, token: object, ids: Mapping[str, int]) -> int:
    found = ids.get(token) if isinstance(token, str) else None
    if found is None:
        raise CheckpointError(
            f"tokenizer {directory}: src_lang is {shortened(token)}, expected one of {', '.join(ids)}"
        )
    return found
