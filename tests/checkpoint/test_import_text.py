"""The text of an import, from a user's collate function to the bundle's answers: proven where texts were recorded,
announced as unproven where not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers

import tfexport
from tests.models.notebooks import Notebook004
from tfexport.checkpoint.reference.golden import read_golden, record
from tfexport.checkpoint.reference.texts import Texts
from tfexport.cli import main
from tfexport.errors import CheckpointError

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SOURCE = [*SPECIAL, *(f"s{i}" for i in range(4, 31))]
TARGET = [*SPECIAL, *(f"t{i}" for i in range(4, 31))]
GIVEN = [
    "--layout",
    "notebook-004",
    *(f"--set=tokens.{name}={i}" for name, i in (("pad", PAD), ("start", BOS), ("eos", EOS), ("unk", UNK))),
]
NEW_TOKENS = 8


class User:
    """Somebody who trained notebook 004, with a vocabulary of words and a collate function that puts BOS and EOS."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.model = Notebook004().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)  # so that the words depend on what goes in
        rng = np.random.default_rng(0)
        self.inputs = [" ".join(rng.choice(SOURCE[4:], rng.integers(1, 7))) for _ in range(300)]
        self.folder = folder
        torch.save(self.model.state_dict(), folder / "model.pt")
        (folder / "source.txt").write_text("\n".join(SOURCE) + "\n")
        (folder / "target.txt").write_text("\n".join(TARGET) + "\n")

    def to_ids(self, text: str) -> list[int]:
        return [BOS, *(SOURCE.index(word) for word in text.split()), EOS]

    def to_text(self, ids: Sequence[int]) -> str:
        return " ".join(TARGET[i] for i in ids if i not in (PAD, BOS, EOS))

    def answer(self, text: str) -> str:
        source, said = torch.tensor([self.to_ids(text)]), [BOS]
        with torch.no_grad():
            while len(said) <= NEW_TOKENS and (len(said) == 1 or said[-1] != EOS):
                logits = self.model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([said]))
                said.append(int(logits[0, -1].argmax()))
        return self.to_text(said[1:])

    def record(self, name: str, samples: Sequence[str] | None = None, **changes: object) -> Path:
        options = {"to_ids": self.to_ids, "to_text": self.to_text, "start": BOS, "end": EOS, **changes}
        texts = None
        if samples is not None:
            texts = Texts(samples=samples, max_new_tokens=NEW_TOKENS, **options)  # type: ignore[arg-type]
        path = self.folder / f"{name}.golden.safetensors"
        record(self.model, Notebook004.forward, path, source_vocab=31, target_vocab=31, heads=6, texts=texts)
        return path


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    made = User(tmp_path_factory.mktemp("user"))
    made.record("texts", made.inputs[:12])
    made.record("none")
    return made


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result


def import_(user: User, output: Path, golden: str, *more: object, code: int = 0) -> Result:
    given = ["--golden", user.folder / f"{golden}.golden.safetensors", "--tokenizer", user.folder / "source.txt"]
    if "--target-tokenizer" not in more:
        given += ["--target-tokenizer", user.folder / "target.txt"]
    return run("import", user.folder / "model.pt", "--output", output, *GIVEN, *given, *more, code=code)


def export(model: Path, bundle: Path, *more: object, code: int = 0) -> Result:
    return run("onnx", model, "--output", bundle, "--forms", "concat", *more, code=code)


def equal(user: User, bundle: Path) -> int:
    """Count the texts that a bundle answers as the user's own code does."""
    with tfexport.load(bundle) as loaded:
        found = loaded.generate(user.inputs, max_new_tokens=NEW_TOKENS)
    return sum(result.text == user.answer(text) for result, text in zip(found, user.inputs, strict=True))


def test_recorded_texts_set_what_stands_around_them_and_prove_it(user: User, tmp_path: Path) -> None:
    result = import_(user, tmp_path / "m", "texts")
    assert "source prefix 1: so the recorded texts have it" in result.stderr
    assert "source suffix 2: so the recorded texts have it" in result.stderr
    assert "says what your code says of 12 recorded texts" in result.stderr
    assert "tokenizer" not in result.stdout, "nothing about it is unverified"
    assert json.loads((tmp_path / "m" / "certificate.json").read_text())["texts"] == 12
    assert export(tmp_path / "m", tmp_path / "bundle").stdout.endswith("verified, 12 recorded texts\n")
    assert equal(user, tmp_path / "bundle") == 300
    parity = json.loads((tmp_path / "bundle" / "parity.json").read_text())
    rungs = [rung for rung in parity["decodes"] if rung["method"] == "recorded texts"]
    assert [(rung["stage"], rung["exact"], rung["sequences"]) for rung in rungs] == [
        ("eager", 12, 12),
        ("ort concat", 12, 12),
    ]
    said = run("inspect", tmp_path / "bundle").output
    assert "tokenizers of source and target, compared with 12 recorded texts" in said
    assert "source_suffix  2" in said


def test_without_recorded_texts_it_is_announced_and_options_repair_it(user: User, tmp_path: Path) -> None:
    result = import_(user, tmp_path / "m", "none")
    assert "warning: sources do not end with the end token 2" in result.stderr
    assert "--source-suffix 2" in result.stderr
    assert "unverified: the tokenizer: no texts were recorded to compare it with" in result.stdout
    exported = export(tmp_path / "m", tmp_path / "bundle", "--no-verify")
    assert exported.stdout.endswith("not verified, its texts were never compared\n")
    assert "never compared with texts" in run("inspect", tmp_path / "bundle").output
    assert equal(user, tmp_path / "bundle") < 150
    result = import_(user, tmp_path / "repaired", "none", "--source-prefix", "1", "--source-suffix", "2")
    assert "warning" not in result.stderr
    export(tmp_path / "repaired", tmp_path / "again", "--no-verify")
    assert equal(user, tmp_path / "again") == 300


def test_a_bundle_gets_another_tokenizer_or_stays_as_it_was(user: User, tmp_path: Path) -> None:
    import_(user, tmp_path / "m", "none")
    bundle = tmp_path / "bundle"
    export(tmp_path / "m", bundle, "--no-verify")
    (bundle / "engines" / "some").mkdir(parents=True)
    (bundle / "engines" / "some" / "engine.json").write_text("{}")
    run("tokenizer", bundle, "--source-prefix", 1, "--source-suffix", 2)
    assert equal(user, bundle) == 300
    assert (bundle / "engines" / "some" / "engine.json").read_text() == "{}"
    run("tokenizer", bundle, "--source-suffix", "")
    assert equal(user, bundle) < 300
    for options, message in (
        ([], "nothing is to change"),
        (["--source-suffix", 31], "source_suffix has id 31"),
        (["--tokenizer", user.folder / "model.pt"], "tokenizer"),
    ):
        assert message in run("tokenizer", bundle, *options, code=1).stderr
    shutil.rmtree(bundle)
    import_(user, tmp_path / "proven", "texts")
    export(tmp_path / "proven", bundle, "--no-verify")
    before = (bundle / "manifest.json").read_bytes()
    for options in (["--source-suffix", ""], ["--target-tokenizer", user.folder / "source.txt"]):
        assert "text 1 of 12" in run("tokenizer", bundle, *options, code=2).stderr
        assert (bundle / "manifest.json").read_bytes() == before
    word_level(SOURCE).save(str(tmp_path / "same.json"))
    assert "12 recorded texts" in run("tokenizer", bundle, "--tokenizer", tmp_path / "same.json").stdout
    assert equal(user, bundle) == 300


def test_a_bundle_gets_the_tokenizers_of_a_directory(user: User, tmp_path: Path) -> None:
    """Marian's files: two tokenizers, and the end token behind a source, unless an option says otherwise."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    import_(user, tmp_path / "m", "none")
    bundle, folder = tmp_path / "bundle", tmp_path / "marian"
    export(tmp_path / "m", bundle, "--no-verify")
    folder.mkdir()
    for name in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(user.inputs),
            model_prefix=str(folder / name),
            vocab_size=20,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [spm.id_to_piece(i) for i in range(3, spm.get_piece_size())]
    ids = {token: i for i, token in enumerate([*SPECIAL, *reversed(pieces)])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    run("tokenizer", bundle, "--tokenizer", folder)
    with tfexport.load(bundle) as loaded:
        assert loaded.tokenizer is not None
        wanted = [[*(ids[piece] for piece in spm.encode(text, out_type=str)), EOS] for text in user.inputs]
        assert loaded.tokenizer.encode(user.inputs) == wanted
        assert loaded.tokenizer.decode(wanted[0]) == user.inputs[0]
    run("tokenizer", bundle, "--tokenizer", folder, "--source-suffix", "2,2")
    assert "source_suffix  2, 2" in run("inspect", bundle).output
    run("import", user.folder / "model.pt", "--output", tmp_path / "again", *GIVEN, "--heads", 6, "--tokenizer", folder)
    assert (tmp_path / "again" / "target_tokenizer.json").exists()


def test_a_later_checkpoint_keeps_the_ids_of_recorded_texts_alone(user: User, tmp_path: Path) -> None:
    """What the former weights said is not what the new ones say; the tokenizer is compared all the same."""
    state = {name: value * 1.01 for name, value in torch.load(user.folder / "model.pt", weights_only=True).items()}
    torch.save(state, tmp_path / "later.pt")
    golden, lists = user.folder / "texts.golden.safetensors", [user.folder / f"{s}.txt" for s in ("source", "target")]
    given = [*GIVEN, "--golden", golden, "--tokenizer", lists[0], "--target-tokenizer", lists[1]]
    result = run("import", tmp_path / "later.pt", "--output", tmp_path / "m", *given)
    assert "they are not those that the golden was recorded beside" in result.stderr
    samples = json.loads((tmp_path / "m" / "text.json").read_text())["samples"]
    assert [sample["source_ids"] for sample in samples] == [user.to_ids(text) for text in user.inputs[:12]]
    assert all(sample["target_ids"] == [] and sample["output"] is None for sample in samples)


def capitals(folder: Path, inner: Inner) -> Path:
    inner.normalizer = normalizers.Replace("s", "S")
    inner.save(str(folder / "capitals.json"))
    return folder / "capitals.json"


def word_level(words: Sequence[str]) -> Inner:
    inner = Inner(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def shifted(folder: Path) -> Path:
    """Save the vocabulary of somebody who has forgotten one word: each further id is one less."""
    path = folder / "shifted.txt"
    path.write_text("\n".join([*SOURCE[:4], *SOURCE[5:]]) + "\n")
    return path


MISTAKES: dict[str, tuple[Callable[[User, Path], list[object]], str]] = {
    "a dropped suffix": (
        lambda user, folder: ["--source-prefix", 1],
        r"text 1 of 12.*at token \d the tokenizer has the end, your code 2; your ids end with 2.*--source-suffix 2",
    ),
    "a suffix too much": (
        lambda user, folder: ["--source-prefix", 1, "--source-suffix", "2,2"],
        r"the tokenizer's ids end with 2, yours do not",
    ),
    "a swapped tokenizer": (
        lambda user, folder: ["--target-tokenizer", user.folder / "source.txt"],
        r"your code makes 't.*' of the ids .*, the tokenizer 's",
    ),
    "another normalisation": (
        lambda user, folder: ["--tokenizer", capitals(folder, word_level(SOURCE))],
        r"the tokenizer refuses it; give the tokenizer that the model was trained with",
    ),
    "ids that are shifted": (
        lambda user, folder: ["--tokenizer", shifted(folder), "--source-prefix", 1, "--source-suffix", 2],
        r"text 1 of 12",
    ),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_where_texts_were_recorded(
    user: User, tmp_path: Path, options: Callable[[User, Path], list[object]], message: str
) -> None:
    result = import_(user, tmp_path / "m", "texts", *options(user, tmp_path), code=2)
    assert re.search(message, result.stderr.splitlines()[-1]), result.stderr
    assert not (tmp_path / "m").exists()
    result = import_(user, tmp_path / "m", "none", *options(user, tmp_path))
    assert "unverified: the tokenizer: no texts were recorded" in result.stdout


def test_a_mistake_after_the_import_is_found_by_the_export(user: User, tmp_path: Path) -> None:
    import_(user, tmp_path / "m", "texts")
    text = json.loads((tmp_path / "m" / "text.json").read_text())
    (tmp_path / "m" / "text.json").write_text(json.dumps({**text, "source_suffix": []}))
    said = export(tmp_path / "m", tmp_path / "b", code=2).stderr
    assert "eager, recorded texts: 12 of 12 sequences differ; first: text 0: its ids are" in said
    (tmp_path / "m" / "text.json").write_text(json.dumps({**text, "suffix": [2]}))
    assert "text.json: unknown key suffix" in export(tmp_path / "m", tmp_path / "b", code=1).stderr


def test_a_golden_keeps_texts_exactly(user: User) -> None:
    text = read_golden(user.folder / "texts.golden.safetensors").text
    assert text is not None
    assert [sample.text for sample in text.samples] == user.inputs[:12]
    for sample in text.samples:
        assert list(sample.source_ids) == user.to_ids(sample.text)
        assert sample.output == user.answer(sample.text)
    assert read_golden(user.folder / "none.golden.safetensors").text is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": None, "to_text": None}, "to_text is missing.*start is missing"),
        ({"to_ids": lambda text: [99]}, r"text 1: CheckpointError: to_ids gives \[99\]"),
        ({"to_ids": SOURCE.index}, "text 1: .*text 2: "),
    ],
    ids=["missing", "range", "raises"],
)
def test_what_cannot_be_recorded_is_said(user: User, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        user.record("bad", user.inputs[:2], **changes)
    assert not (user.folder / "bad.golden.safetensors").exists()
