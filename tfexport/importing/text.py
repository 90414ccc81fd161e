"""Import tokenizers and compare them with the model and the recorded texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner

from tfexport._io.names import TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport._io.process import LIMITS_MEMORY
from tfexport.contract import ModelSpec
from tfexport.errors import BundleError, CheckpointError, ConfigError, ParityError
from tfexport.importing.bare_vocabulary import BareVocabulary, split_problem, with_rules
from tfexport.importing.huggingface.tokenizer import around, directory_tokenizer, surround
from tfexport.importing.vocabulary import Side, read_tokenizer, tokenizer_error, vocabulary_size
from tfexport.text.compare import check_texts, fit
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import BEYOND, errors_as, try_tokenizer

# A model has more ids than texts use: languages, sentinels, and padding to a multiple.
_PADDING = 256
_REFUSED_COVERAGE, _WARNED_COVERAGE = 0.5, 0.9
# Language tokens of M2M100, mBART, NLLB and Speech2Text: __en__, en_XX, eng_Latn, <lang:en>.
_LANGUAGE = re.compile(r"__[a-z]{2,3}__|[a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}|<lang:[a-z]{2}>")


@dataclass(frozen=True)
class Tokenizers:
    """Tokenizers and languages that the user chooses.

    Attributes:
        source: a tokenizer.json, a SentencePiece model, tokens with ids, or a Hugging Face directory. It is used for
            both sides if `target` is None.
        target: tokenizer of the target, if it has its own.
        source_language: language as the tokenizer names it, such as eng_Latn, en_XX or en. None keeps the tokenizer's
            default.
        target_language: target language in the same form.
        tokenize: words, chars, basic_english, or a regular expression whose matches are the tokens, if `source` has no
            rules. None lets the recorded texts decide.
        lowercase: whether texts are put into lower case before.
    """

    source: Path
    target: Path | None = None
    source_language: str | None = None
    target_language: str | None = None
    tokenize: str | None = None
    lowercase: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Path(self.source))  # callers may give texts
        object.__setattr__(self, "target", None if self.target is None else Path(self.target))
        if self.tokenize and (problem := split_problem(self.tokenize)):
            raise ConfigError(problem)


@dataclass(frozen=True)
class ImportedText:
    """Tokenizer files of a model directory and the results of their checks."""

    files: Mapping[str, bytes]
    tokenizer: Tokenizer | None = None
    compared: int = 0  # number of recorded texts
    generation: Mapping[str, int] = field(default_factory=dict)  # selects the target language
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


def import_text(
    tokenizers: Tokenizers | None,
    user_text: TextConfig,
    recorded: TextConfig | None,
    spec: ModelSpec,
    *,
    has_own_weights: bool,
) -> ImportedText:
    """Read tokenizers and compare them with recorded texts.

    If `has_own_weights` is False, other weights computed the recorded outputs, which are then dropped.
    """
    if tokenizers is None:
        note = "there are recorded texts, but no tokenizer to compare them with; give --tokenizer"
        return ImportedText({}, notes=(note,) if recorded else ())
    read = _read(tokenizers.source, spec, "source" if tokenizers.target else None)
    if tokenizers.target is not None:
        target = _read(tokenizers.target, spec, "target")
        read = {TOKENIZER: read[TOKENIZER], TARGET_TOKENIZER: target.get(TARGET_TOKENIZER, target[TOKENIZER])}
    _check_padding(recorded or user_text, spec)

    def load(files: Mapping[str, bytes]) -> Tokenizer:
        sides = [(name, files[name]) for name in (TOKENIZER, TARGET_TOKENIZER) if name in files]
        parse = partial(Tokenizer.parse, sides, spec)
        return fit(lambda text: parse(text=text), recorded, user_text) if recorded else parse(text=user_text)

    files, splits, unverified = with_rules(
        read, tokenizers.tokenize, load if recorded else None, lowercase=tokenizers.lowercase
    )
    warnings = [check_coverage(files[TOKENIZER], tokenizers.source, spec, "source" if len(files) > 1 else None)]
    if len(files) > 1:
        warnings.append(check_coverage(files[TARGET_TOKENIZER], tokenizers.target or tokenizers.source, spec, "target"))
    if not LIMITS_MEMORY:
        warnings.append("the tokenizer was tried without a memory limit, which this system does not support")
    generation, languages = _choose_languages(files, tokenizers)
    tokenizer = load(files)
    if recorded:
        check_texts(tokenizer)
    text = tokenizer.text
    names = [name for name in ("source_prefix", "source_suffix", "target_prefix") if not getattr(user_text, name)]
    found = {name.replace("_", " "): ids for name in names if (ids := getattr(text, name))}
    notes = [f"{name} {', '.join(map(str, ids))}: as in the recorded texts" for name, ids in found.items()]
    notes = [*filter(None, warnings), *splits, *languages, *notes]
    if recorded:
        notes.append(f"the tokenizer and your code agree on ids and texts for {len(text.samples)} recorded texts")
    elif spec.source_vocab and spec.has_decoder and not tokenizer.ends_sources:
        eos = tokenizer.eos
        notes.append(f"warning: sources do not end with {eos}; if they did in training, give --source-suffix {eos}")
    if not has_own_weights:
        text = replace(text, samples=tuple(replace(s, target_ids=(), output=None) for s in text.samples))
    files[TEXT] = (json.dumps(text.to_dict(), ensure_ascii=False) + "\n").encode()
    if not recorded:
        unverified = ["the tokenizer: no texts were recorded to compare it with"]
    return ImportedText(files, tokenizer, len(text.samples), generation, tuple(notes), tuple(unverified))


def _check_padding(text: TextConfig, spec: ModelSpec) -> None:
    pad = spec.tokens.pad
    padded = [number for number, sample in enumerate(text.samples, 1) if pad in sample.source_ids]
    if padded and pad != spec.tokens.eos:
        problem = f"{len(padded)} of {len(text.samples)} recorded texts have the padding id {pad} in their source ids"
        raise ParityError(f"{problem}, text {padded[0]} first; correct tokens.pad, or return ids without padding")


def _read(path: Path, spec: ModelSpec, side: Side | None) -> dict[str, bytes | BareVocabulary]:
    is_directory = path.is_dir()
    read: Any = directory_tokenizer(path, spec) if is_directory else {TOKENIZER: read_tokenizer(path, spec, side)}
    for raw in read.values():
        try:
            if isinstance(raw, bytes):
                try_tokenizer(raw, f"tokenizer {path}")
        except BundleError as error:
            raise CheckpointError(str(error)) from error
    return {**read}


def check_coverage(raw: bytes, path: Path, spec: ModelSpec, side: Side | None) -> str:
    """Return a warning if a tokenizer.json has too few ids for the model."""
    with errors_as(lambda reason: tokenizer_error(path, f"is not a tokenizer.json ({reason}); save it again")):
        vocab = Inner.from_str(raw.decode("utf-8")).get_vocab(with_added_tokens=True)
    ids = {i for i in vocab.values() if i < vocab.get(BEYOND, i + 1)}
    name, size = vocabulary_size(spec, side)
    if size - len(ids) <= _PADDING or len(ids) >= _WARNED_COVERAGE * size:
        return ""
    problem = f"tokenizer {path}: has {len(ids)} ids, the model's {name} is {size}"
    if len(ids) < _REFUSED_COVERAGE * size:
        raise CheckpointError(f"{problem}; give the tokenizer that the model was trained with")
    return f"warning: {problem}; is it the tokenizer that the model was trained with?"


def _choose_languages(files: dict[str, bytes], tokenizers: Tokenizers) -> tuple[dict[str, int], list[str]]:
    """Set the languages of the tokenizers in `files`, in place.

    The language token that a tokenizer adds to a source shows its position. NLLB and mBART-50 put it before the text,
    mBART and the older NLLB after the end token. Sources of Marian begin with the target language.
    """
    inner = Inner.from_str(files[TOKENIZER].decode("utf-8"))
    before, after = around(inner)
    own_languages = [(i, token) for i in (*before, *after) if _LANGUAGE.fullmatch(token := str(inner.id_to_token(i)))]
    source, target = tokenizers.source_language, tokenizers.target_language
    generation: dict[str, int] = {}
    if source is not None:
        if len(own_languages) != 1:
            problem = f"source_language is {source}, but this tokenizer adds no language to a source"
            raise CheckpointError(f"{problem}; give the ids to add as --source-prefix and --source-suffix")
        own, (place, _) = _language_id(inner, source, "source_language"), own_languages[0]
        before, after = (tuple(own if i == place else i for i in ids) for ids in (before, after))
    if target is not None:
        if (marian := inner.token_to_id(f">>{target}<<")) is not None:
            before = (marian, *before)
        else:
            target_inner = Inner.from_str(files.get(TARGET_TOKENIZER, files[TOKENIZER]).decode("utf-8"))
            # mBART, but not mBART-50, starts a target with its language.
            is_start = target_inner.token_to_id("ar_AR") is not None and target_inner.token_to_id("sl_SI") is None
            option = "decoder_start_token_id" if is_start else "forced_bos_token_id"
            generation = {option: _language_id(target_inner, target, "target_language")}
    if (before, after) != around(inner):
        surround(inner, before, after)
        files[TOKENIZER] = inner.to_str(pretty=True).encode()
    notes = [f"the source language is {token}; --source-language gives another" for _, token in own_languages]
    return generation, notes if source is None else []


def _language_id(inner: Inner, language: str, option: str) -> int:
    added = {token.content: i for i, token in inner.get_added_tokens_decoder().items()}
    for token in (language, f"__{language}__", f"<lang:{language}>"):
        if token in added:
            return added[token]
    names = sorted(token for token in added if _LANGUAGE.fullmatch(token) or token.startswith(">>"))
    expected = f"expected one of {', '.join(names)}" if names else "but this tokenizer has no languages; leave it out"
    raise CheckpointError(f"{option} is {language}, {expected}")
