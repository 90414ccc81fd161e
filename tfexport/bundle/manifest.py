"""The manifest: what a bundle says of itself, read strictly and written always alike."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal, Self

from tfexport._io.names import MANIFEST, SIGNATURE, TOKENIZER
from tfexport._io.sealed_json import seal, unseal
from tfexport.bundle.identity import Identity, Provenance
from tfexport.config import Config, Count, Sha256, read_as
from tfexport.contract import (
    ALIGNMENT,
    DECODER,
    ENCODER,
    ENCODER_CONTRIB,
    REORDER,
    Accuracy,
    AlignmentHeads,
    GraphEntry,
    ModelSpec,
    Quantization,
    contract_problems,
    graph_contract,
    has_speculation,
)
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.nn.config import TransformerConfig, model_spec
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
_GRAPHS = frozenset({*DECODER.values(), ENCODER, ENCODER_CONTRIB, REORDER, ALIGNMENT})


class FileEntry(Config, subject="file"):
    """Size and sha256 (lower-case hex) of one file."""

    bytes: Count
    sha256: Sha256


class ModuleEntry(Config, subject="module"):
    """A module of the user's own that a bundle was made from: the name of its class, which nobody imports, and a sum.

    `weights_sha256` is one sum of the names, types, shapes and values of all tensors in its state dict.
    """

    name: str
    weights_sha256: Sha256

    def _problems(self) -> Iterator[str]:
        if not self.name.isprintable() or not 1 <= len(self.name) <= _MAX_NAME:
            yield f"name is {shortened(self.name)}, expected the name of a class"


class Manifest(Config, subject=MANIFEST):
    """The content of manifest.json.

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
    text: TextConfig = TextConfig()
    alignment: AlignmentHeads | None = None
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict)
    provenance: Provenance | None = None
    identity: Identity = Identity()
    module: ModuleEntry | None = None

    def _problems(self) -> list[str]:
        problems = [*self._spec_problems(), *self._text_problems(), *self._graph_problems()]
        return [*problems, *self._contract_problems(), *self._path_problems()]

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
                problems += [f"alignment: {problem}" for problem in error.problems]
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
        return [
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
        problems = _name_problems("checkpoint", self.checkpoint)
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

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON: sorted keys, its own sum as `self_sha256`."""
        return seal(self.to_dict())

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Rename graphs that had other names, and leave out the greedy loop graph, which nothing runs any more."""
        data = {name: value for name, value in data.items() if name != "loop"}
        if isinstance(graphs := data.get("graphs"), dict):
            data["graphs"] = {_OLD_NAMES.get(name, name): graphs[name] for name in graphs if name != "loop"}
        return data

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            BundleError: not JSON, made by a newer version, or any byte was changed;
                lists every wrong value.
        """
        return unseal(
            raw,
            lambda data: cls.from_dict(data, subject=MANIFEST),
            name=MANIFEST,
            format_version=FORMAT_VERSION,
            remedy="export it again",
        )


def kind_of(spec: ModelSpec) -> Kind:
    """Say what a model is: it generates, or only encodes."""
    return "encoder-decoder" if spec.has_decoder else "encoder"


def read_sources(value: object, name: str) -> dict[str, FileEntry]:
    """Read sizes and sums of files that weights were imported from, by name; raises ConfigError."""
    files: dict[str, FileEntry] = read_as(Mapping[str, FileEntry], value, subject=name, place="files")
    raise_all(ConfigError, name, _name_problems("files", files))
    return files


def _name_problems(place: str, files: Mapping[str, FileEntry]) -> list[str]:
    strange = [file for file in files if not file.isprintable()]
    return [f"{place} has {shortened(strange[0])}, expected names of files"] if strange else []


# The form in ONNX Runtime's own operators was called "fused" once; such bundles are read as they are.
_OLD_NAMES = {"encoder_fused": ENCODER_CONTRIB, "decoder_fused": DECODER["contrib"]}
