"""The tokenizer of a Hugging Face directory, in whichever files it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tfexport.checkpoint.formats.hugging_face_weights import T5_FAMILIES
from tfexport.checkpoint.formats.languages import M2M100, MBART, MBART_50
from tfexport.checkpoint.formats.spm import read_sentencepiece, with_ids
from tfexport.checkpoint.formats.vocabulary import read_vocabulary, tokenizer_json
from tfexport.errors import CheckpointError, ConfigError
from tfexport.files.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.files.strict_json import parse_json, read_json
from tfexport.models.config import TransformerConfig

Ids = tuple[int, ...]
_BYTE_SPACE = "Ġ"  # how byte-level vocabularies write a space


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizers, and what transformers puts around what they make of a source.

    Attributes:
        files: one tokenizer.json a side, by name.
        names: of the files that they were made from.
        source_prefix: ids before a source.
        source_suffix: ids behind it.
        notes: what the caller should know.
    """

    files: Mapping[str, bytes]
    names: tuple[str, ...]
    source_prefix: Ids = ()
    source_suffix: Ids = ()
    notes: tuple[str, ...] = ()


def tokenizer_files(directory: Path, config: TransformerConfig) -> TokenizerFiles | None:
    """Read the tokenizer of a directory as transformers reads it.

    Args:
        directory: with a tokenizer.json, or the files of Marian, M2M100, mBART, T5, PEGASUS, BART or Blenderbot.
        config: of the model.

    Returns:
        One or two tokenizers; None where there is no file of any.

    Raises:
        CheckpointError: a file is damaged or does not fit, or there is a part alone.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    for names, read in _FORMATS.items():
        if all((directory / name).is_file() for name in names):
            return read(directory, config)
    parts = [name for name in _PARTS if (directory / name).is_file()]
    if not parts:
        return None
    whole = "; ".join(" + ".join(names) for names in _FORMATS)
    raise CheckpointError(f"tokenizer {directory}: has {', '.join(parts)} alone, expected one of {whole}")


def _own(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    return TokenizerFiles({TOKENIZER: tokenizer_json(directory / TOKENIZER, config)}, (TOKENIZER,))


def _marian(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """Two SentencePiece models whose pieces have the ids of vocab.json."""
    names = ["source.spm", "target.spm", "vocab.json"]
    ids = _ids(directory / "vocab.json")
    target_ids = ids
    if _settings(directory).get("separate_vocabs"):
        names.append("target_vocab.json")
        target_ids = _ids(directory / "target_vocab.json")
    files = {}
    for name, spm, own in ((TOKENIZER, "source.spm", ids), (TARGET_TOKENIZER, "target.spm", target_ids)):
        path = directory / spm
        # A source begins with its target language, where a model has several.
        languages = [token for token in own if token.startswith(">>") and token.endswith("<<")]
        proto = read_sentencepiece(read_vocabulary(path), path)
        inner = with_ids(proto, own, ("<pad>", "</s>"), "<unk>", whole=languages)
        files[name] = _json(inner)
    return TokenizerFiles(files, tuple(names), source_suffix=(config.tokens.eos,))


def _m2m100(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """A SentencePiece model whose pieces have the ids of vocab.json, and languages behind them."""
    ids = _ids(directory / "vocab.json")
    if (codes := _settings(directory).get("language_codes", "m2m100")) != "m2m100":
        raise CheckpointError(
            f"tokenizer {directory}: language_codes is {codes!r}, expected 'm2m100'; give {TOKENIZER}"
        )
    languages = {f"__{language}__": len(ids) + i for i, language in enumerate(M2M100)}
    files = _multilingual(directory, {**ids, **languages}, tuple(languages))
    language = _settings(directory).get("src_lang") or "en"
    prefix = _language(directory, f"__{language}__", languages)
    note = f"the source language is {language}: --source-prefix {prefix} says so, give the id of another"
    return TokenizerFiles(
        files, (_SPM_BPE, "vocab.json"), source_prefix=(prefix,), source_suffix=(config.tokens.eos,), notes=(note,)
    )


def _mbart(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """A SentencePiece model whose ids are one larger in the model, as fairseq has them, and languages behind them."""
    if (kind := _kind(directory)) != "mbart":
        raise CheckpointError(
            f"tokenizer {directory}: the languages of {_SPM_BPE} for {kind or 'an unknown family'} are in no file; "
            f"give the {TOKENIZER} that AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
        )
    proto = read_sentencepiece(read_vocabulary(directory / _SPM_BPE), directory / _SPM_BPE)
    count = len(proto.pieces)
    is_later = config.source_vocab >= count + 2 + len(MBART_50)
    known = MBART_50 if is_later else MBART
    languages = {language: count + 1 + i for i, language in enumerate(known)}
    ids = {piece.piece: i + 1 for i, piece in enumerate(proto.pieces) if i > 2}
    ids |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **languages, "<mask>": count + 1 + len(known)}
    files = _multilingual(directory, ids, (*languages, "<mask>"))
    language = _settings(directory).get("src_lang") or "en_XX"
    own, eos = _language(directory, language, languages), config.tokens.eos
    prefix, suffix = ((own,), (eos,)) if is_later else ((), (eos, own))
    option = f"--source-prefix {own}" if is_later else f"--source-suffix {eos},{own}"
    note = f"the source language is {language}: {option} says so, give the id of another"
    return TokenizerFiles(files, (_SPM_BPE,), source_prefix=prefix, source_suffix=suffix, notes=(note,))


def _spiece(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """The SentencePiece model of T5, or that of PEGASUS, whose ids are 103 larger in the model."""
    path, kind, suffix = directory / _SPIECE, _kind(directory), (config.tokens.eos,)
    if kind in T5_FAMILIES:
        return TokenizerFiles({TOKENIZER: tokenizer_json(path, config)}, (_SPIECE,), source_suffix=suffix)
    if kind != "pegasus":
        raise CheckpointError(
            f"tokenizer {path}: the ids of {kind or 'an unknown family'} are not known; give {TOKENIZER}"
        )
    proto = read_sentencepiece(read_vocabulary(path), path)
    meanings = {"<pad>": 0, "</s>": 1, "<mask_1>": 2, "<mask_2>": 3, **{f"<unk_{i}>": i + 2 for i in range(2, 103)}}
    ids = {piece.piece: i + 103 for i, piece in enumerate(proto.pieces) if i > 1} | meanings
    return TokenizerFiles(
        {TOKENIZER: _json(with_ids(proto, ids, tuple(meanings), "<unk>"))}, (_SPIECE,), source_suffix=suffix
    )


def _byte_level(directory: Path, config: TransformerConfig) -> TokenizerFiles:
    """Byte-pair encoding of bytes, as GPT-2, BART and Blenderbot have it."""
    ids, kind = _ids(directory / "vocab.json"), _kind(directory)
    if not any(token.startswith(_BYTE_SPACE) for token in ids):
        raise CheckpointError(
            f"tokenizer {directory}: vocab.json has no byte-level tokens, which begin with {_BYTE_SPACE!r} behind a "
            f"space; give the {TOKENIZER} of this model"
        )
    lines = read_vocabulary(directory / "merges.txt").decode("utf-8").split("\n")
    pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    try:
        inner = Inner(models.BPE(ids, pairs))
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"tokenizer {directory / 'merges.txt'}: does not fit vocab.json ({error})") from error
    spaced = _settings(directory).get("add_prefix_space", kind == "blenderbot")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(spaced))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if token in ids])
    prefix = (ids["<s>"],) if "<s>" in ids and kind != "blenderbot" else ()
    return TokenizerFiles(
        {TOKENIZER: _json(inner)},
        ("vocab.json", "merges.txt"),
        source_prefix=prefix,
        source_suffix=(config.tokens.eos,),
    )


_SPIECE, _SPM_BPE = "spiece.model", "sentencepiece.bpe.model"
# The files of each format, the first that are all there are read.
_FORMATS: dict[tuple[str, ...], Callable[[Path, TransformerConfig], TokenizerFiles]] = {
    (TOKENIZER,): _own,
    ("source.spm", "target.spm", "vocab.json"): _marian,
    (_SPM_BPE, "vocab.json"): _m2m100,
    (_SPM_BPE,): _mbart,
    (_SPIECE,): _spiece,
    ("vocab.json", "merges.txt"): _byte_level,
}
_PARTS = ("source.spm", "target.spm", "vocab.json", "merges.txt", "vocab.txt")


def _multilingual(directory: Path, ids: Mapping[str, int], special: tuple[str, ...]) -> dict[str, bytes]:
    path = directory / _SPM_BPE
    proto = read_sentencepiece(read_vocabulary(path), path)
    return {TOKENIZER: _json(with_ids(proto, ids, ("<s>", "<pad>", "</s>", *special), "<unk>"))}


def _language(directory: Path, token: str, ids: Mapping[str, int]) -> int:
    if token not in ids:
        raise CheckpointError(f"tokenizer {directory}: src_lang {token} is none of {', '.join(ids)}")
    return ids[token]


def _json(inner: Inner) -> bytes:
    return inner.to_str(pretty=True).encode()


def _ids(path: Path) -> dict[str, int]:
    """Read a vocab.json: the id of each token."""
    try:
        ids = parse_json(read_vocabulary(path))
    except ValueError as error:
        raise CheckpointError(f"tokenizer {path}: is no JSON ({error})") from error
    whole = isinstance(ids, dict) and all(type(i) is int and i >= 0 for i in ids.values())
    if not whole or len(set(ids.values())) < len(ids) or not ids:
        raise CheckpointError(f"tokenizer {path}: expected tokens with an id of its own each")
    if "<unk>" not in ids:
        raise CheckpointError(f"tokenizer {path}: has no token <unk>")
    return dict(ids)


def _kind(directory: Path) -> str:
    """Return the family that a directory's config.json names, or that of its tokenizer; empty where neither does."""
    if name := _settings(directory, "config.json").get("model_type"):
        return str(name)
    name = str(_settings(directory).get("tokenizer_class") or "")
    return name.removesuffix("Fast").removesuffix("Tokenizer").removesuffix("50").lower()


def _settings(directory: Path, name: str = "tokenizer_config.json") -> Mapping[str, Any]:
    if not (directory / name).is_file():
        return {}
    try:
        found = read_json(directory / name, name)
    except ConfigError as error:
        raise CheckpointError(f"tokenizer {directory}: {error}") from error
    return found if isinstance(found, dict) else {}
