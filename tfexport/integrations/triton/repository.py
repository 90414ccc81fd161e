"""Write a model repository for Triton atomically, and replace only its own files.

NAME/config.pbtxt           configuration of the model
NAME/1/model.py             program for Triton's Python backend
NAME/1/bundle/              a checked copy of the bundle
NAME_stream/                the same model with streaming; has its own copy, so that each can be moved separately
tfexport.json               sha256 of every other file
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tfexport._io.extras import extra_command
from tfexport._io.names import checked_path
from tfexport._io.sealed_directory import FileEntry, plain_problem, read_manifest, walk, written
from tfexport._io.signature import TrustedKeys
from tfexport._io.strict_json import seal, unseal
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.bundle.contents import own_files
from tfexport.config import read_as
from tfexport.errors import MAX_PROBLEMS, BundleError, ConfigError, raise_all
from tfexport.integrations.triton._config import BUNDLE, VERSION, Settings, describe
from tfexport.serve.config import Limits, ServingConfig

SEAL = "tfexport.json"
FORMAT_VERSION = 1
STREAM_SUFFIX = "_stream"
# Python writes this next to a file that it runs.
_COMPILED = re.compile(rf"[^/]+/{VERSION}/__pycache__/model\.[\w.-]+\.pyc")
_ADVICE = "--force replaces only files that tfexport wrote: move that elsewhere, or choose another name"
_MODEL = '''"""Serves the bundle next to this file; written by tfexport {version}."""

try:
    from tfexport.integrations.triton.backend import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{{error}}; install it where Triton's Python backend runs: {install}"
    ) from error

__all__ = ["TritonPythonModel"]
'''


def write_repository(
    bundles: Mapping[str, Path],
    output: Path,
    *,
    serving: ServingConfig,
    limits: Limits,
    stream: bool = True,
    force: bool = False,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
    **loading: Any,
) -> Path:
    """Write a model repository that appears in `output` complete or not at all.

    `stream` adds a streaming model for each bundle, which loads the weights a second time. `force` replaces an empty
    directory, or an unchanged repository that tfexport wrote. `loading` has options of `tfexport.load`.
    """
    output = checked_path(output, "output")
    target = Path(os.path.realpath(output))
    taken = [f"{name}{STREAM_SUFFIX}" for name in bundles if stream and f"{name}{STREAM_SUFFIX}" in bundles]
    raise_all(ConfigError, "triton", [f"two models are called {name}; give the bundle another name" for name in taken])
    keys = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    opened = {name: _open(path, keys) for name, path in bundles.items()}
    with written(target, f"repository {output}", lambda former: _check_replaceable(former, output, force)) as folder:
        for name, bundle in opened.items():
            settings = Settings(bundle.sha256, serving, limits, loading)
            for model in (name, f"{name}{STREAM_SUFFIX}") if stream else (name,):
                has_texts, is_stream = bundle.manifest.has_tokenizer, model != name
                config = describe(model, settings, has_texts=has_texts, stream=is_stream)
                _write_model(folder / model, config, bundle)
                report(f"{output / model}: bundle {bundle.path} with the sha256 {bundle.sha256[:12]}…")
        files = {name: FileEntry.of(folder / name).sha256 for name, _ in walk(folder)}
        sealed = seal({"format_version": FORMAT_VERSION, "tfexport": version("tfexport"), "files": files})
        (folder / SEAL).write_bytes(sealed)
    return target


def _open(path: Path, keys: TrustedKeys | None) -> Bundle:
    bundle = open_bundle(path, weights=False, trusted_keys=keys)
    if not bundle.manifest.spec.has_decoder:
        raise BundleError(f"bundle {path} is encoder-only and generates no text; use tfexport embed")
    return bundle


def _write_model(folder: Path, config: str, bundle: Bundle) -> None:
    copy, own = folder / VERSION / BUNDLE, version("tfexport")
    copy.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    program = _MODEL.format(version=own, install=extra_command("cpu", own))
    (folder / VERSION / "model.py").write_text(program, encoding="utf-8")
    for name in sorted(own_files(bundle.path, bundle.manifest.files)):
        if (bundle.path / name).exists():  # signatures and engine logs are optional
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, copy / name)
    if open_bundle(copy).sha256 != bundle.sha256:
        raise BundleError(f"bundle {bundle.path} was replaced while it was copied; run it again")


def _check_replaceable(folder: Path, output: Path, force: bool) -> None:
    # `folder` has the files that the user calls `output`.
    if not folder.is_dir():
        raise BundleError(f"output {output} is a file, expected a new directory; choose another name")
    if not any(folder.iterdir()):
        return
    if not force:
        raise BundleError(f"output {output} exists; choose another name, or replace it with --force")
    files, problems = _sealed_files(folder, output), []
    for name, status in walk(folder):
        if problem := plain_problem(name, status):
            problems.append(problem)
        elif name not in files and name != SEAL and not _COMPILED.fullmatch(name):
            problems.append(f"{name!r} is not part of it")
        elif name in files and FileEntry.of(folder / name).sha256 != files[name]:
            problems.append(f"{name!r} was changed")
    raise_all(BundleError, f"output {output}", sorted(problems)[:MAX_PROBLEMS], remedy=_ADVICE)


def _sealed_files(folder: Path, output: Path) -> Mapping[str, str]:
    def read(data: dict[str, Any]) -> Mapping[str, str]:
        files: Mapping[str, str] = read_as(Mapping[str, str], data.get("files"), subject=SEAL, place="files")
        return files

    try:
        raw = read_manifest(folder, SEAL)
    except BundleError as error:
        raise BundleError(f"output {output}: {error}; {_ADVICE}") from error
    return unseal(raw, read, name=SEAL, format_version=FORMAT_VERSION, remedy=_ADVICE)
