"""Model cards: what they state, that their blocks run, and that names in them stay text."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import ran
from tfexport._io.sealed_directory import FileEntry
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.card import render_card
from tfexport.bundle.manifest import Identity, Provenance
from tfexport.serve.config import named_bundles

HOSTILE = "<b>[x](http://evil)</b> `a` | *b*: c"


def test_the_blocks_run_in_the_directory_of_the_bundle(
    dates_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = open_bundle(dates_bundle).manifest
    card, output = (dates_bundle / "README.md").read_text(encoding="utf-8"), manifest.text.samples[0].output
    assert card == render_card(manifest, has_tokenizer=True)
    assert f"- License: not stated\n- Status: {manifest.proof}\n" in card
    monkeypatch.chdir(dates_bundle)
    command, program, server = re.findall(r"^```\w+\n(.+?)\n```$", card, re.MULTILINE | re.DOTALL)
    assert ran(*shlex.split(command)[1:]).stdout == f"{output}\n"
    exec(program, {})
    assert f"text='{output}'" in capsys.readouterr().out
    assert named_bundles(shlex.split(server)[2:])["model"].samefile(dates_bundle)


def test_names_of_others_are_text_and_the_hub_reads_the_front_matter(dates_bundle: Path) -> None:
    manifest = open_bundle(dates_bundle).manifest

    def front_and_text(**changes: Any) -> tuple[dict[str, Any], str]:
        _, front, text = render_card(replace(manifest, **changes), has_tokenizer=False).split("---\n", 2)
        return yaml.safe_load(front), text

    own = {"library_name": "tfexport", "tags": ["onnx", "encoder-decoder"]}
    assert front_and_text()[0] == own
    origin = {"repository": "own/model", "commit": "c" * 40, "license": "MIT", "pipeline_tag": "translation"}
    known = {"license": "mit", "base_model": "own/model", "pipeline_tag": "translation"}
    assert front_and_text(provenance=Provenance(origin=origin))[0] == own | known
    files = {HOSTILE: FileEntry(bytes=1, sha256="0" * 64)}
    front, text = front_and_text(identity=Identity(name=HOSTILE, license=HOSTILE), checkpoint=files)
    assert front == own | {"license": "other", "license_name": HOSTILE}
    assert not re.search(r"(?<!\\)([<\[*|`]|://)", text.partition("\nInstall with")[0])
