"""Define Marian (opus-mt): two SentencePiece models with the ids of a vocab.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Inner

from tfexport._io.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.importing.huggingface._bart import bart_like
from tfexport.importing.huggingface.tokenizer import read_ids, read_json_object, surround
from tfexport.importing.vocabulary import read_sentencepiece, with_ids


def _convert(directory: Path, spec: ModelSpec) -> dict[str, Inner]:
    ids = target_ids = read_ids(directory / "vocab.json")
    if read_json_object(directory / "tokenizer_config.json").get("separate_vocabs"):
        target_ids = read_ids(directory / "target_vocab.json")
    files = {}
    for name, spm, own in ((TOKENIZER, "source.spm", ids), (TARGET_TOKENIZER, "target.spm", target_ids)):
        # A source begins with its target language if a model has several.
        languages = [token for token in own if token.startswith(">>") and token.endswith("<<")]
        proto = read_sentencepiece(directory / spm)
        files[name] = with_ids(proto, own, ("<pad>", "</s>"), "<unk>", whole=languages)
    surround(files[TOKENIZER], (), (spec.tokens.eos,))
    return files


FAMILIES = (
    bart_like(
        "marian", "MarianTokenizer", convert=_convert, tokenizer_files=("source.spm", "target.spm", "vocab.json")
    ),
)
