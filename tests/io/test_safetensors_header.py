"""The header of a safetensors file, against the library that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tfexport._io.safetensors_header import StoredTensor, read_header
from tfexport.errors import CheckpointError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros(0, dtype=np.float16),
    "c.weight": np.array(7, dtype=np.int64),
}


def written(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_it_is_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "w", metadata={"format": "np"})
    found, raw = read_header(tmp_path / "w"), (tmp_path / "w").read_bytes()
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        stored = found[name]
        assert stored.shape == tensor.shape
        assert raw[stored.offset : stored.offset + stored.num_bytes] == tensor.tobytes()
    assert [found[name].dtype for name in TENSORS] == ["F32", "F16", "I64"]


def test_no_tensors_are_none(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "w", {}, b"")) == {}


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"a": "b"}, "x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}
    raw = json.dumps(header)
    assert read_header(written(tmp_path / "w", header)) == {"x": StoredTensor("F64", (1,), 8 + len(raw), 8)}


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"x": 1}',
        b'{"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8], "shape": [2]}}',
        entry(dtype=8),
        entry(shape=["x"]),
        entry(shape=[True]),
        entry(shape=[-1]),
        entry(shape=3),
        entry(data_offsets=[8, 0]),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, 8.0]),
    ],
)
def test_what_is_no_header_is_refused(header: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a safetensors file, or its header is cut off; copy it again"):
        read_header(written(tmp_path / "w", header))


@pytest.mark.parametrize(
    "header",
    [
        entry(data_offsets=[0, 7]),
        entry(data_offsets=[0, 9]),
        entry(data_offsets=[1, 8]),
        entry(data_offsets=[0, 2**63]),
        {**entry(), "y": {"dtype": "F64", "shape": [1], "data_offsets": [4, 12]}},
        {**entry(), "y": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}},
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(header: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which its header does not account for"):
        read_header(written(tmp_path / "w", header))


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63])
def test_a_length_that_lies_is_refused_and_never_allocated(length: int, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header is cut off"):
        read_header(tmp_path / "w")
