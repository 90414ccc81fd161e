"""Vocabularies as people have them, with the functions around them: the same ids and texts, or an error."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importing.huggingface.odd_texts import LINES, odd_texts
from tests.importing.huggingface.test_tokenizer_directories import encoded, spec
from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.importing._options import read_options
from tfexport.importing.config import ImportConfig
from tfexport.importing.text import ImportedText, Tokenizers, import_text
from tfexport.text.config import TextConfig, TextSample

PAD, BOS, EOS, UNK = range(4)
Split = Callable[[str], Sequence[str]]


def basic_english(line: str) -> list[str]:
    """Split as torchtext does."""
    patterns = {r"\'": " '  ", r"\"": "", r"\.": " . ", r"<br \/>": " ", ",": " , ", r"\(": " ( ", r"\)": " ) "}
    line = line.lower()
    for pattern, text in {**patterns, r"\!": " ! ", r"\?": " ? ", r"\;": " ", r"\:": " ", r"\s+": " "}.items():
        line = re.sub(pattern, text, line)
    return line.split()


SPLITS: dict[str, Split] = {
    "words": str.split,
    "words, lower case": lambda text: text.lower().split(),
    "chars": list,
    "chars, lower case": lambda text: list(text.lower()),
    "regex": lambda text: re.findall(r"\w+|[^\w\s]", text),
    "regex, lower case": lambda text: re.findall(r"\w+|[^\w\s]", text.lower()),
    "basic_english": basic_english,
}
RECORDED = [
    "The Software, and  its 'Copyright' (c) notice!",
    'ABOVE all: it\'s Licensed; "as is".',
    "one ½ ²x ΟΔΟΣ\u3000ι",
]


@dataclass
class User:
    """Somebody who trained with a vocabulary of the split lines, and with functions around it."""

    split: Split
    joiner: str = " "
    dropped: tuple[int, ...] = (PAD, BOS, EOS)
    finish: Callable[[str], str] = str
    special: tuple[str, ...] = ("<pad>", "<sos>", "<eos>", "<unk>")
    start: tuple[int, ...] = (BOS,)
    end: tuple[int, ...] = (EOS,)

    def __post_init__(self) -> None:
        tokens = {token for line in [*LINES, "ABC ½² οδος ΟΔΟΣ"] for token in self.split(line)} - {""}
        self.itos = [*self.special, *sorted(tokens)]
        self.stoi = {token: i for i, token in enumerate(self.itos)}

    def encode(self, text: str) -> list[int]:
        ids = [self.stoi.get(t, UNK) if "<unk>" in self.special else self.stoi[t] for t in self.split(text)]
        return [*self.start, *ids, *self.end]

    def decode(self, ids: Sequence[int]) -> str:
        return self.finish(self.joiner.join(self.itos[i] for i in ids if i not in self.dropped))

    def record(self, texts: Sequence[str] = RECORDED) -> TextConfig:
        draw, samples = random.Random(0), []
        for text in [*texts, *(line for line in LINES[:20] if len(self.split(line)) < 60)]:
            target = (*draw.choices(range(3, len(self.itos)), k=9), EOS)
            ids, output = tuple(self.encode(text)), self.decode(target)
            samples.append(TextSample(text=text, source_ids=ids, target_ids=target, output=output))
        return TextConfig(samples=tuple(samples), end=EOS)


def import_(
    path: Path, user: User, recorded: TextConfig | None, target: Path | None = None, **more: Any
) -> ImportedText:
    found = spec(len(user.itos) + 3, pad=PAD, start=BOS, eos=EOS)
    if target:
        found = replace(found, vocab=len(json.loads(target.read_text())))
    around = more.pop("around", TextConfig())
    return import_text(Tokenizers(path, target, **more), around, recorded, found, has_own_weights=True)


def assert_same(made: ImportedText, user: User, other: User | None = None) -> None:
    """Compare ids of odd texts, and texts of random ids; texts without a known token are refused."""
    assert made.tokenizer is not None
    draw, other, compared = random.Random(1), other or user, 0
    for text in [*odd_texts(), *(text.upper() for text in odd_texts()), "a  b", "", " "]:
        try:
            wanted = user.encode(text)
        except KeyError:
            wanted = []
        is_known = text.strip() and set(wanted[len(user.start) : len(wanted) - len(user.end)]) - {UNK}
        assert encoded(made.tokenizer, text) == (wanted if is_known else None), text
        compared += bool(is_known)
    assert compared > 30
    for _ in range(100):
        ids = draw.choices(range(len(other.itos)), k=12)
        assert made.tokenizer.decode(ids) == other.decode(ids)


class Vocab:
    """As torchtext had it, whose default adds unknown words to `stoi`; newer states are tuples."""

    def __init__(self, user: User, state: object = None) -> None:
        self.freqs, self.itos, self.stoi = Counter(user.itos), user.itos, defaultdict(int, user.stoi)
        self.stoi["absent"]
        self.vectors, self.state = torch.zeros(2), state

    def __getstate__(self) -> object:
        return self.state or self.__dict__


class Lang:
    """As the tutorial of PyTorch has it."""

    def __init__(self, user: User) -> None:
        self.name, self.word2index, self.word2count = "eng", user.stoi, Counter(user.itos)
        self.index2word = dict(enumerate(user.itos))


FILES: dict[str, Callable[[User], object]] = {
    "dict.json": lambda user: user.stoi,
    "ids.json": lambda user: dict(enumerate(user.itos)),
    "list.json": lambda user: user.itos,
    "both.json": lambda user: {"itos": user.itos, "stoi": user.stoi, "unk_token": "<unk>"},
    "list.txt": lambda user: "\n".join(user.itos).encode(),
    "dict.pkl": lambda user: user.stoi,
    "default.pkl": lambda user: defaultdict(int, user.stoi),
    "torchtext.pkl": Vocab,
    "newer.pkl": lambda user: Vocab(user, ("0.0.2", [UNK], user.itos, [])),
    "lang.pkl": Lang,
    "ordered.pt": lambda user: {"vocab": OrderedDict(user.stoi), "weights": torch.zeros(2)},
}


def write(path: Path, value: object) -> Path:
    if path.suffix == ".pt" and not isinstance(value, bytes):
        torch.save(value, path)
    else:
        raw = json.dumps(value).encode() if path.suffix == ".json" else value
        path.write_bytes(raw if isinstance(raw, bytes) else pickle.dumps(raw))
    return path


CASES = [("dict.json", split) for split in SPLITS] + [(name, "regex, lower case") for name in FILES]


@pytest.mark.parametrize(("name", "split"), [*CASES, ("list.txt", "chars"), ("dict.pkl", "chars")])
def test_recorded_texts_show_how_texts_are_split(name: str, split: str, tmp_path: Path) -> None:
    user = User(SPLITS[split], "" if split.startswith("chars") else " ")
    made = import_(write(tmp_path / name, FILES[name](user)), user, user.record())
    assert not made.unverified
    assert_same(made, user)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropped": (PAD, BOS, EOS, UNK)},
        {"joiner": ""},
        {"joiner": "", "dropped": (PAD, BOS, EOS, UNK), "split": list},
        {"start": ()},
        {"start": (BOS, UNK), "end": ()},
        {"split": list, "joiner": "", "special": ("<pad>", "<sos>", "<eos>")},
    ],
    ids=str,
)
def test_recorded_texts_show_how_tokens_are_joined(changes: dict[str, Any], tmp_path: Path) -> None:
    user = User(**{"split": str.split, **changes})
    recorded = user.record(RECORDED if "<unk>" in user.stoi else LINES[:3])
    assert_same(import_(write(tmp_path / "dict.json", user.stoi), user, recorded), user)


@pytest.mark.parametrize("split", ["regex, lower case", "chars"])
def test_a_file_for_each_side(split: str, tmp_path: Path) -> None:
    source, target = User(SPLITS["regex, lower case"]), User(SPLITS[split], "" if split == "chars" else " ")
    target.itos[4:] = target.itos[:3:-1]
    pairs = zip(source.record().samples, target.record().samples, strict=False)
    samples = tuple(replace(a, target_ids=b.target_ids, output=b.output) for a, b in pairs)
    paths = write(tmp_path / "source.pkl", source.stoi), write(tmp_path / "target.json", target.itos)
    made = import_(paths[0], source, TextConfig(samples=samples, end=EOS), paths[1])
    assert_same(made, source, target)
    assert made.tokenizer is not None
    known = [token for token in target.itos[4:] if token.islower()][:9]
    assert made.tokenizer.encode_target(target.joiner.join(known)) == [target.itos.index(token) for token in known]


def test_splits_that_recorded_texts_do_not_show_are_unverified(tmp_path: Path) -> None:
    user = User(str.split)
    path = write(tmp_path / "dict.json", user.stoi)
    texts = [
        TextSample(text=text, source_ids=tuple(user.encode(text))) for text in ("the work", "shall be the licensor")
    ]
    made = import_(path, user, TextConfig(samples=tuple(texts)))
    assert r"--tokenize words --lowercase, --tokenize '\w+|[^\w\s]', " in made.unverified[0]
    stated = import_(path, user, TextConfig(samples=tuple(texts)), tokenize="words")
    assert not stated.unverified
    assert_same(stated, user)


@pytest.mark.parametrize("name", ["words", "chars", "basic_english", r"\w+|[^\w\s]", r"\b\w[\w'-]*\b|\d|[^\W_]|\S"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_options_state_how_texts_are_split(name: str, lowercase: bool, tmp_path: Path) -> None:
    split = {"words": str.split, "chars": list, "basic_english": basic_english}.get(name) or re.compile(name).findall
    user = User(
        lambda text: split(text.lower() if lowercase else text), "" if name == "chars" else " ", start=(), end=()
    )
    path, config = write(tmp_path / "dict.json", user.stoi), ImportConfig(tokenize=name, lowercase=lowercase)
    read_options(tmp_path, config, None, path, None)
    assert_same(import_(path, user, None, tokenize=name, lowercase=lowercase), user)


def test_without_texts_and_options_only_characters_and_rules_are_clear(tmp_path: Path) -> None:
    words, chars = (User(split, "", start=(), end=()) for split in (str.split, list))
    with pytest.raises(CheckpointError) as caught:
        import_(write(tmp_path / "dict.json", words.stoi), words, None)
    assert "--tokenize" in caught.value.remedy
    made = import_(write(tmp_path / "dict.json", chars.stoi), chars, None)
    assert_same(made, chars)
    with pytest.raises(CheckpointError, match="has its own rules"):
        import_(write(tmp_path / "t.txt", made.files["tokenizer.json"]), chars, None, lowercase=True)


class Hostile:
    def __reduce__(self) -> object:
        return (Path.write_text, (Path("executed"), "by the pickle"))


WRONG: dict[str, tuple[object, str]] = {
    "hostile.pkl": ({"<unk>": 0, "a": Hostile()}, "json.dump"),
    "alone.pkl": (Hostile(), "json.dump"),
    "sides.json": ({"src": {"<unk>": 0, "a": 1}, "tgt": {"<unk>": 0, "b": 1}}, "src, tgt"),
    "other.json": ({"itos": ["<unk>", "a", "b"], "stoi": {"<unk>": 0, "b": 1, "a": 2}}, "itos, stoi"),
    "counts.json": ({"<pad>": 0, "the": 7, "a": 7}, "'the' and id 7"),
    "far.json": ({"<pad>": 0, "the": 2**40}, "source_vocab"),
    "twice.json": (["<unk>", "a", "a"], "'a' and id 1"),
    "cut.pkl": (b"\x80\x04\x95\xff", "json.dump"),
    "bomb.pkl": (b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".", "memory"),
    "empty.pt": (b"PK\x03\x04", "json.dump"),
    "surrogate.json": ({"a": 0, "\ud800": 1}, "not valid Unicode"),
    "none.json": ({}, "json.dump"),
    "model.json": ({"model_type": "bart"}, "json.dump"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=WRONG[name][1]):
        import_(write(tmp_path / name, WRONG[name][0]), User(list), None)
    assert not (tmp_path / "executed").exists()


Change = Callable[[list[str]], list[str]]
STEPS: list[tuple[str, dict[str, Any], Change, dict[str, Any], str]] = [
    ("normalization", {"split": SPLITS["words, lower case"]}, list, {"tokenize": "words"}, "--lowercase"),
    ("splitting", {"split": lambda text: text.split(" ")}, list, {}, "--tokenize"),
    ("ids around the text", {}, list, {"around": TextConfig(source_prefix=(BOS,))}, "your ids end with 2"),
    (
        "ids around the text",
        {},
        list,
        {"around": TextConfig(source_prefix=(BOS,), source_suffix=(EOS, 3))},
        "yours do not",
    ),
    ("ids", {}, lambda itos: [*itos[:4], *itos[5:]], {}, "shifted"),
    ("unknown words", {}, lambda itos: [f"{t}x" if t == "and" else t for t in itos], {}, "tokens.unk"),
    ("decoding", {"joiner": "_"}, list, {}, "special tokens"),
    ("decoding", {"finish": str.upper}, list, {}, "only lower case"),
    ("decoding", {"finish": " {}".format}, list, {}, "only the white space"),
]


@pytest.mark.parametrize(("step", "changes", "change", "options", "remedy"), STEPS)
def test_a_difference_names_its_step(
    step: str, changes: dict[str, Any], change: Change, options: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    user = User(**{"split": str.split, **changes})
    with pytest.raises(ParityError) as caught:
        import_(write(tmp_path / "list.json", change(user.itos)), user, user.record(), **options)
    assert caught.value.subject.startswith("text 1 of")
    assert caught.value.problems[0].startswith(f"{step}: ")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("split", ["(", r"(?P<a>\w)+", r"\X", "a*"])
def test_a_regular_expression_that_python_reads_otherwise_is_refused_at_once(split: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenize"):
        read_options(tmp_path, ImportConfig(tokenize=split), None, None, None)
    with pytest.raises(ConfigError, match="tokenize"):
        Tokenizers(tmp_path, tokenize=split)
