"""Define M2M100 and NLLB, whose ids differ from those of SentencePiece.

The languages follow the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner

from tfexport._io.names import TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, shortened
from tfexport.importing.huggingface._bart import bart_like
from tfexport.importing.huggingface.tokenizer import need_transformers, read_ids, read_json_object, surround
from tfexport.importing.vocabulary import SPM_BPE, read_sentencepiece, with_ids


def _convert(directory: Path, spec: ModelSpec) -> dict[str, Inner]:
    settings = read_json_object(directory / "tokenizer_config.json")
    proto = read_sentencepiece(directory / SPM_BPE)
    transformers = need_transformers(directory / SPM_BPE)
    if (directory / "vocab.json").is_file():
        if (codes := settings.get("language_codes", "m2m100")) != "m2m100":
            raise CheckpointError(
                f"tokenizer {directory}: language_codes is {codes!r}, expected 'm2m100'; give {TOKENIZER}"
            )
        known = transformers.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
        ids = read_ids(directory / "vocab.json")
        added = {f"__{language}__": len(ids) + i for i, language in enumerate(known)}
        source: Any = f"__{settings.get('src_lang') or 'en'}__"
    else:
        # The NLLB tokenizer of transformers 5 orders the languages differently than the published models.
        known = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
        first = len(proto.pieces) + 1
        ids = {piece.piece: i + 1 for i, piece in enumerate(proto.pieces) if i > 2}
        ids |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
        added = {token: first + i for i, token in enumerate([*known, "<mask>"])}
        added |= _added_later(directory, settings, first, spec.source_vocab)
        source = settings.get("src_lang") or "eng_Latn"
    inner = with_ids(proto, {**ids, **added}, ("<s>", "<pad>", "</s>", *added), "<unk>")
    if not isinstance(source, str) or source not in added:
        raise CheckpointError(
            f"tokenizer {directory}: src_lang is {shortened(source)}, expected one of {', '.join(added)}"
        )
    language, eos = added[source], spec.tokens.eos
    is_legacy = bool(settings.get("legacy_behaviour"))
    surround(inner, () if is_legacy else (language,), (eos, language) if is_legacy else (eos,))
    return {TOKENIZER: inner}


def _added_later(directory: Path, settings: Mapping[str, Any], first: int, limit: int) -> dict[str, int]:
    try:
        found = {str(token): int(i) for token, i in read_json_object(directory / "added_tokens.json").items()}
        found |= {str(token["content"]): int(i) for i, token in (settings.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer {directory}: added tokens are damaged, expected ids and contents; save the tokenizer again"
        ) from error
    return {token: i for token, i in found.items() if first <= i < limit}


FAMILIES = (
    bart_like("m2m_100", "M2M100Tokenizer", "NllbTokenizer", convert=_convert, tokenizer_files=(SPM_BPE, "vocab.json")),
)
