"""Find the files of a bundle's engines, to copy, delete or refuse them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport._io import atomic
from tfexport._io.names import (
    BUILD_LOG,
    ENGINE_LAYERS,
    ENGINE_MANIFEST,
    ENGINE_SIGNATURE,
    KERNELS,
    KERNELS_INDEX,
    KERNELS_SUFFIX,
    MANIFEST,
    SIGNATURE,
    TOKENIZER,
)
from tfexport._io.sealed_directory import FileEntry, plain_problem, read_manifest, walk
from tfexport._io.strict_json import unseal
from tfexport.bundle.manifest import ENGINES
from tfexport.config import read_as
from tfexport.errors import BundleError, ConfigError, raise_all, shortened

ENGINE_FORMAT_VERSION = 1
_PLAIN = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")
# An engine may be replaced while its folder is read.
_ATTEMPTS = 3


@dataclass(frozen=True)
class EngineFiles:
    """Files that the manifest of an engine lists."""

    plans: Mapping[str, str]  # file of each plan in the engine's folder, by the plan's name
    sources: Mapping[str, str]  # sha256 of each file of the bundle that the engine was built from, by name

    @classmethod
    def read(cls, folder: Path) -> EngineFiles:
        """Read the manifest in an engine's folder."""
        if not _is_directory(folder):
            raise BundleError("it is not a directory")
        raw, version = read_manifest(folder, ENGINE_MANIFEST), ENGINE_FORMAT_VERSION
        return unseal(raw, _read_engine, name=ENGINE_MANIFEST, format_version=version, remedy="build it again")

    def names(self, folder: Path) -> set[str]:
        """Return the names of all files that an engine may have."""
        kernels = [KERNELS_INDEX, *(f"{plan}{KERNELS_SUFFIX}" for plan in self.plans)]
        machines = [entry.name for entry in _folders(folder / KERNELS)]
        compiled = {f"{KERNELS}/{machine}/{name}" for machine in machines for name in kernels}
        return {ENGINE_MANIFEST, ENGINE_SIGNATURE, BUILD_LOG, ENGINE_LAYERS, *self.plans.values(), *compiled}


def stale_sources(sources: Mapping[str, str], files: Mapping[str, FileEntry]) -> list[str]:
    """List the source files of an engine that a bundle lacks or has with another hash."""
    # Old engines list the tokenizer, but do not depend on it.
    names = sorted(set(sources) - {TOKENIZER})
    return [name for name in names if name not in files or files[name].sha256 != sources[name]]


def engines_in(root: Path) -> dict[str, EngineFiles]:
    """Return the engines of a bundle that have a readable manifest, by folder name."""
    found = {}
    for folder in _folders(root / ENGINES):
        try:
            found[folder.name] = EngineFiles.read(folder)
        except BundleError:
            continue  # `unlisted_files` reports its files
    return found


def own_files(root: Path, files: Collection[str]) -> set[str]:
    """Return the names of all files of the bundle whose manifest lists `files`."""
    names = {MANIFEST, SIGNATURE, *files}
    for name, engine in engines_in(root).items():
        names |= {f"{ENGINES}/{name}/{file}" for file in engine.names(root / ENGINES / name)}
    return names


def unlisted_files(root: Path) -> list[str]:
    """List everything in `engines/` that no engine lists or that is not a plain file."""
    for _ in range(_ATTEMPTS):
        try:
            return list(_unlisted_files(root))
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = f"cannot read {ENGINES}: {error.strerror}"
            raise BundleError(f"bundle {root}: {reason}; check its permissions") from error
    raise BundleError(f"bundle {root}: {ENGINES} keeps changing; load the bundle when its engines are built")


def check_engines(root: Path) -> None:
    """Check that `engines/` has only files that an engine lists."""
    remedy = "remove it, or copy the bundle again from its source"
    raise_all(BundleError, f"bundle {root}", unlisted_files(root), remedy=remedy)


def _unlisted_files(root: Path) -> Iterator[str]:
    if not (root / ENGINES).exists():
        return
    found = {f"{ENGINES}/{name}": status for name, status in walk(root / ENGINES)}
    own = own_files(root, ())  # after the walk, to include engines that were added during it
    for name, status in sorted(found.items()):
        if any(map(atomic.is_leftover, name.split("/"))) or not os.path.lexists(root / name):
            continue  # temporary files of writers are never read
        if problem := plain_problem(name, status):
            yield problem
        elif name not in own:
            yield f"{name!r} is not listed in any engine.json"


def recover_engines(root: Path) -> None:
    """Clean up after killed writers of engines and kernels, see `atomic.recover_all`."""
    if _is_directory(root / ENGINES):
        atomic.recover_all(root / ENGINES)
        for folder in _folders(root / ENGINES):
            recover_kernels(folder)


def recover_kernels(engine: Path) -> None:
    """Clean up after killed writers of an engine's kernels, see `atomic.recover_all`."""
    if _is_directory(engine) and _is_directory(engine / KERNELS):
        atomic.recover_all(engine / KERNELS)


def engine_state(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of every file under `engines/`, to detect changes."""
    if not _is_directory(root / ENGINES):
        return {}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in walk(root / ENGINES)}


def copy_engines(root: Path, target: Path) -> None:
    """Copy the engines of a bundle into the directory of another."""
    import shutil  # reading a bundle does not need its compression modules

    for name in own_files(root, ()) - {MANIFEST, SIGNATURE}:
        if (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def _folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if _is_directory(parent) else []


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _read_engine(data: dict[str, Any]) -> EngineFiles:
    plans = read_as(Mapping[str, Mapping[str, Any]], data.get("plans"), subject=ENGINE_MANIFEST, place="plans")
    sources = read_as(Mapping[str, str], data.get("sources"), subject=ENGINE_MANIFEST, place="sources")
    files = {name: plan.get("file") for name, plan in plans.items()}
    # The names become parts of paths.
    problems = [
        f"plans.{plan[:80]} has {shortened(name)}, expected a name of letters, digits, '.', '_' and '-'"
        for plan, file in files.items()
        for name in (plan, file)
        if not isinstance(name, str) or not _PLAIN.fullmatch(name)
    ]
    raise_all(ConfigError, ENGINE_MANIFEST, problems)
    return EngineFiles(files, sources)
