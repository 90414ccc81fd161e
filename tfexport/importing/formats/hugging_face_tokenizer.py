"""The tokenizer of a Hugging Face directory, in whichever files it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tfexport._io.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError
from tfexport.importing.formats.hugging_face_weights import T5_FAMILIES
from tfexport.importing.formats.multilingual import SPM_BPE, fairseq, m2m100
from tfexport.importing.formats.spm import read_sentencepiece, with_ids
from tfexport.importing.formats.tokenizer_parts import TokenizerFiles, as_json, family_of, read_ids, read_settings
from tfexport.importing.formats.vocabulary import read_vocabulary, tokenizer_json
from tfexport.text.vocabulary import border

_BYTE_SPACE = "Ġ"  # how byte-level vocabularies write a space


def tokenizer_files(directory: Path, spec: ModelSpec) -> TokenizerFiles | None:
    """Read the tokenizer of a directory as transformers reads it.

    Args:
        directory: with a tokenizer.json, or the files of Marian, M2M100, mBART, NLLB, T5, PEGASUS, BART or Blenderbot.
        spec: of the model.

    Returns:
        One or two tokenizers; None where there is no file of any.

    Raises:
        CheckpointError: a file is damaged or does not fit, or there is a part alone.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    for names, read in _FORMATS.items():
        if all((directory / name).is_file() for name in names):
            with border(partial(_unreadable, directory)):
                return read(directory, spec)
    parts = [name for name in _PARTS if (directory / name).is_file()]
    if not parts:
        return None
    whole = "; ".join(" + ".join(names) for names in _FORMATS)
    raise CheckpointError(f"tokenizer {directory}: has {', '.join(parts)} alone, expected one of {whole}")


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"tokenizer {path}: cannot be read ({reason}); download or save it again")


def _own(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    return TokenizerFiles({TOKENIZER: tokenizer_json(directory / TOKENIZER, spec)}, (TOKENIZER,))


def _marian(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    """Two SentencePiece models whose pieces have the ids of vocab.json."""
    names = ["source.spm", "target.spm", "vocab.json"]
    ids = read_ids(directory / "vocab.json")
    target_ids = ids
    if read_settings(directory).get("separate_vocabs"):
        names.append("target_vocab.json")
        target_ids = read_ids(directory / "target_vocab.json")
    files = {}
    for name, spm, own in ((TOKENIZER, "source.spm", ids), (TARGET_TOKENIZER, "target.spm", target_ids)):
        path = directory / spm
        # A source begins with its target language, where a model has several.
        languages = [token for token in own if token.startswith(">>") and token.endswith("<<")]
        proto = read_sentencepiece(read_vocabulary(path), path)
        inner = with_ids(proto, own, ("<pad>", "</s>"), "<unk>", whole=languages)
        files[name] = as_json(inner)
    return TokenizerFiles(files, tuple(names), source_suffix=(spec.tokens.eos,))


def _spiece(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    """The SentencePiece model of T5, or that of PEGASUS, whose ids are 103 larger in the model."""
    path, kind, suffix = directory / _SPIECE, family_of(directory), (spec.tokens.eos,)
    if kind in T5_FAMILIES:
        return TokenizerFiles({TOKENIZER: tokenizer_json(path, spec)}, (_SPIECE,), source_suffix=suffix)
    if kind != "pegasus":
        raise CheckpointError(
            f"tokenizer {path}: the ids of {kind or 'an unknown family'} are not known; give {TOKENIZER}"
        )
    proto = read_sentencepiece(read_vocabulary(path), path)
    meanings = {"<pad>": 0, "</s>": 1, "<mask_1>": 2, "<mask_2>": 3, **{f"<unk_{i}>": i + 2 for i in range(2, 103)}}
    ids = {piece.piece: i + 103 for i, piece in enumerate(proto.pieces) if i > 1} | meanings
    return TokenizerFiles(
        {TOKENIZER: as_json(with_ids(proto, ids, tuple(meanings), "<unk>"))}, (_SPIECE,), source_suffix=suffix
    )


def _byte_level(directory: Path, spec: ModelSpec) -> TokenizerFiles:
    """Byte-pair encoding of bytes, as GPT-2, BART and Blenderbot have it."""
    ids, kind = read_ids(directory / "vocab.json"), family_of(directory)
    if not any(token.startswith(_BYTE_SPACE) for token in ids):
        raise CheckpointError(
            f"tokenizer {directory}: vocab.json has no byte-level tokens, which begin with {_BYTE_SPACE!r} behind a "
            f"space; give the {TOKENIZER} of this model"
        )
    merges = directory / "merges.txt"
    lines = read_vocabulary(merges).decode("utf-8").split("\n")
    pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    with border(lambda reason: CheckpointError(f"tokenizer {merges}: does not fit vocab.json ({reason})")):
        inner = Inner(models.BPE(ids, pairs))
    spaced = read_settings(directory).get("add_prefix_space", kind == "blenderbot")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(spaced))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if token in ids])
    prefix = (ids["<s>"],) if "<s>" in ids and kind != "blenderbot" else ()
    return TokenizerFiles(
        {TOKENIZER: as_json(inner)},
        ("vocab.json", "merges.txt"),
        source_prefix=prefix,
        source_suffix=(spec.tokens.eos,),
    )


_SPIECE = "spiece.model"
# The files of each format, the first that are all there are read.
_FORMATS: dict[tuple[str, ...], Callable[[Path, ModelSpec], TokenizerFiles]] = {
    (TOKENIZER,): _own,
    ("source.spm", "target.spm", "vocab.json"): _marian,
    (SPM_BPE, "vocab.json"): m2m100,
    (SPM_BPE,): fairseq,
    (_SPIECE,): _spiece,
    ("vocab.json", "merges.txt"): _byte_level,
}
_PARTS = ("source.spm", "target.spm", "vocab.json", "merges.txt", "vocab.txt")
