"""A bundle: one directory with a model's graphs, its weights and a manifest.

docs/reference/bundle.md lists its files. The manifest has every file but those of engines. Every file is hashed before
it is used; only `load` hashes the weights later, while it builds a session. Hashes find damage and mix-ups. Only a
signature proves who made a bundle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tfexport._io import atomic
from tfexport._io.names import GENERATION, MANIFEST, SIGNATURE, checked_path
from tfexport._io.sealed_directory import (
    FileEntry,
    cause,
    changed_problems,
    file_problems,
    foreign_problems,
    plain_problem,
    read_manifest,
    walk,
    write_errors,
    written,
)
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport._io.strict_json import read_json
from tfexport.bundle.contents import copy_engines, engine_state, engines_in, own_files, recover_engines, stale_sources
from tfexport.bundle.manifest import ENGINES, FORMAT_VERSION, Draft, Manifest, kind_of
from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.generation import GenerationDefaults

PARITY = "parity.json"
WEIGHT_FILES = (WEIGHTS, QUANTIZED_WEIGHTS)
SIGNATURE_DROPPED = "the former bundle was signed, but this one is not; sign it with --sign-key"
_COPY_AGAIN = "copy it again from its source or export it again"
_ADVICE = "--force replaces only bundles; choose another name or remove it yourself"


@dataclass(frozen=True)
class Bundle:
    """An opened and checked bundle; its files must not change while it is in use."""

    path: Path  # without symbolic links
    manifest: Manifest
    sha256: str  # of manifest.json, hex; identifies the content of the whole bundle
    # Keys that sign the bundle and its engines; None accepts every bundle.
    trusted_keys: TrustedKeys | None = field(default=None, compare=False)

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, by any key."""
        return os.path.lexists(self.path / SIGNATURE)

    def file(self, name: str) -> Path:
        """Return the path of a file in the manifest; raises BundleError if not listed."""
        if name not in self.manifest.files:
            raise BundleError(f"bundle {self.path} has no {name}; it has {', '.join(sorted(self.manifest.files))}")
        return self.path / name


class Builder:
    """Write the files of a bundle under `path`, then call `finish`."""

    bundle: Bundle  # under its final name; set when the block of `create_bundle` has ended
    stale_engines: tuple[str, ...] = ()  # engines of the replaced bundle that were built from other files; set as well

    def __init__(self, path: Path, key: SigningKey | None = None, *, replaces_signed: bool = False) -> None:
        self.path, self._key = path, key
        self.is_finished = False  # whether there is a manifest
        self.drops_signature = replaces_signed and key is None

    def finish(self, draft: Draft) -> None:
        """Hash all files, then write and sign the manifest; call it again after a change."""
        found = dict(sorted(walk(self.path, without=ENGINES)))
        problems = [problem for name, status in found.items() if (problem := plain_problem(name, status))]
        raise_all(BundleError, "bundle", problems)
        files = {name: FileEntry.of(self.path / name) for name in found if name not in (MANIFEST, SIGNATURE)}
        values = {one.name: getattr(draft, one.name) for one in dataclasses.fields(Draft)}
        try:
            manifest = Manifest(format_version=FORMAT_VERSION, kind=kind_of(draft.spec), files=files, **values)
        except ConfigError as error:
            raise BundleError(*error.problems, **error.of("bundle")) from error
        raw = manifest.to_bytes()
        (self.path / MANIFEST).write_bytes(raw)
        (self.path / SIGNATURE).unlink(missing_ok=True)  # from an earlier call
        if self._key:
            (self.path / SIGNATURE).write_bytes(self._key.sign(raw))
        self.is_finished = True


def open_bundle(
    path: str | os.PathLike[str], *, weights: bool = True, trusted_keys: TrustedKeys | None = None
) -> Bundle:
    """Open a bundle and check its signature, its manifest and the hashes of its files.

    If a writer was killed while replacing the bundle, the previous bundle is restored. `path` may be a symbolic link.
    Without `weights`, only the sizes of the weight files are checked; call `check_weights` for their hashes. The
    BundleError lists every file that is changed, missing, not in the manifest or not a plain file.
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
        unread: Collection[str] = () if weights else WEIGHT_FILES
        problems = file_problems(root, manifest.files, MANIFEST, unread=unread, without=ENGINES)
    except OSError as error:
        raise _unreadable(path, error) from error
    raise_all(BundleError, f"bundle {path}", problems, remedy=_COPY_AGAIN)
    return Bundle(root, manifest, hashlib.sha256(raw).hexdigest(), trusted_keys)


def check_weights(bundle: Bundle) -> None:
    """Check the hashes of a bundle's weight files."""
    files = {name: entry for name, entry in bundle.manifest.files.items() if name in WEIGHT_FILES}
    try:
        problems = changed_problems(bundle.path, files)
    except OSError as error:
        raise _unreadable(bundle.path, error) from error
    raise_all(BundleError, f"bundle {bundle.path}", problems, remedy=_COPY_AGAIN)


def read_defaults(bundle: Bundle) -> GenerationDefaults:
    """Read the default decoding options of a bundle (generation.json)."""
    if GENERATION not in bundle.manifest.files:
        return GenerationDefaults()
    try:
        defaults = GenerationDefaults.from_dict(read_json(bundle.file(GENERATION), GENERATION), subject=GENERATION)
        raise_all(ConfigError, GENERATION, defaults.token_problems(bundle.manifest.spec.vocab))
    except ConfigError as error:
        raise BundleError(f"bundle {bundle.path}: {error}; export it again") from error
    except OSError as error:
        raise _unreadable(bundle.path, error) from error
    return defaults


def _read_manifest(root: Path, path: Path) -> bytes:
    if not os.path.lexists(root):
        raise BundleError(f"there is no bundle {path}; export one with: tfexport onnx SOURCE --output {path}")
    if not root.is_dir():
        raise BundleError(f"{path} is a file, expected the directory of a bundle")
    if not os.path.lexists(root / MANIFEST):
        remedy = f"export a model directory with: tfexport onnx {path} --output BUNDLE"
        raise BundleError(f"{path} is not a bundle: it has no {MANIFEST}; {remedy}")
    try:
        return read_manifest(root, MANIFEST)
    except BundleError as error:
        raise BundleError(f"bundle {path}: {error}; export it again") from error


def _unreadable(path: Path, error: OSError) -> BundleError:
    return BundleError(f"cannot read bundle {path}: {cause(error)}; check its permissions")


@contextmanager
def create_bundle(output: Path, *, force: bool = False, key: SigningKey | None = None) -> Iterator[Builder]:
    """Write a bundle that appears as `output`, complete or not at all, at the end.

    Call `finish` before the block ends. After an error the former `output` is unchanged. `force` replaces a bundle or
    an empty directory; it keeps the bundle's engines, and never deletes files that no manifest lists.
    """
    output = checked_path(output, "output")
    target = Path(os.path.realpath(output))
    if not target.name:
        raise BundleError(f"output {output} is the root of the file system; choose a directory below it")
    engines: dict[str, tuple[int, int, int]] | None = None

    def check(folder: Path) -> None:
        if replaced := _replaceable(folder, output, force):
            if engines is None:
                recover_engines(folder)
            problems = foreign_problems(folder, own_files(folder, replaced.files))
            remedy = "--force deletes only files that a manifest lists; move the others, or choose another name"
            raise_all(BundleError, f"output {output} holds more than a bundle", problems, remedy=remedy)
        if engines is not None and engine_state(folder) != engines:
            raise BundleError(f"the engines of {output} changed while the bundle was written; run it again")

    with written(target, f"bundle {output}", check) as draft:
        builder = Builder(draft, key, replaces_signed=os.path.lexists(target / SIGNATURE))
        yield builder
        with write_errors(f"bundle {output}"):
            if not builder.is_finished:
                raise BundleError(f"bundle {output} was not finished; call finish before the block ends")
            opened = open_bundle(draft)
            engines = engine_state(target)
            copy_engines(target, draft)
            files = opened.manifest.files
            builder.stale_engines = tuple(
                name for name, engine in engines_in(draft).items() if stale_sources(engine.sources, files)
            )
    builder.bundle = dataclasses.replace(opened, path=target)


def _replaceable(folder: Path, output: Path, force: bool) -> Manifest | None:
    if not folder.is_dir():
        raise BundleError(f"output {output} is a file, expected a new directory; choose another name")
    if not force:
        raise BundleError(f"output {output} exists; choose another name, or replace it with --force")
    if not any(folder.iterdir()):
        return None
    if not os.path.lexists(folder / MANIFEST):
        raise BundleError(f"output {output} is not a bundle; {_ADVICE}")
    try:
        return Manifest.from_bytes(_read_manifest(folder, output))
    except BundleError as error:
        raise BundleError(f"output {output} is not a bundle; {_ADVICE} ({error})") from error
