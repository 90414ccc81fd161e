"""A stranger's module, from its class to text through the command line; and what is said of wrong ones."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from tests.command import ran, run
from tests.conftest import ROOT
from tests.stranger import modern, tutorial
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import ConfigError
from tfexport.importing.own_module import OwnModule
from tfexport.tensorrt.store import open_engine
from tfexport.verify import Decodes, VerifyConfig, verify_bundle

Once = Callable[[str, Callable[[Path], object]], Path]
MODERN, TUTORIAL = "tests.stranger.modern", "tests.stranger.tutorial"
# torch.nn.Transformer says so of itself when it is made with the sources first.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def made(*arguments: object) -> Callable[[Path], None]:
    """Return what exports with the command line."""

    def make(path: Path) -> None:
        ran("onnx", *arguments, "--output", path)

    return make


@pytest.fixture(scope="session")
def bundle(once: Once) -> Path:
    """The rotary model, verified by its export; not to be changed."""
    return once("stranger-modern", made(f"{MODERN}:make", "--variants", "contrib"))


@pytest.fixture(scope="session")
def translator(once: Once) -> Path:
    """The tutorial's model with two tokenizers; not to be changed."""
    return once("stranger-tutorial", made(f"{TUTORIAL}:make", "--variants", "static"))


def check_texts(bundle: Path, texts: list[str], expected: list[str]) -> None:
    assert len(set(expected)) == len(texts)
    done = run("generate", bundle, *texts, "--max-new-tokens", 9)
    assert (done.exit_code, done.stdout.splitlines()) == (0, expected)


def test_a_rotary_model_equals_its_own_code(bundle: Path) -> None:
    words, model = Tokenizer.from_file(str(modern.WORDS)), modern.module().eval()
    texts = ["w7 w8 w9", "W12 w30 w31", "w40", "w5 w6 w7 w8 w9 w10 w11"]
    expected = [words.decode(modern.greedy(model, [*words.encode(text.lower()).ids, 2], 9)) for text in texts]
    check_texts(bundle, texts, expected)


def test_a_module_of_nn_transformer_equals_its_own_code(translator: Path) -> None:
    source, target = (Tokenizer.from_file(str(path)) for path in (tutorial.SOURCE, tutorial.TARGET))
    forward, texts = partial(tutorial.trained, tutorial.module().eval()), ["w7 w8 w9", "w5", "w12 w30 w31 w32"]
    expected = [target.decode(modern.greedy(forward, [1, *source.encode(text).ids, 2], 9)) for text in texts]
    check_texts(translator, texts, expected)


def test_the_manifest_names_the_source_of_the_bundle(bundle: Path, translator: Path) -> None:
    manifest, theirs = open_bundle(bundle).manifest, open_bundle(translator).manifest
    assert manifest.config is None
    assert manifest.module is not None
    assert theirs.module is not None
    assert (manifest.module.name, theirs.module.name) == (f"{MODERN}.Modern", f"{TUTORIAL}.Translator")
    assert manifest.module == modern.make().entry()
    assert manifest.module.weights_sha256 != modern.other_weights().entry().weights_sha256
    assert manifest.versions["torch"] == importlib.metadata.version("torch")
    assert manifest.parity is not None
    assert manifest.parity["passed"]
    assert (manifest.proof.status, theirs.proof.status) == ("proven", "consistent")
    assert "own generation loop" in manifest.proof.sentence
    assert (len(manifest.text.samples), manifest.text.source_suffix) == (4, (2,))
    assert (theirs.text.source_prefix, theirs.text.source_suffix) == ((1,), (2,))
    checks = json.loads((bundle / "parity.json").read_text())["decodes"]
    assert {check["stage"] for check in checks if check["method"] == "recorded texts"} >= {"eager", "ort contrib"}
    (loop,) = (check for check in checks if check["method"] == "own loop")
    assert (loop["stage"], loop["exact"] + loop["ties"]) == ("ort contrib", loop["sequences"])
    shown = run("inspect", bundle).stdout
    assert f"module {MODERN}.Modern, weights" in shown
    assert manifest.module.weights_sha256 in shown


def test_opening_a_bundle_does_not_import_its_module(bundle: Path) -> None:
    code = (
        "import sys, tfexport\n"
        "from tfexport.describe import inspect_path\n"
        f"inspect_path({str(bundle)!r})\n"
        f"with tfexport.load({str(bundle)!r}) as model: print(model.generate(['w7 w8'], max_new_tokens=3)[0].text)\n"
        "print([name for name in sys.modules if name.startswith('tests') or name == 'torch'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_verify_compares_only_with_the_original_module(bundle: Path) -> None:
    assert "recorded texts" in ran("verify", bundle, "--against", f"{MODERN}:make", "--samples", 2).stdout
    wrong = ran("verify", bundle, "--against", f"{MODERN}:wrong_reference", "--samples", 2, code=2)
    assert "eager cached" in wrong.stdout
    other = ran("verify", bundle, "--against", f"{MODERN}:other_weights", code=1)
    sums = [own().entry().weights_sha256 for own in (modern.other_weights, modern.make)]
    assert other.stderr.splitlines()[-1] == (
        f"error: {MODERN}:other_weights is not the module of this bundle: its weights have the sha256 {sums[0]}, "
        f"the bundle was made from {sums[1]}"
    )
    shorter = run("verify", bundle, "--against", f"{MODERN}:shorter_spec")
    problems = "d_model is 16, the bundle has 64; max_target_length is 8, the bundle has 32"
    assert shorter.stderr.splitlines()[-1].endswith(problems)


def test_another_generation_loop_is_different(bundle: Path) -> None:
    report = verify_bundle(bundle, against=f"{MODERN}:wrong_loop", config=VerifyConfig(samples=3))
    assert report.proof.status == "unproven"
    (loop,) = (check for check in report.checks if not check.passed)
    assert isinstance(loop, Decodes)
    assert (loop.stage, loop.method) == ("ort contrib", "own loop")
    assert re.match(r"text \d, token \d+: \d+ became \d+", loop.first or "")


@pytest.mark.parametrize("loop", [lambda model: [], lambda *_: "text", lambda *_: [5, 99], lambda *_: [5, -1]])
def test_a_loop_that_returns_no_ids_is_refused(loop: Callable[..., object]) -> None:
    generate = OwnModule(modern.module(), modern.SPEC, generate=loop).model.generate
    assert generate is not None
    with pytest.raises(ConfigError) as caught:
        generate([5, 6], 4)
    assert caught.value.subject == "generate"


def test_a_buffer_on_another_device_is_named() -> None:
    model = modern.module()
    model.register_buffer("table", torch.empty(2, device="meta"))
    with pytest.raises(ConfigError) as caught:
        OwnModule(model, modern.SPEC)
    assert caught.value.problems[0].startswith("table is not float32 on the CPU")


def test_an_encoder_only_module_has_no_loop() -> None:
    sizes = dict.fromkeys(("vocab", "layers", "heads", "head_dim", "value_dim", "max_target_length"), 0)
    with pytest.raises(ConfigError) as caught:
        OwnModule(nn.Identity(), replace(modern.SPEC, kv_heads=None, **sizes), generate=modern.greedy)
    assert any(problem.startswith("generate ") for problem in caught.value.problems)


def test_errors_without_the_module_name_its_option(bundle: Path) -> None:
    needs = (
        f"error: {bundle}: holds graphs and no model to compare with; "
        "give the PACKAGE.MODULE:FACTORY that it was made from with --against\n"
    )
    assert (run("verify", bundle).exit_code, run("verify", bundle).stderr) == (1, needs)
    directory = run("verify", bundle, "--against", ROOT / "models" / "dates")
    assert directory.stderr.endswith("cannot be its reference; give --against PACKAGE.MODULE:FACTORY\n")
    eager = run("generate", bundle, "w5", "--backend", "eager")
    assert eager.stderr == f"error: {bundle}: holds graphs only, no eager model; use --backend ort\n"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.nowhere:make", "ModuleNotFoundError: No module named 'tests.nowhere'"),
        (f"{MODERN}:nothing", f"AttributeError: module '{MODERN}' has no attribute 'nothing'"),
        (f"{MODERN}:fails", "No such file or directory"),
        (f"{MODERN}:returns_a_module", "returns Modern("),
        (
            f"{MODERN}:everything_wrong",
            "Linear has no method encode; see docs/guides/your-own-module.md; Linear has no method",
        ),
        (f"{MODERN}:everything_wrong", "spec.precision is fp16, expected fp32; --precision is for the graphs"),
        (f"{MODERN}:everything_wrong", "weight is not float32 on the CPU; give module.float().cpu()"),
        (f"{MODERN}:everything_wrong", "texts are given, but no tokenizers to compare with them"),
    ],
)
def test_a_factory_without_a_module_is_one_line(name: str, problem: str, tmp_path: Path) -> None:
    done = ran("onnx", name, "--output", tmp_path / "bundle", code=1)
    assert problem in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_module_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory is found, though the command is installed elsewhere."""
    (tmp_path / "broken.py").write_text("def make():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    done = run("onnx", "broken:make", "--output", "b")
    expected = "error: broken:make: ZeroDivisionError: division by zero (broken.py line 2); call it in Python"
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_the_module_limits_the_lengths(tmp_path: Path) -> None:
    done = run("onnx", f"{MODERN}:make", "--output", tmp_path / "b", "--max-target-length", 33)
    assert "max_target_length is 33, expected at most 32 as in the module's spec; lower it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "variant"), [("fp16", "static"), ("int8", "concat"), ("int4", "contrib")])
def test_narrower_weights_are_verified_against_the_module(precision: str, variant: str, tmp_path: Path) -> None:
    done = ran("onnx", f"{MODERN}:steady", "--output", tmp_path / "b", "--precision", precision, "--variants", variant)
    assert f"encoder-decoder, {precision}, 4 recorded texts\nproven: " in done.stdout
    ran("verify", tmp_path / "b", "--against", f"{MODERN}:steady", "--samples", 4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_engines_are_built(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    ran("onnx", f"{MODERN}:make", "--output", tmp_path / "b", "--precision", precision, "--variants", "static")
    gpu = ("--target", "tensorrt-rtx", "--compute-capability", "8.9", "--max-batch", 2)
    ran("trt", tmp_path / "b", *gpu)
    plan = open_engine(tmp_path / "b", f"tensorrt-rtx-static-{precision}").manifest.plans["decoder_static"]
    assert (plan.layers["KV_CACHE_UPDATE"], plan.layers["ATTENTION_INPUT"]) == (2 * modern.LAYERS, 2 * modern.LAYERS)
