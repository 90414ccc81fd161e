"""Mutations of tokenizers, the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens", "truncation", "padding")
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2, 10**9, 2**31, 2**32 - 1, 2**64, 1.5, 1e308, "", "a", "aa", "\ud800", "\0", "▁", "(", "a*",
    "(a|a)*$", "x" * 200, [], {}, [[]], ["a", -1.0], {"String": "a"}, {"Regex": "(a+)+b"}, {"Regex": ""},
    {"type": "NFC"},
]  # fmt: skip


def bases() -> list[dict[str, Any]]:
    """Return one tokenizer of each kind of model, with every kind of part in one of them."""
    letters = {char: place for place, char in enumerate("<abcdefghijklmnopqrstuvwxyz ▁Ġ#.,1")}
    words = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="<"))
    words.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex("[\u200e]"), ""), normalizers.Strip()]
    )
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), pre_tokenizers.Digits(), pre_tokenizers.Punctuation()]
    )
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words.add_special_tokens(["</s>"])
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", len(letters))])
    pieces = [("<", 0.0), *((char, -float(place)) for char, place in letters.items() if place), ("the", -1.0)]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    raw = (1024).to_bytes(4, "little") + bytes(1024) + b"abc\0de\0"
    unigram.normalizer = normalizers.Sequence([normalizers.Precompiled(raw), normalizers.Replace(Regex(" {2,}"), " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    merges = [("a", "b"), ("ab", "c")]
    pairs = tokenizers.Tokenizer(models.BPE({**letters, "ab": 40, "abc": 41}, merges))
    pairs.normalizer = normalizers.Prepend("▁")
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pairs.decoder = decoders.ByteLevel()
    pairs.add_tokens(["plain"])
    bert = tokenizers.Tokenizer(models.WordPiece({**letters, "##a": 50, "##b": 51}, unk_token="<"))
    bert.normalizer = normalizers.BertNormalizer()
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.post_processor = processors.BertProcessing(("a", 1), ("b", 2))
    bert.decoder = decoders.WordPiece()
    return [json.loads(inner.to_str()) for inner in (words, unigram, pairs, bert)]


def mutants(count: int, seed: int) -> Iterator[bytes]:
    """Yield tokenizers with one to three changes each: values, parts of other tokenizers, bytes."""
    draw, originals = random.Random(seed), bases()
    for _ in range(count):
        data = copy.deepcopy(draw.choice(originals))
        for _ in range(draw.randint(1, 3)):
            _change(data, draw, originals)
        raw = bytearray(json.dumps(data).encode())
        if draw.random() < 0.2:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        if draw.random() < 0.05:
            del raw[draw.randrange(len(raw)) :]
        yield bytes(raw)


def _change(data: dict[str, Any], draw: random.Random, originals: list[dict[str, Any]]) -> None:
    part = draw.choice(PARTS)
    if draw.random() < 0.2:
        data[part] = copy.deepcopy(draw.choice(originals)[part])
        return
    place: Any = data
    key: Any = part
    while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    if draw.random() < 0.2 and isinstance(place, list):
        place[key:key] = [place[key]] * draw.choice([1, 30])
    elif draw.random() < 0.1:
        del place[key]
    else:
        place[key] = copy.deepcopy(draw.choice(VALUES))
