"""The tokenizer of a Hugging Face directory is taken without being asked for, and says what transformers says."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.importing.huggingface import published
from tests.importing.huggingface.published_configs import VOCAB
from tfexport.importing.importer import import_checkpoint
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer


def imported(folder: Path, tokenizer: Path | None = None) -> list[str]:
    lines: list[str] = []
    import_checkpoint(folder / "hf", folder / "model", tokenizer=tokenizer, report=lines.append)
    return lines


def ours(model: Path) -> Tokenizer:
    spec = model_spec(load_model(model).config, "fp32")
    text = TextConfig.from_dict(json.loads((model / "text.json").read_text()))
    return Tokenizer.load(model / "tokenizer.json", spec, text=text)


def words(folder: Path, size: int) -> Path:
    """Write a tokenizer.json that puts a start and an end around a text, as that of BART does."""
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(size - 4))]
    inner = Inner(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(names[:3])
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_json_is_taken(tmp_path: Path) -> None:
    file = words(published.write(tmp_path / "hf", "bart-base"), VOCAB)
    assert "the tokenizer is the directory's tokenizer.json" in imported(tmp_path)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == file.read_bytes()
    texts = ["w1 w2", "w9 never w3"]
    assert ours(tmp_path / "model").encode(texts) == PreTrainedTokenizerFast(tokenizer_file=str(file))(texts).input_ids


def test_one_that_is_asked_for_goes_before(tmp_path: Path) -> None:
    words(published.write(tmp_path / "hf", "bart-base"), VOCAB)
    (tmp_path / "other").mkdir()
    other = words(tmp_path / "other", 20)
    assert not any("the directory's" in line for line in imported(tmp_path, other))
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == other.read_bytes()


def test_one_that_does_not_fit_is_left_and_said(tmp_path: Path) -> None:
    words(published.write(tmp_path / "hf", "bart-base"), VOCAB + 1)
    (line,) = (line for line in imported(tmp_path) if "is not taken" in line)
    assert line.startswith("the directory's tokenizer is not taken: ")
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "opus-mt")
    for name in ("source.spm", "vocab.json"):
        (tmp_path / "hf" / name).write_bytes(b"{}")
    (line,) = (line for line in imported(tmp_path) if "is not taken" in line)
    assert "vocab.json: expected tokens with an id of its own each" in line
