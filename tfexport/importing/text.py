"""The text of an import: which tokenizers go beside the weights, what surrounds their ids, and what of it is proven."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tfexport._io.names import TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import BackendError, BundleError, CheckpointError
from tfexport.importing.formats.hugging_face_tokenizer import tokenizer_files
from tfexport.importing.formats.language_pair import AS_IT_IS, LanguagePair, with_languages
from tfexport.importing.formats.tokenizer import checked, read_tokenizers
from tfexport.importing.formats.tokenizer_parts import TokenizerFiles
from tfexport.text.compare import fitted
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Tokenizers:
    """Files that a user gives.

    Attributes:
        source: a tokenizer.json, a SentencePiece model, a list of tokens, or a Hugging Face directory; of both sides
            where there is no other.
        target: the target's own.
        languages: of source and target.
    """

    source: Path
    target: Path | None = None
    languages: LanguagePair = AS_IT_IS


@dataclass(frozen=True)
class ImportedText:
    """What goes beside the weights.

    Attributes:
        files: of the model directory, by name.
        tokenizer: that they are, compared with what was recorded; None where there is none.
        compared: recorded texts that the tokenizer was compared with.
        generation: options of generation that go with a target language.
        notes: what the caller should know.
        unverified: what could be wrong unseen.
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

    Args:
        tokenizers: None where there is none; ids alone go in and out then.
        given: what surrounds the ids, as far as the user says so.
        recorded: the texts of the golden; None where it has none.
        spec: of the model.
        has_own_weights: whether the golden was recorded beside the weights that are imported: if not, what it says is
            not what they say.

    Raises:
        CheckpointError: a tokenizer cannot be read or does not fit.
        BundleError: likewise, or ids around a text that the model does not have.
        ParityError: a tokenizer differs from a recorded text.
    """
    if tokenizers is None:
        lost = ("there are recorded texts, but no tokenizer to compare: give --tokenizer",) if recorded else ()
        return ImportedText({}, notes=lost)
    found = read_tokenizers(tokenizers.source, tokenizers.target, spec, tokenizers.languages)
    if recorded is None or tokenizers.languages != AS_IT_IS:
        given = _completed(given, found)
    return _compared(found, given, recorded, spec, has_own_weights=has_own_weights)


def _compared(
    found: TokenizerFiles,
    given: TextConfig,
    recorded: TextConfig | None,
    spec: ModelSpec,
    *,
    has_own_weights: bool,
) -> ImportedText:
    """Compare what was read with recorded texts."""
    files = dict(found.files)
    sides = [(name, files[name]) for name in (TOKENIZER, TARGET_TOKENIZER) if name in files]

    def load(text: TextConfig) -> Tokenizer:
        return Tokenizer.parse(sides, spec, text=text)

    text = fitted(load, recorded, given) if recorded else given
    tokenizer = load(text)
    around = _notes(tokenizer, given, is_compared=bool(recorded), has_decoder=spec.has_decoder)
    notes = (*found.notes, *around)
    if not has_own_weights:
        text = replace(text, samples=tuple(replace(s, target_ids=(), output=None) for s in text.samples))
    files[TEXT] = (json.dumps(text.to_dict(), ensure_ascii=False) + "\n").encode()
    unverified = () if recorded else ("the tokenizer: no texts were recorded to compare it with",)
    return ImportedText(files, tokenizer, len(text.samples), found.generation, notes, unverified)


def _completed(given: TextConfig, found: TokenizerFiles) -> TextConfig:
    """Put around a source what transformers puts there, as far as the user leaves it open."""
    return replace(
        given,
        source_prefix=given.source_prefix or found.source_prefix,
        source_suffix=given.source_suffix or found.source_suffix,
    )


def import_directory_text(
    directory: Path,
    given: TextConfig,
    recorded: TextConfig | None,
    spec: ModelSpec,
    *,
    has_own_weights: bool,
) -> ImportedText:
    """Take the tokenizer of a directory, which nobody asked for: what does not fit is said and left.

    Args:
        directory: of Hugging Face.
        given: what surrounds the ids, as far as the user says so.
        recorded: the texts of the golden; None where it has none.
        spec: of the model.
        has_own_weights: as in `import_text`.

    Raises:
        ParityError: the tokenizer differs from a recorded text.
    """
    try:
        found = tokenizer_files(directory, spec)
        if found is None:
            return import_text(None, given, recorded, spec, has_own_weights=has_own_weights)
        found = with_languages(checked(found, directory, spec), AS_IT_IS)
        around = _completed(given, found) if recorded is None else given
        text = _compared(found, around, recorded, spec, has_own_weights=has_own_weights)
    except (BackendError, BundleError, CheckpointError) as error:
        return ImportedText({}, notes=(f"the directory's tokenizer is not taken: {error}",))
    return replace(text, notes=(f"the tokenizer is the directory's {', '.join(found.names)}", *text.notes))


def _notes(tokenizer: Tokenizer, given: TextConfig, *, is_compared: bool, has_decoder: bool) -> tuple[str, ...]:
    """Say what was found around the ids, or what is probably missing there."""
    text = tokenizer.text
    notes = [
        f"{name.replace('_', ' ')} {', '.join(map(str, ids))}: so the recorded texts have it"
        for name in ("source_prefix", "source_suffix", "target_prefix")
        if (ids := getattr(text, name)) and not getattr(given, name)
    ]
    if is_compared:
        notes.append(f"the tokenizer says what your code says of {len(text.samples)} recorded texts")
    elif has_decoder and not tokenizer.ends_sources:
        eos = tokenizer.eos
        notes.append(
            f"warning: sources do not end with the end token {eos}; if those of your training did, "
            f"give --source-suffix {eos}, and record texts to be sure"
        )
    return tuple(notes)
