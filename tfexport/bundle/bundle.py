"""The bundle: one directory that holds a model's graphs, weights and what is known of them.

    manifest.json          what the bundle is; every other file with size and sha256
    encoder.onnx           graphs; their weights are external data in
    weights.safetensors    one file for all graphs, readable as safetensors
    tokenizer.json         optional, Hugging Face tokenizers
    target_tokenizer.json  optional, where the target has one of its own
    generation.json        optional, what it generates with unless told otherwise
    parity.json            optional, the full report of the verification
    engines/               optional, checked by whoever uses them

Every byte is checked before any of it is used; only `load` checks the weights
while it builds a session of them. The sums find damage and mix-ups; they are no
signature.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.bundle.manifest import ENGINES, FORMAT_VERSION, FileEntry, GraphEntry, Manifest, kind_of
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.files import atomic
from tfexport.files.names import MANIFEST
from tfexport.files.sealed_json import parse
from tfexport.models.config import TransformerConfig
from tfexport.spec import QUANTIZED_WEIGHTS, WEIGHTS, AlignmentHeads, ModelSpec, Quantization
from tfexport.text.config import TextConfig

PARITY = "parity.json"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_WEIGHT_FILES = (WEIGHTS, QUANTIZED_WEIGHTS)
_CHANGED = "{} was changed (its sha256 differs)"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: checked when it was opened, not to be changed while in use.

    Attributes:
        path: its directory, without symbolic links.
        manifest: what it says of itself.
        sha256: of manifest.json, hex; names the content of the whole bundle.
    """

    path: Path
    manifest: Manifest
    sha256: str

    def file(self, name: str) -> Path:
        """Return the path of a file by its name in the manifest.

        Raises:
            BundleError: the bundle does not have it.
        """
        if name not in self.manifest.files:
            raise BundleError(f"bundle {self.path} has no {name}; it has {', '.join(sorted(self.manifest.files))}")
        return self.path / name


class Builder:
    """A bundle being written: put files under `path`, then call `finish`.

    Attributes:
        path: an empty directory beside the final one.
        is_finished: whether there is a manifest.
        bundle: the finished bundle under its final name, once the block has ended.
    """

    bundle: Bundle

    def __init__(self, path: Path) -> None:
        """Build in the directory `path`."""
        self.path = path
        self.is_finished = False

    def finish(
        self,
        *,
        spec: ModelSpec,
        config: TransformerConfig | None,
        graphs: Mapping[str, GraphEntry],
        versions: Mapping[str, str],
        parity: Mapping[str, Any] | None = None,
        quantization: Quantization | None = None,
        text: TextConfig | None = None,
        alignment: AlignmentHeads | None = None,
    ) -> None:
        """Take stock of all files and write the manifest.

        Afterwards `open_bundle(path)` works, for a verification before the
        bundle gets its name. Call it again when files were added or changed.

        Raises:
            BundleError: lists every file and fact that a bundle cannot have.
        """
        found, problems = _scan(self.path)
        raise_all(BundleError, "bundle", problems)
        files = {name: _entry(self.path / name) for name in sorted(found - {MANIFEST})}
        try:
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                kind=kind_of(spec),
                spec=spec,
                config=config,
                graphs=graphs,
                files=files,
                versions=versions,
                parity=parity,
                quantization=quantization,
                text=text or TextConfig(),
                alignment=alignment,
            )
        except ConfigError as error:
            raise BundleError(f"bundle: {error}") from error
        (self.path / MANIFEST).write_bytes(manifest.to_bytes())
        self.is_finished = True


def open_bundle(path: Path, *, weights: bool = True) -> Bundle:
    """Open a bundle after checking its manifest and every byte of its files.

    A bundle that went missing because its replacement was killed is put back.

    Args:
        path: the directory, or a symbolic link to it. Inside there may be none.
        weights: False leaves the bytes of the weight files to `check_weights`,
            but not their sizes. They are numbers that no parser reads.

    Raises:
        BundleError: it is missing, made by a newer version, or lists all that is
            damaged, missing, too much or not a plain file.
    """
    root = Path(os.path.realpath(path))
    try:
        atomic.restore(root)
        raw = _read_manifest(root, path)
        try:
            manifest = Manifest.from_bytes(raw)
        except BundleError as error:
            raise BundleError(f"bundle {path}: {error}") from error
        except RecursionError as error:
            raise BundleError(f"bundle {path}: {MANIFEST} is nested too deeply; export it again") from error
        problems = _file_problems(root, manifest, unread=() if weights else _WEIGHT_FILES)
    except OSError as error:
        raise BundleError(f"cannot read bundle {path}: {_cause(error)}; check its permissions") from error
    _raise_damage(path, problems)
    return Bundle(root, manifest, hashlib.sha256(raw).hexdigest())


def check_weights(bundle: Bundle) -> None:
    """Check every byte of a bundle's weight files.

    Raises:
        BundleError: lists those that were changed.
    """
    files = bundle.manifest.files
    try:
        problems = [
            _CHANGED.format(name)
            for name in _WEIGHT_FILES
            if name in files and _entry(bundle.file(name)) != files[name]
        ]
    except OSError as error:
        raise BundleError(f"cannot read bundle {bundle.path}: {_cause(error)}; check its permissions") from error
    _raise_damage(bundle.path, problems)


def _raise_damage(path: Path, problems: list[str]) -> None:
    if problems:
        raise BundleError(f"bundle {path}: {'; '.join(problems)}; copy it again from its source or export it again")


@contextmanager
def create_bundle(output: Path, *, force: bool = False) -> Iterator[Builder]:
    """Write a bundle that appears under `output` whole when the block ends, or not at all.

    Args:
        output: directory to make; missing parents are made, a symbolic link is followed.
        force: replace a bundle, or an empty directory, that is there. Nothing
            else is ever deleted.

    Yields:
        The builder; `finish` must be called before the block ends.

    Raises:
        BundleError: before the block runs: `output` is taken, not writable or
            just being written; afterwards: the disk is full, or files and
            manifest do not make a bundle. What was at `output` is still there.
    """
    target = Path(os.path.realpath(output))
    if not target.name:
        raise BundleError(f"output {output} is the root of the file system; choose a directory below it")
    with ExitStack() as stack:
        with write_errors(f"bundle {output}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic.locked(target))
            atomic.recover(target)
            _check_output(target, output, force)
            builder = Builder(stack.enter_context(atomic.temporary(target)))
        with write_errors(f"bundle {output}", builder.path):
            yield builder
        with write_errors(f"bundle {output}"):
            if not builder.is_finished:
                raise BundleError(f"bundle {output} was not finished; call finish before the block ends")
            opened = open_bundle(builder.path)
            atomic.publish(builder.path, target)
            builder.bundle = dataclasses.replace(opened, path=target)


def _read_manifest(root: Path, path: Path) -> bytes:
    """Return the bytes of the manifest in `root`; `path` is how the user calls it."""
    if not os.path.lexists(root):
        raise BundleError(f"there is no bundle {path}; make one with: tfexport onnx SOURCE --output {path}")
    if not root.is_dir():
        raise BundleError(f"{path} is a file, expected the directory of a bundle")
    if not os.path.lexists(root / MANIFEST):
        raise BundleError(
            f"{path} is no bundle, it has no {MANIFEST}; from a model directory make one with: "
            f"tfexport onnx {path} --output BUNDLE"
        )
    status = os.lstat(root / MANIFEST)
    problem = plain_problem(MANIFEST, status)
    if problem is None and status.st_size > MAX_MANIFEST_BYTES:
        problem = f"{MANIFEST} has {status.st_size} bytes, the limit is {MAX_MANIFEST_BYTES}"
    if problem:
        raise BundleError(f"bundle {path}: {problem}; export it again")
    return (root / MANIFEST).read_bytes()


def _file_problems(root: Path, manifest: Manifest, *, unread: Collection[str]) -> list[str]:
    found, problems = _scan(root)
    problems += [f"{name!r} is not in {MANIFEST}" for name in sorted(found - set(manifest.files) - {MANIFEST})]
    for name, entry in sorted(manifest.files.items()):
        if name not in found:
            if not os.path.lexists(root / name):
                problems.append(f"{name} is missing")
            elif stat.S_ISDIR(os.lstat(root / name).st_mode):
                problems.append(f"{name} is a directory, expected a plain file")
            continue
        size = os.lstat(root / name).st_size
        if size != entry.bytes:
            problems.append(f"{name} has {size} bytes, expected {entry.bytes}")
        elif name not in unread and _entry(root / name) != entry:
            problems.append(_CHANGED.format(name))
    return problems


def _scan(root: Path) -> tuple[set[str], list[str]]:
    """Return the plain files below `root` without engines, and a problem for everything else."""
    found: set[str] = set()
    problems = []
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in os.scandir(root / folder):
            name = f"{folder}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if name != ENGINES:
                    folders.append(f"{name}/")
            elif problem := plain_problem(name, status):
                problems.append(problem)
            else:
                found.add(name)
    return found, sorted(problems)


def plain_problem(name: str, status: os.stat_result) -> str | None:
    """Say why what has this status is no plain file of its own, or None."""
    if stat.S_ISLNK(status.st_mode):
        return f"{name!r} is a symbolic link, expected a plain file"
    if not stat.S_ISREG(status.st_mode):
        return f"{name!r} is neither a file nor a directory, expected a plain file"
    if status.st_nlink != 1:
        return f"{name!r} is a hard link ({status.st_nlink} names), expected a file of its own"
    return None


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def _check_output(target: Path, output: Path, force: bool) -> None:
    """Refuse an output that is taken, or that holds anything but a bundle."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise BundleError(f"output {output} is a file, expected a new directory; choose another name")
    if not force:
        raise BundleError(f"output {output} exists; choose another name, or replace it with --force")
    if not any(target.iterdir()):
        return
    advice = "--force replaces bundles only; choose another name or remove it yourself"
    try:
        listed = parse(_read_manifest(target, output), MANIFEST, "export it again")
    except BundleError as error:
        raise BundleError(f"output {output} is no bundle; {advice}") from error
    if not isinstance(listed.get("files"), dict) or "format_version" not in listed:
        raise BundleError(f"output {output} is no bundle; {advice}")
    found, problems = _scan(target)
    problems += [f"{name!r} is not part of the bundle" for name in sorted(found - set(listed["files"]) - {MANIFEST})]
    if problems:
        raise BundleError(f"output {output} holds more than a bundle: {'; '.join(problems[:10])}; {advice}")


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def write_errors(what: str, within: Path | None = None, remedy: str = "choose another output") -> Iterator[None]:
    """Turn OSErrors of writing into BundleError.

    Args:
        what: is being written, for the error.
        within: with it only those about that directory, or a full disk.
        remedy: where the disk is not full.

    Raises:
        BundleError: "cannot write", what, why and the remedy.
    """
    try:
        yield
    except OSError as error:
        concerns_us = within is None or str(error.filename).startswith(str(within))
        if error.errno not in _NO_ROOM and not concerns_us:
            raise
        remedy = "free some space or choose another output" if error.errno in _NO_ROOM else remedy
        raise BundleError(f"cannot write {what}: {_cause(error)}; {remedy}") from error


def _cause(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{reason} ({error.filename})"
