"""What in the directory of a bundle is its own: the files that its manifest, and those of its engines, name."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport._io import atomic
from tfexport._io.names import (
    BUILD_LOG,
    ENGINE_MANIFEST,
    ENGINE_SIGNATURE,
    KERNELS,
    KERNELS_INDEX,
    KERNELS_SUFFIX,
    MANIFEST,
    SIGNATURE,
    TOKENIZER,
)
from tfexport._io.sealed_json import unseal
from tfexport.bundle.manifest import ENGINES, MAX_MANIFEST_BYTES, FileEntry
from tfexport.config import read_as
from tfexport.errors import BundleError, ConfigError, raise_all, shortened

ENGINE_FORMAT_VERSION = 1
_REMEDY = "build it again"
_PLAIN = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class EngineFiles:
    """What the manifest of an engine says of files.

    Attributes:
        plans: in the engine's folder, by name of the plan.
        sources: sha256 of each file of the bundle that it was made from, by name.
    """

    plans: Mapping[str, str]
    sources: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> EngineFiles:
        """Read the manifest in an engine's folder.

        Raises:
            BundleError: it is missing or damaged.
            OSError: it cannot be read.
        """
        file = folder / ENGINE_MANIFEST
        try:
            status = os.lstat(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleError(f"it has no {ENGINE_MANIFEST}") from error
        if not _is_directory(folder) or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{ENGINE_MANIFEST} is no file of at most {MAX_MANIFEST_BYTES} bytes")
        raw = file.read_bytes()
        return unseal(raw, _read_engine, name=ENGINE_MANIFEST, format_version=ENGINE_FORMAT_VERSION, remedy=_REMEDY)

    def names(self, folder: Path) -> set[str]:
        """Return the names of all files that are the engine's in its folder, there or not."""
        kernels = [KERNELS_INDEX, *(f"{plan}{KERNELS_SUFFIX}" for plan in self.plans)]
        kept = folder / KERNELS
        places = [entry.name for entry in os.scandir(kept)] if _is_directory(kept) else []
        among = {f"{KERNELS}/{place}/{name}" for place in places for name in kernels}
        return {ENGINE_MANIFEST, ENGINE_SIGNATURE, BUILD_LOG, *self.plans.values(), *among}


def stale_sources(sources: Mapping[str, str], files: Mapping[str, FileEntry]) -> list[str]:
    """Name what an engine was made from and a bundle has no longer, or has otherwise.

    Args:
        sources: sha256 by name, as the engine's manifest has them.
        files: of the bundle.
    """
    # The tokenizer is named by engines of before; they read ids, and it may be replaced.
    names = sorted(set(sources) - {TOKENIZER})
    return [name for name in names if name not in files or files[name].sha256 != sources[name]]


def walk(root: Path, *, without: str | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name, relative to `root`, and the status of all that is no directory; no link is followed.

    Args:
        root: a directory.
        without: a directory in it that is left out.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in os.scandir(root / folder):
            name = f"{folder}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                yield name, status
            elif name != without:
                folders.append(f"{name}/")


def engines_in(root: Path) -> dict[str, EngineFiles]:
    """Return what can be read of the engines of a bundle, by the name of the folder."""
    found = {}
    for folder in sorted((root / ENGINES).iterdir()) if _is_directory(root / ENGINES) else []:
        try:
            found[folder.name] = EngineFiles.read(folder)
        except BundleError:
            continue  # whatever it is, no manifest names what lies in it
    return found


def recover_engines(root: Path) -> None:
    """Clear up after killed writers of a bundle's engines and of their kernels.

    Raises:
        BundleError: an engine, or its kernels, are just being written.
        OSError: they cannot be cleared up.
    """
    if _is_directory(root / ENGINES):
        atomic.recover_all(root / ENGINES)
        for folder in sorted((root / ENGINES).iterdir()):
            recover_kernels(folder)


def recover_kernels(engine: Path) -> None:
    """Clear up after killed writers of the kernels of one engine; raises as `recover_engines`."""
    if _is_directory(engine) and _is_directory(engine / KERNELS):
        atomic.recover_all(engine / KERNELS)


def own_names(root: Path, files: Collection[str]) -> set[str]:
    """Return the names of all that is a bundle's own in its directory.

    Args:
        root: its directory.
        files: those that its manifest names.

    Raises:
        OSError: it cannot be read.
    """
    engines = {
        f"{ENGINES}/{name}/{file}"
        for name, engine in engines_in(root).items()
        for file in engine.names(root / ENGINES / name)
    }
    return {MANIFEST, SIGNATURE, *files, *engines}


def engine_state(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what changes when an engine of a bundle is added, replaced or written to: inode, size and time by name."""
    if not _is_directory(root / ENGINES):
        return {}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in walk(root / ENGINES)}


def copy_engines(root: Path, target: Path) -> None:
    """Copy the engines of a bundle, and nothing else, into the directory of another."""
    import shutil

    for name, engine in engines_in(root).items():
        for file in sorted(engine.names(root / ENGINES / name)):
            source, copy = (folder / ENGINES / name / file for folder in (root, target))
            if source.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)


def _is_directory(path: Path) -> bool:
    """Say whether there is a directory, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _read_engine(data: dict[str, Any]) -> EngineFiles:
    plans = read_as(Mapping[str, Mapping[str, Any]], data.get("plans"), subject=ENGINE_MANIFEST, place="plans")
    sources = read_as(Mapping[str, str], data.get("sources"), subject=ENGINE_MANIFEST, place="sources")
    files = {name: plan.get("file") for name, plan in plans.items()}
    # Files are copied and kernels are named by the plan, so both have plain names.
    problems = [
        f"plans.{name[:80]} has {shortened(given)}, expected a plain name"
        for name, file in files.items()
        for given in (name, file)
        if not isinstance(given, str) or not _PLAIN.fullmatch(given)
    ]
    raise_all(ConfigError, ENGINE_MANIFEST, problems)
    return EngineFiles(files, sources)
