"""Import tokenizers and compare them with the model and the recorded texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer as Inner

from tfexport._io import process
from tfexport._io.names import TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import BundleError, CheckpointError
from tfexport.importing.huggingface.tokenizer import around, directory_tokenizer, surround
from tfexport.importing.vocabulary import Side, tokenizer_json, vocabulary_size
from tfexport.text.compare import fit_text_config
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import BEYOND, errors_as, try_tokenizer

# A model has more ids than texts use: languages, sentinels, and padding to a multiple.
_PADDING = 256
_REFUSED_COVERAGE, _WARNED_COVERAGE = 0.5, 0.9
# Language tokens of M2M100, mBART and NLLB: __en__, en_XX, eng_Latn.
_LANGUAGE = re.compile(r"__[a-z]{2,3}__|[a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}")


@dataclass(frozen=True)
class Tokenizers:
    """Tokenizers and languages that the user chooses.

    Attributes:
        source: a tokenizer.json, a SentencePiece model, a list of tokens, or a Hugging Face directory. It is used for
            both sides if `target` is None.
        target: tokenizer of the target, if it has its own.
        source_language: language as the tokenizer names it, such as eng_Latn, en_XX or en. None keeps the tokenizer's
            default.
        target_language: target language in the same form.
    """

    source: Path
    target: Path | None = None
    source_language: str | None = None
    target_language: str | None = None


@dataclass(frozen=True)
class ImportedText:
    """Tokenizer files of a model directory and the results of their checks.

    `compared` is the number of recorded texts that the tokenizer was compared with. `generation` selects the target
    language. `unverified` lists what could be wrong without being noticed.
    """

    files: Mapping[str, bytes]
    tokenizer: Tokenizer | None = None
    compared: int = 0
    generation: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


def import_text(
    tokenizers: Tokenizers | None,
    given: TextConfig,
    recorded: TextConfig | None,
    spec: ModelSpec,
    *,
    has_own_weights: bool,
) -> ImportedText:
    """Read tokenizers and compare them with recorded texts.

    `given` has the ids around a text that the user gives, and `recorded` the texts of the reference file. If
    `has_own_weights` is False, other weights computed the recorded outputs, which are then dropped.
    """
    if tokenizers is None:
        lost = ("there are recorded texts, but no tokenizer to compare: give --tokenizer",) if recorded else ()
        return ImportedText({}, notes=lost)
    if tokenizers.target is None:
        files, warnings = _read(tokenizers.source, spec, None)
    else:
        files, warnings = _read(tokenizers.source, spec, "source")
        target, more = _read(tokenizers.target, spec, "target")
        files, warnings = {**files, TARGET_TOKENIZER: target[TOKENIZER]}, [*warnings, *more]
    generation, languages = _choose_languages(files, tokenizers)
    sides = [(name, files[name]) for name in (TOKENIZER, TARGET_TOKENIZER) if name in files]

    def load(text: TextConfig) -> Tokenizer:
        return Tokenizer.parse(sides, spec, text=text)

    text = fit_text_config(load, recorded, given) if recorded else given
    tokenizer = load(text)
    notes = (*warnings, *languages, *_notes(tokenizer, given, is_compared=bool(recorded), has_decoder=spec.has_decoder))
    if not has_own_weights:
        text = replace(text, samples=tuple(replace(s, target_ids=(), output=None) for s in text.samples))
    files[TEXT] = (json.dumps(text.to_dict(), ensure_ascii=False) + "\n").encode()
    unverified = () if recorded else ("the tokenizer: no texts were recorded to compare it with",)
    return ImportedText(files, tokenizer, len(text.samples), generation, notes, unverified)


def _read(path: Path, spec: ModelSpec, side: Side | None) -> tuple[dict[str, bytes], list[str]]:
    files = directory_tokenizer(path, spec) if path.is_dir() else {TOKENIZER: tokenizer_json(path, spec, side)}
    if side is not None:
        own = files.get(TARGET_TOKENIZER) if side == "target" else None
        files = {TOKENIZER: own or files[TOKENIZER]}
    for raw in files.values():
        try:
            try_tokenizer(raw, f"tokenizer {path}")
        except BundleError as error:
            raise CheckpointError(str(error)) from error
    sides: dict[str, Side | None] = {TOKENIZER: side, TARGET_TOKENIZER: "target"}
    if TARGET_TOKENIZER in files:
        sides[TOKENIZER] = "source"
    warnings = [check_coverage(raw, path, spec, sides[name]) for name, raw in files.items()]
    if process.resource is None:
        warnings.append("the tokenizer was tried without a limit of memory, which this system does not have")
    return files, [warning for warning in warnings if warning]


def check_coverage(raw: bytes, path: Path, spec: ModelSpec, side: Side | None) -> str:
    """Return a warning if a tokenizer.json has too few ids for the model.

    Raises:
        CheckpointError: It has fewer than half of the ids.
    """
    with errors_as(lambda reason: CheckpointError(f"tokenizer {path}: is no tokenizer.json ({reason}); save it again")):
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
            raise CheckpointError(
                f"source_language is {source}, but this tokenizer puts no language around a source; "
                "give the ids that it shall put there as --source-prefix and --source-suffix"
            )
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
    for token in (language, f"__{language}__"):
        if token in added:
            return added[token]
    names = sorted(token for token in added if _LANGUAGE.fullmatch(token) or token.startswith(">>"))
    raise CheckpointError(
        f"{option} is {language}, expected one of {', '.join(names)}"
        if names
        else f"{option} is {language}, but this tokenizer has no languages; leave it out"
    )


def _notes(tokenizer: Tokenizer, given: TextConfig, *, is_compared: bool, has_decoder: bool) -> list[str]:
    text = tokenizer.text
    notes = [
        f"{name.replace('_', ' ')} {', '.join(map(str, ids))}: so the recorded texts have it"
        for name in ("source_prefix", "source_suffix", "target_prefix")
        if (ids := getattr(text, name)) and not getattr(given, name)
    ]
    if is_compared:
        notes.append(f"the tokenizer gives the ids and texts of your code for {len(text.samples)} recorded texts")
    elif has_decoder and not tokenizer.ends_sources:
        eos = tokenizer.eos
        notes.append(
            f"warning: sources do not end with the end token {eos}; if those of your training did, "
            f"give --source-suffix {eos}, and record texts to be sure"
        )
    return notes
