"""A Triton server on loopback, only for tests: `scripts/triton-tests` installs that of nvidia-pytriton."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.serve.running import eventually

# Of an environment with nvidia-pytriton, NumPy 1 and tfexport[cpu].
PYTHON = Path(os.environ.get("TRITON_PYTHON", ROOT / "build" / "triton" / "bin" / "python"))
_WHERE = (
    "import importlib.util as util, sysconfig; "
    "print(util.find_spec('pytriton').submodule_search_locations[0]); "
    "print(sysconfig.get_config_var('LIBDIR')); print(sysconfig.get_python_version())"
)


@dataclass
class Triton:
    """A running server, its addresses and its log."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    log: Path

    def stub(self, model: str) -> int:
        """Return the id of the process that runs a model; 0 if there is none."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parts = (folder / "cmdline").read_bytes().split(b"\0")
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, ValueError):
                    continue
                if parent == self.process.pid and any(f"/{model}/1/model.py".encode() in part for part in parts):
                    return int(folder.name)
        return 0

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextmanager
def triton(
    work: Path, repository: Path, *arguments: str, until: Callable[[Triton], bool] | None = None
) -> Iterator[Triton]:
    """Run a server with an empty folder `work`; wait for `until`, or for all models."""
    where = subprocess.run([PYTHON, "-c", _WHERE], capture_output=True, text=True, check=True).stdout.split("\n")
    package, libraries, version = Path(where[0]), where[1], where[2]
    shutil.copytree(package / "tritonserver" / "backends", work / "backends")
    stub = "triton_python_backend_stub"
    shutil.copy(package / "tritonserver" / "python_backend_stubs" / version / stub, work / "backends" / "python")
    http, grpc = free_ports(2)
    command = [
        *(package / "tritonserver" / "bin" / "tritonserver", "--model-repository", repository),
        *("--backend-directory", work / "backends", "--allow-metrics", "false"),
        *("--http-address", "127.0.0.1", "--http-port", http, "--grpc-address", "127.0.0.1", "--grpc-port", grpc),
        *arguments,
    ]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{PYTHON.parent}:{env['PATH']}"
    env["LD_LIBRARY_PATH"] = f"{libraries}:{package.parent / 'nvidia_pytriton.libs'}"
    with (work / "log").open("wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=env)
    server = Triton(process, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", work / "log")
    try:
        eventually(lambda: process.poll() is not None or (until or is_ready)(server))
        assert process.poll() is None, server.tail()
        yield server
    finally:
        process.kill()
        process.wait()


def is_ready(server: Triton) -> bool:
    import tritonclient.http

    try:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            return bool(client.is_server_ready())
    except OSError:
        return False


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Client:
    """One of Triton's own clients; `kind` is "http" or "grpc"."""

    def __init__(self, server: Triton, kind: str) -> None:
        self.kind, self.module = kind, pytest.importorskip(f"tritonclient.{kind}", reason=f"no client for {kind}")
        self.client = self.module.InferenceServerClient(getattr(server, kind))

    def tensor(self, name: str, values: Any) -> Any:
        """Return an input: texts as bytes, token ids, or an option."""
        array = np.array(values)
        if array.dtype.kind == "S":
            array = np.array(values, object)  # otherwise the client converts it to text
        kinds = {"O": "BYTES", "b": "BOOL", "i": "INT64", "f": "FP64"}
        tensor = self.module.InferInput(name, list(array.shape), kinds[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        return tensor

    def infer(self, model: str, *inputs: Any, **parameters: Any) -> Any:
        return self.client.infer(model, list(inputs), parameters=parameters or None)

    def asked(self, model: str, *texts: str, **parameters: Any) -> list[list[str]]:
        found = self.infer(model, self.tensor("text_input", [text.encode() for text in texts]), **parameters)
        return [[one.decode() for one in each] for each in found.as_numpy("text_output").tolist()]
