"""Define BART, mBART, PEGASUS, Blenderbot, Marian (opus-mt), M2M100 and NLLB."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner

from tfexport._io.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import shortened
from tfexport.importing.huggingface import Family, Reader
from tfexport.importing.huggingface.tokenizer import need_transformers, read_ids, read_json_object, stripped, surround
from tfexport.importing.vocabulary import SPM_BPE, read_sentencepiece, tokenizer_error, with_ids
from tfexport.nn.switches import Value

# Keys of published files that only fairseq or ParlAI reads.
_UNREAD = (
    *("add_bias_logits", "add_final_layer_norm", "do_blenderbot_90_layernorm", "extra_layer_norm"),
    *("extra_pos_embeddings", "layernorm_variant", "normalize_before", "normalize_embedding"),
    "static_position_embeddings",
)
# Values of transformers for keys that a config.json may lack.
_DEFAULTS = {"encoder_layers": 12, "decoder_layers": 12, "activation_function": "gelu", "scale_embedding": False}
_PLBART = {**_DEFAULTS, "encoder_layers": 6, "decoder_layers": 6, "scale_embedding": True}
_RELU = {**_DEFAULTS, "activation_function": "relu", "scale_embedding": True}
_UNUSED = ("model.*coder.version", "model.*coder.embed_positions.weights")
_M2M100, _M2M100_FILES = ("M2M100Tokenizer", "NllbTokenizer"), (SPM_BPE, "vocab.json")
_MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")


def _family(model_type: str, *tokenizers: str, layout: str = "", **more: Any) -> Family:
    """Return a family with BART's config.json."""
    more = {"defaults": _DEFAULTS, "unread": _UNREAD, "unused": _UNUSED, **more}
    return Family(model_type, lambda _: layout or f"hf_{model_type}", _settings, tokenizers, **more)


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    config = reader.config
    for side in ("encoder", "decoder"):
        reader.check_layers(f"{side}_layers", side, keys)
    found: dict[str, Value] = {
        "embedding_scale": "sqrt(d_model)" if config.get("scale_embedding") else 1.0,
        "num_heads": reader.whole("encoder_attention_heads"),
    }
    found |= reader.activation("activation_function", config["activation_function"])
    if config.get("decoder_attention_heads") != found["num_heads"]:
        found["dec.num_heads"] = reader.whole("decoder_attention_heads")
    if not any(key.endswith("encoder.embed_positions.weight") for key in keys):
        found["max_length"] = reader.whole("max_position_embeddings")
    return found


def _convert_marian(directory: Path, spec: ModelSpec) -> dict[str, Inner]:
    ids = target_ids = read_ids(directory / "vocab.json")
    if read_json_object(directory / "tokenizer_config.json").get("separate_vocabs"):
        target_ids = read_ids(directory / "target_vocab.json")
    files = {}
    for name, spm, own in ((TOKENIZER, "source.spm", ids), (TARGET_TOKENIZER, "target.spm", target_ids)):
        # A source begins with its target language if a model has several.
        languages = [token for token in own if token.startswith(">>") and token.endswith("<<")]
        proto = read_sentencepiece(directory / spm)
        files[name] = stripped(with_ids(proto, own, ("<pad>", "</s>", "<unk>"), "<unk>", whole=languages))
    surround(files[TOKENIZER], (), (spec.tokens.eos,))
    return files


def _convert_m2m100(directory: Path, spec: ModelSpec) -> dict[str, Inner]:
    settings = read_json_object(directory / "tokenizer_config.json")
    proto = read_sentencepiece(directory / SPM_BPE)
    transformers = need_transformers(directory / SPM_BPE)
    if (directory / "vocab.json").is_file():
        if (codes := settings.get("language_codes", "m2m100")) != "m2m100":
            raise tokenizer_error(directory, f"language_codes is {codes!r}, expected 'm2m100'")
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
    inner = with_ids(proto, {**ids, **added}, ("<s>", "<pad>", "</s>", "<unk>", *added), "<unk>")
    if (directory / "vocab.json").is_file():
        inner = stripped(inner)
    if not isinstance(source, str) or source not in added:
        problem = f"src_lang is {shortened(source)}, expected one of {', '.join(added)}"
        raise tokenizer_error(directory, f"{problem}")
    language, eos = added[source], spec.tokens.eos
    around = ((), (eos, language)) if settings.get("legacy_behaviour") else ((language,), (eos,))
    surround(inner, *around)
    return {TOKENIZER: inner}


def _added_later(directory: Path, settings: Mapping[str, Any], first: int, limit: int) -> dict[str, int]:
    try:
        found = {str(token): int(i) for token, i in read_json_object(directory / "added_tokens.json").items()}
        found |= {str(token["content"]): int(i) for i, token in (settings.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = "added tokens are invalid, expected ids and contents; save the tokenizer again"
        raise tokenizer_error(directory, problem) from error
    return {token: i for token, i in found.items() if first <= i < limit}


FAMILIES = (
    _family("bart", "BartTokenizer"),
    _family("mbart", "MBartTokenizer", "MBart50Tokenizer"),
    _family("mvp", "MvpTokenizer", layout="hf_bart"),
    _family("plbart", "PLBartTokenizer", layout="hf_bart", defaults=_PLBART),
    _family("pegasus", "PegasusTokenizer"),
    _family("blenderbot", "BlenderbotTokenizer", defaults=_DEFAULTS | {"encoder_layers": 2, "decoder_layers": 24}),
    _family("m2m_100", *_M2M100, defaults=_RELU, convert=_convert_m2m100, tokenizer_files=_M2M100_FILES),
    _family("marian", "MarianTokenizer", convert=_convert_marian, tokenizer_files=_MARIAN_FILES),
)
