"""Show Windows to tfexport, as far as Linux can; Python imports this at the start of each process.

Only the modules of tfexport see another system: other libraries keep theirs. Files that the process has opened or
mapped cannot be renamed, replaced or deleted by anybody.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MISSING = ("fcntl", "grp", "pty", "pwd", "resource", "termios")
POSIX = """
O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown fork geteuid getuid killpg memfd_create mkfifo posix_fadvise sched_getaffinity
statvfs sysconf
""".split()


class View(types.ModuleType):
    """A module without some of its names, and with other values."""

    def __init__(self, module: types.ModuleType, missing: list[str], **values: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_real=module, _missing=missing, _values=values)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return self._values[name] if name in self._values else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


class Entry:
    """An entry of `os.scandir`, whose status has neither numbers of files nor of links."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        status = list(self._entry.stat(follow_symlinks=follow_symlinks))
        status[1:4] = 0, 0, 0
        return os.stat_result(status)


def scandir(path: Any = ".") -> Iterator[Entry]:
    return map(Entry, list(os.scandir(path)))


def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if Path(path).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return os.open(path, flags, mode)


def fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    os.fsync(descriptor)


def locking(descriptor: int, _mode: int, _size: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


def used_files() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the directory itself
            found.add(str(link.readlink()))
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return found | {line.split(maxsplit=5)[5] for line in lines if "/" in line}


def check_unused(*paths: Any) -> None:
    used = used_files()
    for path in paths:
        place = Path(path).parent.resolve() / Path(path).name
        if found := [file for file in used if Path(file).is_relative_to(place)]:
            reason = "The process cannot access the file because it is being used by another process"
            raise PermissionError(13, f"{reason}: {found[0]}", str(path))


def guard(name: str, num_paths: int) -> None:
    real = getattr(os, name)

    def guarded(*arguments: Any, **options: Any) -> Any:
        check_unused(*arguments[:num_paths])
        return real(*arguments, **options)

    setattr(os, name, guarded)


def guard_arrow() -> None:
    from pyarrow import fs

    class LocalFileSystem(fs.LocalFileSystem):  # type: ignore[misc]
        def delete_dir(self, path: str) -> None:
            check_unused(path)
            super().delete_dir(path)

        def delete_file(self, path: str) -> None:
            check_unused(path)
            super().delete_file(path)

        def move(self, source: str, target: str) -> None:
            check_unused(source, target)
            super().move(source, target)

    fs.LocalFileSystem = LocalFileSystem


VIEWS = {
    "sys": View(sys, [], platform="win32"),
    "os": View(os, POSIX, name="nt", open=open_file, scandir=scandir, fsync=fsync),
    # SIGUSR2 is a double of Ctrl-Break.
    "signal": View(signal, ["SIGHUP", "SIGKILL", "SIGXCPU", "SIGUSR1", "SIGUSR2"], SIGBREAK=signal.SIGUSR2),
    "msvcrt": View(types.ModuleType("msvcrt"), [], locking=locking, LK_NBLCK=2),
}
real_import = builtins.__import__


def import_module(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
    if ((globals or {}).get("__package__") or "").split(".")[0] != "tfexport":
        return real_import(name, globals, locals, fromlist, level)
    if name in MISSING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name in VIEWS:
        return VIEWS[name]
    module = real_import(name, globals, locals, fromlist, level)
    if "pyarrow._fs" in sys.modules and sys.modules["pyarrow._fs"].LocalFileSystem is real_arrow():
        guard_arrow()
    return module


def real_arrow() -> Any:
    return getattr(sys.modules.get("pyarrow.fs"), "LocalFileSystem", None)


for name, num_paths in {"rename": 2, "replace": 2, "unlink": 1, "remove": 1}.items():
    guard(name, num_paths)
shutil._use_fd_functions = False  # type: ignore[attr-defined]  # as on Windows
builtins.__import__ = import_module
warnings.filterwarnings("error", category=EncodingWarning, module="tfexport")
Path.symlink_to = None  # type: ignore[method-assign,assignment]  # needs rights that users do not have
