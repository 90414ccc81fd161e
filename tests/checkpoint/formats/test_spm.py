"""SentencePiece models of several kinds, read as SentencePiece reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.formats.odd_texts import odd_texts
from tests.checkpoint.formats.test_tokenizer_directories import train
from tfexport.checkpoint.formats.spm import from_sentencepiece, read_sentencepiece
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
    (tmp_path / "tokenizer.json").write_text(from_sentencepiece(read_sentencepiece(path.read_bytes(), path)).to_str())
    ours = Vocabulary.load(tmp_path / "tokenizer.json", {spm.bos_id(), spm.eos_id()}, spm.unk_id())
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
