"""Write the weight file that all graphs share: safetensors, used as external data.

It has every parameter once, under its name in the model, so that the eager model can be rebuilt from it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from tfexport.errors import BundleError
from tfexport.export.graph_file import Span, refer, tensor_spans

Digest = tuple[str, tuple[int, ...], bytes]
# By place in memory, which is not reused while the tensor is kept.
_Known = dict[object, tuple[ir.TensorProtocol, Digest]]

# https://huggingface.co/docs/safetensors: format
_SAFETENSORS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


def write_weights(
    path: Path,
    parameters: Mapping[str, torch.Tensor],
    graphs: Iterable[ir.Model],
    *,
    joint: Iterable[tuple[str, ...]] = (),
) -> None:
    """Write the weight file and make the graphs refer to it.

    Initializers that are equal to a parameter or its transpose become references. Parameters of a group in `joint` are
    stored next to each other, so that an initializer that is equal to their concatenation becomes a reference too.
    """
    tensors = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
    joint = list(joint)
    names: dict[Digest, tuple[str, ...]] = {}
    for group in [*((name,) for name in tensors), *joint]:
        whole = torch.cat([tensors[name] for name in group]) if len(group) > 1 else tensors[group[0]]
        names.setdefault(_digest(TorchTensor(whole)), group)
    external: list[tuple[ir.Value, tuple[str, ...]]] = []
    known: _Known = {}
    for graph in graphs:
        _unfold_transposes(graph.graph, names, known)
        for value in graph.graph.initializers.values():
            assert value.const_value is not None
            digest = _known_digest(value.const_value, known)
            if digest in names:
                external.append((value, names[digest]))
    order = dict.fromkeys([name for group in joint for name in group])
    _save(path, {name: tensors[name] for name in {**order, **tensors}})
    spans = tensor_spans(path)
    for value, group in external:
        begin, last = spans[group[0]].offset, spans[group[-1]]
        refer(value, Span(path.name, begin, last.offset + last.length - begin), path.parent)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # The safetensors library would sort the tensors by name.
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)  # memory maps need tensors at multiples of 8
    try:
        with path.open("xb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for tensor in tensors.values():
                file.write(TorchTensor(tensor).tobytes())
    except OSError as error:
        raise BundleError(
            f"cannot write bundle: {path.name}: {error}; free some space or choose another output"
        ) from error


def _known_digest(tensor: ir.TensorProtocol, known: _Known) -> Digest:
    """Hash a tensor; those of PyTorch that share memory are hashed once."""
    raw: Any = getattr(tensor, "raw", None)
    is_torch = isinstance(raw, torch.Tensor)
    place = (raw.data_ptr(), raw.dtype, raw.shape, raw.stride()) if is_torch else id(tensor)
    if place not in known:
        known[place] = tensor, _digest(tensor)
    return known[place][1]


def _digest(tensor: ir.TensorProtocol) -> Digest:
    return tensor.dtype.name, tuple(tensor.shape.numpy()), hashlib.sha256(tensor.tobytes()).digest()


def _unfold_transposes(graph: ir.Graph, names: Mapping[Digest, tuple[str, ...]], known: _Known) -> None:
    # The exporter stores a transposed copy of the weight of a linear map over three axes.
    for value in list(graph.initializers.values()):
        folded = value.const_value
        if folded is None or len(folded.shape) != 2 or _known_digest(folded, known) in names:
            continue
        name = value.name or ""
        stored = ir.tensor(np.ascontiguousarray(folded.numpy().T), dtype=folded.dtype, name=f"{name}_stored")
        if _digest(stored) not in names:
            continue
        tape = ir.tape.Tape()
        weight = tape.initializer(stored)
        transposed = tape.op("Transpose", [weight], {"perm": [1, 0]})
        del graph.initializers[name]
        graph.register_initializer(weight)
        value.replace_all_uses_with(transposed)
        transposed.name, transposed.type = name, ir.TensorType(folded.dtype)
        graph.insert_before(graph[0], tape.nodes)
