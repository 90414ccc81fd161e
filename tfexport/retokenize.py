"""From a bundle to the same bundle with another tokenizer, or other ids around it: compare, write anew, publish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tfexport._io.names import MANIFEST, TARGET_TOKENIZER, TOKENIZER
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport.bundle.bundle import SIGNATURE_DROPPED, Builder, Bundle, create_bundle, open_bundle, write_errors
from tfexport.config import Config
from tfexport.errors import ConfigError
from tfexport.importing.formats.language_pair import AS_IT_IS, LanguagePair, with_languages
from tfexport.importing.formats.tokenizer import read_tokenizer
from tfexport.importing.formats.tokenizer_parts import TokenizerFiles
from tfexport.text.compare import check_texts
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer


class TokenizerConfig(Config, subject="tokenizer"):
    """Ids around a text, or the source's language, which stands among them; None leaves what the bundle has."""

    source_language: str | None = None
    source_prefix: tuple[int, ...] | None = None
    source_suffix: tuple[int, ...] | None = None
    target_prefix: tuple[int, ...] | None = None


def replace_tokenizer(
    path: Path,
    config: TokenizerConfig,
    *,
    tokenizer: Path | None = None,
    target_tokenizer: Path | None = None,
    sign_key: Path | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Give a bundle another tokenizer, or other ids around its own; graphs and engines stay as they are.

    Args:
        path: of the bundle, which is replaced whole or not at all.
        config: ids around a text.
        tokenizer: a tokenizer.json, a SentencePiece model, a list of tokens, or a Hugging Face
            directory; None leaves it.
        target_tokenizer: the target's own; None leaves it.
        sign_key: private key that signs the bundle anew; None leaves it unsigned, also where it was signed before.
        trusted_keys: files of public keys, one of which must have signed the bundle as it is; None takes whosever.
        report: told what happens, a line at a time.

    Returns:
        The bundle, opened.

    Raises:
        BundleError: the bundle is damaged or cannot be written, or the tokenizer has more ids than the model.
        CheckpointError: a tokenizer cannot be read.
        ConfigError: there is nothing to change, or no tokenizer to change it of, or a key is none.
        ParityError: a recorded text differs; the bundle stays as it was.
    """
    changes = {name: value for name, value in config.to_dict().items() if value is not None}
    language = LanguagePair(changes.pop("source_language", None))
    if not changes and language == AS_IT_IS and tokenizer is None and target_tokenizer is None:
        raise ConfigError("tokenizer: nothing is to change; give --tokenizer, --source-suffix or another option")
    key = None if sign_key is None else SigningKey.read(sign_key)
    trusted = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    root = open_bundle(path, weights=False, trusted_keys=trusted).path
    rewriting = write_errors(f"bundle {path}", remedy="check the disk that it lies on")
    with create_bundle(root, force=True, key=key) as builder, rewriting:
        bundle = open_bundle(root, trusted_keys=trusted)  # which nobody else replaces now
        files, around = _files(bundle, builder.path, tokenizer, target_tokenizer, language, report)
        text = replace(bundle.manifest.text, **{**around, **changes})
        opened = Tokenizer.load(files[TOKENIZER], bundle.manifest.spec, target=files.get(TARGET_TOKENIZER), text=text)
        check_texts(opened)
        if text.samples:
            report(f"compared with {text.proof}")
        if builder.drops_signature:
            report(SIGNATURE_DROPPED)
        _finish(builder, bundle, files, text)
    return builder.bundle


def _files(
    bundle: Bundle,
    folder: Path,
    source: Path | None,
    target: Path | None,
    language: LanguagePair,
    report: Callable[[str], None],
) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Write new tokenizers into `folder`.

    Returns:
        The tokenizers of the bundle as they shall be, by name, and what a directory's puts around a source.
    """
    manifest = bundle.manifest
    files = {name: bundle.file(name) for name in (TOKENIZER, TARGET_TOKENIZER) if name in manifest.files}
    if TOKENIZER not in files and source is None:
        raise ConfigError(f"tokenizer: {bundle.path} has none; give one as --tokenizer")
    spec = manifest.spec
    has_two = target is not None or TARGET_TOKENIZER in files
    found = TokenizerFiles({}, ())
    if source is not None:
        found = read_tokenizer(source, spec, "source" if has_two and not source.is_dir() else None)
    elif language != AS_IT_IS:
        text = manifest.text
        own = {TOKENIZER: files[TOKENIZER].read_bytes()}
        found = TokenizerFiles(own, (), source_prefix=text.source_prefix, source_suffix=text.source_suffix)
    if found.files:
        found = with_languages(found, language)
    made, notes = dict(found.files), found.notes
    if target is not None:
        theirs = read_tokenizer(target, spec, "target")
        made[TARGET_TOKENIZER], notes = theirs.files[TOKENIZER], (*notes, *theirs.notes)
    for name, raw in made.items():
        (folder / name).write_bytes(raw)
        files[name] = folder / name
    for note in notes:
        report(note)
    around = {"source_prefix": found.source_prefix, "source_suffix": found.source_suffix}
    return files, {name: ids for name, ids in around.items() if ids}


def _finish(builder: Builder, bundle: Bundle, files: dict[str, Path], text: TextConfig) -> None:
    """Copy what stays as it is, and seal the bundle."""
    manifest = bundle.manifest
    for name in {*manifest.files, *files} - {MANIFEST}:
        copy = builder.path / name
        if files.get(name) != copy:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, copy)
    builder.finish(
        spec=manifest.spec,
        config=manifest.config,
        graphs=manifest.graphs,
        versions=manifest.versions,
        parity=manifest.parity,
        quantization=manifest.quantization,
        text=text,
        alignment=manifest.alignment,
        checkpoint=manifest.checkpoint,
        provenance=manifest.provenance,
        identity=manifest.identity,
        module=manifest.module,
        loop=manifest.loop,
    )
