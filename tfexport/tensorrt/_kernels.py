"""Store the kernels that TensorRT-RTX compiles, for use by later processes.

    engines/tensorrt-rtx-static-fp16/kernels/
        1.7.1.116-NVIDIA-L4-13.0/       one folder per library, GPU and driver, replaced atomically
            kernels.json                library, GPU and driver; size and sha256 of each file
            decoder_static.kernels      one file per plan

Kernels that are damaged or do not match are compiled again, so they never cause an error.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from tfexport._io import atomic
from tfexport._io.names import KERNELS, KERNELS_INDEX, KERNELS_SUFFIX
from tfexport._io.sealed_directory import MAX_MANIFEST_BYTES, FileEntry, foreign_problems, plain_problem
from tfexport._io.strict_json import seal, unseal
from tfexport._io.system import opened_folder
from tfexport.config import Config
from tfexport.errors import BundleError, raise_all
from tfexport.tensorrt.cuda import Gpu

_FORMAT_VERSION = 1
# Protects the host's memory. Kernels contain no weights, so those of a plan are far smaller.
MAX_BYTES = 1024 * 1024 * 1024

_log = logging.getLogger(__name__)
_Open: TypeAlias = Callable[[str], BinaryIO]


class _Entry(FileEntry, subject="kernels"):
    plan_sha256: str


class _Index(Config, subject=KERNELS_INDEX):
    format_version: int = _FORMAT_VERSION
    library_version: str
    gpu: str
    driver: str
    plans: Mapping[str, _Entry]


class RuntimeCacheStore:
    """Kernels of one engine for a library, GPU and driver; processes may share them."""

    def __init__(self, engine: Path, plans: Mapping[str, str], library_version: str, gpu: Gpu) -> None:
        """Create a store in the engine's folder; `plans` has the sha256 of each plan."""
        self._plans = plans
        self._key: dict[str, Any] = {"library_version": library_version, "gpu": gpu.name, "driver": gpu.driver_version}
        name = "-".join(self._key.values())
        self._folder = engine / KERNELS / re.sub("[^A-Za-z0-9.]+", "-", name)
        self._has_warned = False

    def read(self, plan: str) -> bytes | None:
        """Return the kernels of a plan, or None if the store has none that match."""
        try:
            # Another process may replace the folder; an open descriptor reads all files from one version.
            with opened_folder(self._folder) as open_file:
                entry = self._entries(open_file).get(plan)
                return None if entry is None else _read_entry(open_file, plan + KERNELS_SUFFIX, entry)
        except FileNotFoundError:
            return None
        except (OSError, BundleError) as error:
            if not self._has_warned:
                _log.warning("%s: kernels are compiled again: %s", self._folder, error)
            self._has_warned = True
            return None

    def write(self, kernels: Mapping[str, bytes]) -> None:
        """Store new kernels if the folder is writable; keep those of other plans."""
        if not kernels:  # the library compiles no kernels
            return
        try:
            self._folder.parent.mkdir(exist_ok=True)
            with atomic.locked(self._folder):
                atomic.recover(self._folder)
                known = {plan: raw for plan in self._plans if (raw := self.read(plan)) is not None}
                wanted = known | {plan: raw for plan, raw in kernels.items() if len(raw) <= MAX_BYTES}
                if wanted != known:
                    self._publish(wanted)
        except (OSError, BundleError) as error:
            _log.debug("%s: kernels are not stored: %s", self._folder, error)

    def _publish(self, kernels: Mapping[str, bytes]) -> None:
        with atomic.temporary(self._folder) as draft:
            entries = {}
            for plan, raw in kernels.items():
                (draft / f"{plan}{KERNELS_SUFFIX}").write_bytes(raw)
                digest = hashlib.sha256(raw).hexdigest()
                entries[plan] = _Entry(bytes=len(raw), sha256=digest, plan_sha256=self._plans[plan])
            (draft / KERNELS_INDEX).write_bytes(seal(_Index(**self._key, plans=entries).to_dict()))
            atomic.publish(draft, self._folder, self._check_own)

    def _check_own(self, folder: Path) -> None:
        own = {KERNELS_INDEX, *(f"{plan}{KERNELS_SUFFIX}" for plan in self._plans)}
        raise_all(BundleError, f"{self._folder} holds more than kernels", foreign_problems(folder, own))

    def _entries(self, open_file: _Open) -> dict[str, _Entry]:
        raw = _read_plain(open_file, KERNELS_INDEX, MAX_MANIFEST_BYTES)
        index = unseal(
            raw, _Index.from_dict, name=KERNELS_INDEX, format_version=_FORMAT_VERSION, remedy="remove the folder"
        )
        if {name: getattr(index, name) for name in self._key} != self._key:
            return {}
        return {plan: entry for plan, entry in index.plans.items() if self._plans.get(plan) == entry.plan_sha256}


def _read_entry(open_file: _Open, name: str, entry: _Entry) -> bytes:
    if entry.bytes > MAX_BYTES:
        raise BundleError(f"{name} has {entry.bytes} bytes, the limit is {MAX_BYTES}")
    raw = _read_plain(open_file, name, entry.bytes)
    if len(raw) != entry.bytes or hashlib.sha256(raw).hexdigest() != entry.sha256:
        raise BundleError(f"{name} was changed (its sha256 differs)")
    return raw


def _read_plain(open_file: _Open, name: str, limit: int) -> bytes:
    with open_file(name) as file:
        status = os.fstat(file.fileno())
        if status.st_nlink == 0:  # another process has replaced the folder since it was opened
            raise FileNotFoundError(name)
        if problem := plain_problem(name, status):
            raise BundleError(problem)
        if status.st_size > limit:
            raise BundleError(f"{name} has {status.st_size} bytes, expected at most {limit}")
        return file.read()
