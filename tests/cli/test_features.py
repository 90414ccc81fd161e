"""Commands on bundles that read audio, features or images."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import tfexport
from tests.command import ran, refuses, run
from tests.conftest import Once
from tests.features.signals import wav
from tests.runtime.exported import sense_graphs
from tests.stranger import senses
from tests.test_inputs import samples
from tfexport.bench.config import BenchConfig, resolve
from tfexport.bundle.card import render_card
from tfexport.errors import ConfigError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.tensorrt.store import engine_names, open_engine


def test_the_blocks_of_the_card_run(speech_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (speech_bundle / "README.md").read_text(encoding="utf-8")
    assert "Longest source: 200 positions" in card
    (tmp_path / "recording.wav").write_bytes(wav(samples()))
    (tmp_path / "b").symlink_to(speech_bundle)
    monkeypatch.chdir(tmp_path)
    command, program, _ = re.findall(r"^```\w+\n(.+?)\n```$", card, re.MULTILINE | re.DOTALL)
    assert ran(*(word.replace(".", "b") if word == "." else word for word in shlex.split(command)[1:])).stdout
    exec(program.replace('"."', '"b"'), {})


@pytest.mark.parametrize("kind", ["features", "image", "states"])
def test_a_card_without_a_processor_gives_an_array(
    kind: str, once: Once, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = sense_graphs(kind, once).bundle
    assert bundle is not None
    card = render_card(bundle.manifest, has_tokenizer=False)
    monkeypatch.chdir(bundle.path)
    exec(re.findall(r"^```python\n(.+?)\n```$", card, re.MULTILINE | re.DOTALL)[0], {})
    assert ("[[" if kind == "states" else "token_ids=") in capsys.readouterr().out


def test_inspect_lists_what_the_encoder_reads(once: Once) -> None:
    features, image = (sense_graphs(kind, once).bundle for kind in ("features", "image"))
    assert features
    assert image
    assert re.search(r"^Features\n  dim +6\n  convolutions ", ran("inspect", features.path).stdout, re.MULTILINE)
    assert re.search(r"^Image\n  channels +3\n  height +6\n", ran("inspect", image.path).stdout, re.MULTILINE)


@pytest.mark.parametrize("scenario", ["single", "server"])
def test_bench_draws_features(scenario: str, speech_bundle: Path, tmp_path: Path) -> None:
    rate = ("--rate", 30, "--slots", 2) if scenario == "server" else ()
    sizes = ("--source-length", 7, "--target-length", 4, "--duration", 0.1, "--processes", 1)
    run("bench", speech_bundle, "--scenario", scenario, *rate, *sizes, "--no-verify", "--json", tmp_path / "report")
    (cell,) = json.loads((tmp_path / "report").read_text())["cells"]
    assert cell["metrics"]["input_sequence_length"]["value"] == 7
    assert cell["metrics"]["output_sequence_length"]["value"] == 4


def test_bench_takes_files_and_no_url(speech_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(samples()))
    (tmp_path / "list").write_text(f"{tmp_path / 'a.wav'}\n")
    effort = ("--target-length", 4, "--duration", 0.1, "--processes", 1, "--no-verify", "--json", tmp_path / "report")
    run("bench", speech_bundle, "--input", tmp_path / "list", *effort)
    assert json.loads((tmp_path / "report").read_text())["cells"][0]["metrics"]["input_sequence_length"]["value"] == 24
    server = ("--url", "http://127.0.0.1:9", "--scenario", "server", "--rate", 1)
    refuses(run("bench", speech_bundle, *server), "reads features")


def test_a_fixed_number_of_positions_is_that_of_the_bench() -> None:
    spec = senses.OWN["fixed"]().spec
    assert resolve(BenchConfig(), spec, has_texts=False).source_length == (8,)
    with pytest.raises(ConfigError) as caught:
        resolve(BenchConfig(source_length=(8, 9)), spec, has_texts=False)
    assert len(caught.value.problems) == 1


def test_bulk_reads_the_files_that_rows_name(speech_bundle: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.wav" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(wav(samples(0.3 + number, number)))
    (tmp_path / "in.txt").write_text("".join(f"{path}\n" for path in paths))
    files = ("--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt")
    ran("generate", speech_bundle, *files, "--max-new-tokens", 5)
    with tfexport.load(speech_bundle) as model:
        expected = [result.text for result in model.generate(paths, max_new_tokens=5)]
    assert (tmp_path / "out.txt").read_text().splitlines() == expected
    paths[1].write_bytes(b"no audio")
    assert "row 2: " in ran("generate", speech_bundle, *files, "--batch-size", 1, code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["features", "image"])
@pytest.mark.parametrize(("precision", "variant"), [("fp16", "static"), ("int8", "contrib"), ("int4", "contrib")])
def test_narrower_weights_keep_inputs_and_convolutions_in_float(
    kind: str, precision: str, variant: str, tmp_path: Path
) -> None:
    config = ExportConfig(precision=precision, variants=(variant,))
    bundle = export_bundle(senses.OWN[kind](), tmp_path / "b", config)  # verified
    encoder = next(graph for name, graph in bundle.manifest.graphs.items() if name.startswith("encoder"))
    assert encoder.inputs[0].dtype == "float32"
    found = ran("inspect", tmp_path / "b" / encoder.file).stdout
    assert re.search(r"^  Conv ", found, re.MULTILINE)
    assert not re.search(r"^  ConvInteger ", found, re.MULTILINE)
    kernel = np.zeros((30, senses.DIM) if kind == "features" else (3, 6, 8), np.float32)
    with tfexport.load(tmp_path / "b") as model:
        assert model.generate_ids([kernel], max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["features", "image", "states"])
def test_engines_of_a_module_are_built(kind: str, once: Once, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    bundle = sense_graphs(kind, once).bundle
    assert bundle is not None
    shutil.copytree(bundle.path, tmp_path / "b")
    ran("trt", tmp_path / "b", "--target", "tensorrt-rtx", "--compute-capability", "8.9", "--max-batch", 2)
    (name,) = engine_names(tmp_path / "b")
    plans = open_engine(tmp_path / "b", name).manifest.plans
    assert plans["encoder"].layers["CONVOLUTION"] == (1 if kind == "image" else 2)
    if kind != "states":
        assert plans["decoder_static"].layers["KV_CACHE_UPDATE"] == 2 * senses.LAYERS
