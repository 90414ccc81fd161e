"""Removing tokens from a model directory changes neither the tokens of a text nor the scores of those that are left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner

import tfexport
from tests import tiny
from tests.conftest import DATES
from tests.importing.huggingface.odd_texts import LINES
from tests.importing.huggingface.test_tokenizer_directories import FAMILIES, imported
from tfexport.cli import main
from tfexport.errors import CheckpointError, ConfigError, InputError
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import load_model, save_model
from tfexport.nn.transformer import Transformer
from tfexport.trim import trim_model

NAMES = ("tokenizer.json", "target_tokenizer.json")


def model_directory(folder: Path, family: str, *, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a random model with the tokenizer of a Hugging Face directory."""
    (folder / "hf").mkdir(parents=True)
    _, spec = FAMILIES[family](folder / "hf")
    imported(folder / "hf", spec, folder / "text")
    config = replace(
        tiny.config(),
        source_vocab=spec.source_vocab,
        target_vocab=spec.vocab,
        tokens=spec.tokens,
        max_source_length=200,
        **changes,
    )
    model = Transformer(config)
    tiny.randomise(model)
    files = {file.name: file.read_bytes() for file in (folder / "text").iterdir()}
    # A random model would also write ids without a token, as T5 has.
    unassigned = [i for i in range(spec.vocab) if files_of(folder / "text")[1].id_to_token(i) is None]
    files["generation.json"] = json.dumps({"suppress_tokens": unassigned, **(generation or {})}).encode()
    save_model(model, folder / "model", files=files)
    return folder / "model"


def files_of(folder: Path) -> list[tokenizers.Tokenizer]:
    """Return the tokenizers of source and target."""
    found = [tokenizers.Tokenizer.from_file(str(folder / name)) for name in NAMES if (folder / name).exists()]
    return [found[0], found[-1]]


def old_ids(full: Path, trimmed: Path) -> list[list[int]]:
    """Return the old id of each id that is left, of source and target, by the tokens' names."""
    config = load_model(trimmed).config
    sizes = (config.source_vocab, config.target_vocab or 0)
    pairs = zip(files_of(full), files_of(trimmed), sizes, strict=True)
    return [[old.token_to_id(new.id_to_token(i)) for i in range(size)] for old, new, size in pairs]


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("trocr")])
def test_tokens_and_scores_of_kept_tokens_stay(family: str, tmp_path: Path) -> None:
    """Against `tokenizers` itself, and the full model in float64."""
    is_separate = family.endswith("separate")
    full = model_directory(tmp_path, family, **({} if is_separate else {"tie_embeddings": True, "tie_output": True}))
    texts = LINES[:12]
    found = trim_model(full, tmp_path / "small", texts)
    for side, (before, after) in enumerate(zip(files_of(full), files_of(tmp_path / "small"), strict=True)):
        own = texts if side == 0 else []
        assert [after.encode(text).tokens for text in own] == [before.encode(text).tokens for text in own]
    source, target = old_ids(full, tmp_path / "small")
    assert (found.source_vocab[1], found.target_vocab[1]) == (len(source), len(target))
    assert (len(source), len(target)) < (found.source_vocab[0], found.target_vocab[0])
    old, new = load_model(full).double(), load_model(tmp_path / "small").double()
    rng = np.random.default_rng(0)
    ids, prefix = (torch.from_numpy(rng.integers(len(side), size=(4, 9))) for side in (source, target))
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.inference_mode():
        expected = old(torch.tensor(source)[ids], mask, torch.tensor(target)[prefix])[..., target]
        assert torch.allclose(new(ids, mask, prefix), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_other_texts_are_spelled_with_what_is_left(family: str, tmp_path: Path) -> None:
    full = model_directory(tmp_path, family)
    trim_model(full, tmp_path / "small", LINES[:5])
    (before, _), (after, _) = files_of(full), files_of(tmp_path / "small")
    for text in LINES[5:]:
        old, new = before.encode(text, add_special_tokens=False), after.encode(text, add_special_tokens=False)
        assert len(new.ids) >= len(old.ids)
        assert after.decode(new.ids) == before.decode(old.ids)


def test_targets_and_listed_tokens_are_kept(tmp_path: Path) -> None:
    full = model_directory(tmp_path, "marian, separate")
    reader, writer = files_of(full)
    wanted = writer.encode(LINES[7].upper()).tokens
    read = reader.encode(LINES[3]).tokens
    word = next(
        token for token in sorted(reader.get_vocab()) if len(token) > 2 and token.isalpha() and token not in read
    )
    trim_model(full, tmp_path / "plain", [LINES[3]])
    trim_model(full, tmp_path / "small", [(LINES[3], LINES[7].upper())], keep=[word])
    assert {*wanted} <= files_of(tmp_path / "small")[1].get_vocab().keys()
    assert not {*wanted} <= files_of(tmp_path / "plain")[1].get_vocab().keys()
    assert [word in files_of(tmp_path / name)[0].get_vocab() for name in ("small", "plain")] == [True, False]


def test_options_keep_their_tokens(tmp_path: Path) -> None:
    options = {
        "num_beams": 2,
        "forced_bos_token_id": 21,
        "suppress_tokens": [22, 30],
        "bad_words_ids": [[23], [24, 25]],
    }
    full = model_directory(tmp_path, "m2m100", generation=options)
    found = trim_model(full, tmp_path / "small", LINES[:2])
    (before, _), (after, _) = files_of(full), files_of(tmp_path / "small")
    kept = after.get_vocab()
    read = json.loads((tmp_path / "small" / "generation.json").read_text())
    assert read["forced_bos_token_id"] == kept[before.id_to_token(21)]
    names = [before.id_to_token(i) for i in (22, 30)]
    assert read.get("suppress_tokens", []) == [kept[name] for name in names if name in kept]
    assert found.changed is not None


def test_a_trimmed_model_writes_the_same_texts_in_all_stages(tmp_path: Path) -> None:
    texts = ["Tuesday, March 3, 2026", "14 July 1989", "Jan 1, 2000", "12/31/1999"]
    runner = CliRunner()
    (tmp_path / "texts").write_text("\n".join(texts), encoding="utf-8")
    files = ["--corpus", str(tmp_path / "texts"), "--output", str(tmp_path / "small"), "--json"]
    done = runner.invoke(main, ["trim", str(DATES), *files], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert all(found[name][1] < found[name][0] for name in ("source_vocab", "target_vocab", "weight_bytes"))
    tfexport.export_bundle(str(tmp_path / "small"), tmp_path / "bundle", ExportConfig(variants=("contrib",)))
    with tfexport.load(tmp_path / "bundle", threads=1) as model:
        assert [each.text for each in model.generate(texts)] == ["2026-03-03", "1989-07-14", "2000-01-01", "1999-12-31"]


@pytest.mark.parametrize(
    ("texts", "options", "error"),
    [
        ([], {}, InputError),
        ([""], {}, InputError),
        (["14 July 1989"], {"keep": ["no such token"]}, ConfigError),
    ],
)
def test_bad_input_writes_nothing(
    texts: list[str], options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        trim_model(DATES, tmp_path / "small", texts, **options)
    assert not (tmp_path / "small").exists()


def test_a_model_without_texts_is_refused(tmp_path: Path) -> None:
    save_model(Transformer(tiny.config()), tmp_path / "ids")
    with pytest.raises(ConfigError):
        trim_model(tmp_path / "ids", tmp_path / "small", ["a"])
    with pytest.raises(CheckpointError):
        trim_model(tmp_path / "ids", DATES, ["a"])
