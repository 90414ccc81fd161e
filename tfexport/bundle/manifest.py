"""The manifest of a bundle, read strictly and written deterministically."""

import dataclasses
import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, Self

from tfexport._io.names import CERTIFICATE, CONFIG, MANIFEST, MODEL_WEIGHTS, SHORTLIST_TABLE, SIGNATURE, TOKENIZER
from tfexport._io.sealed_directory import FileEntry, changed_problems
from tfexport._io.strict_json import seal, unseal
from tfexport.bundle.status import MODULE, REFERENCE, Proof, Status, proof_of
from tfexport.config import Config, Sha256, read_as
from tfexport.contract import (
    ALIGNMENT,
    DECODER,
    ENCODER,
    ENCODER_CONTRIB,
    REORDER,
    SHORTLIST,
    AlignmentHeads,
    GraphEntry,
    ModelSpec,
    Quantization,
    contract_problems,
    graph_contract,
    has_shortlist,
)
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.precision import Accuracy
from tfexport.text.config import TextConfig

ENGINES = "engines"
FORMAT_VERSION = 1
_MAX_MODULE_NAME, _MAX_IDENTITY = 400, 200

Kind = Literal["encoder-decoder", "encoder"]

# Excludes "..", absolute paths, drives, backslashes and everything that file systems spell differently, except case.
_PLAIN_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_PLAIN_PATH = re.compile(f"{_PLAIN_PART}(/{_PLAIN_PART})*")
_GRAPHS = frozenset({*DECODER.values(), ENCODER, ENCODER_CONTRIB, REORDER, ALIGNMENT, SHORTLIST})
# Former names of the contrib graphs.
_OLD_NAMES = {"encoder_fused": ENCODER_CONTRIB, "decoder_fused": DECODER["contrib"]}


class Identity(Config, subject="identity"):
    """Name, version, license and date that the maker gives to a bundle."""

    name: str | None = None
    version: str | None = None
    license: str | None = None  # for example an SPDX identifier
    date: str | None = None  # YYYY-MM-DD; not from the clock, so that equal input gives equal bytes

    def _problems(self) -> Iterator[str]:
        for name, value in self.given().items():
            if not (value.strip() == value and value.isprintable() and 0 < len(value) <= _MAX_IDENTITY):
                yield f"{name} is {shortened(value)}, expected 1 to {_MAX_IDENTITY} characters of one line"
        if self.date is not None and not _is_date(self.date):
            yield f"date is {shortened(self.date)}, expected YYYY-MM-DD, such as 2026-01-31"

    def given(self) -> dict[str, str]:
        """Return the values that are not None, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


class Provenance(Config, subject="provenance"):
    """Where the weights come from, and what the outputs were compared with."""

    status: Status | None = None  # None in bundles of earlier versions, see `Manifest.proof`
    proof: str | None = None  # the sentence that explains the status
    proven: bool = False  # whether the eager model computes what the author's code computes
    author: str = REFERENCE  # the outputs of the author's code that it was compared with
    layout: str | None = None  # name of the checkpoint layout; None if the weights were not imported
    layout_sha256: Sha256 | None = None  # of layout.yaml; None if the model directory has none
    certificate_sha256: Sha256 | None = None  # of certificate.json; None if the weights were not imported
    # Of the checkpoint, if known: repository, revision and commit on the Hub, license, pipeline_tag.
    origin: Mapping[str, str] = field(default_factory=dict)

    def _problems(self) -> Iterator[str]:
        for name in ("layout", "proof", "author"):
            if not (getattr(self, name) or "").isprintable():
                yield f"{name} is {shortened(getattr(self, name))}, expected printable text in one line"
        if not "".join(self.origin.values()).isprintable():
            yield f"origin is {shortened(self.origin)}, expected printable texts in one line"


class ModuleEntry(Config, subject="module"):
    """The user's own module that a bundle was exported from."""

    name: str  # of its class, which is never imported
    weights_sha256: Sha256  # of names, dtypes, shapes and values of all tensors of its state dict

    def _problems(self) -> Iterator[str]:
        if not self.name.isprintable() or not 1 <= len(self.name) <= _MAX_MODULE_NAME:
            yield f"name is {shortened(self.name)}, expected the name of a class"


class Draft(Config, subject=MANIFEST):
    """The content of a manifest, except for its files."""

    spec: ModelSpec
    config: TransformerConfig | None  # None for a module that is not the canonical transformer
    graphs: Mapping[str, GraphEntry]  # by name; `reorder` is missing in old bundles
    versions: Mapping[str, str]  # of the tools that made the bundle
    parity: Mapping[str, Any] | None  # summary of the verification with at least `passed`; None if not verified
    quantization: Quantization | None = None  # None if the weights have the dtype of the graphs
    text: TextConfig = TextConfig()
    alignment: AlignmentHeads | None = None  # of the alignment graph; None without one
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict)  # that the weights were imported from
    provenance: Provenance | None = None  # None in bundles of earlier versions whose weights were not imported
    identity: Identity = Identity()
    module: ModuleEntry | None = None  # None for the canonical model

    @property
    def author(self) -> str | None:
        """The outputs of the author's code that the eager model agrees with, or None."""
        if self.provenance is not None and self.provenance.proven:
            return self.provenance.author
        return MODULE if self.module is not None and self.spec.has_decoder else None

    @property
    def proof(self) -> Proof:
        """What the outputs were compared with, also in bundles of earlier versions."""
        return proof_of((self.parity or {}).get("passed"), self.author)


class Manifest(Draft, subject=MANIFEST):
    """The content of manifest.json."""

    format_version: int
    kind: Kind
    files: Mapping[str, FileEntry]  # every file except the manifest, its signature and engines, by relative path

    def _problems(self) -> list[str]:
        problems = [*self._spec_problems(), *self._text_problems(), *self._graph_problems()]
        return [*problems, *self._contract_problems(), *self._path_problems()]

    def _spec_problems(self) -> Iterator[str]:
        if self.kind != kind_of(self.spec):
            yield f"kind is {self.kind!r}, but spec describes an {kind_of(self.spec)}"
        if self.config is not None and model_spec(self.config, self.spec.precision) != self.spec:
            yield "spec and config describe different models"
        if self.config is not None and self.module is not None:
            yield "config and module are both given, expected only one"
        expected = "fp16" if self.quantization and self.quantization.calibration else "fp32"
        if self.quantization is not None and self.spec.precision != expected:
            yield f"quantization is given, but spec.precision is {self.spec.precision}, expected {expected}"
        if self.alignment is not None:
            try:
                if self.alignment.within(self.spec) != self.alignment:
                    yield "alignment: expected a layer counted from 0 and a list of heads"
            except ConfigError as error:
                yield from (f"alignment: {problem}" for problem in error.problems)
        if self.parity is not None and not isinstance(self.parity.get("passed"), bool):
            yield f"parity.passed is {shortened(self.parity.get('passed'))}, expected true or false"
        stated = self.provenance and self.provenance.status
        if stated and stated != self.proof.status:
            yield f"provenance.status is {stated}, but parity and proven make it {self.proof.status}"

    def _text_problems(self) -> Iterator[str]:
        text, source, target = self.text, self.spec.source_vocab, self.spec.vocab
        sides = [("source_prefix", text.source_prefix, source), ("source_suffix", text.source_suffix, source)]
        sides.append(("target_prefix", text.target_prefix, target))
        for index, sample in enumerate(text.samples):
            sides.append((f"samples[{index}].source_ids", sample.source_ids, source))
            sides.append((f"samples[{index}].target_ids", sample.target_ids, target))
        for name, ids, vocab in sides:
            if max(ids, default=-1) >= vocab:
                yield f"text.{name} has {shortened(max(ids))}, expected below the vocabulary of {vocab}"

    def _graph_problems(self) -> Iterator[str]:
        names, decoders = set(self.graphs), set(DECODER.values())
        for name, graph in self.graphs.items():
            if graph.file not in self.files:
                yield f"graphs.{name[:80]} is {graph.file[:200]!r}, which is not among the files"
        yield from (f"unknown graph {name[:80]!r}" for name in self.graphs if name not in _GRAPHS)
        portable = decoders - {DECODER["contrib"]}
        if ENCODER not in names and (ENCODER_CONTRIB not in names or portable & names):
            yield f"missing graph {ENCODER!r}"
        if (ENCODER_CONTRIB in names) != (DECODER["contrib"] in names):
            yield f"graphs has only one of {ENCODER_CONTRIB!r} and {DECODER['contrib']!r}, expected both or neither"
        if (ALIGNMENT in names) != (self.alignment is not None):
            yield f"only one of alignment and the graph {ALIGNMENT!r} is given, expected both or neither"
        listed = {has_shortlist(self.graphs[name].spec) for name in decoders & names}
        if len({SHORTLIST in names, SHORTLIST_TABLE in self.files, *listed}) > 1:
            yield f"only some of {SHORTLIST_TABLE}, the graph {SHORTLIST!r} and the decoders are for shortlists"
        if self.spec.has_decoder != bool(decoders & names):
            yield f"kind is {self.kind!r}, but the graphs are {', '.join(sorted(names))[:200] or 'none'}"

    def _contract_problems(self) -> Iterator[str]:
        graphs = {name: graph for name, graph in self.graphs.items() if name in _GRAPHS}
        for name, graph in graphs.items():
            if "/" in graph.file or not graph.file.endswith(".onnx"):
                yield f"graphs.{name} is {graph.file[:200]!r}, expected a file NAME.onnx next to the weights"
            contract = graph_contract(self.spec, name, graph.spec)
            yield from (f"graphs.{name}: {problem}" for problem in contract_problems(graph.spec, contract))

    def _path_problems(self) -> Iterator[str]:
        yield from _name_problems("checkpoint", self.checkpoint)
        seen: dict[str, str] = {}
        for path in self.files:
            if not _PLAIN_PATH.fullmatch(path) or path.split("/")[0].lower() in (MANIFEST, SIGNATURE, ENGINES):
                yield f"files has {path[:200]!r}, expected a plain relative path inside the bundle"
            elif path.lower() in seen:
                yield f"files has {seen[path.lower()]!r} and {path!r}, which are the same file on some systems"
            seen[path.lower()] = path

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model accepts texts in addition to token ids."""
        return TOKENIZER in self.files

    @property
    def has_shortlist(self) -> bool:
        """Whether each text may only have the tokens of its shortlist."""
        return SHORTLIST in self.graphs

    @property
    def accuracy(self) -> Accuracy:
        """The data type that limits the numerical accuracy of the graphs."""
        return self.quantization.precision if self.quantization else self.spec.precision

    def to_bytes(self) -> bytes:
        """Serialize the manifest as sealed JSON."""
        return seal(self.to_dict())

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        # Old bundles had a graph of the greedy loop.
        data = {name: value for name, value in data.items() if name != "loop"}
        if isinstance(graphs := data.get("graphs"), dict):
            data["graphs"] = {_OLD_NAMES.get(name, name): graphs[name] for name in graphs if name != "loop"}
        return data

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a manifest that `to_bytes` wrote."""
        return unseal(
            raw,
            lambda data: cls.from_dict(data, subject=MANIFEST),
            name=MANIFEST,
            format_version=FORMAT_VERSION,
            remedy="export it again",
        )


def kind_of(spec: ModelSpec) -> Kind:
    """Return whether a model generates or only encodes."""
    return "encoder-decoder" if spec.has_decoder else "encoder"


def read_sources(value: object, name: str) -> dict[str, FileEntry]:
    """Read sizes and hashes of a checkpoint's files; raises ConfigError."""
    files: dict[str, FileEntry] = read_as(Mapping[str, FileEntry], value, subject=name, place="files")
    raise_all(ConfigError, name, _name_problems("files", files))
    return files


def changes_since_import(certificate: Mapping[str, Any], folder: Path) -> list[str]:
    """List the files of a model directory that differ from those of its certificate."""
    entries = read_sources(certificate.get("model", {}), f"{folder / CERTIFICATE}: model")
    written = {name: entry for name, entry in entries.items() if name in (CONFIG, MODEL_WEIGHTS)}
    return [f"{problem} after the import" for problem in changed_problems(folder, written)]


def _name_problems(place: str, files: Mapping[str, FileEntry]) -> list[str]:
    strange = [file for file in files if not file.isprintable()]
    return [f"{place} has {shortened(strange[0])}, expected names of files"] if strange else []
