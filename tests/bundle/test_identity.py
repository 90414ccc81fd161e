"""What a bundle is called and where its weights come from: kept, shown, refused where it is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bundle.made import edit, fill, refused
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.manifest import Identity, Provenance
from tfexport.describe import describe, inspect_path
from tfexport.errors import ConfigError

NAMED = Identity(name="Dates", version="2.1", license="Apache-2.0", date="2026-01-31")
IMPORTED = Provenance(layout="hf_marian", proven=True, certificate_sha256="0" * 64, layout_sha256="1" * 64)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, identity=NAMED, provenance=IMPORTED)
    return tmp_path / "bundle"


def test_both_are_kept_and_shown(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert (manifest.identity, manifest.provenance) == (NAMED, IMPORTED)
    found = inspect_path(bundle)
    assert (found["identity"], found["provenance"]) == (NAMED.to_dict(), IMPORTED.to_dict())
    lines = describe(found)
    assert lines[1] == "  name Dates, version 2.1, license Apache-2.0, date 2026-01-31"
    assert f"  layout hf_marian, proven; certificate sha256 {'0' * 64}" in lines


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"name": ""}, "name is '', expected 1 to 200 characters of one line"),
        ({"name": "a\nb"}, "expected 1 to 200 characters of one line"),
        ({"license": " MIT"}, "license is ' MIT', expected 1 to 200 characters of one line"),
        ({"version": "1" * 201}, "expected 1 to 200 characters of one line"),
        ({"version": 2}, "version is 2, expected a text"),
        ({"date": "2026-02-30"}, "date is '2026-02-30', expected YYYY-MM-DD, such as 2026-01-31"),
        ({"date": "20260131"}, "date is '20260131', expected YYYY-MM-DD"),
    ],
)
def test_what_names_nothing_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Identity(**wrong)
    assert problem in str(caught.value)


def test_a_provenance_that_is_none_is_refused(bundle: Path) -> None:
    edit(bundle, lambda data: data["provenance"].update(proven="yes", layout="a\nb", certificate_sha256="x"))
    refused(bundle, "proven is 'yes', expected true or false")
    edit(bundle, lambda data: data["provenance"].update(proven=True))
    refused(
        bundle, "layout is 'a\\nb', expected a name in one line", "certificate_sha256 is 'x', expected 64 hexadecimal"
    )
