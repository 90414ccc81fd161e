"""The programs of docs/languages print the ids and texts of the command line, and refuse invalid input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.conftest import DATES
from tests.importing.huggingface.odd_texts import odd_texts
from tests.languages.conftest import Once, Program, expected
from tfexport.errors import InputError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.model.load import load

pytestmark = pytest.mark.slow


@pytest.fixture(params=["node", "cpp", "rust"])
def program(request: pytest.FixtureRequest) -> Program:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def int8(once: Once) -> Path:
    return once("dates-int8", lambda path: export(path, precision="int8"))


@pytest.fixture(scope="session")
def concat(once: Once) -> Path:
    return once("dates-concat", lambda path: export(path, variants=("concat",)))


def export(path: Path, source: Path = DATES, **config: Any) -> None:
    export_bundle(str(source), path, ExportConfig(**config), verify=False)


@pytest.fixture(scope="session")
def surrounded(once: Once) -> Path:
    """Export a model with a prefix and a suffix around the source, and two tokens before the target."""

    def make(path: Path) -> None:
        model = path.with_name("surrounded-model")
        shutil.copytree(DATES, model)
        shutil.copy(model / "tokenizer.json", model / "target_tokenizer.json")
        words = ["<pad>", "<s>", "</s>", "<unk>", *"the third of March 2026 is a date 日本 naïve </s>x".split()]
        inner = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
        )
        inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        inner.add_special_tokens(words[:3])
        inner.save(str(model / "tokenizer.json"))
        text = {"source_prefix": [1], "source_suffix": [2], "target_prefix": [12, 20], "samples": []}
        (model / "text.json").write_text(json.dumps(text))
        export(path, model)

    return once("surrounded", make)


@pytest.fixture(scope="session")
def unmarked(once: Once) -> Path:
    """Export models/dates with a tokenizer without special tokens, which only the manifest lists."""

    def make(path: Path) -> None:
        model = path.with_name("unmarked-model")
        shutil.copytree(DATES, model)
        data = json.loads((model / "tokenizer.json").read_text())
        (model / "tokenizer.json").write_text(json.dumps({**data, "added_tokens": []}))
        export(path, model, variants=("contrib",))

    return once("unmarked", make)


@pytest.mark.parametrize("options", [["--batch-size", "1"], []], ids=str)
@pytest.mark.parametrize("bundle", ["dates_bundle", "concat", "dates_fp16", "int8", "unmarked"])
def test_outputs_equal_those_of_the_command_line(
    program: Program, bundle: str, options: list[str], dates: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(bundle)
    assert program.answers(path, dates, *options) == expected(path, dates, tmp_path)


def test_odd_texts(program: Program, dates_bundle: Path, tmp_path: Path) -> None:
    tokenizer, texts = load(dates_bundle).tokenizer, []
    assert tokenizer is not None
    for text in [*odd_texts(), "</s> 3.3.2026 <unk>", "\u200f3 במרץ 2026\u200e"]:
        with contextlib.suppress(InputError):
            tokenizer.encode([text])
            texts += [text] if len(text.splitlines()) == 1 else []
    assert len(texts) > 130
    assert program.answers(dates_bundle, texts) == expected(dates_bundle, texts, tmp_path)


def test_tokens_around_the_ids_and_two_tokenizers(program: Program, surrounded: Path, tmp_path: Path) -> None:
    texts = ["the third of March 2026", " a  date\u00a0日本 </s>", "naïve </s>x <pad> is", "date " * 60]
    wanted = expected(surrounded, texts, tmp_path)
    assert all(answer["token_ids"][:2] == [12, 20] for answer in wanted)  # type: ignore[index]
    assert program.answers(surrounded, texts, "--batch-size", "3") == wanted


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest of a bundle; the programs do not check its own hash."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    edit(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def damage_weights(bundle: Path) -> None:
    raw = (bundle / "weights.safetensors").read_bytes()
    (bundle / "weights.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


GENERATION = {"generation.json": {"bytes": 2, "sha256": ""}}
SHORTLIST = {"shortlist.bin": {"bytes": 2, "sha256": ""}}
REFUSED: dict[str, Callable[[Path], None]] = {
    "weights.safetensors is not the file that the manifest names": damage_weights,
    "decoder_contrib.onnx": lambda bundle: (bundle / "decoder_contrib.onnx").unlink(),
    "the bundle is encoder-only": partial(edit_manifest, edit=lambda it: it.update(kind="encoder")),
    "the bundle has a format that is not 1": partial(edit_manifest, edit=lambda it: it.update(format_version=2)),
    "shortlists": partial(edit_manifest, edit=lambda it: it["files"].update(SHORTLIST)),
    "defaults in generation.json": partial(edit_manifest, edit=lambda it: it["files"].update(GENERATION)),
    "the bundle has no tokenizer": partial(edit_manifest, edit=lambda it: it["files"].pop("tokenizer.json")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_invalid_bundles_are_refused(program: Program, reason: str, dates_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(dates_bundle, bundle)
    REFUSED[reason](bundle)
    done = program.run(bundle, "3.3.2026")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["  "], "a text is empty"), (["3" * 70], "64"), (["--batch-size", "0"], "usage: "), (["\U00013000"], "knows no")],
)
def test_invalid_texts_and_options_are_refused(
    program: Program, words: list[str], reason: str, dates_bundle: Path
) -> None:
    done = program.run(dates_bundle, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert reason in done.stderr


def test_the_c_program_refuses_other_tokenizers(cpp: Program, dates_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(dates_bundle, bundle)
    raw = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode()
    (bundle / "tokenizer.json").write_bytes(raw)
    sha256 = hashlib.sha256(raw).hexdigest()
    edit_manifest(bundle, lambda manifest: manifest["files"]["tokenizer.json"].update(sha256=sha256))
    done = cpp.run(bundle, "3.3.2026")
    assert done.stderr.startswith("error: the tokenizer's model is not covered")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_time_is_printed(program: Program, dates_bundle: Path) -> None:
    done = program.run(dates_bundle, "--time", "le 14 juillet 1989", "Dienstag, 3. März 2026")
    assert done.stdout == "1989-07-14\n2026-03-03\n"
    assert done.stderr.startswith("2 texts, 22 tokens, ")
