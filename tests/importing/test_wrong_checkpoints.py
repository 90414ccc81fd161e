"""Wrong and strange checkpoints, through the command: none ends as proven unless it is the author's model.

Other cases are tested elsewhere:

| checkpoint | test |
|---|---|
| sliding window, rescaled rotary positions, short references | `reference/test_lengths.py` |
| no bias of the head, a third layer, more ids, a second head, unexplained convolutions | `test_accounting.py` |
| state of an optimizer, averaged weights | `test_accounting.py` |
| truncated files, flipped bits | `test_damage.py` |
| weights of a later epoch, outputs of other weights, NaN, a guess without reference outputs | `../cli/test_import.py` |
| mixture of experts, decoder-only, features as source, convolutions in the layers | `detect/test_scope.py` |
| swapped end and padding, padding inside sources, a wrong list of tokens | `test_import_text.py` |
| more or fewer layers in config.json | `huggingface/test_hugging_face.py` |
| a window only in the training path of a module of the user | `../verify/test_lengths.py` |
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch import notebook_004
from models.from_scratch.devjwsong import Devjwsong
from models.from_scratch.notebook_004 import Notebook004, attend
from models.from_scratch.of_today import OfToday
from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tests.command import run
from tfexport.bundle.status import REFERENCE
from tfexport.describe import inspect_path
from tfexport.errors import CheckpointError
from tfexport.export._source import open_source
from tfexport.export.config import ExportConfig
from tfexport.importing.reference.outputs import read_reference, record_reference, write_reference

State = dict[str, Tensor]
Options = Sequence[object]
EMBED = "encoder.input_embedding.embedding_layer.weight"
LAYOUT = ("--layout", "notebook-004")


def record(model: nn.Module, folder: Path, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
    given = {"source_vocab": 31, "target_vocab": 31, "heads": 6, "pad_source": 0, "start": 1, "end": 2, **options}
    record_reference(model, lambda model, *inputs: model(*inputs), folder / "reference", **given)
    return folder


def import_(folder: Path, *options: object) -> Result:
    files = (folder / "model.pt", "--output", folder / "model", "--reference", folder / "reference")
    return run("import", *files, *options)


def refused(result: Result, folder: Path, code: int, part: str) -> None:
    error = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert error.startswith("error: ")
    assert part in error
    assert not (folder / "model").exists()


def notebook(layers: int = 1) -> Notebook004:
    torch.manual_seed(0)
    return Notebook004(layers=layers).eval()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(notebook(layers=2), tmp_path_factory.mktemp("own") / "own")


# The file has other weights than the recorded model


OTHER_WEIGHTS: Mapping[str, Callable[[State], State]] = {
    "queries and keys swapped": lambda state: {
        name: state[name.translate(str.maketrans("QK", "KQ"))] for name in state
    },
    "a bias lost": lambda state: state | {"generator.bias": torch.zeros_like(state["generator.bias"])},
    "rounded to 16 bits": lambda state: {name: x.half() for name, x in state.items()},
}


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_other_weights_than_recorded(name: str, own: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(own, tmp_path / "own")
    state = OTHER_WEIGHTS[name](torch.load(own / "model.pt", weights_only=True))
    torch.save(state, folder / "model.pt")
    refused(import_(folder), folder, 2, "was recorded with other weights")


# The author's code differs from the layout


class Wrong(NamedTuple):
    """Code that differs from notebook 004, and the value of a switch that makes the layout right, if there is one."""

    model: Callable[[pytest.MonkeyPatch], nn.Module]
    right: str | None = None


def activated(activation: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], nn.Module]:
    def make(patch: pytest.MonkeyPatch) -> nn.Module:
        patch.setattr(F, "relu", activation)
        return notebook()

    return make


def scaled(scale: float) -> Callable[[pytest.MonkeyPatch], nn.Module]:
    def make(patch: pytest.MonkeyPatch) -> nn.Module:
        patch.setattr(notebook_004, "attend", lambda q, k, v, keep: attend(scale * q, k, v, keep))
        return notebook()

    return make


def with_eps(model: nn.Module, eps: float) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps
    return model


class Changed(Notebook004):
    """Ids, mask or outputs are changed on their way."""

    def __init__(self, change: Callable[..., Any], *, is_output: bool = False) -> None:
        super().__init__(layers=1)
        self.change, self.is_output = change, is_output

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        if self.is_output:
            return self.change(super().forward(source, keep, target))  # type: ignore[no-any-return]
        return super().forward(*self.change(source, keep, target))


def offset(patch: pytest.MonkeyPatch) -> nn.Module:
    def embedded(self: Any, ids: Tensor) -> Tensor:
        return self.embedding_layer(ids) * 30**0.5 + self.pos_encoder.pos_enc[1:][: ids.shape[1]]  # type: ignore[no-any-return]

    patch.setattr(notebook_004.InputEmbedding, "forward", embedded)
    return notebook()


WRONG = {
    "gelu": Wrong(activated(F.gelu), "activation=gelu"),
    "gelu by tanh": Wrong(activated(lambda x: F.gelu(x, approximate="tanh")), "activation=gelu_tanh"),
    "quick gelu": Wrong(activated(lambda x: x * torch.sigmoid(1.702 * x))),
    "leaky relu": Wrong(activated(F.leaky_relu)),
    "scores not scaled": Wrong(scaled(5**0.5), "attention_scale=1.0"),
    "scores scaled twice": Wrong(scaled(5**-0.5), "attention_scale=0.2"),
    "epsilon": Wrong(lambda _: with_eps(notebook(), 1e-6), "norm_eps=1e-6"),
    "positions from 1": Wrong(offset),
    "two ids are one": Wrong(lambda _: Changed(lambda source, *more: (source.where(source != 7, 8), *more))),
    "temperature": Wrong(lambda _: Changed(lambda logits: logits / 0.7, is_output=True), "logit_scale=1 / 0.7"),
    "probabilities": Wrong(lambda _: Changed(lambda logits: logits.softmax(-1), is_output=True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_code_that_differs_from_the_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is proven only with the right switch."""
    folder, right = tmp_path / "own", WRONG[name].right
    record(WRONG[name].model(monkeypatch), folder)
    refused(import_(folder, *LAYOUT), folder, 2, "does not reproduce the reference outputs")
    if right:
        assert import_(folder, *LAYOUT, "--set", right).exit_code == 0
        assert inspect_path(folder / "model")["status"] == "proven"


def test_padding_that_the_code_does_not_mask_is_refused_when_recorded(tmp_path: Path) -> None:
    """Also if the code masks another id than the one recorded."""
    for change in (lambda ids, keep, y: (ids, keep | True, y), lambda ids, keep, y: (ids, ids != 5, y)):
        with pytest.raises(CheckpointError, match="source_mask"):
            record(Changed(change).eval(), tmp_path / "own")


@pytest.mark.parametrize("value", [1e-7, 1e-8, 3e-6])
def test_another_epsilon_is_found(value: float, tmp_path: Path) -> None:
    """Also one whose effect float32 could explain, and one that nobody else uses."""
    torch.manual_seed(0)
    model = with_eps(Devjwsong().eval(), value)
    folder = record(model, tmp_path / "own", source_vocab=19, target_vocab=23, heads=HEADS)
    assert import_(folder).exit_code == 0
    found = inspect_path(folder / "model")
    assert (found["status"], found["config"]["norm_eps"]) == ("proven", value)


def test_mappings_that_are_swapped_in_a_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"source_vocab": SOURCE, "target_vocab": TARGET, "heads": HEADS, "max_source_len": 16, "max_target_len": 16}
    folder = record(OfToday(), tmp_path / "own", **sizes)
    known = "norm=rms norm_place=pre activation=silu norm_eps=1e-6 rotary_pairs=interleaved embedding_scale=1.0"
    assert import_(folder, *(f"--set={one}" for one in known.split())).exit_code == 0
    layout = (folder / "model" / "layout.yaml").read_text()
    for right, swapped in (("{w1,w3,", "{w3,w1,"), ("{q_norm,k_norm,wq", "{k_norm,q_norm,wq")):
        assert right in layout
        shutil.rmtree(folder / "model", ignore_errors=True)
        (folder / "layout.yaml").write_text(layout.replace(right, swapped))
        refused(import_(folder, "--layout", folder / "layout.yaml"), folder, 2, "does not reproduce the reference")


# Options that contradict the reference outputs


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--heads", 3], "num_heads is 3, the reference outputs were recorded with 6"),
        (["--heads", 4], "num_heads is 4"),
        (["--set", "norm_place=pre"], "but not with norm_place=pre"),
        (["--set", "activation=gelu"], "but not with activation=gelu"),
        (["--set", "norm_eps=1e-6"], "but not with norm_eps=1e-6"),
        (["--set", "tokens.start=2", "--set", "tokens.eos=1"], "tokens.start is 2, the reference outputs were "),
        (["--set", "tie_output=true"], "switch tie_output is unknown"),
    ],
)
def test_options_that_contradict_the_reference_outputs(options: Options, part: str, own: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(own, tmp_path / "own")
    started = time.perf_counter()
    refused(import_(folder, *options), folder, 1, part)
    assert time.perf_counter() - started < 2


def test_a_value_that_is_worse_than_another_is_refused(own: Path, tmp_path: Path) -> None:
    """Within the tolerance, which is that of the float32 root in this model."""
    folder = shutil.copytree(own, tmp_path / "own")
    refused(
        import_(folder, *LAYOUT, "--set", "norm_eps=1.2e-5"), folder, 2, "norm_eps is 1.2e-05, with 1e-05 the error"
    )


# After the import


def rewritten(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation": "gelu"}))


def reweighted(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"out.bias": weights["out.bias"] + 1}, folder / "model.safetensors")


@pytest.mark.parametrize(("change", "name"), [(rewritten, "config.json"), (reweighted, "model.safetensors")])
def test_a_model_that_was_changed_after_its_import_is_not_proven(
    change: Callable[[Path], None], name: str, own: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(own, tmp_path / "own")
    assert import_(folder).exit_code == 0
    change(folder / "model")
    found = inspect_path(folder / "model")
    assert (found["status"], found["certificate"]["status"]) == ("unproven", "unproven")
    assert any(name in line for line in found["certificate"]["unverified"])
    lines: list[str] = []
    assert not open_source(str(folder / "model"), ExportConfig(), lines.append).provenance.proven
    assert any(name in line for line in lines)


def test_weights_that_an_older_file_does_not_name_are_listed(own: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(own, tmp_path / "own")
    older = dataclasses.replace(read_reference(own / "reference"), weights={}, real={})
    (folder / "reference").unlink()
    write_reference(older, folder / "reference")
    torch.save(Notebook004().state_dict(), folder / "model.pt")
    assert "unverified: weights: not compared" in import_(folder).stdout


def test_a_bundle_states_the_lengths_that_were_compared(tmp_path: Path) -> None:
    """If they are shorter than the model accepts, for example because a window would show."""
    folder = record(notebook(), tmp_path / "own", max_source_len=12, max_target_len=10)
    assert import_(folder).exit_code == 0
    author = open_source(str(folder / "model"), ExportConfig(), print).model.author
    assert author is not None
    assert author.endswith(" up to 12 source and 10 target tokens")
    whole = open_source(str(folder / "model"), ExportConfig(max_source_length=12, max_target_length=10), print)
    assert whole.model.author == REFERENCE
