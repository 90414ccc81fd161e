"""Describe a bundle, a model directory or a graph file."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tfexport._io.atomic import restore
from tfexport._io.extras import install_command
from tfexport._io.names import (
    CERTIFICATE,
    CONFIG,
    GENERATION,
    MANIFEST,
    MODEL_WEIGHTS,
    TARGET_TOKENIZER,
    TOKENIZER,
    checked_path,
)
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.signature import TrustedKeys
from tfexport._io.strict_json import plain_problem, read_json
from tfexport.bundle.bundle import Bundle, open_bundle, read_defaults
from tfexport.bundle.contents import stale_sources, unlisted_files
from tfexport.bundle.manifest import changes_since_import, read_sources
from tfexport.bundle.status import REFERENCE, Proof, proof_of
from tfexport.contract import ALIGNMENT
from tfexport.errors import CheckpointError, ConfigError, EngineError, GraphError, InputError
from tfexport.generation import GenerationDefaults
from tfexport.nn.config import TransformerConfig
from tfexport.tensorrt.compatibility import explain, incompatibilities, this_machine
from tfexport.tensorrt.store import engine_names, open_engine

_CERTIFICATE_DICTS = ("switches", "lines", "tensors")
_CERTIFICATE_TYPES = {"layout": str, "proven": bool, "unverified": list, **dict.fromkeys(_CERTIFICATE_DICTS, dict)}
_SIGNATURES = {
    None: "not signed",
    "unchecked": "signed, signature not checked: use --trusted-keys",
    "trusted": "signed with a trusted key",
}


def inspect_path(
    path: str | PathLike[str],
    *,
    trusted_keys: Sequence[str | PathLike[str]] | None = None,
    for_here: bool = True,
) -> dict[str, Any]:
    """Describe a bundle, a model directory or an ONNX file, which needs onnx.

    If a writer was killed while replacing the directory, the previous one is restored. Without `trusted_keys` every
    bundle is accepted. `for_here` reports whether engines can be used on this machine, which loads the GPU driver. In
    the result, `kind` is "bundle", "model" or "graph" and determines the other keys.
    """
    path = checked_path(path, "inspect")
    keys = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    try:
        restore(Path(os.path.realpath(path)))
        if keys is not None or (path.is_dir() and (path / MANIFEST).exists()):
            return _inspect_bundle(path, keys, for_here)
        if path.is_dir() and ((path / CONFIG).exists() or (path / MODEL_WEIGHTS).exists()):
            return _inspect_model(path)
        if path.is_file() and path.suffix == ".onnx":
            return _inspect_graph(path)
        found = "is something else" if path.exists() else "does not exist"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    expected = f"a bundle (a directory with {MANIFEST}), a model directory ({CONFIG}, {MODEL_WEIGHTS}) or an .onnx file"
    raise InputError(f"{path}: {found}, expected {expected}")


def describe(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `inspect_path` as lines for the terminal."""
    return {"bundle": _bundle_lines, "model": _model_lines, "graph": _graph_lines}[found["kind"]](found)


def _inspect_bundle(path: Path, keys: TrustedKeys | None, for_here: bool) -> dict[str, Any]:
    bundle = open_bundle(path, trusted_keys=keys)
    manifest = bundle.manifest.to_dict()
    manifest["model"] = manifest.pop("kind")
    sizes = [entry["bytes"] for entry in manifest["files"].values()]
    facts = {"kind": "bundle", "path": str(path), "sha256": bundle.sha256, "bytes": sum(sizes), **manifest}
    facts |= bundle.manifest.proof.to_dict()
    facts["generation"] = read_defaults(bundle).given()
    facts["tokenizers"] = _tokenizers(bundle)
    facts["signature"] = ("unchecked" if keys is None else "trusted") if bundle.is_signed else None
    return {**facts, "engines": _inspect_engines(bundle, for_here), "unsealed": unlisted_files(bundle.path)}


def _inspect_engines(bundle: Bundle, for_here: bool) -> dict[str, Any]:
    engines: dict[str, Any] = {}
    names = engine_names(bundle.path)
    machine = this_machine() if names and for_here else None
    for name in names:
        try:
            engine = open_engine(bundle.path, name, bundle.trusted_keys)
            engine.check_plans()
        except EngineError as error:  # the bundle works without this engine
            engines[name] = {"problem": str(error)}
            continue
        manifest = engine.manifest
        engines[name] = {
            "problem": explain(incompatibilities(manifest, bundle, machine)) if machine else None,
            "stale": bool(stale_sources(manifest.sources, bundle.manifest.files)),
            "version": manifest.library_version,
            "bytes": sum(plan.bytes for plan in manifest.plans.values()),
            **manifest.config.to_dict(),
            "limits": manifest.limits.to_dict(),
            "layers": {plan: dict(entry.layers) for plan, entry in manifest.plans.items()},
        }
    return engines


def _inspect_model(path: Path) -> dict[str, Any]:
    config = TransformerConfig.from_dict(read_json(path / CONFIG, str(path / CONFIG)), subject=str(path / CONFIG))
    tensors = _stored_tensors(path / MODEL_WEIGHTS)
    files = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_file()}
    certificate = _certificate(path / CERTIFICATE)
    return {
        "kind": "model",
        "path": str(path),
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "config": config.to_dict(),
        "tensors": tensors,
        "generation": _defaults(path / GENERATION),
        "certificate": certificate,
        **_proof(certificate).to_dict(),
        "files": {name: FileEntry.of(entry).to_dict() for name, entry in files.items()},
    }


def _defaults(path: Path) -> dict[str, Any]:
    return GenerationDefaults.from_dict(read_json(path, str(path)), subject=str(path)).given() if path.exists() else {}


def _certificate(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found = read_json(path, str(path))
    values: dict[str, Any] = {"tensors": {}, **found} if isinstance(found, dict) else {}
    is_whole = all(isinstance(values.get(name), kind) for name, kind in _CERTIFICATE_TYPES.items())
    if not is_whole or not all(isinstance(entry, dict) for entry in found["switches"].values()):
        raise ConfigError(f"{path}: is not a valid import certificate; import the checkpoint again")
    if changes := changes_since_import(found, path.parent):
        found |= {"proven": False, "unverified": [*changes, *found["unverified"]]}
    files = read_sources(found.get("checkpoint", {}), f"{path}: checkpoint")
    checkpoint = {name: file.to_dict() for name, file in files.items()}
    return {**found, "checkpoint": checkpoint, **_proof(found).to_dict()}


def _proof(certificate: Mapping[str, Any] | None) -> Proof:
    """Return the proof of an import; certificates of earlier versions have no status."""
    found = certificate or {"proven": False}
    return proof_of(found["proven"] or None, str(found.get("author", REFERENCE)))


def _inspect_graph(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("onnx") is None:
        raise GraphError(f"{path}: reading a graph needs the onnx package; {install_command('onnx')}")
    from tfexport.export.graph_file import describe_graph

    return {"kind": "graph", "path": str(path), **FileEntry.of(path).to_dict(), **describe_graph(path)}


def _stored_tensors(path: Path) -> list[dict[str, Any]]:
    if problem := plain_problem(path):
        raise CheckpointError(f"{path}: {problem}; a model directory has {CONFIG} and {MODEL_WEIGHTS}")
    from tfexport.nn.stored import read_header  # needs safetensors, which inspecting a bundle does not

    tensors = sorted(read_header(path).items())
    return [{"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in tensors]


def _bundle_lines(found: Mapping[str, Any]) -> list[str]:
    spec, parity, quantization = found["spec"], found["parity"], found["quantization"]
    precision = spec["precision"]
    if quantization:
        method, goal = quantization["calibration"], quantization["optimize_for"]
        precision = f"{quantization['weights']} {f'and activations by {method}' if method else f'for {goal}'}"
    identity = [f"{name} {value}" for name, value in found["identity"].items() if value is not None]
    module, origin = found["module"], found["provenance"]
    lines = [
        f"bundle {found['path']}: {found['model']}, {precision}, {_bytes(found['bytes'])}",
        *([f"  {', '.join(identity)}"] if identity else []),
        f"  sha256 {found['sha256']}",
        f"  {found['status']}: {found['proof']}",
        f"  {_SIGNATURES[found['signature']]}",
        f"  made with {', '.join(f'{name} {version}' for name, version in found['versions'].items())}",
        *([f"  module {module['name']}, weights sha256 {module['weights_sha256']}"] if module else []),
        *_checkpoint_lines(found),
    ]
    if origin and origin["layout"] is not None:
        lines.append(f"  layout {origin['layout']}, certificate sha256 {origin['certificate_sha256']}")
    lines += [
        *("", "Sizes", *_table((name, value) for name, value in spec.items() if isinstance(value, int) and value)),
        *_source_lines(spec),
        *("", "Tokens", *_table(_token_rows(spec["tokens"], found["tokenizers"]))),
    ]
    if spec["labels"]:
        lines += ["", "Labels", *_table(enumerate(spec["labels"]))]
    lines += _generation_lines(found)
    for name, graph in found["graphs"].items():
        lines += ["", f"Graph {name}: {graph['file']}, opset {graph['opset']}"]
        if name == ALIGNMENT:
            layer, heads = found["alignment"]["layer"], found["alignment"]["heads"]
            lines[-1] += f", attention of layer {layer}, heads {', '.join(map(str, heads))}"
        lines += _tensor_table(graph)
    lines += ["", "Text", *_text_lines(found["text"], found["tokenizers"])]
    lines += ["", "Files", *_file_table(found["files"])]
    for name, engine in found["engines"].items():
        lines += ["", f"Engine {name}", *_engine_lines(engine)]
    if found["unsealed"]:
        lines += ["", "Engines", *(f"  load refuses it: {problem}" for problem in found["unsealed"])]
    if parity is not None:
        lines += ["", "Parity", *_table((name, json.dumps(value)) for name, value in parity.items())]
    return lines


def _source_lines(spec: Mapping[str, Any]) -> list[str]:
    source = spec["features"] or spec["image"] or {}
    rows = [(name, json.dumps(value)) for name, value in source.items() if value]
    return ["", "Features" if spec["features"] else "Image", *_table(rows)] if rows else []


def _tokenizers(bundle: Bundle) -> dict[str, Any]:
    names = [name for name in (TOKENIZER, TARGET_TOKENIZER) if name in bundle.manifest.files]
    ids = dataclasses.asdict(bundle.manifest.spec.tokens)
    found = {}
    for name in names:
        model, tokens = _read_tokenizer(bundle.file(name))
        special = {token: tokens.get(number) for token, number in ids.items() if number is not None}
        found[name] = {"model": model, "size": len(tokens), "tokens": special}
    return found


def _read_tokenizer(path: Path) -> tuple[str | None, dict[int, str]]:
    """Return the model type and tokens of a tokenizer.json; empty if invalid."""
    try:
        data = json.loads(path.read_bytes())
        model = data["model"]
        vocab = model["vocab"]
        # Unigram lists pieces with their scores.
        pairs = zip(vocab.values(), vocab, strict=True) if isinstance(vocab, dict) else enumerate(p[0] for p in vocab)
        tokens = dict(pairs) | {one["id"]: one["content"] for one in data.get("added_tokens", [])}
        kind = model.get("type")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None, {}
    is_valid = all(isinstance(number, int) and isinstance(token, str) for number, token in tokens.items())
    return (kind if isinstance(kind, str) else None), (tokens if is_valid else {})


def _token_rows(ids: Mapping[str, int | None], tokenizers: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, number in ids.items():
        if number is not None:
            tokens = (json.dumps(one["tokens"][name], ensure_ascii=False) for one in tokenizers.values())
            yield name, number, " ".join(tokens)


def _text_lines(text: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> list[str]:
    if not tokenizers:
        return ["  no tokenizer: input and output are token ids"]
    kind = "tokenizers of source and target" if TARGET_TOKENIZER in tokenizers else "one tokenizer"
    count = len(text["samples"])
    proof = f"compared with {count} recorded text{'s' if count > 1 else ''}" if count else "not compared with texts"
    prefixes = {name: text[name] for name in ("source_prefix", "source_suffix", "target_prefix")}
    around = [(name, ", ".join(map(str, ids))) for name, ids in prefixes.items() if ids]
    kinds = [(name, one["model"] or "unknown", f"{one['size']} tokens") for name, one in tokenizers.items()]
    return [f"  {kind}, {proof}", *_table(kinds), *_table(around)]


def _engine_lines(engine: Mapping[str, Any]) -> list[str]:
    if engine["problem"] is None:
        state = "not compared with this machine"
    else:
        state = f"cannot be used here: {engine['problem']}" if engine["problem"] else "can be used here"
    if engine.get("stale"):
        state = f"stale, {state}"
    if "target" not in engine:
        return [f"  {state}"]
    kind = ", ".join(part for part in (engine["variant"], engine["precision"], engine["weights"]) if part)
    gpus = f" for {', '.join(engine['compute_capabilities'])}" if engine["compute_capabilities"] else ""
    return [
        f"  {engine['target']} {engine['version']}{gpus}: {kind}, {_bytes(engine['bytes'])}",
        *_table(engine["limits"].items()),
        f"  {state}",
    ]


def _model_lines(found: Mapping[str, Any]) -> list[str]:
    dtypes = Counter(tensor["dtype"] for tensor in found["tensors"])
    written = ", ".join(f"{number} {dtype}" for dtype, number in dtypes.items())
    return [
        f"model {found['path']}: {found['parameters']:,} parameters, {len(found['tensors'])} tensors ({written})",
        f"  {found['status']}: {found['proof']}",
        *("", "Configuration", *_table((name, json.dumps(value)) for name, value in found["config"].items())),
        *_generation_lines(found),
        *("", "Tensors", *_table((t["name"], t["dtype"], _shape(t["shape"])) for t in found["tensors"])),
        *(["", "Certificate", *_certificate_lines(found["certificate"])] if found["certificate"] else []),
        *("", "Files", *_file_table(found["files"])),
    ]


def _generation_lines(found: Mapping[str, Any]) -> list[str]:
    rows = [(name, json.dumps(value)) for name, value in found["generation"].items()]
    return ["", "Generation defaults", *_table(rows)] if rows else []


def _certificate_lines(found: Mapping[str, Any]) -> list[str]:
    error = f", error {found.get('error')}, at most {found.get('tolerance')}" if found["proven"] else ""
    if source_tokens := found.get("source_tokens"):
        error += f", compared up to {source_tokens} source and {found.get('target_tokens')} target tokens"
    lines = [f"  layout {found['layout']}{error}", *(f"  unverified  {entry}" for entry in found["unverified"])]
    lines += _checkpoint_lines(found)
    counts = Counter[str]()
    for use in map(str, found.get("tensors", {}).values()):  # such as "ignored: decoder, 12 tensors"
        counts[use.partition(":")[0]] += int((re.findall(r", (\d{1,9}) tensors$", use) or [1])[0])
    if counts:
        lines.append("  tensors of the checkpoint: " + ", ".join(f"{n} {use}" for use, n in counts.most_common()))
    rows = [
        (name, *(f"{key} {json.dumps(entry.get(key))}" for key in ("value", "nearest", "error")))
        for name, entry in found["switches"].items()
    ]
    return [*lines, *(_table(rows) if rows else [])]


def _checkpoint_lines(found: Mapping[str, Any]) -> list[str]:
    origin = (found.get("provenance") or found).get("origin")
    lines = [f"  imported from {name}, sha256 {file['sha256']}" for name, file in found["checkpoint"].items()]
    return [*lines, *(f"  {name} {value}" for name, value in origin.items())] if isinstance(origin, dict) else lines


def _graph_lines(found: Mapping[str, Any]) -> list[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in found["opsets"].items())
    return [
        f"graph {found['path']}: {_bytes(found['bytes'])}, opset {opsets}, IR version {found['ir_version']}",
        f"  sha256  {found['sha256']}",
        f"  weights {', '.join(found['weight_files']) or 'inside'}",
        *("", "Tensors", *_tensor_table(found)),
        *("", "Operators", *_table(found["operators"].items())),
    ]


def _tensor_table(graph: Mapping[str, Any]) -> list[str]:
    """List inputs and outputs; those that differ only in the layer share a line."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for side, tensors in (("in", graph["inputs"]), ("out", graph["outputs"])):
        for tensor in tensors:
            stem, _, layer = tensor["name"].partition(".")
            groups.setdefault((side, stem, tensor["dtype"], _shape(tensor["shape"])), []).append(layer)
    rows = []
    for (side, stem, dtype, shape), layers in groups.items():
        first, last = f".{layers[0]}" if layers[0] else "", f" … .{layers[-1]}" if layers[1:] else ""
        rows.append((side, stem + first + last, dtype, shape))
    return _table(rows)


def _file_table(files: Mapping[str, Any]) -> list[str]:
    return _table((name, f"{file['bytes']:>13,} bytes", f"sha256 {file['sha256']}") for name, file in files.items())


def _table(rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _shape(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _bytes(number: int) -> str:
    size, unit = float(number), "bytes"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
