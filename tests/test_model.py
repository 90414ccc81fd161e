"""A loaded bundle: what its calls take."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from tests import tiny
from tfexport import ConfigError, DecodeConfig, InputError, Model
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import Pooling
from tfexport.generation import GenerationDefaults
from tfexport.runtime.eager import EagerSession

TEXT = "le 14 juillet 1989"


@pytest.fixture(scope="module")
def model(dates_bundle: Path) -> Iterator[Model]:
    with tfexport.load(dates_bundle, threads=1) as loaded:
        yield loaded


def test_a_model_has_the_manifest_of_its_bundle(model: Model, dates_bundle: Path) -> None:
    assert model.manifest == open_bundle(dates_bundle).manifest
    assert Model(model.session, model.tokenizer).manifest is None


def test_loading_logs_and_does_not_configure_logging(dates_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tfexport"), tfexport.load(dates_bundle, threads=3):
        pass
    (record,) = [record for record in caplog.records if record.name == "tfexport.model.load"]
    message = f"{dates_bundle}: loaded on ort, cpu with 3 threads for the encoder, 3 for a step"
    assert (record.levelname, record.getMessage()) == ("INFO", message)
    assert logging.getLogger("tfexport").handlers == []
    assert logging.getLogger("tfexport").level == logging.NOTSET


def test_a_configuration_equals_its_fields_as_options(model: Model) -> None:
    config = DecodeConfig(num_beams=3, num_return_sequences=2)
    expected = model.generate([TEXT], num_beams=3, num_return_sequences=2)
    assert model.generate([TEXT], config=config) == expected
    ids = [list(model.tokenizer.encode([TEXT])[0])] if model.tokenizer else []
    (hypotheses,) = model.generate_ids(ids, config=config)
    assert [best.token_ids for best in hypotheses] == [result.token_ids for result in expected]


def test_options_override_a_configuration(model: Model) -> None:
    config = DecodeConfig(max_new_tokens=2, suppress_tokens=(7,))
    assert len(model.generate([TEXT], config=config)[0].token_ids) == 2
    assert len(model.generate([TEXT], config=config, max_new_tokens=3)[0].token_ids) == 3
    assert "".join(model.stream(TEXT, config=config, max_new_tokens=None, suppress_tokens=())) == "1989-07-14"


def test_a_configuration_excuses_no_unknown_or_contradictory_option(model: Model) -> None:
    with pytest.raises(ConfigError, match="unknown key beams"):
        model.generate([TEXT], config=DecodeConfig(), beams=3)
    with pytest.raises(ConfigError, match="num_return_sequences is 2 but num_beams is 1"):
        model.generate([TEXT], config=DecodeConfig(num_beams=2, num_return_sequences=2), num_beams=1)


def test_ids_equal_those_of_generate_ids(model: Model) -> None:
    assert model.tokenizer is not None
    (source,) = model.tokenizer.encode([TEXT])
    prefix = model.tokenizer.encode_target("19")
    sampled: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 2.0}
    for options in ({}, sampled, {"max_new_tokens": 3}, {"stop_strings": "-"}):
        ((wanted,),) = model.generate_ids([source], prefixes=[prefix], **options)
        assert tuple(model.stream_ids(source, prefix=prefix, **options)) == wanted.token_ids
    bare = Model(model.session, None)
    assert next(bare.stream_ids(source)) == prefix[0]
    with pytest.raises(InputError, match="num_beams is 2"):
        bare.stream_ids(source, num_beams=2)


def test_a_stream_reports_the_parents_of_its_beams(model: Model) -> None:
    own = Model(model.session, model.tokenizer, GenerationDefaults(num_beams=3))
    wanted = r"num_beams is 3 \(the model's default\), expected 1 for a stream; set it to 1"
    for begin in (lambda **options: own.stream(TEXT, **options), lambda **options: own.stream_ids([5, 6], **options)):
        with pytest.raises(InputError, match=wanted):
            begin()
        with pytest.raises(InputError, match="num_beams is 2, expected 1"):
            begin(num_beams=2)
        with pytest.raises(InputError, match="num_beams is 3, expected 1"):
            begin(config=DecodeConfig(num_beams=3))
    assert "".join(own.stream(TEXT, num_beams=1)) == "1989-07-14"


def test_a_bias_does_not_affect_the_target_prefix(model: Model) -> None:
    assert model.tokenizer is not None
    first = tuple(model.tokenizer.encode_target("3"))
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.text = dataclasses.replace(model.tokenizer.text, target_prefix=first)
    own = Model(model.session, tokenizer)
    (result,) = own.generate([TEXT], prefixes=["19"], prefix_bias_beta=1e-9)
    (forced,) = own.generate([TEXT])
    assert (result.text, result.token_ids) == (forced.text, forced.token_ids)
    assert result.token_ids[: len(first)] == first
    assert "".join(own.stream(TEXT, prefix="19", prefix_bias_beta=1e-9)) == result.text


@pytest.mark.parametrize(
    ("strings", "text", "reason"),
    [
        (["9-0", "14"], "1989-0", "stop"),
        (["x", "89"], "1989", "stop"),
        ("x", "1989-07-14", "eos"),
    ],
)
def test_a_text_ends_with_its_stop_string(model: Model, strings: object, text: str, reason: str) -> None:
    (found,) = model.generate([TEXT], stop_strings=strings)
    assert (found.text, found.finish_reason) == (text, reason)
    assert "".join(model.stream(TEXT, stop_strings=strings)) == text
    beams = model.generate([TEXT], stop_strings=strings, num_beams=3, num_return_sequences=3)
    assert beams[0].text == text
    assert {one.finish_reason for one in beams} <= {"stop", "eos"}


def test_stop_strings_of_ids_and_in_a_prefix(model: Model) -> None:
    assert model.tokenizer is not None
    sources = model.tokenizer.encode([TEXT])
    ((found,),) = model.generate_ids(sources, stop_strings="89-")
    assert (model.tokenizer.decode(found.token_ids), found.finish_reason) == ("1989-", "stop")
    (found,) = model.generate([TEXT], prefixes=["1989-"], stop_strings=["-", "07"])  # not the one in the prefix
    assert found.text == "1989-07"
    assert "".join(model.stream(TEXT, prefix="1989-", stop_strings=["-", "07"])) == "1989-07"


def test_targets_are_scored_after_the_target_prefix(model: Model) -> None:
    assert model.tokenizer is not None
    source, target = "le 14 juillet 1989", "1989-07-14"
    (whole,) = model.score([source], [target])
    ids = model.tokenizer.encode_target(target)
    assert whole.token_ids == (*ids, model.spec.tokens.eos)
    assert model.score_ids(model.tokenizer.encode([source]), [ids]) == [whole]
    (best,) = model.generate([source])
    assert best.token_ids == whole.token_ids
    assert whole.log_prob == pytest.approx(best.score * len(best.token_ids), abs=1e-6)
    forced = Model(model.session, model.tokenizer, GenerationDefaults(forced_bos_token_id=7))
    behind = model.score_ids(model.tokenizer.encode([source]), [ids], prefixes=[[7]])
    assert forced.score([source], [target]) == behind != [whole]
    started = Model(model.session, model.tokenizer, GenerationDefaults(decoder_start_token_id=5))
    assert started.score([source], [target]) != [whole]


def test_samples_of_some_texts_equal_those_of_the_whole_call(model: Model) -> None:
    texts = [TEXT, "1.1.2000", "3 Mar 2026", "31.12.1999"]
    options = {"do_sample": True, "temperature": 5.0, "num_return_sequences": 2}
    every = model.generate(texts, **options)
    some = model.generate(texts[2:], indices=[2, 3], **options)
    assert [(one.index, one.text) for one in some] == [(one.index, one.text) for one in every[4:]]
    assert [one.text for one in model.generate(texts[2:], **options)] != [one.text for one in some]
    for wrong in ([1], [0, -1], [0, 1.5], "01"):
        with pytest.raises(InputError, match="expected a whole number from 0 for each of 2 texts"):
            model.generate(texts[2:], indices=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_embed_pools_each_text_as_declared(pooling: Pooling) -> None:
    config = dataclasses.replace(tiny.ENCODER_ALONE, pooling=pooling)
    wide, model = tiny.model(config), Model(EagerSession(tiny.model(config, dtype=torch.float32)), None)
    rng, expected = np.random.default_rng(0), []
    rows = [rng.integers(1, tiny.VOCAB, length).tolist() for length in (1, 24, *rng.integers(1, 24, 18))]
    for row in rows:
        with torch.no_grad():
            states = wide.hidden_states(torch.tensor([row]), torch.ones(1, len(row)).bool())[0].numpy()
        expected.append({"mean": states.mean(0), "max": states.max(0), "cls": states[0]}[pooling])
    for size in (1, 7):
        np.testing.assert_allclose(model.embed(rows, normalize=False, batch_size=size), expected, atol=2e-5)
    other: Pooling = "cls" if pooling == "mean" else "mean"
    assert not np.allclose(model.embed(rows, normalize=False, pooling=other), expected, atol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(model.embed(rows), axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("wrong", [[], [-1], [31], [1] * 25, [True], "w"])
def test_every_wrong_source_is_named(wrong: Any) -> None:
    model = Model(EagerSession(tiny.model(tiny.ENCODER_ALONE, dtype=torch.float32)), None)
    with pytest.raises(InputError) as caught:
        model.embed([[5], wrong])
    assert caught.value.indices == (() if wrong == "w" else (1,))
    with pytest.raises(ConfigError, match="pooling"):
        dataclasses.replace(tiny.config(), pooling="max")
