"""Run a command once for each file system call, which fails, is the last before kill -9, or is interrupted.

python -m tests.fuzz.faults COMMAND HOME STEP ACTION...

An audit hook sees the calls, in a fork of a process that has loaded everything. After each run the target is the old or
the new one, other files are unchanged, and a second run succeeds and leaves nothing behind. The actions take turns;
STEP 2 tries every second call. Prints the number of calls and what went wrong, as JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bundle.made import CONTENT, fill
from tests.tensorrt.artifact import stored
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.cli import main as tfexport
from tfexport.errors import TfexportError
from tfexport.tensorrt.store import engine_names, open_engine

Content = dict[str, str]
EXIT = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.chmod", "os.utime"}


def rewrite(folder: Path) -> None:
    """Replace a bundle; its engine stays."""
    with create_bundle(folder / "out" / "bundle", force=True) as builder:
        fill(builder, CONTENT | {"parity.json": b'{"other": 1}'})


def rebuild(folder: Path) -> None:
    """Replace an engine."""
    bundle = open_bundle(folder / "out" / "bundle")
    stored.store(bundle, stored.manifest(bundle, versions={"tfexport": "0.2.0"}), force=True)


def import_again(folder: Path) -> None:
    """Replace a model directory."""
    words = f"import {folder}/weights --layout {folder}/identity.yaml --heads 4 --output {folder}/out/model --force"
    tfexport(args=words.split(), prog_name="tfexport")


def bundle_of(folder: Path) -> Content:
    engine_names(open_bundle(folder / "out" / "bundle").path)  # removes leftovers of a writer in engines/
    return {name: digest for name, digest in content(folder / "out" / "bundle").items() if "/." not in name}


def engine_of(folder: Path) -> Content:
    (name,) = engine_names(folder / "out" / "bundle")
    return content(open_engine(folder / "out" / "bundle", name).path)


def model_of(folder: Path) -> Content:
    from tfexport.nn.directory import load_model

    load_model(folder / "out" / "model")
    return content(folder / "out" / "model")


COMMANDS: dict[str, tuple[Callable[[Path], None], str, Callable[[Path], Content]]] = {
    "bundle": (rewrite, "out/bundle", bundle_of),
    "engine": (rebuild, "out/bundle/engines/tensorrt-rtx-static-fp32", engine_of),
    "import": (import_again, "out/model", model_of),
}


def content(folder: Path) -> Content:
    """Return the hash of every file, and a dash for every directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        for path in sorted(folder.rglob("*"))
    }


def run(command: Callable[[Path], None], folder: Path, at: int = 0, action: str = "") -> tuple[int, str, int]:
    """Run in a fork; return the exit code, the last line of stderr, and the number of calls."""
    output, calls = folder.with_name("said"), folder.with_name("calls")
    calls.write_text("")
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lines = output.read_text().splitlines() or [""]
        return status, lines[-1], calls.stat().st_size
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    counter, inside = os.open(calls, os.O_WRONLY), f"{folder}/"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event in EVENTS else None
        is_ours = isinstance(path, str | Path) and (str(path)[:1] != "/" or str(path).startswith(inside))
        if is_ours or event == "fsync":
            os.write(counter, b".")
            if os.lseek(counter, 0, os.SEEK_CUR) == at:
                if action in EXIT:
                    os.kill(os.getpid(), getattr(signal, action))
                else:
                    raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)), path)

    # Python does not audit it, and it is slow.
    os.fsync = lambda _: hook("fsync", (None,))  # type: ignore[assignment]
    sys.addaudithook(hook)
    code = 0
    try:
        command(folder)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001 - as Python would print it
        print("error:" if isinstance(error, TfexportError) else "Traceback", repr(error), file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)


def main(name: str, home: Path, step: int, actions: list[str]) -> dict[str, Any]:
    command, target, read = COMMANDS[name]
    folder = home.with_name("copy")

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(home, folder)

    fresh()
    status, output, calls = run(command, folder)
    assert status == 0, output
    old, new, old_target, new_target = content(home), content(folder), read(home), read(folder)
    others = {path: digest for path, digest in old.items() if path != target and not path.startswith(f"{target}/")}
    assert old_target != new_target
    wrong = []
    for number in range(1, calls + 1, step):
        action = actions[number % len(actions)]
        fresh()
        status, output, _ = run(command, folder, number, action)
        left = content(folder)
        try:
            found = read(folder)
            assert found in (old_target, new_target), "incomplete"
            assert others.items() <= left.items(), "other files are lost"
            assert "Traceback" not in output, output
            assert status in ((EXIT[action], 0) if action in EXIT else (0, 1)), f"exit code {status}"
            if action not in EXIT:
                assert (status == 0) == (found == new_target), f"exit code {status}, and that is not there"
            elif action != "SIGKILL":
                assert left in (old, new), "there is litter"
                assert not output or ("is complete" in output) == (found == new_target), output
            status, output, _ = run(command, folder)
            assert (status, content(folder)) == (0, new), f"the next run fails or leaves litter: {output}"
        except (AssertionError, TfexportError, OSError) as error:
            wrong.append(f"{action} at call {number}: {error!r}")
    return {"calls": calls, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
