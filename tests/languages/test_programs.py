"""The programs of docs/languages beside the command line: the same ids and texts, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.conftest import DATES
from tests.importing.huggingface.odd_texts import odd_texts
from tests.languages.conftest import Once, Program, said
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
    config = ExportConfig(precision="int8")
    return once("dates-int8", lambda path: export_bundle(str(DATES), path, config, verify=False))


@pytest.fixture(scope="session")
def concat(once: Once) -> Path:
    config = ExportConfig(forms=("concat",))
    return once("dates-concat", lambda path: export_bundle(str(DATES), path, config, verify=False))


@pytest.fixture(scope="session")
def surrounded(once: Once) -> Path:
    """Export a model whose sources are words between two ids, and whose targets begin with two tokens."""

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
        export_bundle(str(model), path, ExportConfig(), verify=False)

    return once("surrounded", make)


@pytest.fixture(scope="session")
def unmarked(once: Once) -> Path:
    """Export models/dates with a tokenizer that does not say which tokens are special: the manifest does."""

    def make(path: Path) -> None:
        model = path.with_name("unmarked-model")
        shutil.copytree(DATES, model)
        data = json.loads((model / "tokenizer.json").read_text())
        (model / "tokenizer.json").write_text(json.dumps({**data, "added_tokens": []}))
        export_bundle(str(model), path, ExportConfig(forms=("contrib",)), verify=False)

    return once("unmarked", make)


def odd(bundle: Path) -> list[str]:
    """Return odd texts of one line that the model takes."""
    model, taken = load(bundle), []
    for text in [*odd_texts(), "</s> 3.3.2026 <unk>", "\u200f3 במרץ 2026\u200e"]:
        try:
            assert model.tokenizer is not None
            model.tokenizer.encode([text])
        except InputError:
            continue
        taken += [text] if len(text.splitlines()) == 1 else []
    return taken


@pytest.mark.parametrize("batch_size", ["1", "32"])
def test_dates_are_read_as_the_command_line_does(
    program: Program, batch_size: str, dates: list[str], dates_bundle: Path, tmp_path: Path
) -> None:
    assert len(dates) == 240
    expected = said(dates_bundle, dates, tmp_path)
    assert program.answers(dates_bundle, dates, "--batch-size", batch_size) == expected


@pytest.mark.parametrize("bundle", ["concat", "dates_fp16", "int8", "unmarked"])
def test_every_form_and_precision(
    program: Program, bundle: str, dates: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(bundle)
    assert program.answers(path, dates) == said(path, dates, tmp_path)


def test_odd_texts(program: Program, dates_bundle: Path, tmp_path: Path) -> None:
    texts = odd(dates_bundle)
    assert len(texts) > 130
    assert program.answers(dates_bundle, texts) == said(dates_bundle, texts, tmp_path)


def test_what_surrounds_the_ids_and_two_tokenizers(program: Program, surrounded: Path, tmp_path: Path) -> None:
    texts = ["the third of March 2026", " a  date\u00a0日本 </s>", "naïve </s>x <pad> is", "date " * 60]
    expected = said(surrounded, texts, tmp_path)
    assert all(answer["token_ids"][:2] == [12, 20] for answer in expected)  # type: ignore[index]
    assert program.answers(surrounded, texts, "--batch-size", "3") == expected


@contextmanager
def manifest_of(bundle: Path) -> Iterator[dict[str, Any]]:
    """Edit the manifest of a bundle, whose own sum the programs leave to tfexport."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    yield manifest
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def damaged_weights(bundle: Path) -> None:
    raw = bytearray((bundle / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (bundle / "weights.safetensors").write_bytes(raw)


def missing_graph(bundle: Path) -> None:
    (bundle / "decoder_contrib.onnx").unlink()


def encoder_alone(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["kind"] = "encoder"


def later_format(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["format_version"] = 2


def own_defaults(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["files"]["generation.json"] = {"bytes": 2, "sha256": ""}


def no_tokenizer(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        del manifest["files"]["tokenizer.json"]


REFUSED = {
    damaged_weights: "weights.safetensors is not the file that the manifest names",
    missing_graph: "decoder_contrib.onnx",
    encoder_alone: "the bundle is an encoder alone",
    later_format: "the bundle has a format that is not 1",
    own_defaults: "the bundle has defaults in generation.json",
    no_tokenizer: "the bundle has no tokenizer",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_what_is_refused(program: Program, edit: Callable[[Path], None], dates_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(dates_bundle, bundle)
    edit(bundle)
    done = program.run(bundle, "3.3.2026")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert REFUSED[edit] in done.stderr


WRONG = [
    (["  "], "a text is empty"),
    (["3" * 70], "64"),
    (["--batch-size", "0"], "usage: "),
    (["\U00013000"], "knows no"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG)
def test_texts_and_options_that_are_refused(
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
    with manifest_of(bundle) as manifest:
        manifest["files"]["tokenizer.json"]["sha256"] = hashlib.sha256(raw).hexdigest()
    done = cpp.run(bundle, "3.3.2026")
    assert done.stderr.startswith("error: the tokenizer's model is not covered")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_time_is_told(program: Program, dates_bundle: Path) -> None:
    done = program.run(dates_bundle, "--time", "le 14 juillet 1989", "Dienstag, 3. März 2026")
    assert done.stdout == "1989-07-14\n2026-03-03\n"
    assert done.stderr.startswith("2 texts, 22 tokens, ")
