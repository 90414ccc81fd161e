"""Read the tokenizer of a Hugging Face directory or make it from vocabulary files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers, processors
from tokenizers import Tokenizer as Inner

from tfexport._io.extras import install_command
from tfexport._io.names import CONFIG, TOKENIZER
from tfexport._io.strict_json import parse_json, read_json
from tfexport.contract import ModelSpec
from tfexport.errors import BackendError, ConfigError, shortened
from tfexport.importing.huggingface import families, family_of
from tfexport.importing.vocabulary import SPM_BPE, read_sentencepiece, read_vocabulary, tokenizer_error, tokenizer_json
from tfexport.text.vocabulary import errors_as

SETTINGS = "tokenizer_config.json"
_MODELS = (SPM_BPE, "spiece.model", "tokenizer.model")
_PARTS = ("source.spm", "target.spm", "vocab.json", "merges.txt", "vocab.txt")
TOKENIZER_FILES = (TOKENIZER, *_MODELS, *_PARTS)  # each is enough to have a tokenizer
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_MAX_ID = 2**21  # twice the size of any known vocabulary; each unused id costs a token


def tokenizer_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a directory's tokenizer files, empty if it has no tokenizer."""
    names = tuple(name for name in TOKENIZER_FILES if (directory / name).is_file())
    return names[:1] if TOKENIZER in names else names


def directory_tokenizer(directory: Path, spec: ModelSpec) -> dict[str, bytes]:
    """Return the tokenizer.json of each side, by name, as transformers reads it."""
    names = tokenizer_names(directory)
    if not names:
        raise tokenizer_error(directory, f"has no tokenizer file; give a directory with {TOKENIZER}")
    for name in names:
        read_vocabulary(directory / name)  # checks its size
    with errors_as(lambda reason: tokenizer_error(directory, f"cannot be read ({reason}); save it again")):
        if names == (TOKENIZER,):
            raw = tokenizer_json(directory / TOKENIZER, spec)
            inner = Inner.from_str(raw.decode("utf-8"))
            if _add_special(inner, directory) | _clean_up(inner, directory, is_slow=False):
                raw = inner.to_str(pretty=True).encode()
            return {TOKENIZER: raw}
        inners, is_slow = _convert(directory, names, spec), "vocab.json" in names and "merges.txt" not in names
        for inner in inners.values():
            _clean_up(inner, directory, is_slow=is_slow)
        return {name: inner.to_str(pretty=True).encode() for name, inner in inners.items()}


def _add_special(inner: Inner, directory: Path) -> bool:
    """Mark tokens that the settings name as special, as transformers does."""
    settings = read_json_object(directory / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **read_json_object(directory / "special_tokens_map.json")}
    values = [value for key, value in settings.items() if key.endswith("_token") and value]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or ()
        values += more.values() if isinstance(more, dict) else more
    names = [str(value["content"] if isinstance(value, dict) else value) for value in values]
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    new = [name for name in names if name not in added and inner.token_to_id(name) is not None]
    inner.add_special_tokens(new)
    return bool(new)


def _clean_up(inner: Inner, directory: Path, *, is_slow: bool) -> bool:
    """Remove spaces before punctuation as tokenizer_config.json states."""
    is_set = read_json_object(directory / SETTINGS).get("clean_up_tokenization_spaces") is True
    if not is_set or (type(inner.model).__name__ == "BPE" and not is_slow):
        return False
    steps = [decoders.Replace(old, old.strip()) for old in _CLEANED]
    inner.decoder = decoders.Sequence([inner.decoder or decoders.WordPiece(cleanup=False), decoders.Fuse(), *steps])
    return True


def _convert(directory: Path, names: Sequence[str], spec: ModelSpec) -> dict[str, Inner]:
    config, settings = read_json_object(directory / CONFIG), read_json_object(directory / SETTINGS)
    named = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    known = families().values()
    family = (
        family_of(config)
        or next((one for one in known if named in one.tokenizers), None)
        or next((one for one in known if one.tokenizer_files and set(one.tokenizer_files) <= set(names)), None)
    )
    if family and family.convert and (not named or named in family.tokenizers):
        return family.convert(directory, spec)
    if family is None and not named:
        remedy = f"give the {TOKENIZER} that AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
        raise tokenizer_error(directory, f"has {', '.join(names)}, but no {CONFIG} with a known model_type; {remedy}")
    transformers = need_transformers(directory)
    kind = transformers.AutoTokenizer if named or family is None else getattr(transformers, family.tokenizers[0])
    loaded = kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if (inner := getattr(loaded, "backend_tokenizer", None)) is None:
        raise tokenizer_error(directory, f"{type(loaded).__name__} cannot write a {TOKENIZER}; give one")
    spm = next((directory / name for name in _MODELS if name in names), None)
    # transformers 5 loses the normalization of mBART, and the end token of Blenderbot.
    if inner.normalizer is None and spm and (charsmap := read_sentencepiece(spm).normalizer_spec.precompiled_charsmap):
        inner.normalizer = normalizers.Precompiled(charsmap)
    before, after = around(inner)
    if not before and not after:
        surround(inner, (), (spec.tokens.eos,))
    if loaded.unk_token_id in (*before, *after):
        language = shortened(settings.get("src_lang"))
        raise tokenizer_error(directory, f"src_lang is {language}, expected one of its languages")
    return {TOKENIZER: inner}


def need_transformers(path: Path) -> Any:
    """Import transformers; raise a BackendError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise BackendError(f"{path}: transformers is not installed; {install_command('transformers')}") from error
    return transformers


def around(inner: Inner) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer adds before and after a text."""
    if inner.post_processor is None:
        return (), ()
    encoded = inner.encode("a")
    text = [i for i, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
    if not text:
        return (), tuple(encoded.ids)
    return tuple(encoded.ids[: text[0]]), tuple(encoded.ids[text[-1] + 1 :])


def surround(inner: Inner, before: Sequence[int], after: Sequence[int]) -> None:
    """Make a tokenizer add exactly these ids around a text."""
    tokens = {i: inner.id_to_token(i) for i in (*before, *after)}
    single = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, i) for i, token in tokens.items()]
    )


def stripped(inner: Inner) -> Inner:
    """Remove spaces around decoded texts, as several tokenizers of transformers do."""
    # The library's own Strip panics at an empty text.
    strip = decoders.Replace(Regex(r"\A +| +\z"), "")
    inner.decoder = decoders.Sequence([inner.decoder, decoders.Fuse(), strip])
    return inner


def read_ids(path: Path) -> dict[str, int]:
    """Read the token ids of a vocab.json that contains <unk>."""
    try:
        ids = parse_json(read_vocabulary(path))
    except ValueError as error:
        raise tokenizer_error(path, f"is not JSON ({error}); save the tokenizer again") from error
    is_valid = isinstance(ids, dict) and all(type(i) is int and 0 <= i <= _MAX_ID for i in ids.values())
    if not is_valid or len(set(ids.values())) < len(ids) or "<unk>" not in ids:
        expected = f"<unk> and other tokens, each with its own id of at most {_MAX_ID}"
        raise tokenizer_error(path, f"is not a vocabulary, expected {expected}; save the tokenizer again")
    return dict(ids)


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        found = read_json(path, path.name)
    except ConfigError as error:
        raise tokenizer_error(path.parent, str(error)) from error
    return found if isinstance(found, dict) else {}
