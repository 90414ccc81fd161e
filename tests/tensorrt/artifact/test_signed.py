"""Engines are code: with trusted keys, one of them must have signed the engine too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.bundle.made import fill
from tests.tensorrt.artifact import stored
from tests.tensorrt.artifact.stored import MACHINE, PLANS
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport.bundle.bundle import Bundle, create_bundle, open_bundle
from tfexport.errors import EngineError
from tfexport.tensorrt.store import choose_engine, open_engine

NAME = "tensorrt-rtx-static-fp32"
MINE, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
TRUSTED = TrustedKeys([MINE.public_key()])


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Return a signed bundle, opened with its key."""
    with create_bundle(tmp_path / "bundle", key=SigningKey(MINE)) as builder:
        fill(builder)
    return open_bundle(tmp_path / "bundle", trusted_keys=TRUSTED)


def add(bundle: Bundle, key: Ed25519PrivateKey | None) -> Path:
    return stored.store(bundle, stored.manifest(bundle), key=key and SigningKey(key), force=True)


def test_a_signed_engine_is_accepted(bundle: Bundle) -> None:
    folder = add(bundle, MINE)
    assert (folder / "engine.json.sig").read_bytes() == MINE.sign((folder / "engine.json").read_bytes())
    for name in (NAME, None):
        engine = choose_engine(bundle, name, MACHINE)
        assert engine.read_plan("encoder") == PLANS["encoder"]
    add(bundle, MINE)  # replaced, with the signature that was there


@pytest.mark.parametrize(
    ("key", "message"),
    [(None, "engine.json is not signed"), (OTHER, "engine.json was changed, or is not signed with a trusted")],
)
def test_another_engine_is_refused(bundle: Bundle, key: Ed25519PrivateKey | None, message: str) -> None:
    folder = add(bundle, key)
    for name in (NAME, None):
        with pytest.raises(EngineError, match=re.escape(f"engine {folder}: {message}")):
            choose_engine(bundle, name, MACHINE)
    # Without trusted keys it is accepted.
    assert choose_engine(open_bundle(bundle.path), None, MACHINE).name == NAME


def test_an_engine_that_was_changed_and_sealed_again_is_refused(bundle: Bundle) -> None:
    folder = add(bundle, MINE)
    stored.edit(folder / "engine.json", lambda data: data["versions"].update(tfexport="0.2.0"))
    open_engine(bundle.path, NAME)
    with pytest.raises(EngineError, match=r"engine\.json was changed, or is not signed with a trusted key"):
        choose_engine(bundle, NAME, MACHINE)


def test_the_log_is_sealed_with_the_plans(bundle: Bundle) -> None:
    folder = add(bundle, None)
    (folder / "build.log").write_text("INFO build\n")
    opened = open_engine(bundle.path, NAME)
    with pytest.raises(EngineError, match=r"build\.log was changed \(its sha256 differs\)"):
        opened.check_plans()
    (folder / "build.log").write_text("INFO built, and more\n")
    with pytest.raises(EngineError, match=r"build\.log has 21 bytes, expected 11"):
        open_engine(bundle.path, NAME)
