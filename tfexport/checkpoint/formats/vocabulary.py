"""Vocabularies in the forms that people have them, written as the tokenizer.json of Hugging Face `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tfexport.errors import BackendError, CheckpointError, raise_all
from tfexport.files.strict_json import plain_problem
from tfexport.files.text import MAX_BYTES
from tfexport.install import install_command
from tfexport.models.config import TransformerConfig

_SPACE = "▁"
# The types of SentencePiece's trainer and pieces, from its model format.
_UNIGRAM, _BPE = 1, 2
_CONTROL, _USER_DEFINED = 3, 4


Side = Literal["source", "target"]


def tokenizer_json(path: Path, config: TransformerConfig, side: Side | None = None) -> bytes:
    """Read a vocabulary and return it as tokenizer.json.

    Args:
        path: a tokenizer.json, which is returned as it is; a SentencePiece
            model; or a list with one token a line, which splits texts at white space.
        config: says which tokens are special and how many ids there are.
        side: of the model that it is for; None for both.

    Raises:
        CheckpointError: no plain file, too large, none of the three, or not of this model.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    try:
        if problem := plain_problem(path):
            raise CheckpointError(
                f"tokenizer {path}: {problem}; give a tokenizer.json, a SentencePiece model or a list"
            )
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"tokenizer {path}: has {path.stat().st_size} bytes, the limit is {MAX_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"tokenizer {path}: cannot be read ({error.strerror or error})") from error
    if raw.lstrip()[:1] == b"{":
        return raw
    inner = _from_list(raw, path, config, side) if _is_text(raw) else _from_sentencepiece(raw, path, config, side)
    return inner.to_str(pretty=True).encode()


def _is_text(raw: bytes) -> bool:
    try:
        return "\0" not in (text := raw.decode("utf-8")) and "\x0e" not in text
    except UnicodeDecodeError:
        return False


def _limit(config: TransformerConfig, side: Side | None) -> tuple[str, int]:
    """Return how many ids a vocabulary may have, and what it is called."""
    if side == "target" and config.target_vocab is not None:
        return "target_vocab", config.target_vocab
    return "source_vocab", config.source_vocab


def _from_list(raw: bytes, path: Path, config: TransformerConfig, side: Side | None) -> Inner:
    """Read one token a line; line n has id n - 1."""
    tokens = raw.decode("utf-8").removeprefix("\ufeff").splitlines()
    name, limit = _limit(config, side)
    problems = [f"line {i} is empty" for i, token in enumerate(tokens, 1) if not token]
    places: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if places.setdefault(token, number) != number and token:
            problems.append(f"line {number} repeats line {places[token]}")
    if len(tokens) > limit:
        problems.append(f"has {len(tokens)} tokens, the model's {name} is {limit}")
    if config.tokens.unk is None:
        problems.append("needs to know the id of unknown words; give --set tokens.unk=ID")
    elif config.tokens.unk >= len(tokens):
        problems.append(f"has {len(tokens)} tokens, tokens.unk is {config.tokens.unk}")
    raise_all(CheckpointError, f"tokenizer {path}", problems)
    assert config.tokens.unk is not None
    inner = Inner(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[config.tokens.unk]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = config.tokens
    # Where the target has ids of its own, start and end of a target are ordinary words of the source.
    special = (ids.pad,) if side == "source" else (ids.pad, ids.start, ids.eos)
    inner.add_special_tokens(list(dict.fromkeys(tokens[i] for i in special if i < len(tokens))))
    return inner


def _from_sentencepiece(raw: bytes, path: Path, config: TransformerConfig, side: Side | None) -> Inner:
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
    name, limit = _limit(config, side)
    if len(proto.pieces) > limit:
        raise CheckpointError(f"tokenizer {path}: has {len(proto.pieces)} tokens, the model's {name} is {limit}")
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
