"""Speculation does not change the output, with any option, as a stream and on the command line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tfexport
from tests import phrases, tiny
from tests.phrases import ENDS, EOS, ID, ROUND, ids
from tfexport.cli import main
from tfexport.decode.loop import Loop
from tfexport.decode.request import check_requests
from tfexport.errors import ConfigError, GraphError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.nn.directory import save_model
from tfexport.runtime.ort._contrib import ContribBatch

ON: dict[str, Any] = {"prompt_lookup_num_tokens": 15}
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="module")
def bundle(once: Once) -> Path:
    return once("phrases", phrases.made)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with tfexport.load(bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the drafts that are verified."""
    counts: Counter[str] = Counter()
    verify = ContribBatch.verify

    def counted(batch: ContribBatch, target_ids: Any, num_candidates: int) -> Any:
        counts["drafts"] += 1
        counts["tokens"] += target_ids.size - 1
        return verify(batch, target_ids, num_candidates)

    monkeypatch.setattr(ContribBatch, "verify", counted)
    return counts


def decoder_runs(model: Model, source: list[int], **options: Any) -> int:
    loop = Loop(model.session, 32)
    loop.submit(check_requests(model.session, [source], DecodeConfig(**options)))
    while loop.is_busy:
        loop.step()
    return loop.num_steps


@pytest.mark.parametrize("source", [ids(ROUND), ids("other words"), ids([*ROUND[3:], "other", *ROUND[:5]])])
def test_runs_of_a_text_that_repeats_itself(model: Model, source: list[int]) -> None:
    """The text repeats 12 tokens; the first round takes single steps, unless the source has it."""
    assert decoder_runs(model, source, max_new_tokens=120) == 120
    assert decoder_runs(model, source, max_new_tokens=120, **ON) <= (12 if source[0] == ID["other"] else 8) + 120 / 8


def test_runs_where_every_draft_is_wrong(model: Model, verified: Counter[str]) -> None:
    """A misleading source costs a draft now and then, an unrelated source none."""
    misleading = [token for word in ROUND for token in (ID[word], ID["other"])]
    steps = decoder_runs(model, misleading, max_new_tokens=12, **ON)
    assert steps == 12
    assert verified["tokens"] == verified["drafts"] <= 4
    verified.clear()
    assert decoder_runs(model, ids("other other words"), max_new_tokens=12, **ON) == 12
    assert not verified


@pytest.mark.parametrize(
    "options",
    [
        *({"max_new_tokens": count} for count in (1, 2, 13, 14, 15, 37)),
        {"max_length": 30},
        {"max_new_tokens": 50, "min_new_tokens": 20, "eos_token_id": ID["where"]},
        {"max_new_tokens": 60, "eos_token_id": [ID["we"], EOS], "min_new_tokens": 13},
        {"max_new_tokens": 40, "suppress_tokens": (ID["other"],)},
        {"max_new_tokens": 40, "suppress_tokens": (ID["once"],)},
        {"max_new_tokens": 40, "begin_suppress_tokens": tuple(map(ID.get, ROUND))},
        {"max_new_tokens": 40, "bad_words_ids": ((ID["once"],),)},
        {"max_new_tokens": 40, "forced_eos_token_id": EOS},
        {"max_new_tokens": 40, "forced_bos_token_id": ID["and"]},
        {"max_new_tokens": 40, "decoder_start_token_id": ID["come"]},
        {"decoder_start_token_id": ID["this"]},
        {"max_new_tokens": 60, "prompt_lookup_num_tokens": 1},
        {"max_new_tokens": 60, "prompt_lookup_num_tokens": 4},
        {"max_new_tokens": 60, "max_time": 1000.0},
        {},
    ],
)
def test_every_option_gives_the_same_text(model: Model, options: dict[str, Any]) -> None:
    for source in (ids(ROUND), ids([*ROUND[5:], *ENDS, *ROUND]), ids("other")):
        for prefixes in (None, [ids(ROUND[:3])]):
            (plain,) = model.generate_ids([source], prefixes=prefixes, **{**options, "prompt_lookup_num_tokens": None})
            (found,) = model.generate_ids([source], prefixes=prefixes, **{**ON, **options})
            assert found[0].token_ids == plain[0].token_ids
            assert found[0].finish_reason == plain[0].finish_reason
            assert found[0].log_prob == pytest.approx(plain[0].log_prob, abs=1e-4)


def test_an_end_within_a_draft(model: Model, verified: Counter[str]) -> None:
    """The source continues after the end token."""
    source = [*ids(ENDS), EOS, *ids(ROUND)]
    (found,) = model.generate_ids([source], decoder_start_token_id=ID[ENDS[0]], **ON)
    assert found[0].token_ids == (*ids(ENDS[1:]), EOS)
    assert found[0].finish_reason == "eos"
    assert verified["tokens"] > verified["drafts"]


def test_stop_strings_and_streams(model: Model, verified: Counter[str]) -> None:
    """A text stops in the middle of a draft, and a stream yields every token."""
    text, options = " ".join(ROUND), {"max_new_tokens": 70, "stop_strings": "before once more we go"}
    (plain,) = model.generate([text], **options)
    assert not verified
    (found,) = model.generate([text], **options, **ON)
    assert verified
    assert (found.text, found.token_ids, found.finish_reason) == (plain.text, plain.token_ids, "stop")
    for given in ({"max_new_tokens": 70}, options):
        whole = model.generate([text], **given)[0]
        pieces = list(model.stream(text, **given, **ON))
        assert "".join(pieces) == whole.text
        assert list(model.stream_ids(ids(ROUND), max_new_tokens=70)) == list(
            model.stream_ids(ids(ROUND), max_new_tokens=70, **ON)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True},
        {"no_repeat_ngram_size": 20},
        {"repetition_penalty": 1.01},
        {"return_alternatives": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": None},
    ],
)
def test_it_is_not_used_if_more_than_the_best_token_counts(
    model: Model, options: dict[str, Any], verified: Counter[str]
) -> None:
    model.generate_ids([ids(ROUND)], max_new_tokens=30, **{**ON, **options})
    assert not verified


def test_several_texts(model: Model, verified: Counter[str]) -> None:
    """Texts in one batch take single steps; the last one that is left drafts."""
    sources, limits = [ids(ROUND), ids("other")], [20, 60]
    plain = [model.generate_ids([s], max_new_tokens=n)[0] for s, n in zip(sources, limits, strict=True)]
    loop, outcomes = Loop(model.session, 32), {}
    for text, (source, limit) in enumerate(zip(sources, limits, strict=True)):
        (request,) = check_requests(model.session, [source], DecodeConfig(max_new_tokens=limit, **ON))
        loop.submit([replace(request, text=text)])
    while loop.is_busy:
        rows, drafts = loop.num_rows, verified["drafts"]
        outcomes |= {update.request.text: update.outcome for update in loop.step() if update.outcome is not None}
        assert rows < 2 or verified["drafts"] == drafts
    assert [outcomes[text][0].token_ids for text in range(2)] == [one[0].token_ids for one in plain]
    assert verified


@pytest.mark.parametrize(
    ("precision", "count"),
    [("fp32", 20), *(pytest.param(name, 600, marks=pytest.mark.slow) for name in ("fp32", "int8"))],
)
def test_random_sequences(once: Once, precision: str, count: int, verified: Counter[str]) -> None:
    """With random weights and repetitive sources, every text is the same, token for token."""
    config = ExportConfig(variants=("contrib",), speculation=True, precision=precision)  # type: ignore[arg-type]
    path = once(f"speculation-{precision}", lambda path: export_bundle("preset:tiny", path, config, verify=False))
    rng, differ = np.random.default_rng(7), 0
    with tfexport.load(path, threads=1) as model:
        for _ in range(count):
            source = rng.choice(rng.integers(4, 1000, rng.integers(2, 30)), rng.integers(1, 40)).tolist()
            limit = int(rng.integers(2, 100))
            (plain,) = model.generate_ids([source], max_new_tokens=limit)
            (found,) = model.generate_ids([source], max_new_tokens=limit, **ON)
            differ += (plain[0].token_ids, plain[0].finish_reason) != (found[0].token_ids, found[0].finish_reason)
            if precision == "fp32":
                assert found[0].log_prob == pytest.approx(plain[0].log_prob, abs=1e-4)
    assert verified["drafts"] > count
    assert differ == 0


def test_command_line(bundle: Path) -> None:
    """Drafts change no output; `inspect` shows the input, and `verify` checks several tokens."""
    run = CliRunner()
    lines = [
        run.invoke(main, ["generate", str(bundle), " ".join(ROUND), "--max-new-tokens", "50", "--json", *given]).output
        for given in ([], ["--prompt-lookup-num-tokens", "10"], ["--prompt-lookup-num-tokens", "3"])
    ]
    texts = [json.loads(line) for line in lines]
    assert texts[0]["text"].split() == (5 * ROUND)[:50]
    assert [one["token_ids"] for one in texts] == [texts[0]["token_ids"]] * 3
    assert "logits_to_keep" in run.invoke(main, ["inspect", str(bundle)]).output
    verified = run.invoke(main, ["verify", str(bundle), "--samples", "10"])
    assert verified.exit_code == 0, verified.output
    assert "speculation" in verified.output


def test_exports_that_cannot_speculate(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"variants": ("concat", "static")}, "speculation needs the contrib variant; add contrib to the variants"),
        ({"precision": "fp16"}, "speculation needs the contrib variant, which does not exist in fp16; omit it"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ExportConfig(speculation=True, **settings)
    save_model(tiny.model(tiny.VARIANTS["t5"], dtype=torch.float32), tmp_path / "model")
    with pytest.raises(GraphError, match="speculation: needs the contrib variant"):
        export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(speculation=True), verify=False)
