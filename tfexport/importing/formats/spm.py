"""SentencePiece models as tokenizers of Hugging Face `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tfexport._io.extras import install_command
from tfexport.errors import BackendError, CheckpointError
from tfexport.text.vocabulary import BEYOND

SPACE = "▁"
# The types of SentencePiece's trainer and pieces, from its model format.
_UNIGRAM, _BPE = 1, 2
# SentencePiece makes pieces of at most 16 characters unless told otherwise.
MAX_PIECE = 256
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Before a token that no text shall become: white space is replaced before texts are split.
_HIDDEN = " "


def read_sentencepiece(raw: bytes, path: Path) -> Any:
    """Read a SentencePiece model.

    Args:
        raw: the file.
        path: of it, for messages.

    Returns:
        Its ModelProto, a unigram or a BPE model.

    Raises:
        CheckpointError: it is none.
        BackendError: the package `sentencepiece` is not installed.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise BackendError(
            f"tokenizer {path}: is no text; to read a SentencePiece model run: {install_command('sentencepiece')}"
        ) from error
    format_: Any = sentencepiece_model_pb2  # made by protobuf at run time, unknown to a type checker
    proto = format_.ModelProto()
    try:
        proto.ParseFromString(raw)
    except Exception as error:  # protobuf's own class, which may not be imported here
        raise CheckpointError(f"tokenizer {path}: is no SentencePiece model ({error}); give the .model file") from error
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE) or not proto.pieces:
        raise CheckpointError(f"tokenizer {path}: is neither a unigram nor a BPE model; give a tokenizer.json")
    if (longest := max(len(piece.piece) for piece in proto.pieces)) > MAX_PIECE:
        raise CheckpointError(f"tokenizer {path}: has a piece of {longest} characters, expected at most {MAX_PIECE}")
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        size = int.from_bytes(charsmap[:4], "little")  # of its trie, which the library allocates unasked
        if size > len(charsmap) - 4:
            raise CheckpointError(f"tokenizer {path}: has a damaged character map; download or save it again")
    return proto


def is_ordinary(piece: Any) -> bool:
    """Say whether a piece is one that texts are made of, and none with a meaning."""
    return bool(piece.type == _NORMAL)


def from_sentencepiece(proto: Any) -> Inner:
    """Return a tokenizer that says what the SentencePiece model says."""
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    inner = _around(_model(proto, pieces, pieces, proto.trainer_spec.unk_piece), proto)
    inner.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == _CONTROL])
    inner.add_tokens([piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED])
    return inner


def with_ids(proto: Any, ids: Mapping[str, int], special: Sequence[str], unk: str, whole: Sequence[str] = ()) -> Inner:
    """Return a tokenizer that splits as the SentencePiece model does and has the ids of another vocabulary.

    Args:
        proto: the SentencePiece model.
        ids: of all tokens, each once. What the model lacks of them is in no text, and is shown like its own.
        special: tokens among them that have a meaning.
        unk: the token for what is unknown, and for pieces that `ids` lacks.
        whole: tokens among them that a text may hold, such as languages, and that are never split.
    """
    own = {piece.piece: piece.score for piece in proto.pieces if piece.type not in (_CONTROL, _UNKNOWN)}
    seen = {*own, *special, *whole, unk}
    tokens = {i: token if token in seen else _HIDDEN + token for token, i in ids.items()}
    size = max(tokens) + 1
    names = [tokens.get(i, f"{_HIDDEN}{i}") for i in range(size)]
    if beyond := [piece for piece in own if piece not in ids]:
        names += [BEYOND, *beyond]
    inner = _around(_model(proto, [(name, own.get(name, 0.0)) for name in names], list(own.items()), unk), proto)
    inner.decoder = decoders.Sequence([decoders.Replace(_HIDDEN, ""), inner.decoder])
    inner.add_special_tokens([token for token in special if token in ids])
    inner.add_tokens([*whole, *(piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED)])
    return inner


def _around(model: Any, proto: Any) -> Inner:
    """Put around a model what SentencePiece does before and behind it."""
    inner = Inner(model)
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.remove_extra_whitespaces:
        # Only what is a space by now, and at the end what is spelled like one.
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    elif proto.normalizer_spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))  # before other spaces too, where Metaspace adds none
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
    scheme: Any = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    metaspace = decoders.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    is_bytes = proto.trainer_spec.byte_fallback
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if is_bytes else metaspace
    return inner


def _model(proto: Any, vocab: list[tuple[str, float]], own: list[tuple[str, float]], unk: str) -> Any:
    """Return the model with one token a place of `vocab`, whose texts consist of its `own` pieces."""
    spec = proto.trainer_spec
    ids = {piece: i for i, (piece, _) in enumerate(vocab)}
    if spec.model_type == _UNIGRAM:
        return models.Unigram(vocab, unk_id=ids[unk], byte_fallback=spec.byte_fallback)
    return models.BPE(ids, _merges(own), unk_token=unk, fuse_unk=True, byte_fallback=spec.byte_fallback)


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model, the best piece first, as SentencePiece applies them."""
    order = {piece: i for i, (piece, _) in enumerate(pieces)}
    found = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in order and right in order:
                found.append((-score, order[left], order[right], (left, right)))
    return [merge for *_, merge in sorted(found)]
