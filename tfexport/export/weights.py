"""One weight file for all graphs: safetensors, which ONNX reads as external data.

The file holds every parameter once, under its name in the model, so that the
eager model can be rebuilt from it; graphs point into it by offset.
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

from tfexport.errors import BundleError

Digest = tuple[str, tuple[int, ...], bytes]

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
    """Write the weight file and let the graphs refer to it.

    Args:
        path: of the file, beside which the graphs will lie.
        parameters: of the model, by name, without tied duplicates.
        graphs: changed in place: initializers that equal a parameter become
            references into the file, those that equal its transpose become
            transposed references; constants stay in the graph.
        joint: names of parameters that lie side by side, so that an initializer
            that equals all of them, one below the other, is a reference too.

    Raises:
        BundleError: the disk is full.
    """
    tensors = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
    joint = list(joint)
    together = {name for group in joint for name in group}
    names: dict[Digest, tuple[str, ...]] = {}
    for group in [*((name,) for name in tensors), *joint]:
        names.setdefault(
            _digest_torch(torch.cat([tensors[name] for name in group]) if len(group) > 1 else tensors[group[0]]), group
        )
    external: list[tuple[ir.Value, tuple[str, ...]]] = []
    digests = _Digests()
    for graph in graphs:
        _unfold_transposes(graph.graph, names, digests)
        for value in graph.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            digest = digests(tensor)
            if digest in names:
                external.append((value, names[digest]))
    order = [name for group in joint for name in group] + [name for name in tensors if name not in together]
    offsets = _save(path, {name: tensors[name] for name in order})
    for value, group in external:
        tensor = value.const_value
        assert tensor is not None
        begin, end = offsets[group[0]][0], offsets[group[-1]][1]
        value.const_value = ir.ExternalTensor(
            path.name,
            begin,
            end - begin,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=path.parent,
        )


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Write a safetensors file in the order given; the library that reads it would sort by name.

    Returns:
        Where each tensor begins and ends in the file.
    """
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    spelled = json.dumps(header).encode()
    spelled += b" " * (-len(spelled) % _ALIGNMENT)  # what a reader may map has to lie at a multiple of 8
    try:
        with path.open("xb") as file:
            file.write(struct.pack("<Q", len(spelled)) + spelled)
            for tensor in tensors.values():
                file.write(_raw(tensor))
    except OSError as error:
        raise BundleError(
            f"cannot write bundle: {path.name}: {error}; free some space or choose another output"
        ) from error
    start = 8 + len(spelled)
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1]) for name, entry in header.items()
    }


class _Digests:
    """What tensors hold, worked out once for each place in memory: the graphs of a model share its parameters."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[ir.TensorProtocol, Digest]] = {}

    def __call__(self, tensor: ir.TensorProtocol) -> Digest:
        raw: object = getattr(tensor, "raw", None)
        place: object = id(tensor)
        if isinstance(raw, torch.Tensor):
            place = raw.data_ptr(), raw.dtype, raw.shape, raw.stride()
        if place not in self._known:  # with the tensor, so that no other takes its place
            self._known[place] = tensor, _digest(tensor)
        return self._known[place][1]


def _unfold_transposes(graph: ir.Graph, names: Mapping[Digest, tuple[str, ...]], digests: _Digests) -> None:
    """Take back what the exporter does to a linear map over three axes: it stores a transposed copy of the weight."""
    for value in list(graph.initializers.values()):
        folded = value.const_value
        if folded is None or len(folded.shape) != 2 or digests(folded) in names:
            continue
        stored = ir.tensor(np.ascontiguousarray(folded.numpy().T), dtype=folded.dtype)
        if _digest(stored) not in names:
            continue
        name = value.name or ""
        weight = ir.Value(
            name=f"{name}_stored",
            type=ir.TensorType(stored.dtype),
            shape=ir.Shape(stored.shape.numpy()),
            const_value=stored,
        )
        turn = ir.Node("", "Transpose", [weight], [ir.AttrInt64s("perm", [1, 0])], num_outputs=1)
        del graph.initializers[name]
        graph.register_initializer(weight)
        value.replace_all_uses_with(turn.outputs[0])
        turn.outputs[0].name, turn.outputs[0].type = name, ir.TensorType(folded.dtype)
        graph.insert_before(graph[0], turn)


def _digest(tensor: ir.TensorProtocol) -> Digest:
    return tensor.dtype.name, tuple(tensor.shape.numpy()), hashlib.sha256(tensor.tobytes()).digest()


def _digest_torch(tensor: torch.Tensor) -> Digest:
    dtype = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}[tensor.dtype]
    return dtype, tuple(tensor.shape), hashlib.sha256(_raw(tensor)).digest()


def _raw(tensor: torch.Tensor) -> memoryview:
    return (tensor if tensor.dim() else tensor[None]).view(torch.uint8).numpy().data
