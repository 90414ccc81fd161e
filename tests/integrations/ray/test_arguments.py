"""Arguments of the application are read strictly, from files and from command lines; without Ray."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tfexport.errors import ConfigError
from tfexport.integrations.ray import Arguments
from tfexport.serve.config import HttpConfig, ServingConfig


def test_text_from_a_command_line_is_parsed() -> None:
    """`serve run tfexport.integrations.ray:app slots=4 …` passes text."""
    texts = {"slots": "4", "num_gpus": "0.5", "completions": "true", "timeout_s": "null"}
    values = {"slots": 4, "num_gpus": 0.5, "completions": True, "timeout_s": None}
    same = {"bundle": "de=/srv/a", "variant": "static", "token_file": "1234"}
    assert Arguments.read(texts | same) == Arguments.read(values | same)
    assert Arguments.read({"bundle": ["de=/srv/a", "/srv/b"]}).bundles == {"de": Path("/srv/a"), "b": Path("/srv/b")}
    assert Arguments.read({"bundle": "build/dates"}).bundles == {"dates": Path("build/dates")}
    assert Arguments.read({"bundle": "de=build/dates"}).bundles == {"de": Path("build/dates")}


def test_defaults_are_those_of_the_server() -> None:
    found = Arguments.read({"bundle": "b"})
    defaults = {field.name: field.default for kind in (ServingConfig, HttpConfig) for field in dataclasses.fields(kind)}
    defaults["timeout_s"] = HttpConfig.max_timeout_s
    assert {name: getattr(found, name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "missing key bundle"),
        ({"bundle": []}, "bundle is empty"),
        ({"bundle": ["a", "x/a"]}, "name a is taken by a"),
        ({"bundle": "a b"}, "is not valid in a URL"),
        ({"bundle": "a", "slotz": 1, "slots": "x"}, "unknown key slotz; slots is 'x', expected a whole number"),
        ({"bundle": "a", "slots": "0", "max_texts": 0, "min_replicas": 0}, "max_texts is 0"),
        ({"bundle": "a", "min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, below min_replicas 3"),
        ({"bundle": "a", "num_gpus": 1.5}, "expected at most 1 or a whole number"),
        ({"bundle": "a", "num_gpus": 0.5, "device": "cpu"}, "which device cpu does not use"),
        ({"bundle": "a", "num_gpus": "nan"}, "num_gpus is 'nan', expected a number"),
        ({"bundle": "a", "completions": "yes"}, "completions is 'yes', expected true or false"),
    ],
)
def test_invalid_arguments_are_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Arguments.read(given)
    assert str(caught.value).startswith("application: ")
    assert why in str(caught.value)
