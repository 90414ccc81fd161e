"""Sign manifests with Ed25519, and check the signatures.

A signature is a file of 64 bytes next to the manifest. For the openssl commands see docs/reference/bundle.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tfexport._io.extras import install_command
from tfexport._io.names import checked_path
from tfexport._io.system import open_plain
from tfexport.errors import ConfigError, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_SUFFIX = ".sig"
SIGNATURE_BYTES = 64
_MAX_KEY_BYTES = 64 * 1024
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out sign.pem"
_MAKE_PUBLIC = "make it with: openssl pkey -in sign.pem -pubout -out sign.pub"


class SigningKey:
    """A private key, whose `sign` returns the signature of a manifest."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.sign = key.sign

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SigningKey:
        """Read a private key without passphrase from a PEM file; raises ConfigError."""
        file = checked_path(path, "sign_key")
        raw = _read_key(file, "sign_key")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(raw, password=None)
        except TypeError as error:
            raise ConfigError(f"sign_key: {file} has a passphrase; remove it with openssl pkey -in {file}") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"sign_key: {file} is not a private key in PEM; {_MAKE}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"sign_key: {file} is a key of another type, expected Ed25519; {_MAKE}")
        return cls(key)


class TrustedKeys:
    """Check signatures with trusted public keys."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def read(cls, paths: object) -> TrustedKeys:
        """Read public keys from a list of PEM files; raises ConfigError."""
        if not isinstance(paths, list | tuple):
            raise ConfigError(f"trusted_keys is {shortened(paths)}, expected a list of paths")
        keys = [key for path in paths for key in _read_public(checked_path(path, "trusted_keys"))]
        if not keys:
            raise ConfigError("trusted_keys is empty, expected at least one path; give None to trust every bundle")
        return cls(keys)

    def problem(self, file: Path, data: bytes) -> str | None:
        """Return why no trusted key has signed `data`, the content of `file`."""
        from cryptography.exceptions import InvalidSignature

        signed = file.with_name(file.name + SIGNATURE_SUFFIX)
        if not os.path.lexists(signed):
            return f"{file.name} is not signed, but trusted keys were given; sign it with --sign-key"
        with open_plain(signed) as stream:
            signature = stream.read(SIGNATURE_BYTES + 1)
        if len(signature) != SIGNATURE_BYTES:
            return f"{signed.name} is not a signature, expected {SIGNATURE_BYTES} bytes; sign it again"
        for key in self._keys:
            with suppress(InvalidSignature):
                key.verify(signature, data)
                return None
        return f"{file.name} was changed, or is not signed with a trusted key; use one that you trust"


def _read_public(file: Path) -> list[Ed25519PublicKey]:
    raw = _read_key(file, "trusted_keys")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = []
    for block in _PUBLIC_KEY.findall(raw):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"trusted_keys: {file} has a damaged key; {_MAKE_PUBLIC}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"trusted_keys: {file} has a key of another type, expected Ed25519; {_MAKE}")
        keys.append(key)
    if not keys:
        raise ConfigError(f"trusted_keys: {file} has no public key in PEM; {_MAKE_PUBLIC}")
    return keys


def _read_key(file: Path, name: str) -> bytes:
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(f"{name}: signatures need cryptography; {install_command('cryptography')}")
    if not file.is_file():
        raise ConfigError(f"{name}: {file} is missing or not a plain file; {_MAKE}")
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: {file} cannot be read ({error.strerror}); check its permissions") from error
    if len(raw) > _MAX_KEY_BYTES:
        raise ConfigError(f"{name}: {file} has more than {_MAX_KEY_BYTES} bytes, which no key has")
    return raw
