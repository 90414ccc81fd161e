"""The bundle: one directory that holds a model's graphs, weights and what is known of them.

    manifest.json          what the bundle is; every other file with size and sha256
    manifest.json.sig      optional, the signature of that
    encoder.onnx           graphs; their weights are external data in
    weights.safetensors    one file for all graphs, readable as safetensors
    tokenizer.json         optional, Hugging Face tokenizers
    target_tokenizer.json  optional, where the target has one of its own
    generation.json        optional, what it generates with unless told otherwise
    parity.json            optional, the full report of the verification
    engines/               optional, checked by whoever uses them

Every byte is checked before any of it is used; only `load` checks the weights
while it builds a session of them. The sums find damage and mix-ups; who made
a bundle is for a signature to say.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfexport._io import atomic
from tfexport._io.names import MANIFEST, SIGNATURE
from tfexport._io.paths import checked_path
from tfexport._io.signature import SIGNATURE_BYTES, SigningKey, TrustedKeys
from tfexport.bundle.contents import (
    copy_engines,
    engine_state,
    engines_in,
    own_names,
    recover_engines,
    stale_sources,
    walk,
)
from tfexport.bundle.graph_check import WEIGHT_FILES, graph_problems
from tfexport.bundle.identity import Identity, Provenance
from tfexport.bundle.manifest import (
    ENGINES,
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    ModuleEntry,
    kind_of,
)
from tfexport.contract import AlignmentHeads, GraphEntry, ModelSpec, Quantization
from tfexport.errors import MAX_PROBLEMS, BundleError, ConfigError, raise_all
from tfexport.nn.config import TransformerConfig
from tfexport.text.config import TextConfig

PARITY = "parity.json"
# For who replaces a bundle without a key.
SIGNATURE_DROPPED = "the bundle was signed and will not be; sign it with --sign-key"
# What is not among the files that the manifest names: it cannot say its own sum, nor that of its signature.
_ABOUT = frozenset({MANIFEST, SIGNATURE})
_CHANGED = "{} was changed (its sha256 differs)"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: checked when it was opened, not to be changed while in use.

    Attributes:
        path: its directory, without symbolic links.
        manifest: what it says of itself.
        sha256: of manifest.json, hex; names the content of the whole bundle.
        trusted_keys: one of which has signed the bundle, and has to have signed the engines that are loaded from it;
            None for anybody.
    """

    path: Path
    manifest: Manifest
    sha256: str
    trusted_keys: TrustedKeys | None = field(default=None, compare=False)

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, whosever it is."""
        return os.path.lexists(self.path / SIGNATURE)

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
        drops_signature: whether what is replaced was signed, and this is not.
        bundle: the finished bundle under its final name, once the block has ended.
        stale_engines: of the bundle that was replaced, kept though they were made from other files; then too.
    """

    bundle: Bundle
    stale_engines: tuple[str, ...] = ()

    def __init__(self, path: Path, key: SigningKey | None = None, *, replaces_signed: bool = False) -> None:
        """Build in the directory `path`; `key` signs the manifest."""
        self.path, self._key = path, key
        self.is_finished = False
        self.drops_signature = replaces_signed and key is None

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
        checkpoint: Mapping[str, FileEntry] | None = None,
        provenance: Provenance | None = None,
        identity: Identity | None = None,
        module: ModuleEntry | None = None,
    ) -> None:
        """Take stock of all files, write the manifest and sign it where there is a key.

        Afterwards `open_bundle(path)` works, for a verification before the
        bundle gets its name. Call it again when files were added or changed.

        Raises:
            BundleError: lists every file and fact that a bundle cannot have.
        """
        found, problems = _scan(self.path)
        raise_all(BundleError, "bundle", problems)
        files = {name: _entry(self.path / name) for name in sorted(found - _ABOUT)}
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
                checkpoint=checkpoint or {},
                provenance=provenance,
                identity=identity or Identity(),
                module=module,
            )
        except ConfigError as error:
            raise BundleError(*error.problems, **error.of("bundle")) from error
        raw = manifest.to_bytes()
        (self.path / MANIFEST).write_bytes(raw)
        (self.path / SIGNATURE).unlink(missing_ok=True)  # of what was here before
        if self._key:
            (self.path / SIGNATURE).write_bytes(self._key.sign(raw))
        self.is_finished = True


def open_bundle(
    path: str | os.PathLike[str], *, weights: bool = True, trusted_keys: TrustedKeys | None = None
) -> Bundle:
    """Open a bundle after checking its manifest, every byte of its files, and that its graphs are what it says.

    A bundle that went missing because its replacement was killed is put back.

    Args:
        path: the directory, or a symbolic link to it. Inside there may be none.
        weights: False leaves the bytes of the weight files to `check_weights`,
            but not their sizes. They are numbers that no parser reads.
        trusted_keys: one of which must have signed the manifest, which is looked at before anything is read of it; None
            opens whosever bundle.

    Raises:
        ConfigError: `path` can be no path.
        BundleError: it is missing, made by a newer version, signed by none of the keys, or lists all that is
            damaged, missing, too much or not a plain file, or all that is in
            its graphs and not in the contract of its manifest.
    """
    path = checked_path(path, "bundle")
    root = Path(os.path.realpath(path))
    try:
        atomic.restore(root)
        raw = _read_manifest(root, path)
        if trusted_keys is not None and (problem := trusted_keys.problem(root / MANIFEST, raw)):
            raise BundleError(f"bundle {path}: {problem}")
        try:
            manifest = Manifest.from_bytes(raw)
        except BundleError as error:
            raise BundleError(*error.problems, **error.of(f"bundle {path}")) from error
        problems = _file_problems(root, manifest, unread=() if weights else WEIGHT_FILES)
        problems = problems or graph_problems(root, manifest)
    except OSError as error:
        raise BundleError(f"cannot read bundle {path}: {_cause(error)}; check its permissions") from error
    _raise_damage(path, problems)
    return Bundle(root, manifest, hashlib.sha256(raw).hexdigest(), trusted_keys)


def check_weights(bundle: Bundle) -> None:
    """Check every byte of a bundle's weight files.

    Raises:
        BundleError: lists those that were changed.
    """
    files = bundle.manifest.files
    try:
        problems = [
            _CHANGED.format(name) for name in WEIGHT_FILES if name in files and _entry(bundle.file(name)) != files[name]
        ]
    except OSError as error:
        raise BundleError(f"cannot read bundle {bundle.path}: {_cause(error)}; check its permissions") from error
    _raise_damage(bundle.path, problems)


def _raise_damage(path: Path, problems: list[str]) -> None:
    if len(problems) > MAX_PROBLEMS:
        problems = [*problems[:MAX_PROBLEMS], f"and {len(problems) - MAX_PROBLEMS} more"]
    if problems:
        raise BundleError(f"bundle {path}: {'; '.join(problems)}; copy it again from its source or export it again")


@contextmanager
def create_bundle(output: Path, *, force: bool = False, key: SigningKey | None = None) -> Iterator[Builder]:
    """Write a bundle that appears under `output` whole when the block ends, or not at all.

    Args:
        output: directory to make; missing parents are made, a symbolic link is followed.
        force: replace a bundle, or an empty directory, that is there. Its
            engines are kept. Nothing is ever deleted that no manifest names.
        key: signs the bundle; None leaves it unsigned.

    Yields:
        The builder; `finish` must be called before the block ends.

    Raises:
        ConfigError: `output` can be no path.
        BundleError: before the block runs: `output` is taken, not writable or
            just being written; afterwards: the disk is full, or files and
            manifest do not make a bundle. What was at `output` is still there.
    """
    output = checked_path(output, "output")
    target = Path(os.path.realpath(output))
    if not target.name:
        raise BundleError(f"output {output} is the root of the file system; choose a directory below it")
    with ExitStack() as stack:
        with write_errors(f"bundle {output}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic.locked(target))
            atomic.recover(target)
            if replaced := _replaceable(target, output, force):
                recover_engines(target)
                _check_own(target, output, replaced)
            is_signed = os.path.lexists(target / SIGNATURE)
            builder = Builder(stack.enter_context(atomic.temporary(target)), key, replaces_signed=is_signed)
        with write_errors(f"bundle {output}", builder.path):
            yield builder
        with write_errors(f"bundle {output}"):
            if not builder.is_finished:
                raise BundleError(f"bundle {output} was not finished; call finish before the block ends")
            opened = open_bundle(builder.path)
            engines = engine_state(target)
            copy_engines(target, builder.path)
            found = engines_in(builder.path)
            files = opened.manifest.files
            builder.stale_engines = tuple(name for name in found if stale_sources(found[name].sources, files))

            def check(former: Path) -> None:
                if replaced := _replaceable(former, output, force):
                    _check_own(former, output, replaced)
                if engine_state(former) != engines:
                    raise BundleError(f"the engines of {output} were changed meanwhile; run it again")

            atomic.publish(builder.path, target, check)
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
    problems += [f"{name!r} is not in {MANIFEST}" for name in sorted(found - set(manifest.files) - _ABOUT)]
    if SIGNATURE in found and (size := os.lstat(root / SIGNATURE).st_size) != SIGNATURE_BYTES:
        problems.append(f"{SIGNATURE} has {size} bytes, expected {SIGNATURE_BYTES}")
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
    for name, status in walk(root, without=ENGINES):
        if problem := plain_problem(name, status):
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


_ADVICE = "--force replaces bundles only; choose another name or remove it yourself"


def _replaceable(folder: Path, output: Path, force: bool) -> Manifest | None:
    """Refuse an output that is taken by anything but a bundle that may be replaced.

    Args:
        folder: where it lies just now.
        output: how the user calls it.
        force: whether a bundle may be replaced.

    Returns:
        The manifest of the bundle; None where there is nothing, or an empty directory.
    """
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        raise BundleError(f"output {output} is a file, expected a new directory; choose another name")
    if not force:
        raise BundleError(f"output {output} exists; choose another name, or replace it with --force")
    if not any(folder.iterdir()):
        return None
    if not os.path.lexists(folder / MANIFEST):
        raise BundleError(f"output {output} is no bundle; {_ADVICE}")
    try:
        return Manifest.from_bytes(_read_manifest(folder, output))
    except BundleError as error:
        raise BundleError(f"output {output} is no bundle; {_ADVICE} ({error})") from error


def _check_own(folder: Path, output: Path, manifest: Manifest) -> None:
    """Refuse to replace a bundle whose directory holds what no manifest names."""
    own, problems = own_names(folder, manifest.files), []
    for name, status in walk(folder):
        if problem := plain_problem(name, status):
            problems.append(problem)
        elif name not in own:
            problems.append(f"{name!r} is not part of the bundle")
    if problems:
        listed = "; ".join(sorted(problems)[:10])
        raise BundleError(
            f"output {output} holds more than a bundle: {listed}; --force deletes only what a bundle names: "
            "move that elsewhere, or choose another name"
        )


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def write_errors(what: str, within: Path | None = None, remedy: str = "choose another output") -> Iterator[None]:
    """Turn OSErrors of writing into BundleError.

    Args:
        what: is being written, for the error.
        within: with it only those about that directory, about no file by name, or a full disk.
        remedy: where the disk is not full.

    Raises:
        BundleError: "cannot write", what, why and the remedy.
    """
    try:
        yield
    except OSError as error:
        concerns_us = within is None or error.filename is None or str(error.filename).startswith(str(within))
        if isinstance(error, BrokenPipeError) or (error.errno not in _NO_ROOM and not concerns_us):
            raise
        remedy = "free some space or choose another output" if error.errno in _NO_ROOM else remedy
        raise BundleError(f"cannot write {what}: {_cause(error)}; {remedy}") from error


def _cause(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{reason} ({error.filename})"
