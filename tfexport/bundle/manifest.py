"""The manifest: what a bundle says of itself, read strictly and written always alike."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfexport.bundle.identity import Identity, Provenance
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.fields import Config
from tfexport.files.names import MANIFEST, SIGNATURE, TOKENIZER
from tfexport.files.sealed_json import collect, read_fields, read_list, read_map, read_object, read_text, seal, unseal
from tfexport.models.config import TransformerConfig, model_spec
from tfexport.spec import (
    ALIGNMENT,
    DECODER,
    ENCODER,
    ENCODER_CONTRIB,
    LOOP,
    REORDER,
    Accuracy,
    AlignmentHeads,
    Dim,
    DType,
    GraphSpec,
    LoopSettings,
    ModelSpec,
    Quantization,
    TensorSpec,
    contract_problems,
    graph_contract,
    has_speculation,
)
from tfexport.text.config import TextConfig

ENGINES = "engines"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_MAX_NAME = 400

Kind = Literal["encoder-decoder", "encoder"]

# Letters, digits, "_", "." and "-", not beginning with "." or "-": no "..", no absolute path, no drive, no
# backslash, and nothing that two file systems could spell differently but for the case.
_PLAIN_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_PLAIN_PATH = re.compile(f"{_PLAIN_PART}(/{_PLAIN_PART})*")
_SHA256 = re.compile("[0-9a-f]{64}")
_GRAPHS = frozenset({*DECODER.values(), ENCODER, ENCODER_CONTRIB, REORDER, ALIGNMENT, LOOP})


class FileEntry(Config, subject="file"):
    """Size and sha256 (lower-case hex) of one file."""

    bytes: int
    sha256: str

    def _problems(self) -> Iterator[str]:
        if self.bytes < 0:
            yield f"bytes is {self.bytes}, expected 0 or more"
        if not _SHA256.fullmatch(self.sha256):
            yield f"sha256 is {self.sha256[:80]!r}, expected 64 hexadecimal digits"


class ModuleEntry(Config, subject="module"):
    """A module of the user's own that a bundle was made from: the name of its class, which nobody imports, and a sum.

    `weights_sha256` is one sum of the names, types, shapes and values of all tensors in its state dict.
    """

    name: str
    weights_sha256: str

    def _problems(self) -> Iterator[str]:
        if not self.name.isprintable() or not 1 <= len(self.name) <= _MAX_NAME:
            yield f"name is {shortened(self.name)}, expected the name of a class"
        if not _SHA256.fullmatch(self.weights_sha256):
            yield f"weights_sha256 is {self.weights_sha256[:80]!r}, expected 64 hexadecimal digits"


@dataclass(frozen=True, kw_only=True)
class GraphEntry:
    """One graph: its file in the bundle, ONNX opset, inputs and outputs in order."""

    file: str
    opset: int
    spec: GraphSpec


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json says.

    Attributes:
        format_version: 1.
        kind: an encoder alone has no decoder graph.
        spec: sizes, limits, token ids and precision.
        config: None for a module that is not the canonical transformer.
        graphs: by name: encoder, decoder, decoder_static; encoder_contrib and decoder_contrib together; reorder, which
            bundles of before do not have; alignment where it was asked for.
        files: every file but the manifest and engines, by path relative to the bundle.
        versions: of the tools that made the bundle, by name.
        parity: summary of the verification with at least `passed`; None when there was none.
        quantization: how the weights are stored; None where they have the type of the graphs.
        text: what surrounds the ids of a text, and the texts that were compared.
        alignment: layer and heads of the graph of that name; None where there is none.
        checkpoint: the files that the weights were imported from, by name, as they were read; empty where nothing was
            imported, and in bundles of before.
        provenance: how they were imported; None where nothing was, and in bundles of before.
        identity: what whoever made the bundle calls it.
        loop: what the graph of that name generates; None where there is none.
        module: the user's own that was exported; None for the canonical model, and in bundles of before.
    """

    format_version: int
    kind: Kind
    spec: ModelSpec
    config: TransformerConfig | None
    graphs: Mapping[str, GraphEntry]
    files: Mapping[str, FileEntry]
    versions: Mapping[str, str]
    parity: Mapping[str, Any] | None
    quantization: Quantization | None = None
    text: TextConfig = field(default_factory=TextConfig)
    alignment: AlignmentHeads | None = None
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict)
    provenance: Provenance | None = None
    identity: Identity = field(default_factory=Identity)
    module: ModuleEntry | None = None
    loop: LoopSettings | None = None

    def __post_init__(self) -> None:
        """Check how the parts fit together.

        Raises:
            ConfigError: lists every contradiction.
        """
        problems = [*self._spec_problems(), *self._text_problems(), *self._graph_problems()]
        raise_all(ConfigError, MANIFEST, [*problems, *self._contract_problems(), *self._path_problems()])

    def _spec_problems(self) -> list[str]:
        problems = []
        if self.kind != kind_of(self.spec):
            problems.append(f"kind is {self.kind!r}, but spec describes an {kind_of(self.spec)}")
        if self.config is not None and model_spec(self.config, self.spec.precision) != self.spec:
            problems.append("spec and config describe different models")
        if self.config is not None and self.module is not None:
            problems.append("config and module are both given, but a model is the canonical one or the user's own")
        if self.quantization is not None and self.spec.precision != "fp32":
            problems.append(f"quantization is given, but spec.precision is {self.spec.precision}, expected fp32")
        if self.alignment is not None:
            try:
                if self.alignment.within(self.spec) != self.alignment:
                    problems.append("alignment: layer and heads are not counted from 0 and all named")
            except ConfigError as error:
                problems.append(str(error))
        if self.loop is not None:
            problems += self.loop.problems_of(self.spec)
        if self.parity is not None and not isinstance(self.parity.get("passed"), bool):
            problems.append(f"parity.passed is {shortened(self.parity.get('passed'))}, expected true or false")
        return problems

    def _text_problems(self) -> list[str]:
        text, source, target = self.text, self.spec.source_vocab, self.spec.vocab
        sides = [("source_prefix", text.source_prefix, source), ("source_suffix", text.source_suffix, source)]
        sides.append(("target_prefix", text.target_prefix, target))
        for index, sample in enumerate(text.samples):
            sides.append((f"samples[{index}].source_ids", sample.source_ids, source))
            sides.append((f"samples[{index}].target_ids", sample.target_ids, target))
        begun = self.loop is None or self.loop.prompt[1:] == text.target_prefix
        problems = [] if begun else ["the loop graph begins with another text.target_prefix; export without loop"]
        return problems + [
            f"text.{name} has {shortened(max(ids))}, expected below the vocabulary of {vocab}"
            for name, ids, vocab in sides
            if max(ids, default=-1) >= vocab
        ]

    def _graph_problems(self) -> list[str]:
        problems = [
            f"graphs.{name[:80]} is {graph.file[:200]!r}, which is not among the files"
            for name, graph in self.graphs.items()
            if graph.file not in self.files
        ]
        decoders = set(DECODER.values())
        problems += [f"unknown graph {name[:80]!r}" for name in self.graphs if name not in _GRAPHS]
        portable = decoders - {DECODER["contrib"]}
        if ENCODER not in self.graphs and (ENCODER_CONTRIB not in self.graphs or portable & set(self.graphs)):
            problems.append(f"missing graph {ENCODER!r}")
        if (ENCODER_CONTRIB in self.graphs) != (DECODER["contrib"] in self.graphs):
            problems.append(
                f"of {ENCODER_CONTRIB!r} and {DECODER['contrib']!r} there is only one, expected both or none"
            )
        if (ALIGNMENT in self.graphs) != (self.alignment is not None):
            problems.append(f"of alignment and the graph {ALIGNMENT!r} there is only one, expected both or none")
        if (LOOP in self.graphs) != (self.loop is not None):
            problems.append(f"of loop and the graph {LOOP!r} there is only one, expected both or none")
        if self.spec.has_decoder != bool(decoders & set(self.graphs)):
            graphs = ", ".join(sorted(self.graphs))[:200] or "none"
            problems.append(f"kind is {self.kind!r}, but the graphs are {graphs}")
        return problems

    def _contract_problems(self) -> list[str]:
        graphs = {name: graph for name, graph in self.graphs.items() if name in _GRAPHS}
        problems = [
            f"graphs.{name} is {graph.file[:200]!r}, expected a file NAME.onnx beside the weights"
            for name, graph in graphs.items()
            if "/" in graph.file or not graph.file.endswith(".onnx")
        ]
        return problems + [
            f"graphs.{name}: {problem}"
            for name, graph in graphs.items()
            for problem in contract_problems(
                graph.spec, graph_contract(self.spec, name, speculation=has_speculation(graph.spec))
            )
        ]

    def _path_problems(self) -> list[str]:
        problems = []
        seen: dict[str, str] = {}
        for path in self.files:
            if not _PLAIN_PATH.fullmatch(path) or path.split("/")[0].lower() in (MANIFEST, SIGNATURE, ENGINES):
                problems.append(f"files has {path[:200]!r}, expected a plain relative path inside the bundle")
            elif path.lower() in seen:
                problems.append(f"files has {seen[path.lower()]!r} and {path!r}, one file where case does not count")
            seen[path.lower()] = path
        return problems

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts go in and out; ids alone otherwise."""
        return TOKENIZER in self.files

    @property
    def accuracy(self) -> Accuracy:
        """What bounds how exactly the graphs compute."""
        return self.quantization.weights if self.quantization else self.spec.precision

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return {
            "format_version": self.format_version,
            "kind": self.kind,
            "spec": self.spec.to_dict(),
            "config": self.config.to_dict() if self.config else None,
            "graphs": {
                name: {"file": graph.file, "opset": graph.opset, **dataclasses.asdict(graph.spec)}
                for name, graph in self.graphs.items()
            },
            "files": {path: entry.to_dict() for path, entry in self.files.items()},
            "versions": dict(self.versions),
            "parity": None if self.parity is None else dict(self.parity),
            "quantization": self.quantization.to_dict() if self.quantization else None,
            "text": self.text.to_dict(),
            "alignment": self.alignment.to_dict() if self.alignment else None,
            "checkpoint": {name: entry.to_dict() for name, entry in self.checkpoint.items()},
            "provenance": self.provenance.to_dict() if self.provenance else None,
            "identity": self.identity.to_dict(),
            "module": self.module.to_dict() if self.module else None,
            "loop": self.loop.to_dict() if self.loop else None,
        }

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON: sorted keys, its own sum as `self_sha256`."""
        return seal(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Read a manifest strictly.

        Raises:
            ConfigError: lists every unknown, missing, wrongly typed and contradictory value.
        """
        return cls(**read_fields({**_FORMER, **data}, _READERS, MANIFEST))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            BundleError: not JSON, made by a newer version, or any byte was changed;
                lists every wrong value.
        """
        return unseal(raw, cls.from_dict, name=MANIFEST, format_version=FORMAT_VERSION, remedy="export it again")


def kind_of(spec: ModelSpec) -> Kind:
    """Say what a model is: it generates, or only encodes."""
    return "encoder-decoder" if spec.has_decoder else "encoder"


class _Tensor(Config, subject="tensor"):
    name: str
    dtype: DType
    shape: tuple[Dim, ...]


class _GraphHead(Config, subject="graph"):
    file: str
    opset: int


def read_sources(value: object, name: str) -> dict[str, FileEntry]:
    """Read sizes and sums of files that weights were imported from, by name; raises ConfigError."""
    files = read_map(value, name, _read_file)
    if strange := [file for file in files if not file.isprintable()]:
        raise ConfigError(f"{name} has {shortened(strange[0])}, expected names of files")
    return files


def _read_file(value: object, name: str) -> FileEntry:
    return FileEntry.from_dict(value, subject=name)


def _read_graph(value: object, name: str) -> GraphEntry:
    data = dict(read_object(value, name))
    problems: list[str] = []
    inputs, outputs = (
        collect(problems, read_tensors, data.pop(side, None), f"{name}.{side}") for side in ("inputs", "outputs")
    )
    head = collect(problems, lambda: _GraphHead.from_dict(data, subject=name))
    if inputs is None or outputs is None or head is None:
        raise ConfigError("; ".join(problems))
    return GraphEntry(file=head.file, opset=head.opset, spec=GraphSpec(inputs, outputs))


def read_tensors(value: object, name: str) -> tuple[TensorSpec, ...]:
    """Read the inputs or outputs of a graph; raises ConfigError."""
    return read_list(value, name, _read_tensor)


def _read_tensor(value: object, name: str) -> TensorSpec:
    tensor = _Tensor.from_dict(value, subject=name)
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape)


def _read_kind(value: object) -> str:
    if value not in typing.get_args(Kind):
        raise ConfigError(f"kind is {shortened(value)}, expected {' or '.join(map(repr, typing.get_args(Kind)))}")
    return typing.cast(str, value)


# What bundles do not mention that were made before there was such a thing.
_FORMER: dict[str, Any] = {
    "quantization": None,
    "text": {},
    "alignment": None,
    "checkpoint": {},
    "provenance": None,
    "module": None,
    "identity": {},
    "loop": None,
}
# The form in ONNX Runtime's own operators was called "fused" once; such bundles are read as they are.
_OLD_NAMES = {"encoder_fused": ENCODER_CONTRIB, "decoder_fused": DECODER["contrib"]}
_READERS: dict[str, Callable[[Any], object]] = {
    "format_version": int,  # checked before everything else
    "kind": _read_kind,
    "spec": lambda value: ModelSpec.from_dict(value, subject="spec"),
    "config": lambda value: None if value is None else TransformerConfig.from_dict(value, subject="config"),
    "graphs": lambda value: {
        _OLD_NAMES.get(name, name): graph for name, graph in read_map(value, "graphs", _read_graph).items()
    },
    "files": lambda value: read_map(value, "files", _read_file),
    "versions": lambda value: read_map(value, "versions", read_text),
    "parity": lambda value: None if value is None else read_object(value, "parity"),
    "quantization": lambda value: None if value is None else Quantization.from_dict(value, subject="quantization"),
    "alignment": lambda value: None if value is None else AlignmentHeads.from_dict(value, subject="alignment"),
    "checkpoint": lambda value: read_sources(value, "checkpoint"),
    "provenance": lambda value: None if value is None else Provenance.from_dict(value, subject="provenance"),
    "identity": lambda value: Identity.from_dict(value, subject="identity"),
    "module": lambda value: None if value is None else ModuleEntry.from_dict(value, subject="module"),
    "loop": lambda value: None if value is None else LoopSettings.from_dict(value, subject="loop"),
    "text": lambda value: TextConfig.from_dict(value, subject="text"),
}
