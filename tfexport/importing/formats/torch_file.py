"""Files of `torch.save`: checked as far as their form allows, then read without running anything that is in them.

Today's form is a zip archive with a checksum for each record. The library
ignores those; here every record is compared with its own. The form from before
PyTorch 1.6 is pickles with the storages behind them and has no checksum.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from tfexport.errors import CheckpointError, first_line, shortened

STATE_DICT_ONLY = "save the state dict alone: torch.save(model.state_dict(), FILE), or safetensors.torch.save_file"

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
# Of the header before each record, as the format has it, and its flag for names in UTF-8.
_HEADER_SIZE, _UTF8 = 30, 0x800
# What training scripts keep beside the weights and nothing here needs: options, paths, dates, numbers of NumPy. What
# stands for them does nothing, and none of their code is imported.
_KEPT_BESIDE = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
    *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata", "SCMode")),
    *(
        f"omegaconf.nodes.{kind}Node"
        for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum")
    ),
    "omegaconf.nodes.InterpolationResultNode",
    *(f"typing.{name}" for name in ("Any", "Union", "Optional")),
    *(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "object", "str", "tuple")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(f"numpy.dtypes.{kind}DType" for kind in ("Float16", "Float32", "Float64", "Int32", "Int64", "Bool", "Str")),
    "numpy.dtype",
    "numpy.ndarray",
)
# The same, whose entries a pickle sets one by one.
_MAPPINGS_BESIDE = (
    "collections.defaultdict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
_UNKNOWN = "is damaged, cut short or no file of torch.save"


def is_torch_file(head: bytes) -> bool:
    """Say whether a file that begins with these bytes, nine or more, can be one of torch.save.

    The length that a safetensors file begins with may have the same first byte; behind it stands the brace of a header.
    """
    return head.startswith((_ZIP, _PICKLE)) and head[8:9] != b"{"


def read_torch(file: Path, path: Path) -> Any:
    """Read a file of `torch.save`.

    Args:
        file: that nobody changes; what is returned of a zip archive stays mapped to it.
        path: what the user calls it, for messages.

    Returns:
        What was saved: tensors, containers and plain values.

    Raises:
        CheckpointError: damaged, cut short, with bytes behind its end, or with anything else in it.
    """
    with file.open("rb") as opened:
        is_zip = opened.read(len(_ZIP)) == _ZIP
        opened.seek(0)
        if is_zip:
            _check_archive(opened, path)
            return _loaded(file, path, mapped=True)
        data = _loaded(opened, path, mapped=False)
        _check_old_form(opened, path)
    return data


def _loaded(file: Path | BinaryIO, path: Path, *, mapped: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are refused a moment later
            with torch.serialization.safe_globals(_STAND_INS):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # on a torn file its reader fails in every way there is
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path}: holds more than tensors and plain values ({found[1]}), which would have to be run to be "
                f"read, and that is not done; {STATE_DICT_ONLY}"
            ) from error
        if found := re.search(r"must be imported to load ([\w ]+)", str(error)):
            raise CheckpointError(
                f"{path}: holds {found[1].strip()}, expected plain tensors; save them dense and whole"
            ) from error
        reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({shortened(first_line(error))})"
        raise CheckpointError(f"{path}: {_UNKNOWN}{reason}; copy it again") from error


def _check_archive(file: BinaryIO, path: Path) -> None:
    """Compare every record with its checksum, where it lies.

    The archive stores its records as they are; what only looks like a file of
    torch.save, and could unpack to any size, does not.
    """
    try:
        with zipfile.ZipFile(file) as archive, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError(f"{path}: is a compressed archive, expected a file of torch.save; unpack it")
            if not any(record.CRC for record in records):
                raise CheckpointError(
                    f"{path}: has no checksums, expected those that torch.save writes; save it again with "
                    "torch.serialization.set_crc32_options(True)"
                )
            problem = _record_problem(records, content)
    except CheckpointError:
        raise
    except Exception as error:  # it was not made for files that are damaged
        raise CheckpointError(
            f"{path}: is damaged or cut short ({shortened(first_line(error))}); copy it again"
        ) from error
    if problem:
        raise CheckpointError(f"{path}: is damaged or cut short ({problem}); copy it again")


def _record_problem(records: Sequence[zipfile.ZipInfo], content: mmap.mmap) -> str:
    """Say what is wrong with the first record that is not as it was written; empty where all are."""
    seen: set[str] = set()
    with memoryview(content) as view:
        for record in records:
            # As torch finds it: behind a header of its own, with another copy of the name and room to align.
            start = record.header_offset
            name_size, extra_size = struct.unpack_from("<HH", view, start + 26)
            begin = start + _HEADER_SIZE + name_size + extra_size
            name = bytes(view[start + _HEADER_SIZE : start + _HEADER_SIZE + name_size])
            is_named = name.decode("utf-8" if record.flag_bits & _UTF8 else "cp437") == record.orig_filename
            if not is_named or record.filename in seen or view[start : start + 4] != _ZIP:
                return f"{record.filename!r} is not where it should be"
            seen.add(record.filename)
            with view[begin : begin + record.file_size] as stored:
                is_whole = len(stored) == record.file_size == record.compress_size
                if not is_whole or zlib.crc32(stored) != record.CRC:
                    return f"the checksum of {record.filename!r} differs"
    return ""


def _check_old_form(file: BinaryIO, path: Path) -> None:
    """Refuse storages that are not those which the tensors need, and a file that does not end behind the last.

    The library has compared the size of each storage with that of its tensors. It
    leaves a storage that is not listed as it finds the memory.

    Args:
        file: where the library has stopped reading; it has found nothing wrong.
        path: what the user calls it.
    """
    end, size = file.tell(), os.fstat(file.fileno()).st_size
    if end != size:
        raise CheckpointError(f"{path}: has {size - end} bytes behind its last storage; copy it again")
    file.seek(0)
    needed: set[object] = set()
    try:
        for _ in range(4):  # a number, a version, the system, and what was saved
            _walk(file, needed)
        stored = _walk(file, needed)
    except Exception as error:
        raise CheckpointError(f"{path}: {_UNKNOWN} ({shortened(first_line(error))}); copy it again") from error
    if Counter(stored) != Counter(needed):
        raise CheckpointError(
            f"{path}: has {len(stored)} storages, which are not the {len(needed)} that its tensors need; copy it again"
        )


def _walk(file: BinaryIO, storages: set[object]) -> Any:
    """Go through one pickle, running nothing of it, and note the storages that it names."""
    # The one in C reserves memory for as many objects as the pickle says.
    reader = cast(Any, pickle)._Unpickler(file, encoding="utf-8")
    reader.find_class = lambda module, name: _Inert
    reader.persistent_load = lambda saved: storages.add(saved[2])
    return reader.load()


class _Inert:
    """Stands for what a pickle names: takes what it is given and does nothing."""

    def __new__(cls, *_: object) -> _Inert:
        return super().__new__(cls)

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _InertMapping:
    """Stands for a mapping of another class: nothing that a pickle sets in it is kept for long."""

    def __new__(cls, *_: object) -> OrderedDict[object, object]:  # type: ignore[misc]  # the only ones that may be set
        return OrderedDict()


_STAND_INS: list[Any] = [
    *((_Inert, name) for name in _KEPT_BESIDE),
    *((_InertMapping, name) for name in _MAPPINGS_BESIDE),
]
