"""The vocabulary of bundle.mjs equals the tokenizers of the runtime on odd texts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conftest import DATES
from tests.importing.huggingface.odd_texts import odd_texts
from tfexport.errors import InputError
from tfexport.text.vocabulary import Vocabulary

pytestmark = pytest.mark.slow
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEXTS = [*odd_texts(), "a </s> <s> <unk> b", "a</s>b", "Dienstag, 3. März 2026"]
SCRIPT = """
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";
import { Vocabulary } from "./bundle.mjs";
const vocabulary = new Vocabulary(readFileSync(process.argv[1]), Tokenizer, null, []);
const answers = JSON.parse(readFileSync(0)).map((text) => {
  try {
    const ids = vocabulary.encode(text);
    return [ids, vocabulary.decode(ids)];
  } catch {
    return null;
  }
});
console.log(JSON.stringify(answers));
"""


def dates() -> str:
    return (DATES / "tokenizer.json").read_text(encoding="utf-8")


def pieces() -> str:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=900, special_tokens=SPECIAL))
    return str(inner.to_str())


def byte_pairs() -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet)
    inner.train_from_iterator(TEXTS, trainer)
    around = [("<s>", 1), ("</s>", 2)]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return str(inner.to_str())


@pytest.mark.parametrize("kind", [dates, pieces, byte_pairs])
def test_text_becomes_the_same_ids_and_back(kind: Callable[[], str], javascript: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(kind(), encoding="utf-8")
    command = ["node", "--input-type=module", "-e", SCRIPT, str(file)]
    done = subprocess.run(command, cwd=javascript, input=json.dumps(TEXTS), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    ours = Vocabulary(file.read_bytes(), "tokenizer.json", set(), None)
    for text, answer in zip(TEXTS, json.loads(done.stdout), strict=True):
        try:
            ids = ours.encode(text, special=True)
        except InputError:
            assert answer is None, text
        else:
            assert answer == [ids, ours.decode(ids)], text
