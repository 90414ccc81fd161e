"""A tokenizer from outside is tried in a process of its own: where it panics or fills the memory, that ends alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from tfexport.errors import BackendError, BundleError, InputError, shortened
from tfexport.text.border import is_panic
from tfexport.text.vocabulary import Vocabulary

resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # not on Windows

MEMORY, MEMORY_PER_BYTE = 2 * 1024**3, 8
CPU_S, WAIT_S = 30, 600
# Each below the characters that every model may be given: long ones alike, what normalizers and regexes stumble over.
ODD_TEXTS = (
    "",
    " ",
    "The quick brown fox, 12.345 times!",
    "Größe café ﬁ ½ ﷺ İ ẞ ﬃ ＡＢＣ ①",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "السلام عليكم שלום नमस्ते สวัสดี",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301\u0302\u0303 \u202eright to left\u202c \ufeff\u200b\u00ad",
    "\0\x01\x1b\x7f\x85\u2028\uffff\U0010ffff\ue000",
    "</s><pad><unk> ▁▁ Ġ ## @@ <0x0A>",
    "line\nbreak\r\n\ttab  two   three",
    "a" * 2000 + "!",
    "1" * 2000 + "!",
    "!" * 2000 + "a",
    " " * 2000 + "a",
    "é" * 2000 + "!",
    "中" * 2000 + "!",
    "ab " * 700,
    "aA1 _-" * 350,
    "a" + "\u0301" * 2000,
)
# Tokenizers that were found well in this process, by their sums.
_passed: set[bytes] = set()


def try_tokenizer(raw: bytes, name: str) -> None:
    """Try a tokenizer.json of any origin before it is read in this process.

    Args:
        raw: the file.
        name: of it, for errors.

    Raises:
        BundleError: it is refused by `Vocabulary.parse`; or it ends its process, panics at a text, takes more memory
            than 2 GiB and eight times its size, or more than 30 s of a core. Memory and time of a core are limited
            where the system can (`limits_memory`); elsewhere it may take ten minutes.
    """
    digest = hashlib.sha256(raw).digest()
    if digest in _passed:
        return
    if problem := _tried(raw, name):
        raise BundleError(problem)
    _passed.add(digest)


def limits_memory() -> bool:
    """Say whether this system limits the memory of the process that tries."""
    return resource is not None


def _tried(raw: bytes, name: str) -> str:
    """Return what is wrong, "" for nothing."""
    command = [sys.executable, "-P", "-m", __name__, name]
    try:
        done = subprocess.run(command, input=raw, capture_output=True, timeout=WAIT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"{name} was tried for {WAIT_S} s without an end; {_REMEDY}"
    except OSError as error:
        return f"{name} cannot be tried: no process begins ({error}); free memory or processes"
    if done.returncode == 0:
        return str(json.loads(done.stdout.rpartition(b"\n")[2]))
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if "memory allocation" in said or "MemoryError" in said:
        return f"{name} asks for more memory than any tokenizer needs; {_REMEDY}"
    if done.returncode in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
        return f"{name} takes more than {CPU_S} s for short texts; {_REMEDY}"
    return f"{name} ends the process that reads it (exit code {done.returncode}: {said}); {_REMEDY}"


_REMEDY = "give the tokenizer that the model was trained with"


def main() -> None:
    """Try the tokenizer on standard input, and write what is wrong with it in JSON."""
    raw = sys.stdin.buffer.read()
    _limit(MEMORY + MEMORY_PER_BYTE * len(raw))
    sys.stdout.write("\n" + json.dumps(_problem(raw, sys.argv[1])))


def _limit(memory: int) -> None:
    """Limit what this process takes, as far as the system can."""
    if resource is None:
        return
    for kind, soft, hard in ((resource.RLIMIT_AS, memory, memory), (resource.RLIMIT_CPU, CPU_S, CPU_S + 1)):
        with suppress(ValueError, OSError):  # there is a lower limit, or the system has none of this kind
            resource.setrlimit(kind, (soft, hard))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _problem(raw: bytes, name: str) -> str:
    try:
        vocabulary = Vocabulary.parse(raw, name, (), None)
    except BackendError:  # who asked has no library either
        return ""
    except BundleError as error:
        return str(error)
    for text in ODD_TEXTS:
        try:
            ids = vocabulary.encode(text, special=True)
            vocabulary.pieces(text, spelled=True)
            vocabulary.decode(ids)
        except InputError as error:  # it may lack what a text consists of
            if is_panic(error.__cause__) or isinstance(error.__cause__, MemoryError):
                return f"{name} fails at the text {shortened(text)} ({error}); {_REMEDY}"
    return ""


if __name__ == "__main__":
    os.environ["RUST_BACKTRACE"] = "0"
    main()
