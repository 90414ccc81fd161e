"""Open a source to export: a model directory, a preset or a user's own module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfexport._io.names import CERTIFICATE, GENERATION, LAYOUT, PROCESSOR, TEXT
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import read_json, render
from tfexport.bundle.manifest import ModuleEntry, Provenance, changes_since_import, read_sources
from tfexport.bundle.processor import ProcessorConfig
from tfexport.bundle.status import LOOP, REFERENCE
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, raise_all
from tfexport.export.config import ExportConfig
from tfexport.importing.directory import stored_defaults, stored_tokenizer
from tfexport.importing.own_module import OwnModule, is_own_module, load_own_module
from tfexport.importing.preprocessing import compare_processor
from tfexport.importing.reference.texts import record_texts
from tfexport.importing.text import import_text
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.nn.directory import load_model
from tfexport.nn.eager import EagerModel
from tfexport.nn.presets import build_preset
from tfexport.nn.transformer import Transformer
from tfexport.text.tokenizer import Tokenizer

PRESET = "preset:"
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, and the files and metadata of its bundle."""

    model: EagerModel
    spec: ModelSpec
    config: TransformerConfig | None = None  # None for a user's own module
    module: ModuleEntry | None = None
    tokenizer: Tokenizer | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)
    versions: Mapping[str, str] = field(default_factory=dict)


def open_source(source: str | OwnModule, config: ExportConfig, report: Report) -> Source:
    """Open a source by its name, or a user's own module."""
    if isinstance(source, OwnModule):
        return _from_module(source, config, report)
    if source.startswith(PRESET):
        return _canonical(build_preset(source.removeprefix(PRESET), config.seed), config)
    if is_own_module(source):
        return _from_module(load_own_module(source), config, report)
    return _from_directory(Path(source), config, report)


def _canonical(model: Transformer, config: ExportConfig) -> Source:
    model.shorten(config.max_source_length, config.max_target_length)
    spec = model_spec(model.config, config.graph_precision)
    return Source(model=EagerModel(model), spec=spec, config=model.config)


def _from_directory(directory: Path, config: ExportConfig, report: Report) -> Source:
    found = _canonical(load_model(directory), config)
    tokenizer, files = stored_tokenizer(directory, found.spec)
    if defaults := stored_defaults(directory, found.spec):
        files[GENERATION] = render(defaults.given())
    if os.path.lexists(path := directory / PROCESSOR):
        files[PROCESSOR] = render(ProcessorConfig.read(path, found.spec).to_dict())
    checkpoint, provenance = _imported(directory, found.spec, report)
    model = dataclasses.replace(found.model, author=provenance.author if provenance.proven else None)
    return dataclasses.replace(
        found, model=model, tokenizer=tokenizer, files=files, checkpoint=checkpoint, provenance=provenance
    )


def _imported(directory: Path, spec: ModelSpec, report: Report) -> tuple[dict[str, FileEntry], Provenance]:
    path, layout = directory / CERTIFICATE, directory / LAYOUT
    found = read_json(path, str(path)) if os.path.lexists(path) else None
    if not isinstance(found, dict):
        return {}, Provenance()
    checkpoint = found.get("checkpoint")
    files = read_sources({} if checkpoint is None else checkpoint, f"{path}: checkpoint")
    if not {"layout", "proven"} <= set(found):
        return files, Provenance()
    changes = changes_since_import(found, directory)
    for change in changes:
        report(f"{directory}: {change}, so that its proof does not apply")
    facts = {
        "layout": found["layout"],
        "proven": False if changes else found["proven"],
        "author": found.get("author", REFERENCE) + _compared(found, spec),
        "origin": found.get("origin", {}),
        "certificate_sha256": FileEntry.of(path).sha256,
        "layout_sha256": FileEntry.of(layout).sha256 if layout.is_file() else None,
    }
    return files, Provenance.from_dict(facts, subject=str(path))


def _compared(certificate: Mapping[str, Any], spec: ModelSpec) -> str:
    """Return the lengths that an import compared, if the model accepts longer texts."""
    source, target = (certificate.get(f"{side}_tokens") for side in ("source", "target"))
    if not isinstance(source, int) or not isinstance(target, int) or not source:  # of an earlier version
        return ""
    if source >= spec.max_source_length and target >= spec.max_target_length:
        return ""
    return f" up to {source} source and {target} target tokens" if spec.has_decoder else f" up to {source} tokens"


def _from_module(own: OwnModule, config: ExportConfig, report: Report) -> Source:
    model, recorded = own.model, None
    if own.texts is not None:
        report("recording texts")
        vocab = own.spec.vocab if own.spec.has_decoder else None
        recorded = record_texts(model.module, model.reference, own.texts, own.spec.source_vocab, vocab)
    text = import_text(own.tokenizers, own.around, recorded, own.spec, has_own_weights=True)
    for note in text.notes:
        report(note)
    files = {name: raw for name, raw in text.files.items() if name != TEXT}
    if own.processor is not None:
        raise_all(ConfigError, "processor", own.processor.problems_for(own.spec))
        processor = own.processor
        if own.preprocess is not None:
            report("comparing the processor with your own code")
            compared = compare_processor(processor, own.preprocess, "the author's own code", "processor")
            processor = dataclasses.replace(processor, compared=compared)
        files[PROCESSOR] = render(processor.to_dict())
    generation = {**own.generation.given(), **text.generation}
    return Source(
        model=model,
        spec=_limited(own.spec, config),
        module=own.entry(),
        provenance=Provenance(proven=model.author in (LOOP, REFERENCE), author=model.author or REFERENCE),
        tokenizer=text.tokenizer,
        files={**files, GENERATION: render(generation)} if generation else files,
        versions=own.versions(),
    )


def _limited(spec: ModelSpec, config: ExportConfig) -> ModelSpec:
    limits = {"max_source_length": config.max_source_length, "max_target_length": config.max_target_length}
    lengths: dict[str, Any] = {name: length for name, length in limits.items() if length is not None}
    problems = [
        f"{name} is {length}, expected at most {maximum} as in the module's spec; lower it or raise the spec's limit"
        for name, length in lengths.items()
        if length > (maximum := getattr(spec, name))
    ]
    raise_all(ConfigError, "export", problems)
    return dataclasses.replace(spec, precision=config.graph_precision, **lengths)
