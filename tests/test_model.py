"""A loaded bundle: what its calls take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tfexport
from tfexport import ConfigError, DecodeConfig, Model

TEXT = "le 14 juillet 1989"


@pytest.fixture(scope="module")
def model(dates_bundle: Path) -> Iterator[Model]:
    with tfexport.load(dates_bundle, threads=1) as loaded:
        yield loaded


def test_a_configuration_does_what_its_fields_do(model: Model) -> None:
    config = DecodeConfig(num_beams=3, num_return_sequences=2)
    expected = model.generate([TEXT], num_beams=3, num_return_sequences=2)
    assert model.generate([TEXT], config=config) == expected
    ids = [list(model.tokenizer.encode([TEXT])[0])] if model.tokenizer else []
    (hypotheses,) = model.generate_ids(ids, config=config)
    assert [best.token_ids for best in hypotheses] == [result.token_ids for result in expected]


def test_what_is_given_beside_a_configuration_overrides_it(model: Model) -> None:
    config = DecodeConfig(max_new_tokens=2, suppress_tokens=(7,))
    assert len(model.generate([TEXT], config=config)[0].token_ids) == 2
    assert len(model.generate([TEXT], config=config, max_new_tokens=3)[0].token_ids) == 3
    assert "".join(model.stream(TEXT, config=config, max_new_tokens=None, suppress_tokens=())) == "1989-07-14"


def test_a_configuration_excuses_no_unknown_or_contradictory_option(model: Model) -> None:
    with pytest.raises(ConfigError, match="unknown key beams"):
        model.generate([TEXT], config=DecodeConfig(), beams=3)
    with pytest.raises(ConfigError, match="num_return_sequences is 2 but num_beams is 1"):
        model.generate([TEXT], config=DecodeConfig(num_beams=2, num_return_sequences=2), num_beams=1)
