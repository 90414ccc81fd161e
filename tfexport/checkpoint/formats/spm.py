"""SentencePiece models as tokenizers of Hugging Face `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tfexport.errors import BackendError, CheckpointError
from tfexport.install import install_command

_SPACE = "▁"
# The types of SentencePiece's trainer and pieces, from its model format.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


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
    return proto


def is_ordinary(piece: Any) -> bool:
    """Say whether a piece is one that texts are made of, and none with a meaning."""
    return bool(piece.type == _NORMAL)


def from_sentencepiece(proto: Any) -> Inner:
    """Return a tokenizer that says what the SentencePiece model says."""
    inner = Inner(_model(proto))
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
    scheme: Any = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    metaspace = decoders.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    is_bytes = proto.trainer_spec.byte_fallback
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if is_bytes else metaspace
    inner.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == _CONTROL])
    inner.add_tokens([piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED])
    return inner


def _model(proto: Any) -> Any:
    spec = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if spec.model_type == _UNIGRAM:
        return models.Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    return models.BPE(
        ids, _merges(pieces, ids), unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback
    )


def _merges(pieces: list[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model, the best piece first, as SentencePiece applies them."""
    found = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], (left, right)))
    return [merge for *_, merge in sorted(found)]
