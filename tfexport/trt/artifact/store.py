"""The engines of a bundle: each a folder under engines/ that is there whole or not at all.

    engines/tensorrt-rtx-static-fp16/
        engine.json            what the engine is and what it is bound to
        encoder.plan           one plan for each graph, with size and sha256 in engine.json
        build.log              what the library said while it built
        kernels/               what TensorRT-RTX compiled of it, see `tfexport.trt.artifact.kernels`

Folders are named by what was chosen: target, form, precision and weight type.
Names that begin with a dot are those of `tfexport.files.atomic`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tfexport.bundle.bundle import MAX_MANIFEST_BYTES, Bundle, plain_problem, write_errors
from tfexport.bundle.manifest import ENGINES
from tfexport.errors import BundleError, EngineError
from tfexport.files import atomic
from tfexport.trt.artifact.compatibility import Machine, explain, incompatibilities
from tfexport.trt.artifact.kernels import KERNELS, foreign_files
from tfexport.trt.artifact.manifest import ENGINE_MANIFEST, EngineManifest

BUILD_LOG = "build.log"


@dataclass(frozen=True)
class StoredEngine:
    """An engine in a bundle: its manifest is read, its files are there in the right size.

    Attributes:
        name: of its folder.
        path: of its folder, without symbolic links.
        manifest: what it says of itself.
    """

    name: str
    path: Path
    manifest: EngineManifest

    def read_plan(self, name: str) -> bytes:
        """Read a plan and check the very bytes that are returned.

        Raises:
            EngineError: it was changed, or cannot be read.
        """
        plan = self.manifest.plans[name]
        try:
            with open(self.path / plan.file, "rb", opener=_open_plain) as file:
                raw = file.read(plan.content.bytes + 1)
        except OSError as error:
            raise EngineError(f"engine {self.path}: {plan.file} cannot be read ({error.strerror})") from error
        if len(raw) != plan.content.bytes or hashlib.sha256(raw).hexdigest() != plan.content.sha256:
            raise EngineError(f"engine {self.path}: {_changed(plan.file)}; {_REMEDY}")
        return raw

    def check_plans(self) -> None:
        """Check every byte of every plan without keeping them.

        Raises:
            EngineError: names every plan that was changed, or one that cannot be read.
        """
        problems = []
        for plan in self.manifest.plans.values():
            try:
                with open(self.path / plan.file, "rb", opener=_open_plain) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise EngineError(f"engine {self.path}: {plan.file} cannot be read ({error.strerror})") from error
            if digest != plan.content.sha256:
                problems.append(_changed(plan.file))
        if problems:
            raise EngineError(f"engine {self.path}: {'; '.join(problems)}; {_REMEDY}")


_REMEDY = "copy it again from its source or build it again with tfexport trt"


def engine_names(bundle: Path) -> list[str]:
    """List the engines of a bundle, whatever their state; puts back what a killed writer left aside.

    Raises:
        EngineError: the folder cannot be read.
    """
    folder = bundle / ENGINES
    try:
        if not os.path.lexists(folder):
            return []
        for missing in atomic.aside(folder):
            atomic.restore(missing)
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise EngineError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error


def open_engine(bundle: Path, name: str) -> StoredEngine:
    """Read an engine's manifest and check that its files are there, plain, in the right size and no others.

    The sums of the plans are checked when they are read.

    Args:
        bundle: its directory.
        name: of the engine's folder.

    Raises:
        EngineError: there is none of this name, or it lists all that is damaged, missing or too much.
    """
    names = engine_names(bundle)
    if name not in names:
        raise EngineError(f"{bundle}: has no engine {name[:80]!r}, it has {', '.join(names) or 'none'}")
    return _read(bundle / ENGINES / name)


def choose_engine(bundle: Bundle, name: str | None, machine: Machine) -> StoredEngine:
    """Return the engine of this name, or the only one that may be used on this machine.

    Args:
        bundle: opened and checked.
        name: of an engine; None for the only one.
        machine: the one that will use it.

    Raises:
        EngineError: it may not be used, with every reason and the remedy; or none may, or several.
    """
    if name is not None:
        engine = open_engine(bundle.path, name)
        if found := incompatibilities(engine.manifest, bundle, machine):
            raise EngineError(f"engine {name}: {explain(found)}")
        return engine
    usable, refused = [], []
    for each in engine_names(bundle.path):
        try:
            usable.append(choose_engine(bundle, each, machine))
        except EngineError as error:
            refused.append(str(error))
    if len(usable) == 1:
        return usable[0]
    if usable:
        names = ", ".join(engine.name for engine in usable)
        raise EngineError(f"{bundle.path}: has several engines for this machine: {names}; choose one with --engine")
    if refused:
        raise EngineError(f"{bundle.path}: has no engine that may be used here: {' | '.join(refused)}")
    raise EngineError(f"{bundle.path}: has no engines; build one with: tfexport trt {bundle.path}")


@contextmanager
def add_engine(bundle: Path, name: str, *, force: bool) -> Iterator[Path]:
    """Write an engine that appears in a bundle whole when the block ends, or not at all.

    Nothing else of the bundle is touched.

    Args:
        bundle: its directory, without symbolic links.
        name: of the engine's folder.
        force: replace an engine of this name; it stays until the new one is whole.

    Yields:
        An empty folder on the same disk, to be filled.

    Raises:
        EngineError: before the block runs: the name is taken; afterwards: what was written is no engine.
        BundleError: it is being written by another process, or cannot be written.
    """
    folder = bundle / ENGINES
    target = folder / name
    what, remedy = f"engine {target}", "make the bundle writable"
    with ExitStack() as stack:
        with write_errors(what, remedy=remedy):
            folder.mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, folder)
            stack.enter_context(atomic.locked(target))
            atomic.recover(target)
            _check_target(target, force)
            draft = stack.enter_context(atomic.temporary(target))
        with write_errors(what, draft, remedy):
            yield draft
        with write_errors(what, remedy=remedy):
            _read(draft)
            atomic.publish(draft, target)


def _read(path: Path) -> StoredEngine:
    """Read the engine in the folder `path`."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise EngineError(f"engine {path}: is no directory; remove it")
        manifest = EngineManifest.from_bytes(_read_manifest(path))
        problems = _file_problems(path, manifest)
    except BundleError as error:
        raise EngineError(f"engine {path}: {error}") from error
    except OSError as error:
        raise EngineError(f"engine {path}: cannot be read ({error.strerror}); check its permissions") from error
    if problems:
        raise EngineError(f"engine {path}: {'; '.join(problems)}; {_REMEDY}")
    return StoredEngine(path.name, path, manifest)


def _read_manifest(path: Path) -> bytes:
    file = path / ENGINE_MANIFEST
    if not os.path.lexists(file):
        raise EngineError(f"engine {path}: {ENGINE_MANIFEST} is missing; {_REMEDY}")
    status = os.lstat(file)
    problem = plain_problem(ENGINE_MANIFEST, status)
    if problem is None and status.st_size > MAX_MANIFEST_BYTES:
        problem = f"{ENGINE_MANIFEST} has {status.st_size} bytes, the limit is {MAX_MANIFEST_BYTES}"
    if problem:
        raise EngineError(f"engine {path}: {problem}; {_REMEDY}")
    return file.read_bytes()


def _file_problems(path: Path, manifest: EngineManifest) -> list[str]:
    expected = {plan.file: plan.content.bytes for plan in manifest.plans.values()}
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    problems = []
    for name, status in sorted(found.items()):
        if stat.S_ISDIR(status.st_mode):
            if name != KERNELS:
                problems.append(f"{name!r} is a directory, expected a plain file")
        elif problem := plain_problem(name, status):
            problems.append(problem)
        elif name in expected and status.st_size != expected[name]:
            problems.append(f"{name} has {status.st_size} bytes, expected {expected[name]}")
        elif name not in expected and name not in (ENGINE_MANIFEST, BUILD_LOG):
            problems.append(f"{name!r} is not in {ENGINE_MANIFEST}")
    return problems + [f"{name} is missing" for name in sorted(expected) if name not in found]


def _check_target(target: Path, force: bool) -> None:
    """Refuse a name that is taken, or a folder that holds anything but an engine."""
    if not os.path.lexists(target):
        return
    if not force:
        raise EngineError(f"engine {target} exists; replace it with --force")
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        raise EngineError(f"{target} is no directory; --force replaces engines only, remove it yourself")
    foreign = [name for entry in sorted(target.iterdir()) for name in _foreign(entry)]
    if foreign:
        listed = ", ".join(repr(name) for name in foreign[:10])
        raise EngineError(f"{target} holds more than an engine: {listed}; remove that yourself")


def _foreign(entry: Path) -> list[str]:
    """Name what is no part of an engine in what lies in its folder."""
    if entry.is_dir():
        return foreign_files(entry) if entry.name == KERNELS else [entry.name]
    return [] if entry.suffix == ".plan" or entry.name in (ENGINE_MANIFEST, BUILD_LOG) else [entry.name]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _changed(file: str) -> str:
    return f"{file} was changed (its sha256 differs)"
