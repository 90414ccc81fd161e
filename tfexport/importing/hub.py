"""Locate a checkpoint: a path, or a repository to download from the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from tfexport._io.extras import install_command
from tfexport._io.names import CARD, CONFIG
from tfexport._io.sealed_directory import FileEntry
from tfexport.errors import CheckpointError, TfexportError, first_line, raise_all, shortened
from tfexport.importing._files import GENERATION_CONFIG, INDEX, SUFFIXES, WEIGHTS
from tfexport.importing.huggingface.processor import PREPROCESSOR, PROCESSORS
from tfexport.importing.huggingface.tokenizer import SETTINGS, TOKENIZER_FILES

_NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_VOCABULARY = (*TOKENIZER_FILES, SETTINGS, "target_vocab.json", "special_tokens_map.json", "added_tokens.json")
_TERMS, _TITLES = "LICENSE", {"Apache License": "apache-2.0", "MIT License": "mit"}
_LOGIN = "run hf auth login or set HF_TOKEN"
# Problem and remedy, by the name of an error's class.
_EXPLAINED = {
    "GatedRepoError": f"is gated on the Hub; accept its terms on its page, then {_LOGIN}",
    "RepositoryNotFoundError": "is neither a path here nor a public repository on the Hub; check the name; "
    f"if it is private, {_LOGIN}",
    "RevisionNotFoundError": "is not a revision of the repository; give a branch, tag or commit",
    "LocalEntryNotFoundError": "is neither a path here nor in the cache of the Hub, which cannot be reached; "
    "check the name and the network",
    "ImportError": "is not a path here, and a download from the Hub needs huggingface_hub; "
    f"{install_command('huggingface_hub')}",
    "Exception": "cannot be downloaded from the Hub ({}); try again later",
}


def locate(path: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """Return the path of a checkpoint, and what is known about its origin.

    [OWNER/]NAME[@REVISION] is downloaded from the Hub into its cache, unless the path exists.
    """
    named = _NAME.fullmatch(str(path))
    if named is None or path.suffix in (*SUFFIXES, ".bin", ".json") or os.path.lexists(path):
        return path, _described(path)
    repository, revision = named[1], named[2] or "main"
    try:
        folder, repository, sums = _download(repository, revision, report)
        found = {name: FileEntry.of(folder / name).sha256 for name in sums}
    except TfexportError as error:
        raise CheckpointError(*error.problems, **error.of(str(path))) from error
    except Exception as error:
        kinds = (kind.__name__ for kind in type(error).__mro__)
        problem, _, remedy = next(_EXPLAINED[kind] for kind in kinds if kind in _EXPLAINED).partition("; ")
        raise CheckpointError(problem.format(first_line(error)), subject=str(path), remedy=remedy) from error
    problems = [f"{name} has sha256 {found[name]}, expected {sums[name]}" for name in sums if found[name] != sums[name]]
    raise_all(CheckpointError, str(path), problems, remedy=f"delete {folder.parents[1]} and import again")
    report(f"{path}: commit {folder.name} of {repository}; the sha256 of {len(sums)} files equals that of the Hub")
    return folder, {"repository": repository, "revision": revision, "commit": folder.name, **_described(folder)}


def _download(repository: str, revision: str, report: Callable[[str], None]) -> tuple[Path, str, dict[str, str]]:
    """Return folder, the repository's current name, and the sums of files in LFS."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=30)
    except HfHubHTTPError:
        raise
    except Exception as error:  # noqa: BLE001 - no network, or HF_HUB_OFFLINE
        report(f"the Hub cannot be reached ({first_line(error)}); looking in its cache")
        folder = Path(hf_hub_download(repository, CONFIG, revision=revision, local_files_only=True)).parent
        names = _needed([file.name for file in folder.iterdir()])
        # Links to files in LFS end with their sha256, others with a shorter hash.
        links = {name: (folder / name).readlink().name for name in names if (folder / name).is_symlink()}
        return folder, repository, {name: link for name, link in links.items() if re.fullmatch("[0-9a-f]{64}", link)}
    names = _needed([file.rfilename for file in info.siblings or ()])
    folder = Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    lfs = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
    return folder, info.id, {name: lfs[name] for name in names if name in lfs}


def _needed(names: Collection[str]) -> list[str]:
    weights = next((name for name in WEIGHTS if name in names), None)
    if weights is None or CONFIG not in names:
        listed = shortened(", ".join(sorted(name for name in names if "/" not in name)))
        problem = f"has only {listed} on the Hub, expected {CONFIG} and one of {', '.join(WEIGHTS)}"
        raise CheckpointError(problem, remedy="download other checkpoints yourself and give the path")
    stem, _, suffix = weights.removesuffix(INDEX).rpartition(".")
    shard = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}" if weights.endswith(INDEX) else re.escape(weights))
    wanted = {CONFIG, GENERATION_CONFIG, PREPROCESSOR, PROCESSORS, CARD, _TERMS, weights, *_VOCABULARY}
    return [name for name in names if name in wanted or shard.fullmatch(name)]


def _described(folder: Path) -> dict[str, str]:
    """Return license and task that a model card or a license file states."""
    card, terms = _head(folder / CARD), _head(folder / _TERMS)
    front = card.partition("\n---")[0] if card.startswith("---") else ""
    licenses = [name for title, name in _TITLES.items() if title in terms[:200]]
    found = {"license": licenses[0]} if licenses else {}
    if re.search(r"^ *- *translation *$", front, re.MULTILINE):  # models older than `pipeline_tag`
        found["pipeline_tag"] = "translation"
    found |= re.findall(r"^(license|pipeline_tag): *[\"']?([\w.+-]+)", front, re.MULTILINE)
    return found


def _head(path: Path) -> str:
    with suppress(OSError, ValueError), path.open(encoding="utf-8", errors="replace") as file:
        return file.read(16_384)
    return ""
