"""Whole error messages as users see them; `UPDATE_MESSAGES=1 pytest tests/test_messages.py` renews them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tfexport
from tests.bundle.made import edit, make
from tests.conftest import DATES
from tfexport._io.signature import SigningKey
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.cli import main
from tfexport.describe import inspect_path
from tfexport.errors import TfexportError
from tfexport.generation import DecodeConfig
from tfexport.nn.config import TransformerConfig
from tfexport.nn.directory import load_model
from tfexport.verify import VerifyConfig

SNAPSHOT = Path(__file__).parent / "data" / "messages.json"


def bundles(tmp: Path) -> dict[str, Callable[[], object]]:
    whole = make(tmp / "bundle").path

    def changed(name: str, change: Callable[[Path], object]) -> Callable[[], object]:
        copy = Path(shutil.copytree(whole, tmp / name))
        change(copy)
        return lambda: open_bundle(copy)

    def stating(name: str, **values: object) -> Callable[[], object]:
        return changed(name, lambda folder: edit(folder, lambda data: data.update(values)))

    def several(folder: Path) -> None:
        (folder / "encoder.onnx").unlink()
        (folder / "parity.json").write_bytes(b"[]")
        (folder / "notes.txt").write_text("mine")

    shutil.copytree(whole, tmp / "engines")
    (tmp / "engines" / "engines").mkdir()
    (tmp / "engines" / "engines" / "notes.txt").write_text("mine")
    (tmp / "file").write_text("x")
    (tmp / "home").mkdir()
    (tmp / "home" / "thesis.tex").write_text("x")
    return {
        "bundle is missing": lambda: open_bundle(tmp / "none"),
        "bundle is a file": lambda: open_bundle(tmp / "file"),
        "bundle is a model directory": lambda: open_bundle(DATES),
        "bundle is damaged": changed("damaged", several),
        "bundle is newer": stating("newer", format_version=9),
        "bundle contradicts itself": stating("odd", kind="encoder"),
        "bundle has unknown keys": stating("keys", wings=2),
        "bundle has unsealed engines": lambda: tfexport.load(tmp / "engines"),
        "output exists": lambda: create_bundle(whole).__enter__(),
        "output is no bundle": lambda: create_bundle(tmp / "home", force=True).__enter__(),
        "output is the root": lambda: create_bundle(Path("/")).__enter__(),
        "path has a null character": lambda: tfexport.load("a\0b"),
        "path is not UTF-8": lambda: tfexport.load("caf\udce9"),
        "key is missing": lambda: SigningKey.read(tmp / "none.pem"),
        "keys are empty": lambda: tfexport.load(whole, trusted_keys=[]),
        "keys but no signature": lambda: tfexport.load(whole, trusted_keys=[_public_key(tmp)]),
        "inspect finds something else": lambda: inspect_path(tmp / "home"),
        "model directory without weights": lambda: load_model(tmp / "home"),
    }


def _public_key(tmp: Path) -> Path:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = Ed25519PrivateKey.generate().public_key()
    (tmp / "key.pub").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return tmp / "key.pub"


def calls(dates_bundle: Path) -> dict[str, Callable[[], object]]:
    model = tfexport.load(dates_bundle, threads=1)
    options: dict[str, dict[str, Any]] = {
        "option is unknown": {"beams": 4},
        "option has another type": {"num_beams": "four"},
        "options are out of range": {"num_beams": 0, "top_p": 2.0},
        "option without sampling": {"temperature": 0.5},
        "options contradict": {"do_sample": True, "num_beams": 4},
        "token is not in the vocabulary": {"eos_token_id": 10**6},
    }
    found = {name: partial(model.generate, ["3. März 2026"], **given) for name, given in options.items()}
    return found | {
        "a text instead of texts": lambda: model.generate("3. März 2026"),
        "no text": lambda: model.generate([]),
        "texts cannot be encoded": lambda: model.generate(["", "3" * 20_000, 7, "\ud800"]),
        "ids are not in the vocabulary": lambda: model.generate_ids([[5, 10**6]]),
        "pairs differ in number": lambda: model.score(["a"], ["b", "c"]),
        "batch size is zero": lambda: model.generate(["3"], batch_size=0),
        "backend is unknown": lambda: tfexport.load(dates_bundle, backend="gpu"),
        "threads are none": lambda: tfexport.load(dates_bundle, threads=0),
        "config has wrong values": lambda: DecodeConfig.from_dict({"num_beams": 65, "seed": -1, "wings": 2}),
        "config is no object": lambda: TransformerConfig.from_dict([1]),
        "verify has wrong values": lambda: VerifyConfig.from_dict({"seed": "x"}),
    }


COMMANDS = {
    "no such command": ["exprt"],
    "option out of range": ["onnx", "preset:tiny", "--output", "x", "--opset", "9"],
    "missing option": ["onnx", "preset:tiny"],
    "no such preset": ["onnx", "preset:none", "--output", "x"],
}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(TfexportError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_messages(tmp_path: Path, dates_bundle: Path) -> None:
    found = {name: message(call) for name, call in {**bundles(tmp_path), **calls(dates_bundle)}.items()}
    for name, words in COMMANDS.items():
        done = CliRunner().invoke(main, words)
        found[f"command: {name}"] = f"exit code {done.exit_code}: {done.stderr.splitlines()[-1]}"
    for place, shown in ((tmp_path, "TMP"), (dates_bundle, "DATES"), (DATES, "models/dates")):
        found = {name: text.replace(str(place), shown) for name, text in found.items()}
    if "UPDATE_MESSAGES" in os.environ:
        SNAPSHOT.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert all("\n" not in text for text in found.values())
