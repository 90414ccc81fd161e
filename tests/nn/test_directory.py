"""Model directories: `load_model` reads what `save_model` wrote, and reports problems in one line."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.tiny import ENCODER_ALONE, VARIANTS
from tfexport.describe import inspect_path
from tfexport.errors import CheckpointError
from tfexport.nn.config import TransformerConfig
from tfexport.nn.directory import check_free, check_weights, load_model, save_model
from tfexport.nn.stored import StoredTensor
from tfexport.nn.transformer import Transformer

REMEDY = (
    "a pickle, which can run any code when opened; convert it to safetensors: "
    "torch.load(weights_only=True), then safetensors.torch.save_file"
)


@pytest.fixture
def model() -> Transformer:
    return tiny.model(VARIANTS["post"], dtype=torch.float32)


@pytest.fixture
def folder(model: Transformer, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", [*VARIANTS, "encoder alone"])
def test_a_saved_model_is_loaded_unchanged(name: str, tmp_path: Path) -> None:
    config = ENCODER_ALONE if name == "encoder alone" else VARIANTS[name]
    saved = tiny.model(config, dtype=torch.float32)
    save_model(saved, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == config
    assert not loaded.training
    ours, theirs = dict(loaded.named_parameters()), dict(saved.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert [p.requires_grad for p in ours.values()] == [p.requires_grad for p in theirs.values()]
    if config.tie_output:
        assert loaded.out.weight is loaded.dec.embed.weight is loaded.enc.embed.weight


def test_same_model_gives_same_bytes(model: Transformer, folder: Path, tmp_path: Path) -> None:
    save_model(model, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_tokenizer_is_copied(model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text("{}")
    (tmp_path / "deep" / "model").mkdir(parents=True)
    save_model(model, tmp_path / "deep" / "model", tmp_path / "some.json")
    found = sorted((tmp_path / "deep").rglob("*.*"))
    assert [path.name for path in found] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert len({path.stat().st_mode for path in found}) == 1


def test_no_directory_is_overwritten(model: Transformer, folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    message = error_of(lambda: save_model(model, folder))
    assert message == f"{folder} exists and is not an empty directory; remove it or choose another name"
    assert (folder / "model.safetensors").read_bytes() == before


def test_former_directory_of_a_killed_save_is_restored(model: Transformer, folder: Path) -> None:
    aside = folder.with_name(".model.old-0123456789abcdef")
    for read in (load_model, inspect_path, lambda path: error_of(lambda: check_free(path, force=False))):
        folder.rename(aside)
        read(folder)
    assert load_model(folder).config == model.config
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_failed_save_leaves_nothing(model: Transformer, tmp_path: Path) -> None:
    message = error_of(lambda: save_model(model, tmp_path / "model", tmp_path / "absent.json"))
    assert message == f"{tmp_path / 'model'} cannot be written: No such file or directory"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32(folder: Path, dtype: torch.dtype) -> None:
    change_weights(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    stored = load_file(folder / "model.safetensors")
    for name, parameter in load_model(folder).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())


def test_everything_that_does_not_fit_is_listed(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["dec.layers.0.norm3.weight"]
        tensors["extra"] = torch.zeros(2, 3)
        tensors["out.weight"] = torch.zeros(30, 32)
        tensors["out.bias"] = tensors["out.bias"].long()

    change_weights(folder, change)
    assert error_of(lambda: load_model(folder)) == (
        f"{folder / 'model.safetensors'} does not fit config.json: missing dec.layers.0.norm3.weight [32]; "
        "unexpected extra [2, 3]; out.weight is [30, 32], expected [31, 32]; "
        "out.bias is I64, expected F32, F16, BF16, F64"
    )


def test_a_long_list_is_cut() -> None:
    config = VARIANTS["post"]
    shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    found = {f"module.{name}": StoredTensor("F32", shape, 0, 0) for name, shape in shapes.items()}
    message = error_of(lambda: check_weights(found, config))
    assert message.count("; ") == 8
    assert message.endswith(f"; and {2 * len(shapes) - 8} more")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["enc.layers.0.self.q.weight"] = tensors["enc.layers.0.self.q.weight"].double() + value
        tensors["out.bias"] = tensors["out.bias"].double() - value

    change_weights(folder, change)
    assert error_of(lambda: load_model(folder)) == (
        f"{folder / 'model.safetensors'} holds NaN or infinity, as float32, in enc.layers.0.self.q.weight, out.bias; "
        "take a checkpoint from before the training diverged"
    )


def test_weights_that_are_cut_short_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file would end the process with a bus error."""
    weights, unfilled = folder / "model.safetensors", Transformer.unfilled

    def cut(config: TransformerConfig) -> Transformer:
        os.truncate(weights, 8000)
        return unfilled(config)

    monkeypatch.setattr(Transformer, "unfilled", cut)
    message = error_of(lambda: load_model(folder))
    assert message == f"{weights} was cut short while it was read; copy it again"


class Bomb:
    """Unpickling an instance makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "torch.save before 1.6"])
def test_a_pickle_is_never_opened(folder: Path, kind: str) -> None:
    """Under the right name, under a name of its own in the directory, and given itself."""
    weights, proof = folder / "model.safetensors", folder / "exploded"
    if kind == "pickle":
        weights.write_bytes(pickle.dumps(Bomb(proof)))
    else:
        torch.save(Bomb(proof), weights, _use_new_zipfile_serialization=kind == "torch.save")
    assert error_of(lambda: load_model(folder)) == f"{weights} is {REMEDY}"
    weights.rename(folder / "model.pt")
    expected = f"{folder}: model.safetensors is missing, and model.pt is {REMEDY}"
    assert error_of(lambda: load_model(folder)) == expected
    expected = f"{folder / 'model.pt'} is {REMEDY}"
    assert error_of(lambda: load_model(folder / "model.pt")) == expected
    assert not proof.exists()
    # The bomb is real: whoever does unpickle it sets it off, if only to find that it is no state dict.
    with suppress(RuntimeError):
        torch.load(folder / "model.pt", weights_only=False)
    assert proof.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_permission(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    assert "cannot be read: Permission denied" in error_of(lambda: load_model(folder))
