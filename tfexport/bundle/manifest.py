"""The manifest: what a bundle says of itself, read strictly and written always alike."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.fields import Config
from tfexport.files.names import MANIFEST, TOKENIZER
from tfexport.files.sealed_json import collect, read_fields, read_list, read_map, read_object, read_text, seal, unseal
from tfexport.models.config import TransformerConfig, model_spec
from tfexport.spec import (
    ALIGNMENT,
    DECODER,
    ENCODER,
    ENCODER_CONTRIB,
    REORDER,
    Accuracy,
    AlignmentHeads,
    Dim,
    DType,
    GraphSpec,
    ModelSpec,
    Quantization,
    TensorSpec,
)
from tfexport.text.config import TextConfig

ENGINES = "engines"
FORMAT_VERSION = 1

Kind = Literal["encoder-decoder", "encoder"]

# Letters, digits, "_", "." and "-", not beginning with "." or "-": no "..", no absolute path, no drive, no
# backslash, and nothing that two file systems could spell differently but for the case.
_PLAIN_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_PLAIN_PATH = re.compile(f"{_PLAIN_PART}(/{_PLAIN_PART})*")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry(Config, subject="file"):
    """Size and sha256 (lower-case hex) of one file."""

    bytes: int
    sha256: str

    def _problems(self) -> Iterator[str]:
        if self.bytes < 0:
            yield f"bytes is {self.bytes}, expected 0 or more"
        if not _SHA256.fullmatch(self.sha256):
            yield f"sha256 is {self.sha256[:80]!r}, expected 64 hexadecimal digits"


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

    def __post_init__(self) -> None:
        """Check how the parts fit together.

        Raises:
            ConfigError: lists every contradiction.
        """
        raise_all(ConfigError, MANIFEST, [*self._spec_problems(), *self._graph_problems(), *self._path_problems()])

    def _spec_problems(self) -> list[str]:
        problems = []
        if self.kind != kind_of(self.spec):
            problems.append(f"kind is {self.kind!r}, but spec describes an {kind_of(self.spec)}")
        if self.config is not None and model_spec(self.config, self.spec.precision) != self.spec:
            problems.append("spec and config describe different models")
        if self.quantization is not None and self.spec.precision != "fp32":
            problems.append(f"quantization is given, but spec.precision is {self.spec.precision}, expected fp32")
        if self.alignment is not None:
            try:
                if self.alignment.within(self.spec) != self.alignment:
                    problems.append("alignment: layer and heads are not counted from 0 and all named")
            except ConfigError as error:
                problems.append(str(error))
        if self.parity is not None and not isinstance(self.parity.get("passed"), bool):
            problems.append(f"parity.passed is {self.parity.get('passed')!r}, expected true or false")
        return problems

    def _graph_problems(self) -> list[str]:
        problems = [
            f"graphs.{name} is {graph.file!r}, which is not among the files"
            for name, graph in self.graphs.items()
            if graph.file not in self.files
        ]
        decoders = set(DECODER.values())
        problems += [
            f"unknown graph {name!r}"
            for name in self.graphs
            if name not in decoders | {ENCODER, ENCODER_CONTRIB, REORDER, ALIGNMENT}
        ]
        portable = decoders - {DECODER["contrib"]}
        if ENCODER not in self.graphs and (ENCODER_CONTRIB not in self.graphs or portable & set(self.graphs)):
            problems.append(f"missing graph {ENCODER!r}")
        if (ENCODER_CONTRIB in self.graphs) != (DECODER["contrib"] in self.graphs):
            problems.append(
                f"of {ENCODER_CONTRIB!r} and {DECODER['contrib']!r} there is only one, expected both or none"
            )
        if (ALIGNMENT in self.graphs) != (self.alignment is not None):
            problems.append(f"of alignment and the graph {ALIGNMENT!r} there is only one, expected both or none")
        if self.spec.has_decoder != bool(decoders & set(self.graphs)):
            problems.append(f"kind is {self.kind!r}, but the graphs are {', '.join(sorted(self.graphs)) or 'none'}")
        return problems

    def _path_problems(self) -> list[str]:
        problems = []
        seen: dict[str, str] = {}
        for path in self.files:
            if not _PLAIN_PATH.fullmatch(path) or path.split("/")[0].lower() in (MANIFEST, ENGINES):
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
        # Bundles from before there was quantisation, texts to compare, or alignment, do not mention them.
        return cls(**read_fields({"quantization": None, "text": {}, "alignment": None, **data}, _READERS, MANIFEST))

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


@dataclass(frozen=True, kw_only=True)
class _Tensor(Config, subject="tensor"):
    name: str
    dtype: DType
    shape: tuple[Dim, ...]


@dataclass(frozen=True, kw_only=True)
class _GraphHead(Config, subject="graph"):
    file: str
    opset: int


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
    "text": lambda value: TextConfig.from_dict(value, subject="text"),
}
