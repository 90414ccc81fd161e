"""Signatures made with --sign-key or openssl, which are required if keys are trusted."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import tfexport
from tests import tiny
from tests.bundle.made import CONTENT, edit, fill
from tests.command import ran, run
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.describe import inspect_path
from tfexport.errors import BundleError, ConfigError
from tfexport.nn.directory import save_model

OPENSSL = shutil.which("openssl")
SIGNATURE = "manifest.json.sig"


class Keys:
    """A private key and its public one, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        key = Ed25519PrivateKey.generate()
        self.key, self.sign, self.trust = key, folder / f"{name}.pem", folder / f"{name}.pub"
        self.sign.write_bytes(private(key))
        self.trust.write_bytes(public(key))

    def put(self, bundle: Path) -> None:
        """Sign an existing bundle without the code under test."""
        (bundle / SIGNATURE).write_bytes(self.key.sign((bundle / "manifest.json").read_bytes()))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"), "mine")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("others"), "theirs")


@pytest.fixture
def signed(tmp_path: Path, keys: Keys) -> Path:
    with create_bundle(tmp_path / "bundle", key=SigningKey.read(keys.sign)) as builder:
        fill(builder)
    return tmp_path / "bundle"


def trusted(*keys: Keys) -> TrustedKeys:
    return TrustedKeys.read([key.trust for key in keys])


def refuses(bundle: Path, keys: Keys, message: str) -> None:
    """Expect one line of `load`, before it reads other files than the manifest."""
    with pytest.raises(BundleError) as caught:
        tfexport.load(bundle, trusted_keys=[keys.trust])
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"bundle {bundle}: manifest.json")


# ---- trusted keys


def test_a_signed_bundle_opens_with_its_key_and_without(signed: Path, keys: Keys, others: Keys) -> None:
    for found in (trusted(keys), trusted(others, keys), None):
        opened = open_bundle(signed, trusted_keys=found)
        assert opened.is_signed
        assert sorted(opened.manifest.files) == sorted(CONTENT)


def test_a_file_may_have_several_keys(signed: Path, keys: Keys, others: Keys, tmp_path: Path) -> None:
    both = tmp_path / "both.pub"
    both.write_bytes(b"# of the team\n" + others.trust.read_bytes() + b"\n" + keys.trust.read_bytes())
    open_bundle(signed, trusted_keys=TrustedKeys.read([both]))


def test_a_wrong_signature_is_refused(signed: Path, keys: Keys, others: Keys) -> None:
    refuses(signed, others, "manifest.json was changed, or is not signed with a trusted key")
    edit(signed, lambda data: data["versions"].update(tfexport="0.2.0"))
    open_bundle(signed)
    refuses(signed, keys, "manifest.json was changed, or is not signed with a trusted key")


def test_an_unsigned_bundle_is_refused(bundle: Path, keys: Keys) -> None:
    refuses(bundle, keys, "manifest.json is not signed, but trusted keys were given; sign it with --sign")


def test_the_signature_is_checked_before_the_manifest_is_parsed(signed: Path, keys: Keys) -> None:
    (signed / "manifest.json").write_bytes(b"[" * 1000)
    refuses(signed, keys, "manifest.json was changed, or is not signed")


@pytest.mark.parametrize("raw", [b"", b"x", bytes(63), bytes(65), b"x" * 10_000])
def test_an_invalid_signature_is_refused_with_keys_and_without(signed: Path, keys: Keys, raw: bytes) -> None:
    (signed / SIGNATURE).write_bytes(raw)
    refuses(signed, keys, "manifest.json.sig is not a signature, expected 64 bytes")
    with pytest.raises(BundleError, match=rf"manifest\.json\.sig has {len(raw)} bytes, expected 64"):
        open_bundle(signed)


def test_a_signature_is_a_plain_file(signed: Path, keys: Keys) -> None:
    (signed / SIGNATURE).rename(signed.parent / "elsewhere")
    (signed / SIGNATURE).symlink_to(signed.parent / "elsewhere")
    for opens in (lambda: open_bundle(signed), lambda: open_bundle(signed, trusted_keys=trusted(keys))):
        with pytest.raises(BundleError, match=r"symbolic link"):
            opens()
    (signed / SIGNATURE).unlink()
    os.mkfifo(signed / SIGNATURE)
    refuses(signed, keys, "manifest.json.sig is not a signature")


# ---- keys


def private(key: Any, password: bytes | None = None) -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))


def public(key: Any) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(encoding, form))


DAMAGED = b"-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n"
OTHER, OWN = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()


@pytest.mark.parametrize(
    ("raw", "sign", "trust"),
    [
        (private(OTHER), "key of another type, expected Ed25519", "no public key in PEM"),
        (public(OTHER), "not a private key in PEM", "key of another type, expected Ed25519"),
        (private(OWN, b"secret"), "has a passphrase", "no public key in PEM"),
        (b"", "not a private key in PEM", r"no public key in PEM; make it with: openssl pkey -in sign\.pem -pubout"),
        (b"x" * 70_000, "more than 65536 bytes", "more than 65536 bytes"),
        (DAMAGED, "not a private key in PEM", "has a damaged key"),
        (None, "missing or not a plain file", "missing or not a plain file"),
    ],
    ids=["another kind", "another public", "locked", "empty", "huge", "damaged", "none"],
)
def test_an_invalid_key_is_refused(raw: bytes | None, sign: str, trust: str, tmp_path: Path, bundle: Path) -> None:
    file = tmp_path / "key"
    if raw is not None:
        file.write_bytes(raw)
    with pytest.raises(ConfigError, match=f"^sign_key: .*{sign}"):
        SigningKey.read(file)
    with pytest.raises(ConfigError, match=f"^trusted_keys: .*{trust}"):
        tfexport.load(bundle, trusted_keys=[file])


@pytest.mark.parametrize("given", [[], (), "key.pub", b"key.pub", Path("key.pub"), 5, [None], ["a\0b"]])
def test_trusted_keys_are_a_list_of_paths(bundle: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^trusted_keys is "):
        tfexport.load(bundle, trusted_keys=given)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    bundle: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for use in (lambda: SigningKey.read(keys.sign), lambda: tfexport.load(bundle, trusted_keys=[keys.trust])):
        with pytest.raises(ConfigError, match=r"signatures need cryptography; pip install 'tfexport\[sign\]'"):
            use()


# ---- openssl


@pytest.mark.skipif(OPENSSL is None, reason="there is no openssl")
def test_openssl_makes_keys_checks_signatures_and_makes_them(tmp_path: Path, bundle: Path) -> None:
    """The commands of the docs."""

    def openssl(line: str) -> None:
        words = line.split()
        done = subprocess.run([str(OPENSSL), *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        if "-rawin" in words and "Ed25519" in done.stderr:
            pytest.skip(f"this openssl cannot sign with Ed25519: {done.stderr}")
        assert done.returncode == 0, done.stderr

    openssl("openssl genpkey -algorithm ed25519 -out sign.pem")
    openssl("openssl pkey -in sign.pem -pubout -out sign.pub")
    with create_bundle(tmp_path / "mine", key=SigningKey.read(tmp_path / "sign.pem")) as builder:
        fill(builder)
    manifest = f"-in mine/manifest.json -sigfile mine/{SIGNATURE}"
    openssl(f"openssl pkeyutl -verify -rawin -pubin -inkey sign.pub {manifest}")
    openssl(f"openssl pkeyutl -sign -rawin -inkey sign.pem -in bundle/manifest.json -out bundle/{SIGNATURE}")
    opened = open_bundle(bundle, trusted_keys=TrustedKeys.read([tmp_path / "sign.pub"]))
    assert opened.is_signed


# ---- commands


@pytest.fixture(scope="module")
def dates(dates_bundle: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a signed copy of models/dates, for reading."""
    copy = tmp_path_factory.mktemp("signed") / "dates"
    shutil.copytree(dates_bundle, copy)
    keys.put(copy)
    return copy


TEXT, ISO = "le 14 juillet 1989", "1989-07-14"


def test_load_and_generate_accept_a_signature(dates: Path, keys: Keys, others: Keys) -> None:
    with tfexport.load(dates, trusted_keys=[others.trust, keys.trust]) as model:
        assert model.generate([TEXT])[0].text == ISO
    done = run("generate", dates, TEXT, "--trusted-keys", keys.trust, "--trusted-keys", others.trust)
    assert (done.exit_code, done.stdout) == (0, f"{ISO}\n")


def test_every_command_that_opens_a_bundle_requires_a_signature(signed: Path, others: Keys) -> None:
    before = (signed / "manifest.json").read_bytes()
    for problem in ("was changed, or is not signed", "is not signed, but"):
        for command in ("generate x", "embed x", "score x\ty", "align x\ty", "verify", "bench", "trt", "trt --dry-run"):
            name, *more = command.split(" ")
            done = run(name, signed, *more, "--trusted-keys", others.trust)
            assert (done.exit_code, done.stdout) == (1, "")
            assert done.stderr.startswith(f"error: bundle {signed}: manifest.json {problem}")
            assert done.stderr.count("\n") == 1
        (signed / SIGNATURE).unlink(missing_ok=True)
    assert (signed / "manifest.json").read_bytes() == before


def test_inspect_prints_whether_the_bundle_is_signed(dates: Path, dates_bundle: Path, keys: Keys, others: Keys) -> None:
    assert (inspect_path(dates)["signature"], inspect_path(dates_bundle)["signature"]) == ("unchecked", None)
    assert inspect_path(dates, trusted_keys=[keys.trust])["signature"] == "trusted"
    assert "\n  not signed\n" in run("inspect", dates_bundle).stdout
    assert "\n  signed, signature not checked: use --trusted-keys\n" in run("inspect", dates).stdout
    assert "\n  signed with a trusted key\n" in run("inspect", dates, "--trusted-keys", keys.trust).stdout
    done = run("inspect", dates, "--trusted-keys", others.trust)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "is not signed with a trusted key" in done.stderr


def test_a_server_requires_a_signature(dates: Path, dates_bundle: Path, keys: Keys) -> None:
    engine = pytest.importorskip("tfexport.serve.engine")

    async def serve(bundle: Path) -> str:
        async with engine.Engine(bundle, trusted_keys=[keys.trust]) as served:
            with pytest.raises(BundleError, match="is not signed"):
                await served.replace(dates_bundle)
            return str((await served.generate(TEXT))[0].text)

    assert asyncio.run(serve(dates)) == ISO
    with pytest.raises(BundleError, match="is not signed"):
        asyncio.run(serve(dates_bundle))
    done = ran("serve", dates_bundle, "--port", "0", "--trusted-keys", keys.trust, code=1)
    assert done.stderr.splitlines()[-1].startswith(f"error: bundle {dates_bundle}: manifest.json is not signed")


def test_commands_sign_their_output(tmp_path: Path, keys: Keys) -> None:
    encoder = replace(tiny.config(encoder={"layers": 1}), decoder=None, target_vocab=None, max_target_length=None)
    save_model(tiny.model(encoder, dtype=torch.float32), tmp_path / "model")
    export = ("onnx", tmp_path / "model", "--output", tmp_path / "out", "--forms", "concat", "--no-verify")
    done = ran(*export, "--sign-key", keys.sign)
    assert "signed" not in done.stderr
    open_bundle(tmp_path / "out", trusted_keys=trusted(keys))
    done = ran(*export, "--force")
    assert "the former bundle was signed, but this one is not; sign it with --sign-key\n" in done.stderr
    assert not open_bundle(tmp_path / "out").is_signed


def test_a_missing_key_is_reported_before_any_work(tmp_path: Path, bundle: Path) -> None:
    before, key = (bundle / "manifest.json").read_bytes(), tmp_path / "none.pem"
    for command in (("onnx", "preset:tiny", "--output", tmp_path / "out"), ("trt", bundle)):
        done = run(*command, "--sign-key", key)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: sign_key: {key} is missing or not a plain file; make one")
    assert (bundle / "manifest.json").read_bytes() == before
    assert not (tmp_path / "out").exists()
