"""Vocabularies in the forms that people have them, written as the tokenizer.json of Hugging Face `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from tfexport._io.strict_json import plain_problem
from tfexport._io.text import MAX_BYTES
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, raise_all
from tfexport.importing.formats.bpe_codes import CODES, codes_beside, goes_on, read_codes, with_codes
from tfexport.importing.formats.spm import SPACE, from_sentencepiece, is_ordinary, read_sentencepiece, with_ids
from tfexport.importing.formats.token_list import read_tokens
from tfexport.text.vocabulary import border

Side = Literal["source", "target"]
# What fairseq calls the SentencePiece model whose pieces a list has.
SPM_BESIDE = "sentencepiece.bpe.model"


def tokenizer_json(path: Path, spec: ModelSpec, side: Side | None = None) -> bytes:
    """Read a vocabulary and return it as tokenizer.json.

    Args:
        path: a tokenizer.json, which is returned as it is; a SentencePiece
            model; or a list of tokens, which splits texts at white space, and
            words by the codes that lie beside it where its tokens are pieces,
            or texts by the SentencePiece model beside it.
        spec: says which tokens are special and how many ids there are.
        side: of the model that it is for; None for both.

    Raises:
        CheckpointError: no plain file, too large, none of the three, a part of a tokenizer alone, or not of this model.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    raw = read_vocabulary(path)
    if raw.lstrip()[:1] == b"{":
        _check_json(raw, path)
        return raw
    with border(lambda reason: CheckpointError(f"tokenizer {path}: cannot be read ({reason}); save it again")):
        inner = _from_list(raw, path, spec, side) if _is_text(raw) else _from_spm(raw, path, spec, side)
        return inner.to_str(pretty=True).encode()


def read_vocabulary(path: Path) -> bytes:
    """Read a file of a tokenizer.

    Raises:
        CheckpointError: no plain file, or too large.
    """
    try:
        if problem := plain_problem(path):
            raise CheckpointError(
                f"tokenizer {path}: {problem}; give a tokenizer.json, a SentencePiece model or a list"
            )
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"tokenizer {path}: has {path.stat().st_size} bytes, the limit is {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"tokenizer {path}: cannot be read ({error.strerror or error})") from error


def _check_json(raw: bytes, path: Path) -> None:
    """Refuse a JSON that is no tokenizer.json."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer {path}: is no JSON ({error}); save the tokenizer again") from error
    if "model" in found and isinstance(found["model"], dict):
        return
    if found and all(isinstance(i, int) for i in found.values()):
        raise CheckpointError(
            f"tokenizer {path}: has ids alone, as a vocab.json, and does not say how a text is split; "
            "give the directory that has its merges.txt or SentencePiece models too"
        )
    raise CheckpointError(f"tokenizer {path}: is a JSON, but no tokenizer.json, for it has no model; give that")


def _is_text(raw: bytes) -> bool:
    try:
        return "\0" not in (text := raw.decode("utf-8")) and "\x0e" not in text
    except UnicodeDecodeError:
        return False


def vocabulary_size(spec: ModelSpec, side: Side | None) -> tuple[str, int]:
    """Return how many ids a vocabulary may have, and what it is called."""
    if side == "target" and spec.has_decoder:
        return "target_vocab", spec.vocab
    return "source_vocab", spec.source_vocab


def is_merges(lines: Sequence[str]) -> bool:
    """Say whether lines are the merges of byte-pair encoding, and not tokens."""
    if lines and lines[0].startswith("#version"):
        return True
    return bool(lines) and all(len(pair := line.split(" ")) == 2 and all(pair) for line in lines)


def _from_list(raw: bytes, path: Path, spec: ModelSpec, side: Side | None) -> Inner:
    """Read a list of tokens, and the codes or the SentencePiece model beside it where its tokens are pieces."""
    tokens, before = read_tokens(raw.decode("utf-8").removeprefix("\ufeff"))
    if is_merges(tokens):
        raise CheckpointError(
            f"tokenizer {path}: has merges alone, as a merges.txt, and no ids; "
            "give the directory that has its vocab.json too"
        )
    name, limit = vocabulary_size(spec, side)
    codes = codes_beside(path) if goes_on(tokens) else None
    problems = [f"line {i} is empty" for i, token in enumerate(tokens, 1 - before) if not token]
    places: dict[str, int] = {}
    for number, token in enumerate(tokens, 1 - before):
        if places.setdefault(token, number) != number and token:
            first = f"line {places[token]}" if places[token] > 0 else "a special token that stands before all lines"
            problems.append(f"line {number} repeats {first}")
    if len(tokens) > limit:
        problems.append(f"has {len(tokens)} tokens, the model's {name} is {limit}")
    if spec.tokens.unk is None:
        problems.append("needs to know the id of unknown words; give --set tokens.unk=ID")
    elif spec.tokens.unk >= len(tokens):
        problems.append(f"has {len(tokens)} tokens, tokens.unk is {spec.tokens.unk}")
    if before and goes_on(tokens) and codes is None:
        problems.append(f"has pieces of words, and no codes lie beside it; call them {CODES[0]}")
    spm = path.with_name(SPM_BESIDE)
    has_pieces = any(token.startswith(SPACE) for token in tokens)
    is_fairseq = before > 0 and tokens[0] == "<s>"
    if has_pieces and is_fairseq and not spm.is_file():
        problems.append(f"has pieces of SentencePiece, and no model lies beside it; call it {SPM_BESIDE}")
    raise_all(CheckpointError, f"tokenizer {path}", problems)
    ids = spec.tokens
    assert ids.unk is not None
    if has_pieces and spm.is_file():
        proto = read_sentencepiece(read_vocabulary(spm), spm)
        around = [*range(3)] if is_fairseq else list(dict.fromkeys((ids.pad, ids.start, ids.eos)))
        controls = [tokens[i] for i in around if i < len(tokens)]
        return with_ids(proto, {token: i for i, token in enumerate(tokens)}, controls, tokens[ids.unk])
    if codes is not None:
        return with_codes(tokens, read_codes(read_vocabulary(codes), codes), ids.unk)
    inner = Inner(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[ids.unk]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Where the target has ids of its own, start and end of a target are ordinary words of the source.
    special = (ids.pad,) if side == "source" else (ids.pad, ids.start, ids.eos)
    inner.add_special_tokens(list(dict.fromkeys(tokens[i] for i in special if i < len(tokens))))
    return inner


def _from_spm(raw: bytes, path: Path, spec: ModelSpec, side: Side | None) -> Inner:
    proto = read_sentencepiece(raw, path)
    name, limit = vocabulary_size(spec, side)
    if len(proto.pieces) > limit:
        raise CheckpointError(f"tokenizer {path}: has {len(proto.pieces)} tokens, the model's {name} is {limit}")
    _check_ids(proto, path, spec, side)
    return from_sentencepiece(proto)


def _check_ids(proto: Any, path: Path, spec: ModelSpec, side: Side | None) -> None:
    """Refuse a model whose ids are not those of the weights, where its special pieces show that."""
    tokens, problems = spec.tokens, []
    unk = proto.trainer_spec.unk_id
    if tokens.unk is not None and tokens.unk != unk:
        problems.append(f"the unknown token is {unk}, of the model {tokens.unk}")
    # Where the target has ids of its own, its end is an ordinary piece of the source.
    if side != "source" and tokens.eos < len(proto.pieces) and is_ordinary(proto.pieces[tokens.eos]):
        problems.append(f"the model's end token {tokens.eos} is the ordinary piece {proto.pieces[tokens.eos].piece!r}")
    if problems:
        beside = path.with_name("vocab.json").is_file()
        remedy = (
            "vocab.json beside it maps its pieces: give the directory"
            if beside
            else "give the directory whose vocab.json maps its pieces, or a tokenizer.json"
        )
        raise CheckpointError(f"tokenizer {path}: its ids are not the model's: {'; '.join(problems)}; {remedy}")
