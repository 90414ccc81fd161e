"""The loop graph says what the runtime says by the same defaults, or the export says what it cannot do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import tfexport
from tests.conftest import DATES
from tests.export.looped import add_loop
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.cli import main
from tfexport.contract import DECODER, LOOP, Form, LoopSettings, ModelSpec, TokenIds
from tfexport.errors import BundleError, ConfigError, GraphError
from tfexport.export.loop.settings import loop_settings
from tfexport.export.loop.write import write_loop
from tfexport.generation import GenerationDefaults
from tfexport.retokenize import TokenizerConfig, replace_tokenizer
from tfexport.runtime.ort.loop import OrtLoop
from tfexport.runtime.session import pad_right

TEXTS = ["Dienstag, 3. März 2026", "le 14 juillet 1989", "2088년 9월 17일 금요일", "3/4/2011"]
FORMS: tuple[Form, ...] = ("concat", "contrib")


@pytest.fixture(scope="session")
def dates(dates_bundle: Path) -> tfexport.Model:
    return tfexport.load(dates_bundle, threads=1)


@pytest.fixture(scope="session")
def sources(dates: tfexport.Model) -> list[list[int]]:
    """Return dates, which end early, and noise, which ends at any length."""
    assert dates.tokenizer is not None
    rng = np.random.default_rng(0)
    noise = [rng.integers(4, dates.spec.source_vocab, length).tolist() for length in (1, 7, 30)]
    return [*dates.tokenizer.encode(TEXTS), *noise]


@pytest.fixture
def loop_of(dates_bundle: Path, tmp_path: Path) -> Callable[[Form, LoopSettings], OrtLoop]:
    """Return a function that writes a loop graph of one form of the dates and opens it."""

    def make(form: Form, settings: LoopSettings) -> OrtLoop:
        manifest = open_bundle(dates_bundle).manifest
        graphs = {name: graph for name, graph in manifest.graphs.items() if name == DECODER[form] or "enc" in name}
        shutil.copytree(dates_bundle, tmp_path, dirs_exist_ok=True)
        entry = write_loop(tmp_path, graphs, manifest.spec, settings)
        return OrtLoop({LOOP: tmp_path / entry.file}, manifest.spec, threads=1)

    return make


# 13 is "0" and 14 "1", 11 is "-".
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several ends": {"eos_token_id": (2, 13)},
    "a limit": {"max_new_tokens": 5},
    "a limit with the start token": {"max_length": 8, "num_beams": 4, "length_penalty": 0.5},
    "no early end": {"min_new_tokens": 12, "eos_token_id": (2, 11)},
    "no early end, with the start token": {"min_length": 13},
    "suppressed": {"suppress_tokens": (13, 14), "bad_words_ids": ((11,), (2,))},
    "suppressed until late": {"suppress_tokens": (13,), "min_new_tokens": 14},
    "another start": {"decoder_start_token_id": 14},
    "forced": {"forced_bos_token_id": 20, "forced_eos_token_id": (17, 16), "max_new_tokens": 6},
    "forced to one token": {"forced_bos_token_id": 20, "forced_eos_token_id": 17, "max_new_tokens": 1},
    "forced to end": {"forced_bos_token_id": 20, "eos_token_id": (2, 20)},
    "samples": {"do_sample": True, "temperature": 2.0, "replace_unknowns": True},
}


CASES = [
    *(("concat", (), name) for name in SETTINGS),
    *(("contrib", (15, 13), name) for name in SETTINGS),
    ("concat", (15, 13), "plain"),
    ("contrib", (), "plain"),
]


@pytest.mark.parametrize(("form", "prefix", "name"), CASES)
def test_it_says_what_greedy_search_says(
    form: Form, prefix: tuple[int, ...], name: str, dates: tfexport.Model, sources: list[list[int]], loop_of: Any
) -> None:
    defaults = GenerationDefaults(**SETTINGS[name])
    settings = loop_settings(dates.spec, defaults, prefix)
    loop, greedy = loop_of(form, settings), defaults.overridden({"num_beams": 1, "do_sample": False})
    expected = dates.generate_ids(sources, prefixes=[prefix] * len(sources), config=greedy)
    got = loop.generate(*pad_right(sources, dates.spec.tokens.pad))
    assert (got.ids.dtype, got.lengths.dtype, got.log_probs.dtype) == (np.int64, np.int64, np.float32)
    assert got.ids.shape == (len(sources), got.lengths.max())
    for row, (best,) in enumerate(expected):
        length = got.lengths[row]
        assert tuple(got.ids[row, :length]) == best.token_ids
        assert (got.ids[row, length:] == dates.spec.tokens.pad).all()
        assert got.log_probs[row] == pytest.approx(best.log_prob, abs=2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_caller_s_limit_goes_before_that_of_the_bundle(
    form: Form, dates: tfexport.Model, sources: list[list[int]], loop_of: Any
) -> None:
    loop = loop_of(form, loop_settings(dates.spec, GenerationDefaults(max_new_tokens=3, suppress_tokens=(2,))))
    batch = pad_right(sources, dates.spec.tokens.pad)
    assert {limit: loop.generate(*batch, limit).ids.shape[1] for limit in (0, -1, 1, 7, 10**12)} == {
        0: 3,
        -1: 3,
        1: 1,
        7: 7,
        10**12: dates.spec.max_target_length,
    }


def test_rows_do_not_depend_on_each_other(dates: tfexport.Model, sources: list[list[int]], loop_of: Any) -> None:
    loop = loop_of("concat", loop_settings(dates.spec, GenerationDefaults()))
    together = loop.generate(*pad_right(sources, dates.spec.tokens.pad))
    for row, source in enumerate(sources):
        alone = loop.generate(*pad_right([source], 0))
        assert alone.ids[0].tolist() == together.ids[row, : together.lengths[row]].tolist()
        assert alone.log_probs[0] == pytest.approx(together.log_probs[row], abs=2e-4)


def test_every_weight_is_there_once_and_none_in_the_body(dates_loop: Path) -> None:
    def places(name: str) -> list[tuple[str, ...]]:
        weights = onnx.load(dates_loop / name, load_external_data=False).graph.initializer
        return [tuple(entry.value for entry in weight.external_data) for weight in weights if weight.external_data]

    graph = onnx.load(dates_loop / "loop.onnx", load_external_data=False).graph
    assert sorted(places("loop.onnx")) == sorted({*places("encoder.onnx"), *places("decoder.onnx")})
    (loop,) = (node for node in graph.node if node.op_type == "Loop")
    assert not loop.attribute[0].g.initializer
    sizes = {file.name: file.stat().st_size for file in dates_loop.iterdir()}
    assert sizes["loop.onnx"] < 0.05 * sizes["weights.safetensors"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 1.2}, "generation.json has repetition_penalty 1.2, which the loop graph cannot do"),
        ({"no_repeat_ngram_size": 3}, "has no_repeat_ngram_size 3"),
        ({"encoder_no_repeat_ngram_size": 2}, "has encoder_no_repeat_ngram_size 2"),
        ({"stop_strings": ("\n",)}, r"has stop_strings ('\n',)"),
        ({"max_time": 1.5}, "has max_time 1.5"),
        ({"bad_words_ids": ((3,), (4, 5))}, "bad_words_ids of several tokens, which the loop graph cannot do"),
        ({"forced_bos_token_id": 5, "bad_words_ids": ((5,),)}, "forced_first 5 is suppressed"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(given: dict[str, Any], message: str, dates: tfexport.Model) -> None:
    with pytest.raises(ConfigError) as caught:
        loop_settings(dates.spec, GenerationDefaults(**given))
    assert str(caught.value).startswith("loop: ")
    assert message in str(caught.value)


def test_everything_that_it_cannot_do_is_named_at_once(dates: tfexport.Model) -> None:
    with pytest.raises(ConfigError, match=r"repetition_penalty.*; .*max_time"):
        loop_settings(dates.spec, GenerationDefaults(repetition_penalty=2.0, max_time=1.0))


def test_what_has_no_decoder_or_no_form_for_it_is_refused(dates_bundle: Path, tmp_path: Path) -> None:
    tokens = TokenIds(pad=0, start=1, eos=2)
    alone = ModelSpec(d_model=8, source_vocab=9, max_source_length=9, tokens=tokens, precision="fp32")
    with pytest.raises(ConfigError, match="an encoder alone generates nothing; leave loop out"):
        loop_settings(alone, GenerationDefaults())
    done = CliRunner().invoke(
        main, ["onnx", str(DATES), "--output", str(tmp_path / "b"), "--loop", "--forms", "static"]
    )
    assert done.exit_code == 1
    assert "loop is made of the concat or the contrib form, and forms is static; add one of them" in done.output
    manifest = open_bundle(dates_bundle).manifest
    static = {name: graph for name, graph in manifest.graphs.items() if name in ("encoder", "decoder_static")}
    with pytest.raises(GraphError, match="choose one of them with --forms"):
        write_loop(tmp_path, static, manifest.spec, loop_settings(manifest.spec, GenerationDefaults()))


def test_an_export_with_it_is_verified_and_does_what_the_model_does_by_default(tmp_path: Path) -> None:
    """Through the command line, in int8: the graph is made of quantised ones."""
    model, output = tmp_path / "model", tmp_path / "bundle"
    shutil.copytree(DATES, model)
    run = ["onnx", str(model), "--output", str(output), "--loop", "--precision", "int8"]
    (model / "generation.json").write_text('{"no_repeat_ngram_size": 2}')
    refused = CliRunner().invoke(main, run)
    assert refused.exit_code == 1
    assert "loop: generation.json has no_repeat_ngram_size 2" in refused.output
    (model / "generation.json").write_text('{"max_new_tokens": 9, "suppress_tokens": [13]}')
    assert CliRunner().invoke(main, run).exit_code == 0
    said = LoopSettings(prompt=(1,), ends=(2,), max_new_tokens=9, suppressed=(13,))
    assert open_bundle(output).manifest.loop == said
    shown = CliRunner().invoke(main, ["inspect", str(output)]).output
    assert "loop.onnx, opset 18, greedy: prompt [1], ends [2], max_new_tokens 9, suppressed [13]" in shown
    verified = CliRunner().invoke(main, ["verify", str(output), "--against", str(DATES), "--samples", "9"])
    assert verified.exit_code == 0
    (rung,) = (line for line in verified.output.splitlines() if line.startswith("ort loop "))
    assert "/9 exact" in rung


def test_a_loop_that_says_something_else_fails(dates_loop: Path, tmp_path: Path) -> None:
    manifest = open_bundle(dates_loop).manifest
    assert manifest.loop is not None
    said = LoopSettings(prompt=(1,), ends=(2,), max_new_tokens=16)
    assert manifest.loop == said
    with create_bundle(tmp_path / "bundle") as builder:
        shutil.copytree(dates_loop, builder.path, dirs_exist_ok=True)
        other = loop_settings(manifest.spec, GenerationDefaults(suppress_tokens=(13,)))
        write_loop(builder.path, manifest.graphs, manifest.spec, other)
        builder.finish(
            spec=manifest.spec, config=manifest.config, graphs=manifest.graphs, versions=manifest.versions, loop=said
        )
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "bundle"), "--samples", "8"])
    assert done.exit_code == 2
    assert "✗ ort loop, greedy: " in done.output


def test_another_beginning_of_texts_is_refused_where_the_graph_has_one(dates_loop: Path, tmp_path: Path) -> None:
    shutil.copytree(dates_loop, tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"the loop graph begins with another text\.target_prefix"):
        replace_tokenizer(tmp_path / "bundle", TokenizerConfig(target_prefix=(15,)))
    assert open_bundle(tmp_path / "bundle").manifest.loop is not None


def test_the_same_input_gives_the_same_bytes(dates_bundle: Path, dates_loop: Path, tmp_path: Path) -> None:
    add_loop(dates_bundle, tmp_path / "again")
    assert (tmp_path / "again" / "loop.onnx").read_bytes() == (dates_loop / "loop.onnx").read_bytes()
