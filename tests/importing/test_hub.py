"""Checkpoints by name, from a server of this machine that answers as the Hugging Face Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests.importing.huggingface import published
from tests.importing.huggingface.test_tokenizer_directories import marian
from tfexport._io.sealed_directory import FileEntry
from tfexport.describe import describe, inspect_path
from tfexport.errors import CheckpointError
from tfexport.export._source import open_source
from tfexport.export.config import ExportConfig
from tfexport.importing.hub import _needed
from tfexport.importing.importer import import_checkpoint

COMMIT, LARGE = "c" * 40, (".safetensors", ".spm", ".bin")
# Run commands in one process, because huggingface_hub reads the environment when it is imported.
RUN = """
import json, sys
from click.testing import CliRunner
from tfexport.cli import main
results = [CliRunner().invoke(main, ["import", "--no-compare", *words]) for words in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.output.splitlines()[-1]] for one in results]))
"""
SMALL = {"README.md", "config.json", "source.spm", "target.spm", "tokenizer_config.json", "vocab.json"}


class Hub(BaseHTTPRequestHandler):
    """Serve the folders of `root`; the name of a repository may be that of its fault."""

    root: Path
    read: set[str]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.removeprefix("/api/models")
        found = re.fullmatch(r"/(own/(\w+))/(revision|tree|resolve)/(\w+)/?(.*)", path)
        name, fault, kind, revision, file = found.groups() if found else ("none", *[""] * 4)
        headers, raw, faults = {"X-Repo-Commit": COMMIT}, b"", {"gated": "GatedRepo", "partial": "EntryNotFound"}
        if not (self.root / name).is_dir():
            headers["X-Error-Code"] = "RepoNotFound"
        elif revision not in ("main", COMMIT):
            headers["X-Error-Code"] = "RevisionNotFound"
        elif kind == "resolve" and fault in faults:
            headers["X-Error-Code"] = faults[fault]
        elif kind == "resolve":
            raw = (self.root / name / file).read_bytes()
            headers["ETag"] = sha256 = hashlib.sha256(raw).hexdigest()
            if file.endswith(LARGE):
                headers |= {"ETag": "other", "X-Linked-Etag": sha256, "X-Linked-Size": str(len(raw))}
            raw = raw[::-1] if fault == "altered" and file.endswith(LARGE) else raw
            self.read.add(f"{fault}/{file}")
        else:
            files = [self.entry(file) for file in sorted((self.root / name).iterdir())]
            raw = json.dumps(files if kind == "tree" else {"id": name, "sha": COMMIT, "siblings": files}).encode()
        self.send_response({None: 200, "RepoNotFound": 401, "GatedRepo": 401}.get(headers.get("X-Error-Code"), 404))
        for header, value in {**headers, "Content-Length": str(len(raw))}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(raw if self.command == "GET" else b"")

    do_HEAD = do_GET  # noqa: N815

    def entry(self, file: Path) -> dict[str, object]:
        sha256, size = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
        lfs = {"sha256": sha256, "oid": sha256, "size": size, "pointerSize": 134} if file.suffix in LARGE else None
        return {"type": "file", "rfilename": file.name, "path": file.name, "oid": sha256[:40], "size": size, "lfs": lfs}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories in a folder of a working directory."""
    place = tmp_path_factory.mktemp("place")
    (place / "text").mkdir()
    _, spec = marian(place / "text")
    tokens = {"pad_token_id": spec.tokens.pad, "decoder_start_token_id": spec.tokens.pad, "eos_token_id": 0}
    tiny = published.write(place / "hub/own/tiny", "opus-mt", **tokens, vocab_size=spec.vocab)
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        shutil.copy(place / "text" / name, tiny)
    (tiny / "README.md").write_text("---\ntags:\n- translation\nlicense: cc-by-4.0\n---\n# The model\n")
    for fault in ("gated", "partial", "altered", "pickle"):
        shutil.copytree(tiny, place / "hub/own" / fault)
    for name in ("pytorch_model.bin", "tf_model.h5", "modeling.py"):
        (tiny / name).write_text("not needed")
    torch.save(published.weights(tiny), place / "hub/own/pickle/pytorch_model.bin")
    (place / "hub/own/pickle/model.safetensors").unlink()
    (place / "hub/own/pickle/README.md").rename(place / "hub/own/pickle/LICENSE").write_text("MIT License")
    (place / "hub/own/none").mkdir()
    (place / "hub/own/none/config.json").write_text("{}")
    return place


@pytest.fixture(scope="module")
def endpoint(place: Path) -> Iterator[str]:
    Hub.root, Hub.read = place / "hub", set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(place: Path, endpoint: str, names: dict[str, str], **env: str) -> list[tuple[int, str]]:
    """Import the names into folders, and return each exit code and last line."""
    words = [sys.executable, "-c", RUN, json.dumps([[name, "--output", folder] for name, folder in names.items()])]
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(place / "home"), **env}
    return json.loads(subprocess.run(words, cwd=place, env=env, stdout=subprocess.PIPE, check=True).stdout)


def test_a_name_is_downloaded_and_its_origin_goes_into_the_bundle(place: Path, endpoint: str) -> None:
    made = {"own/tiny": "tiny", f"own/pickle@{COMMIT}": "pickle"}
    assert [code for code, _ in run(place, endpoint, made)] == [0, 0]
    assert {name[5:] for name in Hub.read if name.startswith("tiny/")} == {*SMALL, "model.safetensors"}
    stated = ({"license": "cc-by-4.0", "pipeline_tag": "translation"}, {"license": "mit"})
    for name, revision, known in zip(made.values(), ("main", COMMIT), stated, strict=True):
        source, repository = open_source(str(place / name), ExportConfig(), print), f"own/{name}"
        assert source.provenance.origin == {"repository": repository, "revision": revision, "commit": COMMIT, **known}
        assert source.checkpoint == {
            file: FileEntry.of(place / "hub" / repository / file) for file in source.checkpoint
        }
    assert "  repository own/tiny" in describe(inspect_path(place / "tiny"))
    # Offline, the cache is read as it was downloaded.
    (code, _), (unknown, line) = run(place, endpoint, {"own/tiny": "again", "own/none": "none"}, HF_HUB_OFFLINE="1")
    assert (place / "again/model.safetensors").read_bytes() == (place / "tiny/model.safetensors").read_bytes()
    assert (code, unknown, "the Hub, which cannot be reached" in line) == (0, 1, True)
    next(place.rglob("snapshots/*/source.spm")).resolve().write_bytes(b"altered")
    ((code, line),) = run(place, "http://127.0.0.1:9", {"own/tiny": "thrice"})
    assert (code, "source.spm has sha256 " in line) == (1, True)


FAULTS = {
    "own/altered": "model.safetensors has sha256 ",
    "own/gated": "is gated on the Hub; accept its terms",
    "own/none": "has only 'config.json' on the Hub, expected config.json and one of model.safetensors",
    "own/partial": "cannot be downloaded from the Hub (404 Client Error",
    "own/tiny@v9": "is not a revision of the repository; give a branch, tag or commit",
    "own/unknown": "is neither a path here nor a public repository on the Hub",
}


def test_wrong_names_are_one_line_and_paths_come_first(place: Path, endpoint: str) -> None:
    shutil.copytree(place / "hub/own/tiny", place / "own/here")
    *results, (code, _) = run(place, endpoint, {**dict.fromkeys(FAULTS, "new"), "own/here": "here"})
    for (name, problem), (status, line) in zip(FAULTS.items(), results, strict=True):
        assert (status, line.startswith(f"error: {name}: "), problem in line) == (1, True, True), line
    assert not (place / "new").exists()
    assert code == 0
    assert json.loads((place / "here/certificate.json").read_text())["origin"].keys() == {"license", "pipeline_tag"}


def test_the_files_of_an_import() -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    wanted = ["config.json", "model.safetensors.index.json", *shards, "tokenizer.json"]
    assert _needed([*wanted, "model.fp16-00001-of-00002.safetensors", "a/config.json", "modeling.py"]) == wanted


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint("own/unknown", tmp_path / "new")
    assert "pip install 'tfexport[hub]'" in caught.value.remedy
