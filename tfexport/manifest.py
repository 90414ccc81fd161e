"""The manifest: what a bundle says of itself, read strictly and written always alike."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tfexport.config import Config, TransformerConfig
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.spec import DECODER, ENCODER, Dim, DType, GraphSpec, ModelSpec, TensorSpec

MANIFEST = "manifest.json"
ENGINES = "engines"
FORMAT_VERSION = 1

Kind = Literal["encoder-decoder", "encoder"]
T = TypeVar("T")

# Letters, digits, "_", "." and "-", not beginning with "." or "-": no "..", no absolute path, no drive, no
# backslash, and nothing that two file systems could spell differently but for the case.
_PLAIN_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_PLAIN_PATH = re.compile(f"{_PLAIN_PART}(/{_PLAIN_PART})*")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry(Config):
    """Size and sha256 (lower-case hex) of one file."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists a negative size and a sum that is none.
        """
        problems = self._check_types()
        if not problems and self.bytes < 0:
            problems.append(f"bytes is {self.bytes}, expected 0 or more")
        if not problems and not _SHA256.fullmatch(self.sha256):
            problems.append(f"sha256 is {self.sha256[:80]!r}, expected 64 hexadecimal digits")
        raise_all(ConfigError, "file", problems)


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
        graphs: by name: encoder, decoder, decoder_static.
        files: every file but the manifest and engines, by path relative to the bundle.
        versions: of the tools that made the bundle, by name.
        parity: summary of the verification with at least `passed`; None when there was none.
    """

    format_version: int
    kind: Kind
    spec: ModelSpec
    config: TransformerConfig | None
    graphs: Mapping[str, GraphEntry]
    files: Mapping[str, FileEntry]
    versions: Mapping[str, str]
    parity: Mapping[str, Any] | None

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
        if self.config is not None and ModelSpec.of(self.config, self.spec.precision) != self.spec:
            problems.append("spec and config describe different models")
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
        problems += [f"unknown graph {name!r}" for name in self.graphs if name not in decoders | {ENCODER}]
        if ENCODER not in self.graphs:
            problems.append(f"missing graph {ENCODER!r}")
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
        }

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON: sorted keys, its own sum as `self_sha256`."""
        data = self.to_dict()
        return render(data | {"self_sha256": _sum(data)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Read a manifest strictly.

        Raises:
            ConfigError: lists every unknown, missing, wrongly typed and contradictory value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        problems = [f"unknown key {key[:80]!r}" for key in data if key not in names]
        problems += [f"missing key {name}" for name in names if name not in data]
        readers = {name: read for name, read in _READERS.items() if name in data}
        values = {name: _collect(problems, read, data[name]) for name, read in readers.items()}
        raise_all(ConfigError, MANIFEST, problems)
        return cls(**typing.cast(dict[str, Any], values))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            BundleError: not JSON, made by a newer version, or any byte was changed;
                lists every wrong value.
        """
        data = parse(raw)
        version = data.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise BundleError(
                f"{MANIFEST}: format_version is {_short(version)}, expected {FORMAT_VERSION}; export it again"
            )
        if version > FORMAT_VERSION:
            raise BundleError(
                f"it was made by a newer tfexport (format {version}, this one reads {FORMAT_VERSION}); "
                "upgrade with: pip install --upgrade tfexport"
            )
        claimed = data.pop("self_sha256", None)
        try:
            manifest = cls.from_dict(data)
        except ConfigError as error:
            raise BundleError(f"{error}; export it again") from error
        if claimed != _sum(data) or render(data | {"self_sha256": claimed}) != raw:
            raise BundleError(f"{MANIFEST} was changed; copy it again from its source or export it again")
        return manifest


def kind_of(spec: ModelSpec) -> Kind:
    """Say what a model is: it generates, or only encodes."""
    return "encoder-decoder" if spec.has_decoder else "encoder"


def render(data: dict[str, Any]) -> bytes:
    """Write a JSON object so that equal objects give equal bytes."""
    return (json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def parse(raw: bytes) -> dict[str, Any]:
    """Read a JSON object, more strictly than Python does by itself.

    Raises:
        BundleError: not UTF-8, not JSON, no object, a key twice, or NaN and Infinity.
    """
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{MANIFEST} is not JSON ({error}); export it again") from error
    if not isinstance(data, dict):
        raise BundleError(f"{MANIFEST} is {_short(data)}, expected an object; export it again")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {counts.most_common(1)[0][0][:80]!r}")
    return data


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _sum(data: dict[str, Any]) -> str:
    return hashlib.sha256(render(data)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Tensor(Config):
    name: str
    dtype: DType
    shape: tuple[Dim, ...]


@dataclass(frozen=True, kw_only=True)
class _GraphHead(Config):
    file: str
    opset: int


def _collect(problems: list[str], read: Callable[..., T], *values: object) -> T | None:
    try:
        return read(*values)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _read_object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {_short(value)}, expected an object")
    return value


def _read_map(value: object, name: str, read: Callable[[object, str], T]) -> dict[str, T]:
    problems: list[str] = []
    entries = _read_object(value, name)
    items = {key: _collect(problems, read, entry, f"{name}.{key[:80]}") for key, entry in entries.items()}
    if problems:
        raise ConfigError("; ".join(problems))
    return typing.cast(dict[str, T], items)


def _read_file(value: object, name: str) -> FileEntry:
    return FileEntry.from_dict(value, subject=name)


def _read_graph(value: object, name: str) -> GraphEntry:
    data = dict(_read_object(value, name))
    problems: list[str] = []
    inputs, outputs = (
        _collect(problems, _read_tensors, data.pop(side, None), f"{name}.{side}") for side in ("inputs", "outputs")
    )
    head = _collect(problems, lambda: _GraphHead.from_dict(data, subject=name))
    if inputs is None or outputs is None or head is None:
        raise ConfigError("; ".join(problems))
    return GraphEntry(file=head.file, opset=head.opset, spec=GraphSpec(inputs, outputs))


def _read_tensors(value: object, name: str) -> tuple[TensorSpec, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {_short(value)}, expected a list")
    tensors = (_Tensor.from_dict(item, subject=f"{name}[{i}]") for i, item in enumerate(value))
    return tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _read_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {_short(value)}, expected a text")
    return value


def _read_kind(value: object) -> str:
    if value not in typing.get_args(Kind):
        raise ConfigError(f"kind is {_short(value)}, expected {' or '.join(map(repr, typing.get_args(Kind)))}")
    return typing.cast(str, value)


_READERS: dict[str, Callable[[Any], object]] = {
    "format_version": int,  # checked before everything else
    "kind": _read_kind,
    "spec": lambda value: ModelSpec.from_dict(value, subject="spec"),
    "config": lambda value: None if value is None else TransformerConfig.from_dict(value, subject="config"),
    "graphs": lambda value: _read_map(value, "graphs", _read_graph),
    "files": lambda value: _read_map(value, "files", _read_file),
    "versions": lambda value: _read_map(value, "versions", _read_text),
    "parity": lambda value: None if value is None else _read_object(value, "parity"),
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
