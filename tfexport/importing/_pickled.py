"""Read the lists and dictionaries of a pickle without its classes and functions."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from typing import Any


class _Inert(dict[Any, Any]):
    """An object of any class: its items, last argument and state."""

    def __new__(cls, *args: object, **_: object) -> _Inert:
        made = super().__new__(cls)
        made.update({"": args[-1]} if args and isinstance(args[-1], dict) else {})
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self["state"] = state


class _Unpickler(pickle._Unpickler):  # its memo is a dictionary, as small as the file
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: object) -> None: ...  # a tensor of `torch.save`


def read_pickled(raw: bytes) -> Any:
    """Return a pickle or a file of `torch.save` as JSON; run it in a limited process."""
    if raw.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            raw = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return json.loads(json.dumps(_Unpickler(io.BytesIO(raw)).load(), skipkeys=True, default=lambda _: None))
