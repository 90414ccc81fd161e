"""Build the image of docs/serving/Containerfile, and serve from its read-only root directory as nobody.

It needs root, buildah and the name of a base image with Python:
CONTAINER_BASE=localhost/base pytest -m slow -s tests/serve/test_container.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
BASE = os.environ.get("CONTAINER_BASE", "")
# The root and what it is given in a mount namespace of their own; then nobody, without rights to gain any.
ENTER = """
set -eu
root=$1 bundle=$2; shift 2
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/mnt"; mkdir "$root/mnt/bundle"
mount --bind "$bundle" "$root/mnt/bundle"; mount -o remount,bind,ro "$root/mnt/bundle"; mount -o remount,ro "$root/mnt"
mount -t proc proc "$root/proc"; mount --bind /dev "$root/dev"
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --bounding-set -all "$@"
"""


def buildah(*words: object) -> str:
    done = subprocess.run(["buildah", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Image:
    """A root directory, and what the image says of it."""

    root: Path
    config: dict[str, Any]

    def enter(self, bundle: Path, *words: str) -> list[str]:
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", ENTER, "enter"]
        return [*inside, str(self.root), str(bundle), *words]

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.config["Env"])


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    if not BASE or os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "unshare", "ss"))):
        pytest.skip("needs root, buildah, util-linux, iproute2 and CONTAINER_BASE, a base image with Python")
    options = ["--format", "docker", "--isolation", "chroot", "--build-arg", f"BASE={BASE}"]
    buildah("bud", "-q", *options, "-f", ROOT / "docs" / "serving" / "Containerfile", "-t", "tfexport-test", ROOT)
    container = buildah("from", "tfexport-test")
    try:
        config = json.loads(buildah("inspect", "--type", "image", "tfexport-test"))["Docker"]["config"]
        yield Image(Path(buildah("mount", container)), config)
    finally:
        buildah("rm", container)


def test_the_image_has_no_pytorch_and_runs_without_root(image: Image) -> None:
    (packages,) = image.root.glob("opt/tfexport/lib/python3*/site-packages")
    installed = {path.name for path in packages.iterdir()}
    assert "onnxruntime" in installed
    assert not installed & {"torch", "onnx", "pip", "setuptools"}
    assert image.config["User"] == "65534:65534"


def test_the_container_starts_answers_and_drains(image: Image, dates_bundle: Path, tmp_path: Path) -> None:
    program = [*image.config["Entrypoint"], "model=/mnt/bundle", "--port", "0", "--shutdown-timeout", "30"]
    start = time.monotonic()
    with subprocess.Popen(
        image.enter(dates_bundle, *program), env=image.environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                url = url or re.findall(r"http://[\d.:]+", line)[0]
                if line.startswith("ready after"):
                    break
            body = {"text_input": "le 14 juillet 1989"}
            answer = httpx.post(f"{url}/v2/models/model/generate", json=body, timeout=PATIENCE_S)
            print(f"\nfirst answer {time.monotonic() - start:.2f} s after the start")
            assert answer.json()["text_output"] == "1989-07-14"

            status = Path(f"/proc/{served_by(url)}/status").read_text(encoding="utf-8")
            assert re.search(r"^Uid:\s+65534\s", status, re.MULTILINE)
            assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)

            check = [part.replace("http://127.0.0.1:8000", url) for part in image.config["Healthcheck"]["Test"][1:]]
            assert subprocess.run(image.enter(dates_bundle, *check), env=image.environment).returncode == 0
            os.kill(served_by(url), signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert subprocess.run(image.enter(dates_bundle, *check), env=image.environment).returncode != 0
        finally:
            process.kill()


def served_by(url: str) -> int:
    done = subprocess.run(["ss", "-Hltnp", f"sport = :{httpx.URL(url).port}"], capture_output=True, text=True)
    return int(re.findall(r"pid=(\d+)", done.stdout)[0])


@pytest.mark.parametrize("place", ["/here", "/opt/tfexport/here", "/tmp/here", "/mnt/bundle/here"])
def test_nothing_can_be_written(image: Image, dates_bundle: Path, place: str) -> None:
    words = image.enter(dates_bundle, *shlex.split(f"touch {place}"))
    done = subprocess.run(words, env=image.environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr
