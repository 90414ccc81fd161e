"""Text in, text out: a whole directory, tokenizer files and weights, imported without being told anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.importing.formats.odd_texts import odd_texts
from tests.importing.formats.published import CLASSES
from tests.importing.formats.test_tokenizer_directories import FAMILIES, encoded, is_of_the_other_side
from tfexport.contract import ModelSpec
from tfexport.generation import GenerationDefaults
from tfexport.importing.importer import import_checkpoint
from tfexport.model.model import Model
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer

TYPES = {"marian": "marian", "bart": "bart", "t5": "t5", "m2m100": "m2m_100"}
NEW_TOKENS, LONGEST = 12, 400


def write_model(folder: Path, family: str, found: ModelSpec) -> Any:
    """Add random weights for a tokenizer's vocabulary to its directory."""
    cls = getattr(transformers, CLASSES[TYPES[family]])
    tokens = {
        "pad_token_id": found.tokens.pad,
        "eos_token_id": found.tokens.eos,
        "decoder_start_token_id": found.tokens.start,
        "vocab_size": found.source_vocab,
    }
    sizes = {"d_model": 16, "max_position_embeddings": LONGEST + 2, "scale_embedding": True, "bos_token_id": 0}
    if family == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    else:
        sides = {"attention_heads": 2, "ffn_dim": 24, "layers": 1}
        sizes |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    torch.manual_seed(0)
    model = cls(cls.config_class(**tokens, **sizes))
    tiny.randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return cls.from_pretrained(folder).double().eval()


@pytest.mark.parametrize("family", TYPES)
def test_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    hf, made = tmp_path / "hf", tmp_path / "model"
    hf.mkdir()
    tokenizer, found = FAMILIES[family](hf)
    theirs = write_model(hf, family, found)
    import_checkpoint(hf, made)
    model = load_model(made).double()
    target = made / "target_tokenizer.json"
    ours = Tokenizer.load(
        made / "tokenizer.json",
        model_spec(model.config, "fp32"),
        target=target if target.exists() else None,
        text=TextConfig.from_dict(json.loads((made / "text.json").read_text())),
    )
    texts = [text for text in odd_texts() if not is_of_the_other_side(tokenizer, text)]
    texts = [text for text in texts if (ids := encoded(ours, text)) is not None and len(ids) < LONGEST]
    assert len(texts) > 180
    texts = texts[::4]  # the ids of all are compared in test_tokenizer_directories.py
    # No word twice, as random weights would repeat one for ever; padding has no position in M2M100.
    options = {"max_new_tokens": NEW_TOKENS, "no_repeat_ngram_size": 1, "num_beams": 1}
    options["suppress_tokens"] = [found.tokens.pad]
    path = made / "generation.json"
    defaults = GenerationDefaults.from_dict(json.loads(path.read_text()) if path.exists() else {}, subject=path.name)
    with Model(EagerSession(model), ours, defaults) as loaded:
        said = [result.text for result in loaded.generate(texts, **options)]
    expected = []
    with torch.inference_mode():
        for text in texts:
            given = tokenizer(text, return_tensors="pt")
            (ids,) = theirs.generate(given.input_ids, attention_mask=given.attention_mask, **options)
            expected.append(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    different = [(a, b) for a, b in zip(said, expected, strict=True) if a.strip() != b.strip()]
    assert len(set(expected)) > 20, "texts that are all alike prove nothing"
    assert not different, (len(different), different[:2])
