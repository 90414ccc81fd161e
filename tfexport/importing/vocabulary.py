"""Convert vocabulary files to a tokenizer.json of Hugging Face `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tfexport._io.extras import install_command
from tfexport._io.process import call_in_process
from tfexport._io.strict_json import plain_problem
from tfexport.contract import ModelSpec
from tfexport.errors import BackendError, CheckpointError, first_line, raise_all, shortened
from tfexport.importing.bare_vocabulary import BareVocabulary
from tfexport.text.vocabulary import BEYOND, MAX_BYTES, TRIAL_CPU_S, TRIAL_MEMORY, errors_as

Side = Literal["source", "target"]
Merge = tuple[str, str]
# Name that fairseq, NLLB and mBART give to a SentencePiece model next to a list of its pieces.
SPM_BPE = "sentencepiece.bpe.model"
_SPACE = "▁"
_JSON = re.compile(r'\s*(\{\s*["}]|\[\s*[]"\[{])')  # not a list of tokens that begins with [PAD]
_TO_JSON = "in your code, save the dictionary of tokens with json.dump(STOI, open('vocab.json', 'w'))"
_UNKNOWN_NAME, _SPECIAL_NAME = re.compile(r"(?i:[<\[_|]+(unk|unknown|oov)[>\]_|]*)|UNK|OOV"), re.compile(r"<.+>|\[.+\]")
# Types of models and pieces in SentencePiece's format.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MAX_PIECE = 256  # characters; the default of SentencePiece is 16
# Prefix of tokens that no text can produce, because white space is replaced before texts are split.
_HIDDEN = " "
_GOES_ON, _END = "@@", "</w>"
# File names of codes in fairseq, its published models, the examples of subword-nmt, and JoeyNMT.
_CODES = ("bpecodes", "code", "codes", "bpe.codes", "codes.bpe", "bpe_codes")
# Lines of a list with counts, and the tokens that precede the first line of such a list.
_FAIRSEQ = re.compile(r"(.+) \d+"), ("<s>", "<pad>", "</s>", "<unk>")
_OPENNMT = re.compile(r"(.+)\t\d+"), ("<unk>", "<blank>", "<s>", "</s>")


def tokenizer_json(path: Path, spec: ModelSpec, side: Side | None = None) -> bytes:
    """Read as `read_tokenizer` does; raise CheckpointError if the split is not known."""
    found = read_tokenizer(path, spec, side)
    return found if isinstance(found, bytes) else found.build(found.candidates()[0])


def read_tokenizer(path: Path, spec: ModelSpec, side: Side | None = None) -> bytes | BareVocabulary:
    """Read tokens with ids, or convert a vocabulary with rules to tokenizer.json.

    Tokens are in JSON, a pickle, or a list: one per line, or as fairseq, OpenNMT-py or Marian write them. If they are
    pieces of words, the codes of subword-nmt or fastBPE, or the SentencePiece model, next to a list split the words.
    """
    raw, limits = read_vocabulary(path), {"memory_bytes": TRIAL_MEMORY, "cpu_s": TRIAL_CPU_S}
    is_pickle = raw.startswith((b"\x80", b"PK\x03\x04"))
    remedy = _TO_JSON if is_pickle else "save it again"
    with errors_as(lambda reason: tokenizer_error(path, f"cannot be read ({reason}); {remedy}")):
        if is_pickle:
            data = call_in_process("tfexport.importing._pickled:read_pickled", **limits, wall_s=600, data=raw)
            return _bare(_token_ids(data, path), path, spec, side)
        try:
            text = raw.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            text = "\0"
        if _JSON.match(text):
            data = json.loads(text)
            is_whole = isinstance(data, dict) and isinstance(data.get("model"), dict)
            return raw if is_whole else _bare(_token_ids(data, path), path, spec, side)
        if "\0" in text or "\x0e" in text:
            return _from_sentencepiece(path, spec, side).to_str(pretty=True).encode()
        return _from_list(text, path, spec, side)


def tokenizer_error(path: Path, problem: str) -> CheckpointError:
    """Return an error about a tokenizer file or directory."""
    return CheckpointError(f"tokenizer {path}: {problem}")


def read_vocabulary(path: Path) -> bytes:
    """Read a regular tokenizer file of limited size."""
    try:
        if problem := plain_problem(path):
            raise tokenizer_error(path, f"{problem}; give a tokenizer.json, a SentencePiece model or a list")
        if path.stat().st_size > MAX_BYTES:
            raise tokenizer_error(path, f"has {path.stat().st_size} bytes, the limit is {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise tokenizer_error(path, f"cannot be read ({error.strerror or error})") from error


def _token_ids(data: Any, path: Path) -> list[tuple[str, int]]:
    """Return tokens with ids from nested lists and dictionaries."""
    found = list(_vocabularies("", data, 8))
    found = [one for one in found if one[0] in ("stoi", "itos")] or found
    lists, others = ([pairs for _, is_list, pairs in found if is_list == kind] for kind in (True, False))
    ids = dict((lists or others or [[]])[0])
    # A dictionary may count words, or have got unknown ones by a default.
    agree = [all(ids.get(token, i) == i for token, i in pairs) for pairs in others]
    if not ids or (agree and not any(agree)) or any(dict(pairs) != ids for pairs in lists or others):
        names = ", ".join(name or "one without a name" for name, *_ in found)
        problem = f"has different vocabularies, {names}" if found else "has no tokens with ids, and no model"
        raise tokenizer_error(path, f"{problem}; {_TO_JSON}, or give a tokenizer.json")
    return (lists or others)[0]


def _vocabularies(name: str, data: Any, depth: int) -> Iterator[tuple[str, bool, list[tuple[str, int]]]]:
    """Yield the name of a vocabulary, whether it lists tokens by id, and its pairs."""
    entries = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    if entries and all(type(value) is str and re.fullmatch("[0-9]+", str(key)) for key, value in entries):
        yield name, True, [(value, int(key)) for key, value in entries]
    elif entries and isinstance(data, dict) and all(type(value) is int for value in data.values()):
        yield name, False, entries
    elif depth:
        for key, value in entries:
            yield from _vocabularies(key if isinstance(data, dict) else name, value, depth - 1)


def vocabulary_size(spec: ModelSpec, side: Side | None) -> tuple[str, int]:
    """Return the name and the size of a side's vocabulary."""
    if spec.has_decoder and (side == "target" or not spec.source_vocab):
        return "target_vocab", spec.vocab
    return "source_vocab", spec.source_vocab


def _bare(
    pairs: Sequence[tuple[str, int]],
    path: Path,
    spec: ModelSpec,
    side: Side | None,
    problems: Sequence[str] | None = None,
) -> BareVocabulary:
    """Check tokens with ids; a list has `problems`, maybe none."""
    (name, limit), given, ids, found = vocabulary_size(spec, side), spec.tokens, dict(pairs), list(problems or ())
    tokens = {i: token for token, i in pairs}
    found += [f"{shortened(t)} and id {i} are not unique" for t, i in pairs if ids[t] != i or tokens[i] != t]
    found += [f"{t!a} is not valid Unicode" for t in ids if t.encode(errors="ignore").decode() != t]
    if not ids or not 0 <= min(tokens) <= max(tokens) < limit:
        found.append(f"has {len(ids)} tokens, the model's {name} is {limit}")
    if given.unk is not None and given.unk not in tokens:
        found.append(f"has {len(ids)} tokens, tokens.unk is {given.unk}")
    raise_all(CheckpointError, f"tokenizer {path}", found)
    named = [token for token in ids if given.unk is None and _UNKNOWN_NAME.fullmatch(token)]
    unknown = named[0] if len(named) == 1 else tokens.get(-1 if given.unk is None else given.unk)
    around = {i: tokens[i] for i in (given.pad, given.start, given.eos) if i in tokens}
    lengths = {len(t) for t in ids.keys() - {unknown, *around.values()} if not _SPECIAL_NAME.fullmatch(t)}
    is_list = problems is not None
    split = "chars" if lengths == {1} and (not is_list or " " in ids) else "words" if is_list else None
    # If the target has ids of its own, its start and end are ordinary words of the source.
    special = tuple(token for i, token in around.items() if side != "source" or i == given.pad)
    return BareVocabulary(path, ids, unknown, special, split)


def _from_list(text: str, path: Path, spec: ModelSpec, side: Side | None) -> bytes | BareVocabulary:
    tokens, before = _read_yaml(text, path) if path.suffix in (".yml", ".yaml") else _read_tokens(text)
    if tokens and (tokens[0].startswith("#version") or all(re.fullmatch("[^ ]+ [^ ]+", token) for token in tokens)):
        remedy = "give the directory that has its vocab.json too"
        raise tokenizer_error(path, f"has only merges, as a merges.txt, and no ids; {remedy}")
    goes_on = any(token.endswith(_GOES_ON) for token in tokens)
    codes = next((found for name in _CODES if goes_on and (found := path.with_name(name)).is_file()), None)
    spm = path.with_name(SPM_BPE)
    has_pieces = any(token.startswith(_SPACE) for token in tokens)
    is_fairseq = before > 0 and tokens[0] == "<s>"
    problems = [f"line {i} is empty" for i, token in enumerate(tokens, 1 - before) if not token]
    if before and goes_on and codes is None:
        problems.append(f"has pieces of words, but no codes next to it; copy them there as {_CODES[0]}")
    if has_pieces and is_fairseq and not spm.is_file():
        problems.append(f"has pieces of SentencePiece, but no model next to it; copy it there as {SPM_BPE}")
    words = _bare([(token, i) for i, token in enumerate(tokens)], path, spec, side, problems)
    if not (codes or (has_pieces and spm.is_file())):
        return words
    if words.unknown is None:
        raise tokenizer_error(path, "needs the id of unknown words; give --set tokens.unk=ID")
    if codes is not None:
        inner = _with_codes(tokens, _read_codes(codes), words.ids[words.unknown])
    else:
        around = range(3) if is_fairseq else (spec.tokens.pad, spec.tokens.start, spec.tokens.eos)
        controls = dict.fromkeys(tokens[i] for i in around if i < len(tokens))
        inner = with_ids(read_sentencepiece(spm), words.ids, [*controls], words.unknown)
    return inner.to_str(pretty=True).encode()


def _read_yaml(text: str, path: Path) -> tuple[list[str], int]:
    """Return the tokens of a vocabulary of Marian, as `_read_tokens` does."""
    loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # which keep every token as its text
    try:
        data = yaml.load(text, Loader=loader)  # noqa: S506 - these make only strings, lists and mappings
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise tokenizer_error(path, f"is not valid YAML ({first_line(error)}); save it again") from error
    if not isinstance(data, dict) or not all(isinstance(i, str) and i.isdecimal() for i in data.values()):
        raise tokenizer_error(path, "is not a list of tokens with ids, TOKEN: ID on each line")
    ids = {str(token): int(i) for token, i in data.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    if not ids or [ids[token] for token in tokens] != list(range(len(ids))):
        raise tokenizer_error(path, f"has {len(ids)} tokens with ids, expected ids from 0 without gaps")
    return tokens, 0


def _read_tokens(text: str) -> tuple[list[str], int]:
    """Return the tokens in id order, and how many of them precede the first line."""
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    for form, special in (_FAIRSEQ, _OPENNMT):
        tokens = [match[1] for line in lines if (match := form.fullmatch(line))]
        if len(tokens) == len(lines):
            is_whole = special[0] in tokens and special == _OPENNMT[1]
            return (tokens, 0) if is_whole else ([*special, *tokens], len(special))
    return lines if text else [], 0


def _read_codes(path: Path) -> list[Merge]:
    try:
        lines = read_vocabulary(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"codes {path}: are not UTF-8 text ({error}); save them again") from error
    merges: dict[Merge, None] = {}
    for number, line in enumerate(lines, 1):
        parts = line.strip("\r ").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) not in (2, 3) or not all(parts):
            raise CheckpointError(f"codes {path}: line {number} is {line[:60]!r}, expected two pieces")
        merges.setdefault((parts[0], parts[1]))
    if lines[0].startswith("#version: 0.1") or any(right == _END for _, right in merges):
        remedy = "give a tokenizer.json, or learn codes of version 0.2"
        raise CheckpointError(f"codes {path}: are of version 0.1, whose words end in a separate piece; {remedy}")
    return list(merges)


def _with_codes(tokens: Sequence[str], merges: Sequence[Merge], unk: int) -> Inner:
    # Pieces that are not in the list become unknown.
    names = [token[: -len(_GOES_ON)] if token.endswith(_GOES_ON) else token + _END for token in tokens]
    ids = {name or _GOES_ON: i for i, name in enumerate(names)}
    pieces = dict.fromkeys(piece for left, right in merges for piece in (left, right, left + right))
    if beyond := [piece for piece in pieces if piece not in ids]:
        ids |= {piece: len(tokens) + i for i, piece in enumerate([BEYOND, *beyond])}
    inner = Inner(models.BPE(ids, list(merges), unk_token=names[unk], end_of_word_suffix=_END))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.BPEDecoder(suffix=_END)
    return inner


def read_sentencepiece(path: Path) -> Any:
    """Read a unigram or BPE model of SentencePiece as a ModelProto."""
    raw = read_vocabulary(path)
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        command = install_command("sentencepiece")
        raise BackendError(f"tokenizer {path}: is not text; to read a SentencePiece model run: {command}") from error
    format_: Any = sentencepiece_model_pb2  # protobuf creates its attributes at run time
    proto = format_.ModelProto()
    try:
        proto.ParseFromString(raw)
    except Exception as error:  # a class of protobuf, which this module must not import
        raise tokenizer_error(path, f"is not a SentencePiece model ({error}); give a .model file") from error
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE) or not proto.pieces:
        raise tokenizer_error(path, "is not a unigram or BPE model; give a tokenizer.json")
    if (longest := max(len(piece.piece) for piece in proto.pieces)) > _MAX_PIECE:
        raise tokenizer_error(path, f"has a piece of {longest} characters, expected at most {_MAX_PIECE}")
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        size = int.from_bytes(charsmap[:4], "little")  # size of its trie, which the library allocates unchecked
        if size > len(charsmap) - 4:
            raise tokenizer_error(path, "has a damaged character map; download or save it again")
    return proto


def _from_sentencepiece(path: Path, spec: ModelSpec, side: Side | None) -> Inner:
    proto, tokens = read_sentencepiece(path), spec.tokens
    name, limit = vocabulary_size(spec, side)
    if len(proto.pieces) > limit:
        raise tokenizer_error(path, f"has {len(proto.pieces)} tokens, the model's {name} is {limit}")
    problems = []
    if tokens.unk not in (None, unk := proto.trainer_spec.unk_id):
        problems.append(f"its unknown token is {unk}, that of the model is {tokens.unk}")
    # If the target has its own ids, its end is an ordinary piece of the source.
    if side != "source" and tokens.eos < len(proto.pieces) and proto.pieces[tokens.eos].type == _NORMAL:
        problems.append(f"the model's end token {tokens.eos} is the ordinary piece {proto.pieces[tokens.eos].piece!r}")
    remedy = "the model has other ids: give the directory whose vocab.json maps its pieces, or a tokenizer.json"
    raise_all(CheckpointError, f"tokenizer {path}", problems, remedy=remedy)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    inner = _split_like(proto, pieces, pieces, proto.trainer_spec.unk_piece)
    inner.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == _CONTROL])
    inner.add_tokens([piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED])
    return inner


def with_ids(proto: Any, ids: Mapping[str, int], special: Sequence[str], unk: str, whole: Sequence[str] = ()) -> Inner:
    """Return a tokenizer that splits like a SentencePiece model but has other ids.

    `ids` are unique. Pieces without an id become `unk`. Texts produce no tokens that the model lacks, except `whole`.
    """
    own = {piece.piece: piece.score for piece in proto.pieces if piece.type not in (_CONTROL, _UNKNOWN)}
    seen = {*own, *special, *whole, unk}
    tokens = {i: token if token in seen else _HIDDEN + token for token, i in ids.items()}
    names = [tokens.get(i, f"{_HIDDEN}{i}") for i in range(max(tokens) + 1)]
    if beyond := [piece for piece in own if piece not in ids]:
        names += [BEYOND, *beyond]
    inner = _split_like(proto, [(name, own.get(name, 0.0)) for name in names], list(own.items()), unk)
    inner.decoder = decoders.Sequence([decoders.Replace(_HIDDEN, ""), inner.decoder])
    inner.add_special_tokens([token for token in special if token in ids])
    defined = (piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED)
    inner.add_tokens([*whole, *(piece for piece in defined if piece not in special)])
    return inner


def _split_like(proto: Any, vocab: list[tuple[str, float]], own: list[tuple[str, float]], unk: str) -> Inner:
    trained, normalizing = proto.trainer_spec, proto.normalizer_spec
    ids = {piece: i for i, (piece, _) in enumerate(vocab)}
    if trained.model_type == _UNIGRAM:
        inner = Inner(models.Unigram(vocab, unk_id=ids[unk], byte_fallback=trained.byte_fallback))
    else:
        merges = _merges(own)
        inner = Inner(models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=trained.byte_fallback))
    steps: list[Any] = []
    if normalizing.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizing.precompiled_charsmap))
    if normalizing.remove_extra_whitespaces:
        # Strip only normalized spaces, and at the end also ▁.
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    elif normalizing.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))  # also before a leading space, where Metaspace adds nothing
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
    scheme: Any = "always" if normalizing.add_dummy_prefix else "never"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    metaspace = decoders.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if trained.byte_fallback else metaspace
    return inner


def _merges(pieces: list[tuple[str, float]]) -> list[Merge]:
    # SentencePiece applies the merge of the best piece first.
    order = {piece: i for i, (piece, _) in enumerate(pieces)}
    cuts = ((score, piece[:cut], piece[cut:]) for piece, score in pieces for cut in range(1, len(piece)))
    found = sorted((-score, order[a], order[b], (a, b)) for score, a, b in cuts if a in order and b in order)
    return [merge for *_, merge in found]
