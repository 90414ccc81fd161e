"""Hostile tokenizers are refused by a trial in a subprocess, or fail only for the text that triggers them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.text.test_tokenizer import byte_pairs
from tfexport.errors import BundleError, InputError
from tfexport.text import vocabulary
from tfexport.text.vocabulary import Vocabulary, try_tokenizer

Json = dict[str, Any]


def plain() -> Json:
    """A tokenizer of words without special tokens."""
    words = {"<unk>": 0, "a": 1, "b": 2, "aa": 3}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return dict(json.loads(inner.to_str()))


def read(data: Json | bytes) -> Vocabulary:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Vocabulary(raw, "t.json", (), 0)


def replace(pattern: str, content: str, kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def chain(*steps: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(steps)}


# Every byte leads to a leaf of this trie that points outside of the text.
_TRIE = (0x3FFFFF << 10).to_bytes(4, "little") * 256
_CHARSMAP = len(_TRIE).to_bytes(4, "little") + _TRIE + b"a\0"
PANICS = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(_CHARSMAP).decode()}
GIVES_UP = replace("(a+)+$", "", "Regex")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Explode"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}),
        ("model", {"type": "Unigram", "vocab": [1, 2]}),
        ("model", None),
        ("added_tokens", [{"id": 0}]),
        ("version", "9" * 100_000),
        (
            "model",  # a merge that is shorter than its prefix: the library panics
            {
                "type": "BPE",
                "vocab": {"a": 0, "b": 1, "ab": 2},
                "merges": [["a", "b"]],
                "continuing_subword_prefix": "####",
            },
        ),
    ],
)
def test_a_file_that_the_library_refuses_is_an_error_in_one_line(part: str, value: object) -> None:
    with pytest.raises(
        BundleError, match=r"^t\.json is not a valid tokenizer\.json \(.+\); save the tokenizer again$"
    ) as error:
        read(plain() | {part: value})
    assert len(str(error.value)) < 1000


def test_a_panic_is_an_error_of_its_text() -> None:
    words = read(plain() | {"normalizer": PANICS})
    with pytest.raises(InputError, match=r"cannot be encoded \(tokenizers panicked: index out of bounds"):
        words.encode("a b", special=True)
    with pytest.raises(InputError, match="tokenizers panicked"):
        words.pieces("a b", spelled=True)
    assert words.decode([1, 2]) == "a b"


def test_a_regex_that_gives_up_is_an_error_of_its_text() -> None:
    words = read(plain() | {"normalizer": GIVES_UP})
    assert words.encode("b b", special=True) == [2, 2]
    with pytest.raises(InputError, match="cannot be encoded"):
        words.encode("a" * 60 + "b", special=True)


def test_a_panic_in_the_decoder_is_an_error() -> None:
    words = read(plain() | {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}})
    with pytest.raises(InputError, match=r"token ids cannot be decoded \(tokenizers panicked"):
        words.decode([1])
    with pytest.raises(InputError, match="token ids cannot be decoded"):
        words.decode_with([1], {})


def test_ctrl_c_and_the_end_of_the_program_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    words = read(plain())

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Inner:
        encode = decode = staticmethod(interrupted)

    monkeypatch.setattr(words, "_inner", Inner())
    for use in (lambda: words.encode("a", special=True), lambda: words.decode([1])):
        with pytest.raises(KeyboardInterrupt):
            use()


# ---- the trial


def test_a_good_tokenizer_passes_its_trial_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = byte_pairs().to_str().encode()
    try_tokenizer(raw, "t.json")
    monkeypatch.setattr(vocabulary, "call_in_process", lambda *_, **__: pytest.fail("it was tried again"))
    try_tokenizer(bytes(bytearray(raw)), "t.json")


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (PANICS, r"^t\.json fails at the text "),
        (GIVES_UP, r"^t\.json: .*|^t\.json fails at the text 'aaa"),
        ({"type": "Explode"}, r"^t\.json is not a valid tokenizer\.json"),
        (chain(*[replace("a", "aa")] * 40), r"^t\.json: a trial with short texts needs more than \d+ bytes"),
    ],
    ids=["panic", "regex", "unknown", "doublings"],
)
def test_a_bad_tokenizer_fails_its_trial(normalizer: Json, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "TRIAL_MEMORY", 2**28)
    with pytest.raises(BundleError, match=message):
        try_tokenizer(json.dumps(plain() | {"normalizer": normalizer}).encode(), "t.json")
