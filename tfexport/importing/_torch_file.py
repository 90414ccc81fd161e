"""Read `torch.save` files without running code stored in them."""

from __future__ import annotations

import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from tfexport.errors import CheckpointError, first_line, shortened

STATE_DICT_ONLY = "save the state dict alone: torch.save(model.state_dict(), FILE), or safetensors.torch.save_file"

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
# Classes of objects that training scripts save next to the weights: options, paths, dates, NumPy numbers. They are
# replaced by inert objects, and their code is not imported.
_OTHERS = (
    *("argparse.Namespace", "types.SimpleNamespace", "numpy.dtype", "numpy.ndarray"),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
    *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata", "SCMode")),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path")),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Enum", "InterpolationResult")),
    *(f"typing.{name}" for name in ("Any", "Union", "Optional")),
    *(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "object", "str", "tuple")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(f"numpy.dtypes.{kind}DType" for kind in ("Float16", "Float32", "Float64", "Int32", "Int64", "Bool", "Str")),
)
_MAPPINGS = (
    "collections.defaultdict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)


class _Inert:
    def __new__(cls, *_: object) -> _Inert:
        return super().__new__(cls)

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _InertMapping:
    # PyTorch lets a pickle set items only on an OrderedDict.
    def __new__(cls, *_: object) -> OrderedDict[object, object]:  # type: ignore[misc]
        return OrderedDict()


def is_torch_file(head: bytes) -> bool:
    """Return whether the first 9 or more bytes can be those of a `torch.save` file."""
    return head.startswith((_ZIP, _PICKLE)) and head[8:9] != b"{"  # the header of safetensors


def read_torch(file: Path, path: Path) -> Any:
    """Read a `torch.save` file in the zip or the older format.

    `file` is a private copy; tensors of a zip file stay mapped to it, except on Windows. `path` is the name for error
    messages.
    """
    with file.open("rb") as opened:
        is_zip = opened.read(len(_ZIP)) == _ZIP
    if is_zip:
        _check_archive(file, path)
    is_mapped = is_zip and sys.platform != "win32"  # which deletes no mapped files
    inert: list[Any] = [(_Inert, name) for name in _OTHERS] + [(_InertMapping, name) for name in _MAPPINGS]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(inert):
            warnings.simplefilter("ignore")  # about pickles that `torch.load` then refuses
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # PyTorch raises all kinds of errors for damaged files
        reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({shortened(first_line(error))})"
        problem = f"is damaged, cut short or not a file of torch.save{reason}; copy it again"
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            problem = (
                f"holds more than tensors and plain values ({found[1]}), which cannot be read without running code of "
                f"the file; {STATE_DICT_ONLY}"
            )
        elif found := re.search(r"must be imported to load ([\w ]+)", str(error)):
            problem = f"holds {found[1].strip()}, expected plain tensors; save them dense and whole"
        raise CheckpointError(f"{path}: {problem}") from error
    if not is_zip and len(_storages(loaded)) > _num_listed(file):
        # PyTorch would not initialize the memory of the other storages.
        raise CheckpointError(f"{path}: is damaged (it lacks the values of some tensors); copy it again")
    return loaded


def _storages(loaded: Any) -> set[int]:
    """Return an identity of each storage that the tensors in nested containers use."""
    found, seen, waiting = set[int](), set[int](), [loaded]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif id(value) not in seen and isinstance(value, dict | list | tuple | set):
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return found


def _num_listed(file: Path) -> int:
    """Count the storages that a file from before PyTorch 1.6 lists."""
    with file.open("rb") as opened:
        for _ in range(4):
            for _opcode in pickletools.genops(opened):
                pass
        return sum(isinstance(value, str) for _, value, _ in pickletools.genops(opened))


def _check_archive(file: Path, path: Path) -> None:
    """Compare every record with its checksum, which `torch.load` ignores."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError(f"{path}: is a compressed archive, expected a file of torch.save; unpack it")
            if not any(record.CRC for record in records):
                raise CheckpointError(
                    f"{path}: has no checksums, expected those that torch.save writes; save it again with "
                    "torch.serialization.set_crc32_options(True)"
                )
            twice = [name for name, count in Counter(archive.namelist()).items() if count > 1]
            damaged = twice[0] if twice else archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises all kinds of errors for damaged files
        reason = shortened(first_line(error))
        raise CheckpointError(f"{path}: is damaged or cut short ({reason}); copy it again") from error
    if damaged:
        problem = "is there twice" if twice else "does not match its checksum"
        raise CheckpointError(f"{path}: is damaged or cut short (record {damaged!r} {problem}); copy it again")
