"""What is known to be wrong is refused at import: parts of a tokenizer alone, ids of another model, too few of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from tests import tiny
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError
from tfexport.importing.text import Tokenizers, check_coverage, import_text
from tfexport.importing.vocabulary import Side, tokenizer_json
from tfexport.nn.config import model_spec
from tfexport.text.config import TextConfig


def spec(size: int, eos: int = 2, unk: int = 3) -> ModelSpec:
    made = replace(
        tiny.config(),
        source_vocab=size,
        target_vocab=size,
        tokens=replace(tiny.config().tokens, pad=0, start=1, eos=eos, unk=unk),
    )
    return model_spec(made, "fp32")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("vocab.json", json.dumps({"<s>": 0, "the": 1}), "has ids alone, as a vocab.json.*give the directory"),
        ("merges.txt", "#version: 0.2\nt h\nth e\n", "has merges alone, as a merges.txt.*give the directory"),
        ("merges.txt", "t h\nth e\nĠ the\n", "has merges alone, as a merges.txt"),
        ("config.json", json.dumps({"model_type": "bart"}), "is a JSON, but no tokenizer.json, for it has no model"),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE"}}), "is no tokenizer.json"),
        ("tokenizer.json", '{"model": {"ty', "is no JSON"),
    ],
)
def test_a_part_of_a_tokenizer_alone(name: str, content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        import_text(Tokenizers(tmp_path / name), TextConfig(), None, spec(10), has_own_weights=False)


def spm(folder: Path, name: str = "source.spm") -> Path:
    """Train a SentencePiece model on this file; <unk> is 0, <s> 1, </s> 2."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    lines = [line for line in Path(__file__).read_text().splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "trained"),
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return (folder / "trained.model").rename(folder / name)


@pytest.mark.parametrize(
    ("eos", "unk", "problem"),
    [
        (2, 1, "the unknown token is 0, of the model 1; give the directory whose vocab.json"),
        (7, 0, "end token 7 is the ordinary piece"),
    ],
)
def test_a_sentencepiece_model_whose_ids_are_not_the_models(eos: int, unk: int, problem: str, tmp_path: Path) -> None:
    path = spm(tmp_path)
    with pytest.raises(CheckpointError, match=f"its ids are not the model's: .*{problem}"):
        tokenizer_json(path, spec(300, eos, unk))
    tokenizer_json(path, spec(300, 2, 0))


def test_the_end_of_a_target_may_be_a_piece_of_a_source(tmp_path: Path) -> None:
    tokenizer_json(spm(tmp_path), spec(300, eos=7, unk=0), "source")


@pytest.mark.parametrize(
    ("count", "size", "said"),
    [
        (32_100, 32_128, None),  # padded to a multiple, as T5
        (10, 200, None),
        (9_500, 10_000, None),
        (8_000, 10_000, "warning"),
        (4_999, 10_000, "refused"),
    ],
)
@pytest.mark.parametrize("side", [None, "source", "target"])
def test_too_few_ids(count: int, size: int, said: str | None, side: Side | None) -> None:
    raw = Inner(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w3")).to_str().encode()
    if said == "refused":
        with pytest.raises(CheckpointError, match=f"has {count} ids, the model's {side or 'source'}_vocab is {size}"):
            check_coverage(raw, Path("t"), spec(size), side)
        return
    found = check_coverage(raw, Path("t"), spec(size), side)
    assert found.startswith("warning: tokenizer t: has") == (said == "warning")
    assert bool(found) == (said is not None)


def test_an_import_passes_the_warning_on(tmp_path: Path) -> None:
    Inner(models.WordLevel({f"w{i}": i for i in range(800)}, unk_token="w3")).save(str(tmp_path / "t.json"))
    found = import_text(Tokenizers(tmp_path / "t.json"), TextConfig(), None, spec(1200), has_own_weights=False)
    assert any("has 800 ids, the model's source_vocab is 1200" in note for note in found.notes)
