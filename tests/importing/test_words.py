"""Vocabularies as people have them, with the functions around them: the same ids and texts, or an error."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.importing.huggingface.odd_texts import LINES, odd_texts
from tests.importing.huggingface.test_tokenizer_directories import spec
from tfexport.errors import CheckpointError, ConfigError, InputError, ParityError
from tfexport.importing._options import read_options
from tfexport.importing.config import ImportConfig
from tfexport.importing.text import ImportedText, Tokenizers, import_text
from tfexport.text.config import TextConfig, TextSample

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ["<pad>", "<sos>", "<eos>", "<unk>"]
IDS = {"pad": PAD, "start": BOS, "eos": EOS}
Split = Callable[[str], Sequence[str]]


def basic_english(line: str) -> list[str]:
    """Split as torchtext does."""
    line = line.lower()
    patterns = {r"\'": " '  ", r"\"": "", r"\.": " . ", r"<br \/>": " ", ",": " , ", r"\(": " ( ", r"\)": " ) "}
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
    keeps_unknown: bool = True
    has_unknown: bool = True
    start: tuple[int, ...] = (BOS,)
    end: tuple[int, ...] = (EOS,)

    def __post_init__(self) -> None:
        tokens = Counter(token for line in [*LINES, "ABC ½² οδος ΟΔΟΣ"] for token in self.split(line))
        self.itos = [*SPECIAL[: 4 if self.has_unknown else 3], *sorted(tokens)]
        self.stoi = {token: i for i, token in enumerate(self.itos)}

    def encode(self, text: str) -> list[int]:
        ids = [self.stoi.get(token, UNK) if self.has_unknown else self.stoi[token] for token in self.split(text)]
        return [*self.start, *ids, *self.end]

    def decode(self, ids: Sequence[int]) -> str:
        dropped = {PAD, BOS, EOS} | (set() if self.keeps_unknown else {UNK})
        return self.joiner.join(self.itos[i] for i in ids if i not in dropped)

    def record(self, texts: Sequence[str] = RECORDED) -> TextConfig:
        draw, samples = random.Random(0), []
        for text in [*texts, *(line for line in LINES[:20] if len(self.split(line)) < 60)]:
            target = (*draw.choices(range(3, len(self.itos)), k=9), EOS)
            ids = tuple(self.encode(text))
            samples.append(TextSample(text=text, source_ids=ids, target_ids=target, output=self.decode(target)))
        return TextConfig(samples=tuple(samples), end=EOS)


def import_(
    path: Path, user: User, recorded: TextConfig | None, target: Path | None = None, **more: Any
) -> ImportedText:
    found, around = spec(len(user.itos) + 3, **IDS), more.pop("around", TextConfig())
    if target:
        found = replace(found, vocab=len(json.loads(target.read_text())))
    return import_text(Tokenizers(path, target, **more), around, recorded, found, has_own_weights=True)


def assert_same(made: ImportedText, user: User, other: User | None = None) -> None:
    """Compare ids of odd texts, and texts of random ids."""
    tokenizer, other = made.tokenizer, other or user
    assert tokenizer is not None
    compared = 0
    for text in [*odd_texts(), *(text.upper() for text in odd_texts()), "a  b", "", " "]:
        try:
            wanted = user.encode(text)
        except KeyError:
            wanted = []
        # Texts without a known token are refused.
        if text.strip() and set(wanted[len(user.start) : len(wanted) - len(user.end)]) - {UNK}:
            assert tokenizer.encode([text]) == [wanted], text
            compared += 1
        else:
            with pytest.raises(InputError):
                tokenizer.encode([text])
    assert compared > 30
    draw = random.Random(1)
    for _ in range(100):
        ids = draw.choices(range(len(other.itos)), k=12)
        assert tokenizer.decode(ids) == other.decode(ids)


class Vocab:
    """As torchtext had it, whose default adds unknown words to `stoi`."""

    def __init__(self, user: User) -> None:
        self.freqs = Counter(user.itos)
        self.itos, self.stoi = user.itos, defaultdict(int, user.stoi)
        self.stoi["absent"]
        self.vectors = torch.zeros(2)


class State:
    """As the newer torchtext has it: a class of C++, whose state is a tuple."""

    def __init__(self, user: User) -> None:
        self.state = ("0.0.2", [UNK], user.itos, [])

    def __getstate__(self) -> object:
        return self.state


class Lang:
    """As the tutorial of PyTorch has it."""

    def __init__(self, user: User) -> None:
        self.name, self.word2index, self.n_words = "eng", user.stoi, len(user.itos)
        self.word2count = Counter(user.itos)
        self.index2word = dict(enumerate(user.itos))


def pickled(value: Callable[[User], object], protocol: int) -> Callable[[User, Path], None]:
    """Return a function that pickles an object of a class that is gone when the file is read."""

    def write(user: User, path: Path) -> None:
        module = sys.modules["gone"] = ModuleType("gone")
        for kind in (Vocab, State, Lang):
            kind.__module__ = "gone"
            setattr(module, kind.__name__, kind)
        path.write_bytes(pickle.dumps(value(user), protocol))
        del sys.modules["gone"]

    return write


def saved(value: Callable[[User], object]) -> Callable[[User, Path], None]:
    return lambda user, path: torch.save(value(user), path)


def dumped(value: Callable[[User], object]) -> Callable[[User, Path], None]:
    return lambda user, path: path.write_text(json.dumps(value(user)))  # type: ignore[return-value]


FILES: dict[str, Callable[[User, Path], None]] = {
    "dict.json": dumped(lambda user: user.stoi),
    "ids.json": dumped(lambda user: dict(enumerate(user.itos))),
    "list.json": dumped(lambda user: user.itos),
    "both.json": dumped(lambda user: {"itos": user.itos, "stoi": user.stoi, "unk_token": "<unk>"}),
    "nested.json": dumped(lambda user: {"vocab": user.stoi, "special": {"pad": "<pad>"}}),
    "list.txt": lambda user, path: path.write_text("\n".join(user.itos)),  # type: ignore[dict-item, return-value]
    "dict.pkl": pickled(lambda user: user.stoi, 4),
    "default.pkl": pickled(lambda user: defaultdict(int, user.stoi), 2),
    "ordered.pt": saved(lambda user: OrderedDict(user.stoi)),
    "nested.pt": saved(lambda user: {"vocab": user.stoi, "weights": torch.zeros(2)}),
    "torchtext.pkl": pickled(Vocab, 4),
    "torchtext2.pkl": pickled(State, 5),
    "lang.pkl": pickled(Lang, 3),
}


CASES = [("dict.json", split) for split in SPLITS] + [(name, "regex, lower case") for name in FILES]


@pytest.mark.parametrize(("name", "split"), [*CASES, ("list.txt", "chars"), ("dict.pkl", "chars")])
def test_recorded_texts_show_how_texts_are_split(name: str, split: str, tmp_path: Path) -> None:
    user = User(SPLITS[split], "" if split.startswith("chars") else " ")
    FILES[name](user, tmp_path / name)
    made = import_(tmp_path / name, user, user.record())
    assert not made.unverified
    assert_same(made, user)


@pytest.mark.parametrize(
    "changes",
    [
        {"keeps_unknown": False},
        {"joiner": ""},
        {"joiner": "", "keeps_unknown": False, "split": list},
        {"start": ()},
        {"start": (BOS, UNK), "end": ()},
        {"split": list, "joiner": "", "has_unknown": False},
    ],
    ids=str,
)
def test_recorded_texts_show_how_tokens_are_joined(changes: dict[str, Any], tmp_path: Path) -> None:
    user = User(**{"split": str.split, **changes})
    FILES["dict.json"](user, tmp_path / "dict.json")
    assert_same(
        import_(tmp_path / "dict.json", user, user.record(LINES[:3] if not user.has_unknown else RECORDED)), user
    )


@pytest.mark.parametrize("split", ["regex, lower case", "chars"])
def test_a_file_for_each_side(split: str, tmp_path: Path) -> None:
    source, target = User(SPLITS["regex, lower case"]), User(SPLITS[split], "" if split == "chars" else " ")
    target.itos[4:] = target.itos[:3:-1]
    FILES["dict.pkl"](source, tmp_path / "source.pkl")
    FILES["list.json"](target, tmp_path / "target.json")
    pairs = zip(source.record().samples, target.record().samples, strict=False)
    samples = tuple(replace(a, target_ids=b.target_ids, output=b.output) for a, b in pairs)
    made = import_(tmp_path / "source.pkl", source, TextConfig(samples=samples, end=EOS), tmp_path / "target.json")
    assert_same(made, source, target)
    assert made.tokenizer is not None
    known = [token for token in target.itos[4:] if token.islower()][:9]
    assert made.tokenizer.encode_target(target.joiner.join(known)) == [target.itos.index(token) for token in known]


def test_what_recorded_texts_do_not_show_is_not_verified(tmp_path: Path) -> None:
    user = User(str.split)
    FILES["dict.json"](user, tmp_path / "dict.json")
    plain = [
        TextSample(text=text, source_ids=tuple(user.encode(text))) for text in ("the work", "shall be the licensor")
    ]
    made = import_(tmp_path / "dict.json", user, TextConfig(samples=tuple(plain)))
    assert "--tokenize words --lowercase, " in made.unverified[0]
    stated = import_(tmp_path / "dict.json", user, TextConfig(samples=tuple(plain)), tokenize="words")
    assert not stated.unverified
    assert_same(stated, user)


@pytest.mark.parametrize("name", ["words", "chars", "basic_english", r"\w+|[^\w\s]", r"\b\w[\w'-]*\b|\d|[^\W_]|\S"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_options_state_how_texts_are_split(name: str, lowercase: bool, tmp_path: Path) -> None:
    named: dict[str, Split] = {"words": str.split, "chars": list, "basic_english": basic_english}
    split = named.get(name, lambda text: re.findall(name, text))
    user = User((lambda text: split(text.lower())) if lowercase else split, "" if name == "chars" else " ")
    FILES["dict.json"](user, tmp_path / "dict.json")
    config = ImportConfig(tokenize=name, lowercase=lowercase)
    assert read_options(tmp_path, config, None, tmp_path / "dict.json", None).layout is None
    made = import_(tmp_path / "dict.json", user, None, tokenize=name, lowercase=lowercase)
    assert_same(made, replace(user, start=(), end=()))


def test_without_texts_and_options_only_characters_are_clear(tmp_path: Path) -> None:
    for split in (str.split, list):
        user = User(split, "", start=(), end=())
        FILES["dict.json"](user, tmp_path / "dict.json")
        if split is list:
            assert_same(import_(tmp_path / "dict.json", user, None), user)
        else:
            with pytest.raises(CheckpointError) as caught:
                import_(tmp_path / "dict.json", user, None)
            assert "--tokenize" in caught.value.remedy


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
    "model.json": ({"model_type": "bart"}, "json.dump"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, problem = WRONG[name]
    raw = json.dumps(content).encode() if name.endswith("json") else content
    (tmp_path / name).write_bytes(raw if isinstance(raw, bytes) else pickle.dumps(raw))
    with pytest.raises(CheckpointError, match=problem):
        import_(tmp_path / name, User(list), None)
    assert not (tmp_path / "executed").exists()


def changed(change: Callable[[list[str]], list[str]]) -> Callable[[User], list[str]]:
    return lambda user: change(list(user.itos))


STEPS: dict[str, tuple[dict[str, Any], Callable[[User], list[str]], dict[str, Any], str]] = {
    "normalization": ({"split": SPLITS["words, lower case"]}, changed(list), {"tokenize": "words"}, "--lowercase"),
    "splitting": ({"split": lambda text: text.split(" ")}, changed(list), {}, "--tokenize"),
    "ids around the text": ({}, changed(list), {"around": TextConfig(source_prefix=(BOS,))}, "--source-suffix 2"),
    "ids": ({}, changed(lambda itos: [*itos[:4], *itos[5:]]), {}, "shifted"),
    "unknown words": ({}, changed(lambda itos: [f"{t}x" if t == "and" else t for t in itos]), {}, "tokens.unk"),
    "decoding": ({"joiner": "_"}, changed(list), {}, "special tokens"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_difference_names_its_step(step: str, tmp_path: Path) -> None:
    changes, file, options, remedy = STEPS[step]
    user = User(**{"split": str.split, **changes})
    (tmp_path / "list.json").write_text(json.dumps(file(user)))
    with pytest.raises(ParityError) as caught:
        import_(tmp_path / "list.json", user, user.record(), **options)
    assert caught.value.subject.startswith("text 1 of")
    assert caught.value.problems[0].startswith(f"{step}: ")
    assert remedy in caught.value.remedy


def test_a_tokenizer_with_rules_takes_no_others(tmp_path: Path) -> None:
    user = User(list, "")
    FILES["dict.json"](user, tmp_path / "dict.json")
    made = import_(tmp_path / "dict.json", user, None)
    (tmp_path / "tokenizer.json").write_bytes(made.files["tokenizer.json"])
    with pytest.raises(CheckpointError, match="has its own rules"):
        import_(tmp_path / "tokenizer.json", user, None, lowercase=True)


@pytest.mark.parametrize("split", ["(", r"(?P<a>\w)+", r"\X"])
def test_a_regular_expression_that_python_reads_otherwise_is_refused_at_once(split: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenize"):
        read_options(tmp_path, ImportConfig(tokenize=split), None, None, None)
