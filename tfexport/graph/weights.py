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

import numpy as np
import onnx_ir as ir
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tfexport.errors import BundleError

Digest = tuple[str, tuple[int, ...], bytes]


def write_weights(path: Path, parameters: Mapping[str, torch.Tensor], graphs: Iterable[ir.Model]) -> None:
    """Write the weight file and let the graphs refer to it.

    Args:
        path: of the file, beside which the graphs will lie.
        parameters: of the model, by name, without tied duplicates.
        graphs: changed in place: initializers that equal a parameter become
            references into the file, those that equal its transpose become
            transposed references; constants stay in the graph.

    Raises:
        BundleError: the disk is full.
    """
    names: dict[Digest, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach().contiguous()
        names.setdefault(_digest_torch(tensors[name]), name)
    external: list[tuple[ir.Value, str]] = []
    for graph in graphs:
        _unfold_transposes(graph.graph, names)
        for value in graph.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            digest = _digest(tensor)
            if digest in names:
                external.append((value, names[digest]))
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what the library makes of an OSError
        raise BundleError(
            f"cannot write bundle: {path.name}: {error}; free some space or choose another output"
        ) from error
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    offsets = _offsets(path)
    for value, name in external:
        tensor = value.const_value
        assert tensor is not None
        begin, end = offsets[name]
        value.const_value = ir.ExternalTensor(
            path.name,
            begin,
            end - begin,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=path.parent,
        )


def _unfold_transposes(graph: ir.Graph, names: Mapping[Digest, str]) -> None:
    """Take back what the exporter does to a linear map over three axes: it stores a transposed copy of the weight."""
    for value in list(graph.initializers.values()):
        folded = value.const_value
        if folded is None or len(folded.shape) != 2 or _digest(folded) in names:
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
    raw = tensor.view(torch.uint8) if tensor.dim() else tensor[None].view(torch.uint8)
    return dtype, tuple(tensor.shape), hashlib.sha256(raw.numpy().data).digest()


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Read where each tensor lies in a safetensors file (https://huggingface.co/docs/safetensors: format)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
