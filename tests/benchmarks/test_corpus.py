"""The corpus of uneven lengths: a model that ends each text where its source asks for it, decoded beside itself."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

import corpus as command
import lengths
import pytest
from click.testing import CliRunner
from lengths import LONGEST, SHORTEST, corpus
from timing import Effort

from tfexport.decode.offline import decode
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession

NAME = f"tiny{lengths.SUFFIX}"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return lengths.build("tiny")


@pytest.fixture(scope="module")
def work(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both sides find the same bundle."""
    folder = tmp_path_factory.mktemp("work") / NAME
    save_model(model, folder / "weights")
    export_bundle(str(folder / "weights"), folder / "bundle-fp32", ExportConfig(variants=("concat",)), verify=False)
    (folder / "revision-fp32").symlink_to(folder / "bundle-fp32")
    return folder.parent


def test_lengths_are_log_normal_and_the_same_on_every_call() -> None:
    texts = corpus(500, 1_000)
    assert texts == corpus(500, 1_000)
    for found in ([len(text.source) for text in texts], [text.length for text in texts]):
        assert 26 <= statistics.median(found) <= 30
        assert SHORTEST <= min(found) < 10
        assert 100 < max(found) <= LONGEST


def test_each_text_ends_at_the_length_of_its_source(model: Transformer) -> None:
    texts = corpus(40, 1_000)
    config = DecodeConfig(max_new_tokens=LONGEST)
    found = decode(EagerSession(model), [text.source for text in texts], config, batch_size=len(texts))
    assert [len(best[0].token_ids) for best in found] == [text.length for text in texts]
    assert {best[0].finish_reason for best in found} == {"eos"}
    assert len({best[0].token_ids[0] for best in found}) > 1


@pytest.mark.slow
def test_the_table_of_a_bundle_compared_with_itself(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE_S", 0.0)
    monkeypatch.setattr(command, "TURN", Effort(warm_up=0))
    words = ["--beside", sys.executable, "--model", "tiny", "--texts", "4", "--rounds", "2", "--work", str(work)]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 0, done.output
    tokens = sum(text.length for text in corpus(4, 1_000))
    assert re.search(rf"\| tiny \| 4 \| {tokens} \| [\d,]+ \| [\d,]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \|", done.stdout)
