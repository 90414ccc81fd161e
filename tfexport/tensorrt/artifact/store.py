"""The engines of a bundle: each a folder under engines/ that is there whole or not at all.

    engines/tensorrt-rtx-static-fp16/
        engine.json            what the engine is and what it is bound to
        engine.json.sig        optional, the signature of that
        encoder.plan           one plan for each graph, with size and sha256 in engine.json
        build.log              what the library said while it built
        kernels/               what TensorRT-RTX compiled of it, see `tfexport.tensorrt.artifact.kernels`

Folders are named by what was chosen: target, form, precision and weight type.
Names that begin with a dot are those of `tfexport._io.atomic`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tfexport._io import atomic
from tfexport._io.names import BUILD_LOG, ENGINE_MANIFEST, ENGINE_SIGNATURE, KERNELS
from tfexport._io.sealed_directory import MAX_MANIFEST_BYTES, FileEntry, plain_problem, walk, write_errors
from tfexport._io.signature import SIGNATURE_BYTES, SigningKey, TrustedKeys
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.contents import EngineFiles, recover_kernels
from tfexport.bundle.manifest import ENGINES
from tfexport.errors import BundleError, EngineError
from tfexport.tensorrt.artifact.compatibility import Machine, explain, incompatibilities
from tfexport.tensorrt.artifact.manifest import EngineManifest


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
                raw = file.read(plan.bytes + 1)
        except OSError as error:
            raise EngineError(f"engine {self.path}: {plan.file} cannot be read ({error.strerror})") from error
        if len(raw) != plan.bytes or hashlib.sha256(raw).hexdigest() != plan.sha256:
            raise EngineError(f"engine {self.path}: {_changed(plan.file)}; {_REMEDY}")
        return raw

    def check_plans(self) -> None:
        """Check every byte of every plan, and of the log, without keeping them.

        Raises:
            EngineError: names every file that was changed, or one that cannot be read.
        """
        problems = []
        files: dict[str, FileEntry] = {plan.file: plan for plan in self.manifest.plans.values()}
        if self.manifest.log is not None:
            files[BUILD_LOG] = self.manifest.log
        for name, content in files.items():
            try:
                with open(self.path / name, "rb", opener=_open_plain) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise EngineError(f"engine {self.path}: {name} cannot be read ({error.strerror})") from error
            if digest != content.sha256:
                problems.append(_changed(name))
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


def open_engine(bundle: Path, name: str, trusted_keys: TrustedKeys | None = None) -> StoredEngine:
    """Read an engine's manifest and check that its files are there, plain, in the right size and no others.

    The sums of the plans are checked when they are read.

    Args:
        bundle: its directory.
        name: of the engine's folder.
        trusted_keys: one of which must have signed the engine's manifest; None opens whosever engine.

    Raises:
        EngineError: there is none of this name, or it lists all that is damaged, missing or too much.
    """
    names = engine_names(bundle)
    if name not in names:
        raise EngineError(f"{bundle}: has no engine {name[:80]!r}, it has {', '.join(names) or 'none'}")
    return _read(bundle / ENGINES / name, trusted_keys)


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
        engine = open_engine(bundle.path, name, bundle.trusted_keys)
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
def add_engine(bundle: Path, name: str, *, force: bool, key: SigningKey | None = None) -> Iterator[Path]:
    """Write an engine that appears in a bundle whole when the block ends, or not at all.

    Nothing else of the bundle is touched.

    Args:
        bundle: its directory, without symbolic links.
        name: of the engine's folder.
        force: replace an engine of this name; it stays until the new one is whole.
        key: signs the engine's manifest; None leaves it unsigned.

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
            if key:
                (draft / ENGINE_SIGNATURE).write_bytes(key.sign(_read_manifest(draft)))
            _read(draft)
            atomic.publish(draft, target, lambda former: _check_taken(former, target, force))


def _read(path: Path, trusted_keys: TrustedKeys | None = None) -> StoredEngine:
    """Read the engine in the folder `path`."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise EngineError(f"engine {path}: is no directory; remove it")
        raw = _read_manifest(path)
        if trusted_keys is not None and (problem := trusted_keys.problem(path / ENGINE_MANIFEST, raw)):
            raise EngineError(f"engine {path}: {problem}")
        manifest = EngineManifest.from_bytes(raw)
        problems = _file_problems(path, manifest)
    except BundleError as error:
        raise EngineError(*error.problems, **error.of(f"engine {path}")) from error
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
    expected = {plan.file: plan.bytes for plan in manifest.plans.values()}
    if manifest.log is not None:
        expected[BUILD_LOG] = manifest.log.bytes
    others = {ENGINE_MANIFEST, ENGINE_SIGNATURE, BUILD_LOG}  # which no engine must have
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
        elif name == ENGINE_SIGNATURE and status.st_size != SIGNATURE_BYTES:
            problems.append(f"{name} has {status.st_size} bytes, expected {SIGNATURE_BYTES}")
        elif name not in expected and name not in others:
            problems.append(f"{name!r} is not in {ENGINE_MANIFEST}")
    return problems + [f"{name} is missing" for name in sorted(expected) if name not in found]


def _check_target(target: Path, force: bool) -> None:
    """Refuse a name that is taken, or a folder that holds anything but an engine."""
    if not os.path.lexists(target):
        return
    if force:
        recover_kernels(target)
    _check_taken(target, target, force)


def _check_taken(folder: Path, target: Path, force: bool) -> None:
    """Refuse to replace what lies in `folder`, which is called `target`, unless all of it is an engine's."""
    if not force:
        raise EngineError(f"engine {target} exists; replace it with --force")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise EngineError(f"{target} is no directory; --force replaces engines only, remove it yourself")
    try:
        own = EngineFiles.read(folder).names(folder)
    except BundleError as error:
        raise EngineError(
            f"{target} is no engine ({error}); --force replaces engines only, remove it yourself"
        ) from error
    foreign = sorted({name for name, _ in walk(folder)} - own)
    if foreign:
        listed = ", ".join(map(repr, foreign[:10]))
        raise EngineError(f"{target} holds more than an engine: {listed}; remove that yourself")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _changed(file: str) -> str:
    return f"{file} was changed (its sha256 differs)"
