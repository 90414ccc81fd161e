"""Tokenizers that were made to harm: each is refused, or what it does to a text is an error of that text."""

from __future__ import annotations

import base64
import copy
import functools
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.text.test_tokenizer import byte_pairs, characters, spec_of
from tfexport.errors import BundleError, InputError
from tfexport.text import parts, trial
from tfexport.text.parts import charsmap_growth, read_parts
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import MAX_NORMALIZED, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]


def plain() -> Json:
    """A tokenizer of words with nothing around them."""
    words = {"<unk>": 0, "a": 1, "b": 2, "aa": 3}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return dict(json.loads(inner.to_str()))


def read(data: Json | bytes) -> Vocabulary:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Vocabulary.parse(raw, "t.json", (), 0)


def replace(pattern: str, content: str, kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def chain(*steps: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(trie: bytes, texts: bytes, size: int | None = None) -> Json:
    raw = (len(trie) if size is None else size).to_bytes(4, "little") + trie + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


# Every byte leads to a leaf of this trie, in a place that does not exist.
PANICS = charsmap((0x3FFFFF << 10).to_bytes(4, "little") * 256, b"a\0")
REFUSED: dict[str, tuple[str, Any, str]] = {
    "an unknown normalizer": ("normalizer", {"type": "Explode"}, "normalizer has 'Explode', expected one of BertN"),
    "a normalizer without a type": ("normalizer", {"pattern": "a"}, "expected an object with a type"),
    "an unknown pre-tokenizer": ("pre_tokenizer", {"type": "Custom"}, "pre_tokenizer has 'Custom', expected one of"),
    "an unknown post-processor": ("post_processor", {"type": "Custom"}, "post_processor has 'Custom'"),
    "an unknown decoder": ("decoder", {"type": "Custom"}, "decoder has 'Custom'"),
    "an unknown model": ("model", {"type": "Custom", "vocab": {}}, "model is 'Custom', expected one of BPE"),
    "a chain of doublings": ("normalizer", chain(*[replace("a", "aa")] * 40), "may make 1099511627776 bytes of one"),
    "doublings in chains in chains": (
        "normalizer", chain(*[chain(chain(replace("a", "aa"), replace("a", "aa")))] * 15), "bytes of one, expected"),
    "regexes that put in more and more": ("normalizer", chain(*[replace("", "x" * 99, "Regex")] * 5), "bytes of one"),
    "something long in the place of something short": ("normalizer", replace("a", "b" * 200), "puts in 200 bytes"),
    "a long chain": ("normalizer", chain(*[{"type": "NFC"}] * 65), "normalizer is a chain of more than 64 parts"),
    "a long regex": ("normalizer", replace("a" * 10_001, "", "Regex"), "pattern has 10001 characters"),
    "a pattern of neither kind": ("normalizer", replace("a", "b", "Glob"), "expected a String or a Regex"),
    "a map that asks for gigabytes": ("normalizer", charsmap(b"\0" * 8, b"a\0", 2**32 - 4), "4294967292 are its trie"),
    "a map without a trie": ("normalizer", charsmap(b"", b"a\0"), "says that 0 are its trie"),
    "a map of nothing": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "of 0 bytes says"),
    "a map that is not in base 64": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}, "base 64"),
    "a map to long texts": ("normalizer", charsmap(b"\0" * 8, b"a" * 300), "makes 300 bytes of one"),
    "a doubling decoder": (
        "decoder", {"type": "Sequence", "decoders": [replace("a", "aa")] * 40}, "decoder may make 1099511627776"),
    "a part of no length": ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "length is 0, expected 1 or more"),
    "a text again and again": (
        "post_processor",
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9, "pair": [],
         "special_tokens": {}},
        "single has the text 9 times"),
    "a token that the template lacks": (
        "post_processor",
        {"type": "TemplateProcessing", "special_tokens": {}, "pair": [],
         "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "b", "type_id": 0}}]},
        "special_tokens lacks 'b'"),
    "words without an end": (
        "model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 10**9}, "max_input_chars_per_word is 1000000000"),
    "a huge token": ("model", {"type": "WordLevel", "vocab": {"a" * 3000: 0}, "unk_token": "a"}, "a token of 12000"),
    "an added token without words": ("added_tokens", [{"id": 0}], "expected an object with a content"),
    "a vocabulary of numbers": ("model", {"type": "Unigram", "vocab": [1, 2]}, "expected tokens"),
    "a merge that is shorter than its prefix": (
        "model",
        {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
         "continuing_subword_prefix": "####"},
        "tokenizers panicked"),
    "no vocabulary": ("model", None, "model is None, expected an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_tokenizer_is_refused_in_one_line(name: str) -> None:
    part, value, says = REFUSED[name]
    with pytest.raises(BundleError) as refused:
        read(plain() | {part: value})
    assert says in str(refused.value)
    assert str(refused.value).startswith("t.json is no tokenizer.json (")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"model": 1e999}', b'{"a": ' * 5000, b'"\\ud800"', b"\xff\xfe"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BundleError, match=r"t\.json is no tokenizer\.json \("):
        read(raw)


def test_lone_surrogates_in_a_file_are_refused() -> None:
    for part, value in (("normalizer", replace("\ud800", "a")), ("added_tokens", [{"id": 9, "content": "\udfff"}])):
        with pytest.raises(BundleError, match=r"t\.json is no tokenizer\.json"):
            read(plain() | {part: value})


# ---- panics


def test_a_panic_is_an_error_of_its_text() -> None:
    words = read(plain() | {"normalizer": PANICS})
    with pytest.raises(InputError, match=r"cannot be encoded \(tokenizers panicked: index out of bounds"):
        words.encode("a b", special=True)
    with pytest.raises(InputError, match="tokenizers panicked"):
        words.pieces("a b", spelled=True)
    assert words.decode([1, 2]) == "a b"


def test_a_regex_that_gives_up_is_an_error_of_its_text() -> None:
    words = read(plain() | {"normalizer": replace("(a+)+$", "", "Regex")})
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


# ---- texts that grow


def test_a_text_that_grows_is_refused_before_it_does() -> None:
    words = read(plain() | {"normalizer": chain(*[replace("a", "aa")] * 14)})
    assert words.encode("b", special=True) == [2]
    assert words.encode("b " * 5000, special=True) == [2] * 5000
    with pytest.raises(InputError, match=rf"may become \d+ bytes .*, the limit is {MAX_NORMALIZED}; split it"):
        words.encode("a" * 1100, special=True)


def test_a_text_that_may_grow_and_does_not_is_encoded() -> None:
    """ALBERT's chain: what its parts could make of a text, each at its worst, is thousands of times what they do."""
    steps = [replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
             charsmap(b"\0" * 1024, b"x" * 33 + b"\0"), replace(" {2,}", " ", "Regex")]  # fmt: skip
    words = read(plain() | {"normalizer": chain(*steps)})
    assert words._parts.growth > 700
    assert words.encode("A  b " * 5000, special=True) == [1, 2] * 5000


@functools.cache
def changing() -> list[str]:
    """Return the characters that have another form or lower case, and those below 3,000."""
    every = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    return [c for c in every if c < "\u0bb8" or unicodedata.normalize("NFKD", c) != c or c.lower() != c]


@pytest.mark.parametrize(
    "bound", sorted(name for name, step in parts._NORMALIZERS.items() if isinstance(step, parts.Step))
)
def test_what_a_normalizer_makes_of_a_character_is_bounded(bound: str) -> None:
    step = parts._NORMALIZERS[bound]
    assert isinstance(step, parts.Step)
    normalizer: Any = getattr(normalizers, bound)()
    worst = max(len(normalizer.normalize_str(char).encode()) / len(char.encode()) for char in changing())
    assert worst <= step.times
    assert normalizer.normalize_str("") == ""


@pytest.mark.parametrize(
    ("pre_tokenizer", "bound"),
    [
        ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}, 4),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, 4),
    ],
)
def test_what_a_pre_tokenizer_makes_of_a_text_is_bounded(pre_tokenizer: Json, bound: int) -> None:
    assert read_parts(plain() | {"pre_tokenizer": pre_tokenizer}).split == bound
    inner = tokenizers.Tokenizer.from_str(json.dumps(plain() | {"pre_tokenizer": pre_tokenizer}))
    assert inner.pre_tokenizer is not None
    for text in ("x", " ", "é", "x y", "\0", "中", "  x"):
        pieces = "".join(piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text))
        assert len(pieces.encode()) <= bound * len(text.encode())


def test_replacing_is_bounded() -> None:
    for pattern, content, kind in (
        ("a", "bcd", "String"),
        ("", "xy", "Regex"),
        ("a*", "xy", "Regex"),
        (".", "$0$0", "Regex"),
    ):
        (step,) = read_parts(plain() | {"normalizer": replace(pattern, content, kind)}).steps
        inner = tokenizers.Tokenizer.from_str(json.dumps(plain() | {"normalizer": replace(pattern, content, kind)}))
        assert inner.normalizer is not None
        for text in ("a", "aaa", "bab", "é"):
            found = len(inner.normalizer.normalize_str(text).encode())
            assert found <= step.most(text) + step.inserts


def test_tokens_that_together_are_too_long_a_target_are_refused(tmp_path: Path) -> None:
    inner = characters()
    inner.add_tokens(["x" * 9000])
    inner.decoder = decoders.Sequence([decoders.Replace("x", "y" * 99), decoders.Fuse()])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BundleError, match=r"tokenizer\.json: 1000 tokens may become 891000000 bytes, the limit is"):
        Tokenizer.load(tmp_path / "tokenizer.json", spec_of(inner, max_target_length=1000))
    assert Tokenizer.load(tmp_path / "tokenizer.json", spec_of(inner, max_target_length=100))


# ---- the trial


def test_a_good_tokenizer_passes_its_trial_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = byte_pairs().to_str().encode()
    trial.try_tokenizer(raw, "t.json")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was tried"))
    trial.try_tokenizer(copy.copy(raw), "t.json")


TRIED: dict[str, tuple[str, Any, str]] = {
    "a panic at any text": ("normalizer", PANICS, "t.json fails at the text "),
    "a regex that gives up": (
        "normalizer",
        replace("(a+)+$", "", "Regex"),
        "t.json fails at the text 'aaa",
    ),
    "an unknown part": ("normalizer", {"type": "Explode"}, "t.json is no tokenizer.json (normalizer has 'Explode'"),
}


@pytest.mark.parametrize("name", TRIED)
def test_a_bad_tokenizer_fails_its_trial(name: str) -> None:
    part, value, says = TRIED[name]
    with pytest.raises(BundleError) as refused:
        trial.try_tokenizer(json.dumps(plain() | {part: value}).encode(), "t.json")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("bytearray(2**40)", "asks for more memory than any tokenizer needs"),
        ("import os; os.abort()", "ends the process that reads it (exit code -6"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "takes more than 30 s for short texts"),
        ("while True: pass", "takes more than 1 s for short texts"),
        ("raise SystemExit(3)", "ends the process that reads it (exit code 3"),
    ],
)
def test_a_trial_that_ends_badly_is_told(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits hold for whatever the process does, here in the place of the library."""
    within = 1 if "while" in code else trial.CPU_S
    program = f"import sys; from tfexport.text import trial; trial.CPU_S = {within}; trial._limit(trial.MEMORY)\n{code}"
    run = subprocess.run
    monkeypatch.setattr(trial, "CPU_S", within)
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", program], **options))
    with pytest.raises(BundleError) as refused:
        trial.try_tokenizer(code.encode(), "t.json")
    assert says in str(refused.value)


def test_where_nothing_can_be_limited_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.limits_memory()
    monkeypatch.setattr(trial, "resource", None)
    assert not trial.limits_memory()
    trial._limit(1)


def test_character_maps_of_sentencepiece_are_taken() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    assert sentencepiece
    raw = (64).to_bytes(4, "little") + bytes(64) + b"abc\0de\0"
    assert charsmap_growth(raw) == 3


# ---- mutations

FUZZ = """
import json, random, resource, sys
from pathlib import Path
from tests.text.hostile import mutants
from tfexport.errors import BundleError, InputError
from tfexport.text.trial import ODD_TEXTS
from tfexport.text.vocabulary import Vocabulary

resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
found = {"refused": 0, "taken": 0}
for raw in mutants(int(sys.argv[1]), int(sys.argv[2])):
    try:
        words = Vocabulary.parse(raw, "t.json", (), 0)
    except BundleError as error:
        assert "\\n" not in str(error)
        found["refused"] += 1
        continue
    found["taken"] += 1
    for text in ODD_TEXTS[2:9]:
        try:
            words.decode(words.encode(text, special=True))
        except InputError as error:
            assert "\\n" not in str(error)
# Not ru_maxrss, which a process takes over from who has started it.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
found["peak"] = int(peak) * 1024
print(json.dumps(found))
"""


def fuzzed(count: int, seed: int) -> Json:
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(count), str(seed)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.rpartition("{")[1] + done.stdout.rpartition("{")[2]))


def test_mutated_tokenizers_are_refused_or_harmless() -> None:
    found = fuzzed(300, 1)
    assert found["refused"] > 100
    assert found["taken"] > 20
    assert found["peak"] < 2**30


@pytest.mark.slow
def test_many_mutated_tokenizers_are_refused_or_harmless() -> None:
    found = fuzzed(5000, 2)
    assert found["peak"] < 2**30
