"""What becomes a bundle, wherever it comes from: a model directory, a preset, or a module of the user's own."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfexport._io.names import CERTIFICATE, GENERATION, LAYOUT, TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.sealed_json import render
from tfexport._io.strict_json import read_json
from tfexport.bundle.manifest import ModuleEntry, Provenance, read_sources
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, raise_all
from tfexport.export.config import ExportConfig
from tfexport.generation import GenerationDefaults
from tfexport.importing.own_module import OwnModule, is_own_module, load_own_module
from tfexport.importing.reference.texts import record_texts
from tfexport.importing.text import import_text
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.nn.directory import load_model
from tfexport.nn.eager import EagerModel
from tfexport.nn.lengths import shorten
from tfexport.nn.presets import build_preset
from tfexport.nn.transformer import Transformer
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import read_plain, try_tokenizer

PRESET = "preset:"
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and what goes beside its graphs.

    Attributes:
        model: that is traced, and that every stage is compared with.
        spec: of the graphs: their precision and lengths.
        config: of the canonical model; None for a module of the user's own.
        module: what the manifest says of that; None for the canonical model.
        tokenizer: read, tried and compared with recorded texts; None where there is none.
        files: of the bundle, by name.
        checkpoint: the files that the weights were imported from, by name.
        provenance: how they were imported; None where nothing was.
        versions: of what the user's module is from, by name.
    """

    model: EagerModel
    spec: ModelSpec
    config: TransformerConfig | None = None
    module: ModuleEntry | None = None
    tokenizer: Tokenizer | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict)
    provenance: Provenance | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def open_source(name: str, config: ExportConfig, report: Report) -> Source:
    """Open what a user names.

    Args:
        name: a model directory, "preset:NAME" for seeded random weights, or PACKAGE.MODULE:FACTORY, which is imported.
        config: precision, lengths and seed.
        report: told what is found, a line at a time.

    Raises:
        ConfigError: the model cannot be had this way.
        CheckpointError: weights are missing, damaged or do not fit, or a tokenizer cannot be read.
        BundleError: a tokenizer does not fit the model.
        ParityError: a tokenizer differs from a recorded text.
    """
    if name.startswith(PRESET):
        return _canonical(build_preset(name.removeprefix(PRESET), config.seed), config)
    if is_own_module(name):
        return of_module(load_own_module(name), config, report)
    return of_directory(Path(name), config)


def of_directory(directory: Path, config: ExportConfig) -> Source:
    """Read a model directory; see `open_source`."""
    found = _canonical(load_model(directory), config)
    paths = {name: path for name in (TOKENIZER, TARGET_TOKENIZER) if os.path.lexists(path := directory / name)}
    files = {name: read_plain(path) for name, path in paths.items()}
    named = [(str(path), files[name]) for name, path in paths.items()]
    tokenizer = _tokenizer(named, found.spec, _text(directory)) if TOKENIZER in files else None
    if generation := _generation(directory, found.spec):
        files[GENERATION] = render(generation.given())
    sources, provenance = _imported(directory)
    return dataclasses.replace(found, tokenizer=tokenizer, files=files, checkpoint=sources, provenance=provenance)


def of_module(own: OwnModule, config: ExportConfig, report: Report) -> Source:
    """Take a module of the user's own, and run its samples through the user's code; see `open_source`."""
    model, recorded = own.model, None
    if own.texts is not None:
        report("recording texts")
        vocab = own.spec.vocab if own.spec.has_decoder else None
        recorded = record_texts(model.module, model.reference, own.texts, own.spec.source_vocab, vocab)
    text = import_text(own.tokenizers, own.around, recorded, own.spec, has_own_weights=True)
    for note in text.notes:
        report(note)
    files = {name: raw for name, raw in text.files.items() if name != TEXT}
    generation = {**own.generation.given(), **text.generation}
    return Source(
        model=model,
        spec=_limited(own.spec, config),
        module=own.entry(),
        tokenizer=text.tokenizer,
        files={**files, GENERATION: render(generation)} if generation else files,
        versions=own.versions(),
    )


def _canonical(model: Transformer, config: ExportConfig) -> Source:
    shorten(model, config.max_source_length, config.max_target_length)
    spec = model_spec(model.config, config.graph_precision)
    return Source(model=EagerModel(model), spec=spec, config=model.config)


def _limited(spec: ModelSpec, config: ExportConfig) -> ModelSpec:
    """Return a specification of the graphs' precision with the lengths that are asked for."""
    lengths = {name: getattr(config, name) for name in ("max_source_length", "max_target_length")}
    lengths = {name: length for name, length in lengths.items() if length is not None}
    problems = [
        f"{name} is {length}, above the {getattr(spec, name)} of the module's spec; ask for less, or raise that"
        for name, length in lengths.items()
        if length > getattr(spec, name)
    ]
    raise_all(ConfigError, "export", problems)
    return dataclasses.replace(spec, precision=config.graph_precision, **lengths)


def _text(directory: Path) -> TextConfig:
    """Read what surrounds the ids; directories from before there was such a file have nothing around them."""
    path = directory / TEXT
    return TextConfig.from_dict(read_json(path, TEXT), subject=TEXT) if os.path.lexists(path) else TextConfig()


def _tokenizer(files: Sequence[tuple[str, bytes]], spec: ModelSpec, text: TextConfig) -> Tokenizer:
    """Try and read the tokenizers of a model directory, each with the name of its file; the first is the source's."""
    for name, raw in files:
        try_tokenizer(raw, name)
    return Tokenizer.parse(files, spec, text=text)


def _generation(directory: Path, spec: ModelSpec) -> GenerationDefaults | None:
    """Return what a model directory says of generation, where it does."""
    path = directory / GENERATION
    if not os.path.lexists(path):
        return None
    defaults = GenerationDefaults.from_dict(read_json(path, str(path)), subject=str(path))
    raise_all(ConfigError, str(path), defaults.token_problems(spec.vocab))
    return defaults


def _imported(directory: Path) -> tuple[dict[str, FileEntry], Provenance | None]:
    """Return the files that the weights were read from and how, as the certificate of an import says."""
    path, layout = directory / CERTIFICATE, directory / LAYOUT
    found = read_json(path, str(path)) if os.path.lexists(path) else None
    if not isinstance(found, dict):
        return {}, None
    checkpoint = found.get("checkpoint")
    sources = read_sources({} if checkpoint is None else checkpoint, f"{path}: checkpoint")
    if not {"layout", "proven"} <= set(found):
        return sources, None
    sums = {"certificate_sha256": _sha256(path), "layout_sha256": _sha256(layout) if layout.is_file() else None}
    said = {"layout": found["layout"], "proven": found["proven"], **sums}
    return sources, Provenance.from_dict(said, subject=str(path))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
