"""SentencePiece models of several kinds, read as SentencePiece reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.importing.huggingface.odd_texts import odd_texts
from tests.importing.huggingface.test_tokenizer_directories import train
from tfexport.errors import CheckpointError
from tfexport.importing.vocabulary import read_sentencepiece, tokenizer_json
from tfexport.nn.config import model_spec
from tfexport.text.vocabulary import Vocabulary

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
EDGES = [
    "  indented",
    "\ttab first",
    "behind \t",
    "def f(x):\n    return x",
    "line\nline",
    "trailing  ",
    "a  b   c",
    "\u3000wide\u3000",
    "soft\u00adhyphen",
    "\u2003em space",
    "the \u2581 ",
]
KINDS: dict[str, dict[str, Any]] = {
    "as trained by default": {},
    "BPE": {"model_type": "bpe"},
    "nfkc, which leaves tabs": {"normalization_rule_name": "nfkc"},
    "all spaces kept": {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    "BPE, all spaces kept": {
        "model_type": "bpe",
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "byte_fallback": True,
    },
    "no space before": {"add_dummy_prefix": False},
    "lower case": {"normalization_rule_name": "nmt_nfkc_cf"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_ids_are_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    path = tmp_path / "spm.model"
    train(path, options.pop("model_type", "unigram"), **{"vocab_size": 600, **options})
    spm = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size, eos = spm.get_piece_size(), spm.eos_id()
    config = replace(tiny.config(), source_vocab=size, target_vocab=size)
    tokens = replace(config.tokens, eos=eos, start=eos, pad=eos, unk=spm.unk_id())
    raw = tokenizer_json(path, model_spec(replace(config, tokens=tokens), "fp32"))
    ours = Vocabulary.parse(raw, "tokenizer.json", {spm.bos_id(), spm.eos_id()}, spm.unk_id())
    # A text that begins with the sign for a space: where no rule makes it one, a single one comes of both.
    texts = [text for text in [*odd_texts(), *EDGES] if not text.startswith("\u2581")]
    known = [text for text in texts if set(spm.encode(text)) - {spm.unk_id()}]
    assert len(known) > 190
    different = [(text, a, b) for text in known if (a := spm.encode(text)) != (b := ours.encode(text, special=False))]
    assert not different, (len(different), different[:3])
    whole = [text for text in known if spm.unk_id() not in spm.encode(text)]
    assert [ours.decode(spm.encode(text)).strip() for text in whole] == [
        spm.decode(spm.encode(text)).strip() for text in whole
    ]


def test_mutated_models_are_converted_or_refused_in_one_line(tmp_path: Path) -> None:
    """A format without sums: what was changed and is a model all the same is tried, as every tokenizer is."""
    path = tmp_path / "spm.model"
    train(path)
    raw, draw, refused = path.read_bytes(), random.Random(1), list[str]()
    config = replace(tiny.config(), source_vocab=400, target_vocab=400)
    config = replace(config, tokens=replace(config.tokens, eos=2, unk=0))
    for _ in range(300):
        changed = bytearray(raw)
        for _ in range(draw.randint(1, 4)):
            # Half of the changes before or behind the map of characters, which is most of the file.
            place = draw.choice((draw.randrange(len(raw)), draw.randrange(1500), len(raw) - 1 - draw.randrange(400)))
            changed[place] = draw.randrange(256)
        path.write_bytes(bytes(changed[: draw.choice((len(raw), len(raw), draw.randrange(len(raw))))]))
        try:
            tokenizer_json(path, model_spec(config, "fp32"))
        except CheckpointError as error:
            refused.append(str(error))
    assert all(said.startswith(f"tokenizer {path}: ") and "\n" not in said for said in refused)
    assert len(refused) > 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda proto: setattr(proto.pieces[9], "piece", "a" * 300), "has a piece of 300 characters"),
        (lambda proto: setattr(proto.trainer_spec, "unk_piece", "<gone>"), r"cannot be read \('<gone>'\); save it"),
        (
            lambda proto: setattr(
                proto.normalizer_spec,
                "precompiled_charsmap",
                b"\xfc\xff\xff\xff" + proto.normalizer_spec.precompiled_charsmap[4:],
            ),
            "has a damaged character map",
        ),
    ],
)
def test_a_model_that_was_made_to_harm_is_refused(change: Callable[[Any], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "spm.model"
    train(path)
    proto = read_sentencepiece(path)
    change(proto)
    path.write_bytes(proto.SerializeToString())
    config = replace(tiny.config(), source_vocab=400, target_vocab=400)
    with pytest.raises(CheckpointError, match=says):
        tokenizer_json(path, model_spec(replace(config, tokens=replace(config.tokens, eos=2, unk=0)), "fp32"))
