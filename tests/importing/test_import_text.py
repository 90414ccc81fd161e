"""The text of an import, from a user's collate function to the bundle's answers: proven where texts were recorded,
announced as unproven where not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from click.testing import Result

import tfexport
from models.from_scratch.notebook_004 import Notebook004
from tests.command import ran
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.manifest import Manifest
from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.reference.outputs import read_reference, record_reference, write_reference
from tfexport.importing.reference.texts import RecordedTexts
from tfexport.model.load import load_tokenizer
from tfexport.runtime.eager import EagerSession, load_eager_model
from tfexport.text.config import TextConfig, TextSample
from tfexport.verify._decodes import Stage, recorded_texts

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
TEXTS = 100


class User:
    """Somebody who trained notebook 004, with a vocabulary of words and a collate function that puts BOS and EOS."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.model = Notebook004(layers=1).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)  # so that the words depend on what goes in
        rng = np.random.default_rng(0)
        self.inputs = [" ".join(rng.choice(SOURCE[4:], rng.integers(1, 7))) for _ in range(TEXTS)]
        self.folder = folder
        torch.save(self.model.state_dict(), folder / "model.pt")
        (folder / "source.txt").write_text("\n".join(SOURCE) + "\n")
        (folder / "target.txt").write_text("\n".join(TARGET) + "\n")
        self.answers = list(map(self.answer, self.inputs))

    def to_ids(self, text: str) -> list[int]:
        return [BOS, *(SOURCE.index(word) for word in text.split()), EOS]

    def to_text(self, ids: Sequence[int]) -> str:
        return " ".join(TARGET[i] for i in ids if i not in (PAD, BOS, EOS))

    def answer(self, text: str) -> str:
        source, token_ids = torch.tensor([self.to_ids(text)]), [BOS]
        with torch.no_grad():
            while len(token_ids) <= NEW_TOKENS and (len(token_ids) == 1 or token_ids[-1] != EOS):
                logits = self.model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([token_ids]))
                token_ids.append(int(logits[0, -1].argmax()))
        return self.to_text(token_ids[1:])

    def record(self, name: str, samples: Sequence[str] | None = None, **changes: object) -> Path:
        options = {"to_ids": self.to_ids, "to_text": self.to_text, "start": BOS, "end": EOS, **changes}
        texts = None
        if samples is not None:
            texts = RecordedTexts(samples=samples, max_new_tokens=NEW_TOKENS, **options)  # type: ignore[arg-type]
        path = self.folder / f"{name}.golden.safetensors"
        record_reference(self.model, Notebook004.forward, path, source_vocab=31, target_vocab=31, heads=6, texts=texts)
        return path


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    made = User(tmp_path_factory.mktemp("user"))
    made.record("texts", made.inputs[:12])
    made.record("none")
    return made


def import_(user: User, output: Path, reference: str, *more: object, code: int = 0) -> Result:
    given = ["--reference", user.folder / f"{reference}.golden.safetensors", "--tokenizer", user.folder / "source.txt"]
    if "--target-tokenizer" not in more:
        given += ["--target-tokenizer", user.folder / "target.txt"]
    return ran("import", user.folder / "model.pt", "--output", output, *GIVEN, *given, *more, code=code)


def export(model: Path, bundle: Path, *more: object, code: int = 0) -> Result:
    return ran("onnx", model, "--output", bundle, "--variants", "concat", *more, code=code)


def equal(user: User, bundle: Path) -> int:
    """Count the texts that a bundle answers as the user's own code does."""
    with tfexport.load(bundle) as loaded:
        found = loaded.generate(user.inputs, max_new_tokens=NEW_TOKENS)
    return sum(result.text == answer for result, answer in zip(found, user.answers, strict=True))


class Made(NamedTuple):
    """A model, what its import said, and the bundle of it; neither is to be changed."""

    model: Path
    imported: Result
    bundle: Path
    exported: Result


NAMED = {"name": "Mine", "version": "1.2", "license": "MIT", "date": "2026-01-31"}


@pytest.fixture(scope="module")
def proven(user: User) -> Made:
    """With recorded texts."""
    model, bundle = user.folder / "proven", user.folder / "proven-bundle"
    return Made(model, import_(user, model, "texts"), bundle, export(model, bundle))


@pytest.fixture(scope="module")
def unproven(user: User) -> Made:
    """Without, and with an identity."""
    model, bundle = user.folder / "unproven", user.folder / "unproven-bundle"
    named = [f"--{'model-version' if name == 'version' else name}={value}" for name, value in NAMED.items()]
    return Made(model, import_(user, model, "none"), bundle, export(model, bundle, "--no-verify", *named))


@pytest.fixture
def bundle(unproven: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unproven.bundle, tmp_path / "bundle"))


def test_recorded_texts_set_and_prove_their_special_tokens(user: User, proven: Made) -> None:
    result = proven.imported
    assert "source prefix 1: as in the recorded texts" in result.stderr
    assert "source suffix 2: as in the recorded texts" in result.stderr
    assert "for 12 recorded texts" in result.stderr
    assert "tokenizer" not in result.stdout, "nothing about it is unverified"
    assert json.loads((proven.model / "certificate.json").read_text())["texts"] == 12
    assert proven.exported.stdout.splitlines()[0].endswith("fp32, 12 recorded texts")
    assert equal(user, proven.bundle) == TEXTS
    parity = json.loads((proven.bundle / "parity.json").read_text())
    checks = [check for check in parity["decodes"] if check["method"] == "recorded texts"]
    assert [(check["stage"], check["exact"], check["sequences"]) for check in checks] == [
        ("eager", 12, 12),
        ("ort concat", 12, 12),
    ]
    printed = ran("inspect", proven.bundle).output
    assert "tokenizers of source and target, compared with 12 recorded texts" in printed
    assert "source_suffix  2" in printed


def test_provenance_of_the_weights_is_passed_on(user: User, unproven: Made, bundle: Path) -> None:
    """Into the certificate, from there into the bundle, and stays when that gets another tokenizer."""
    content = (user.folder / "model.pt").read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reference = hashlib.sha256((user.folder / "none.golden.safetensors").read_bytes()).hexdigest()
    assert f"read model.pt: {len(content)} bytes, sha256 {entry['sha256']}" in unproven.imported.stderr
    assert f"sha256 {reference}" in unproven.imported.stderr
    certificate = json.loads((unproven.model / "certificate.json").read_text())
    assert (certificate["checkpoint"], certificate["reference"]["sha256"]) == ({"model.pt": entry}, reference)
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["checkpoint"], manifest["identity"]) == ({"model.pt": entry}, NAMED)
    assert manifest["provenance"] == {
        **Manifest.from_bytes((bundle / "manifest.json").read_bytes()).proof.to_dict(),
        **{name: certificate[name] for name in ("layout", "proven", "author", "origin")},
        **{
            f"{file.split('.')[0]}_sha256": hashlib.sha256((unproven.model / file).read_bytes()).hexdigest()
            for file in ("certificate.json", "layout.yaml")
        },
    }
    for path in (unproven.model, bundle):
        assert f"  imported from model.pt, sha256 {entry['sha256']}\n" in ran("inspect", path).output


def test_without_recorded_texts_special_tokens_are_reported_and_can_be_set(
    user: User, proven: Made, unproven: Made, tmp_path: Path
) -> None:
    assert "warning: sources do not end with 2;" in unproven.imported.stderr
    assert "--source-suffix 2" in unproven.imported.stderr
    assert "unverified: the tokenizer: no texts were recorded to compare it with" in unproven.imported.stdout
    first, second = unproven.exported.stdout.splitlines()
    assert first.endswith("fp32, its texts were never compared")
    assert second.startswith("unproven: "), "the export was not verified"
    assert "not compared with texts" in ran("inspect", unproven.bundle).output
    assert equal(user, unproven.bundle) < TEXTS / 2
    result = import_(user, tmp_path / "repaired", "none", "--source-prefix", "1", "--source-suffix", "2")
    assert "warning" not in result.stderr
    repaired, right = (json.loads((path / "text.json").read_text()) for path in (tmp_path / "repaired", proven.model))
    assert repaired == {**right, "samples": [], "end": None}
    for name in ("model.safetensors", "tokenizer.json", "target_tokenizer.json"):
        assert (tmp_path / "repaired" / name).read_bytes() == (proven.model / name).read_bytes()


def test_a_difference_ends_the_import(user: User, tmp_path: Path) -> None:
    result = import_(user, tmp_path / "m", "texts", "--target-tokenizer", user.folder / "source.txt", code=2)
    assert "text 1 of 12, " in result.stderr.splitlines()[-1]
    assert not (tmp_path / "m").exists()


def test_the_export_finds_a_tokenizer_changed_after_the_import(proven: Made, tmp_path: Path) -> None:
    shutil.copytree(proven.model, tmp_path / "m")
    text = json.loads((tmp_path / "m" / "text.json").read_text())
    (tmp_path / "m" / "text.json").write_text(json.dumps({**text, "source_suffix": []}))
    printed = export(tmp_path / "m", tmp_path / "b", code=2).stderr
    assert "eager, recorded texts: 12 of 12 sequences differ; first: text 0: its ids are" in printed
    (tmp_path / "m" / "text.json").write_text(json.dumps({**text, "suffix": [2]}))
    assert "text.json: unknown key suffix" in export(tmp_path / "m", tmp_path / "b", code=1).stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": None, "to_text": None}, "to_text is missing.*start is missing"),
        ({"to_ids": lambda text: [99]}, r"text 1: CheckpointError: to_ids gives \[99\]"),
        ({"to_ids": SOURCE.index}, "text 1: .*text 2: "),
    ],
    ids=["missing", "range", "raises"],
)
def test_invalid_texts_are_not_recorded(user: User, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        user.record("bad", user.inputs[:2], **changes)
    assert not (user.folder / "bad.golden.safetensors").exists()


@pytest.mark.parametrize("is_stored", [True, False], ids=["end stored", "older file"])
def test_a_text_that_does_not_end_as_recorded_is_different(is_stored: bool, proven: Made) -> None:
    """With the end and padding ids swapped, the same tokens are followed by others."""
    bundle = open_bundle(proven.bundle)
    spec, model, tokenizer = bundle.manifest.spec, load_eager_model(bundle), load_tokenizer(bundle)
    assert tokenizer is not None
    assert tokenizer.text.end == EOS
    if not is_stored:
        tokenizer.text = replace(tokenizer.text, end=None)
    swapped = replace(spec, tokens=replace(spec.tokens, pad=EOS, eos=PAD))
    eager = EagerSession(model)
    right, wrong = (
        recorded_texts(Stage("eager", EagerSession(model, one), 0.0), tokenizer, eager) for one in (spec, swapped)
    )
    assert (right.passed, right.exact) == (True, 12)
    assert not wrong.passed


def test_swapped_ids_end_the_import(user: User, tmp_path: Path) -> None:
    """Whether they are stored, or only the recorded texts show them."""
    reference = read_reference(user.folder / "texts.golden.safetensors")
    assert (reference.tokens, reference.text and reference.text.end) == ({"start": BOS, "eos": EOS}, EOS)
    assert reference.text is not None
    write_reference(replace(reference, tokens={}, text=replace(reference.text, end=None)), tmp_path / "older")
    swapped = ImportConfig(layout="notebook-004", settings=("tokens.pad=2", "tokens.start=1", "tokens.eos=0"))
    for path in (user.folder / "texts.golden.safetensors", tmp_path / "older"):
        with pytest.raises(ConfigError, match=r"tokens\.eos is 0, the reference outputs were recorded with 2"):
            import_checkpoint(user.folder / "model.pt", tmp_path / "new", swapped, reference=path)


def test_sources_that_contain_the_padding_id_end_the_import(user: User, tmp_path: Path) -> None:
    """The end id of the sources is given as padding."""
    wrong = ImportConfig(layout="notebook-004", settings=("tokens.pad=1", "tokens.unk=3"))
    with pytest.raises(ParityError, match="12 of 12 recorded texts have the padding id 1"):
        import_checkpoint(
            user.folder / "model.pt",
            tmp_path / "new",
            wrong,
            reference=user.folder / "texts.golden.safetensors",
            tokenizer=user.folder / "source.txt",
            target_tokenizer=user.folder / "target.txt",
        )


def test_an_older_file_shows_the_end_by_targets_of_unequal_length() -> None:
    def samples(*targets: tuple[int, ...]) -> tuple[TextSample, ...]:
        return tuple(TextSample(text="a", source_ids=(5,), target_ids=ids, output="b") for ids in targets)

    text = TextConfig(samples=samples((5, 2), (5, 6, 7), (6, 7, 2)))
    assert text.recorded_end == 2
    assert [text.is_ended(sample, 0) for sample in text.samples] == [True, False, False]
    assert [replace(text, end=2).is_ended(sample, 0) for sample in text.samples] == [True, False, True]
    assert TextConfig(samples=samples((5, 6, 7))).recorded_end is None
