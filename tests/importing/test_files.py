"""Containers: state dicts are found in everything people save, nothing in a file runs, weights are in memory once."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.nn.test_directory import Bomb
from tfexport.errors import CheckpointError
from tfexport.importing._files import read_checkpoint

STATE = {"encoder.weight": torch.arange(6.0).reshape(2, 3), "decoder.bias": torch.ones(2, dtype=torch.float16)}


def message_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "weights_only=False" not in message
    return message


def is_state(found: Any, expected: dict[str, Tensor] = STATE) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_safetensors_that_begin_as_a_pickle_does(tmp_path: Path) -> None:
    """One in 32 does, by the length of its header."""
    path = tmp_path / "a.safetensors"
    for length in range(1, 300):
        save_file(STATE, path, metadata={"note": "x" * length})
        if path.read_bytes().startswith(b"\x80"):
            break
    assert path.read_bytes().startswith(b"\x80")
    assert read_checkpoint(path).tensors.keys() == STATE.keys()


@pytest.mark.parametrize(
    ("saved", "note"),
    [
        (STATE, ""),
        (OrderedDict(STATE), ""),
        ({"state_dict": STATE, "epoch": 3, "lr": 0.1}, "taken from the entry 'state_dict'"),
        ({"model_state_dict": STATE, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}, "'model_state_dict'"),
        ({"model": STATE, "optim": None, "args": {"layers": 2}}, "taken from the entry 'model'"),
        ({"model_state": STATE, "train_iter_state": torch.ones(8), "scaler_state": None}, "the entry 'model_state'"),
        ({"model": {"state_dict": STATE}}, "'state_dict'"),
        ({"transformer": STATE, "epoch": 3}, "taken from the entry 'transformer'"),
        ({f"module.{name}": tensor for name, tensor in STATE.items()}, "removed the prefix 'module.' from every"),
        ({"state_dict": {f"model.{name}": t for name, t in STATE.items()}}, "removed the prefix 'model.'"),
        ({f"module._orig_mod.{n}": t for n, t in STATE.items()}, "removed the prefix '_orig_mod.' from every key"),
        ({**STATE, "epoch": 3}, "left out entries that are not tensors: 'epoch'"),
    ],
)
def test_wrappers_and_prefixes(saved: Any, note: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert is_state(found.tensors)
    assert note in "; ".join(found.notes)
    assert bool(note) == bool(found.notes)


class Foreign:
    """Makes an object of another class pickle as one of a library that is not installed."""

    def __init__(self, module: str, name: str, *bases: type, **state: Any) -> None:
        self.kind = type(name, bases, {"__module__": module, "__qualname__": name})
        self.made = self.kind()
        vars(self.made).update(state)

    def save(self, saved: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write with the class where pickle looks for it, which reading does not."""
        names = self.kind.__module__.split(".")
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), types.ModuleType(".".join(names[:end])))
        setattr(sys.modules[self.kind.__module__], self.kind.__name__, self.kind)
        torch.save({**saved, "beside": self.made}, path)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("module", "name", "bases"),
    [
        ("omegaconf.dictconfig", "DictConfig", ()),
        ("omegaconf.nodes", "AnyNode", ()),
        ("pytorch_lightning.utilities.parsing", "AttributeDict", (dict,)),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_options_of_libraries_that_are_not_installed(
    module: str, name: str, bases: tuple[type, ...], old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *what: save(*what, _use_new_zipfile_serialization=not old))
    Foreign(module, name, *bases, _content={"layers": 6}).save({"model": STATE}, tmp_path / "a.pt", monkeypatch)
    assert module not in sys.modules
    found = read_checkpoint(tmp_path / "a.pt")
    assert is_state(found.tensors)
    assert found.notes == ("taken from the entry 'model'",)


@pytest.mark.parametrize(
    "beside",
    [
        argparse.Namespace(layers=6, path=Path("data"), nested=argparse.Namespace(lr=1e-3)),
        types.SimpleNamespace(layers=6),
        Path("runs/1"),
        {"best": np.float64(0.25), "step": np.int64(3), "losses": np.arange(3.0)},
        datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC),
        defaultdict(list, losses=[1.0, 2.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_options_dates_and_numbers_next_to_the_weights(beside: Any, tmp_path: Path) -> None:
    torch.save({"model": STATE, "beside": beside}, tmp_path / "a.pt")
    assert is_state(read_checkpoint(tmp_path / "a.pt").tensors)


def test_wrappers_inside_of_a_model(tmp_path: Path) -> None:
    """torch.compile of a part, FSDP and activation checkpointing."""
    names = ("encoder._orig_mod.weight", "decoder._fsdp_wrapped_module._checkpoint_wrapped_module.bias")
    torch.save({f"_orig_mod.{name}": t for name, t in zip(names, STATE.values(), strict=True)}, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert is_state(found.tensors)
    assert found.notes[1].startswith("removed '_checkpoint_wrapped_module', '_fsdp_wrapped_module', '_orig_mod' from")


@pytest.mark.parametrize("name", ["n_averaged", "criterion.weight", "loss_fn.weight", "metrics.total"])
def test_tensors_without_the_common_prefix_are_ignored(name: str, tmp_path: Path) -> None:
    """AveragedModel counts; a Lightning module has its loss beside its model."""
    torch.save({name: torch.ones(()), **{f"model.{key}": t for key, t in STATE.items()}}, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert is_state(found.tensors)
    assert found.notes[0] == f"left out keys that are not part of the model: {name!r}"


def test_averaged_weights_by_choice(tmp_path: Path) -> None:
    averaged = {name: tensor + 1 for name, tensor in STATE.items()}
    others = {"epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}
    torch.save({**others, "model": STATE, "ema": {"module": averaged, "decay": 0.999}}, tmp_path / "a.pt")
    usual = read_checkpoint(tmp_path / "a.pt")
    assert is_state(usual.tensors)
    assert usual.notes == ("taken from the entry 'model'; to take 'ema' instead, give --entry ema",)
    chosen = read_checkpoint(tmp_path / "a.pt", "ema")
    assert is_state(chosen.tensors, averaged)
    assert is_state(read_checkpoint(tmp_path / "a.pt", "ema.module").tensors, averaged)
    for entry in ("swa", "epoch", ""):
        with pytest.raises(CheckpointError, match=f"no entry '{entry}' with tensors; choose one of model, ema$"):
            read_checkpoint(tmp_path / "a.pt", entry)


def test_averaged_weights_under_keys_of_their_own(tmp_path: Path) -> None:
    """ema-pytorch has both in one state dict."""
    averaged = {name: tensor + 1 for name, tensor in STATE.items()}
    both = {f"online.{key}": tensor for key, tensor in STATE.items()}
    both |= {f"ema_model.{key}": tensor for key, tensor in averaged.items()}
    save_file({**both, "step": torch.ones(1)}, tmp_path / "a.safetensors")
    found = read_checkpoint(tmp_path / "a.safetensors", "ema_model").tensors
    assert is_state(dict(sorted(found.items(), reverse=True)), averaged)


def test_a_prefix_of_only_some_keys_is_not_removed(tmp_path: Path) -> None:
    state = {"model.encoder.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    assert is_state(read_checkpoint(tmp_path / "a.pt").tensors, state)


def test_separately_saved_parts_are_joined(tmp_path: Path) -> None:
    saved = {"model": {"encoder.w": torch.ones(2)}, "generator": {"weight": torch.ones(3), "bias": torch.ones(1)}}
    torch.save({**saved, "opt": {"layers": 6}, "optim": {"state": {}}}, tmp_path / "onmt.pt")
    assert list(read_checkpoint(tmp_path / "onmt.pt").tensors) == ["encoder.w", "generator.weight", "generator.bias"]
    torch.save({"encoder": {"w": torch.ones(2)}, "decoder": {"w": torch.ones(3)}, "epoch": 1}, tmp_path / "b.pt")
    found = read_checkpoint(tmp_path / "b.pt")
    assert list(found.tensors) == ["encoder.w", "decoder.w"]
    assert found.notes == ("joined the entries 'encoder', 'decoder'",)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("wrap", [lambda trap: trap, lambda trap: {"model": STATE, "args": trap}])
def test_a_malicious_pickle_does_not_run(wrap: Callable[[Bomb], Any], old: bool, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    torch.save(wrap(Bomb(trap)), tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    message = message_of(tmp_path / "a.pt")
    assert "holds more than tensors and plain values (posix.mkdir)" in message
    assert "torch.save(model.state_dict(), FILE)" in message
    assert not trap.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert trap.exists(), "the trap would have sprung"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_bare_malicious_pickle_does_not_run(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Bomb(trap), protocol))
    message_of(tmp_path / "a.pkl")
    assert not trap.exists()


def test_a_whole_module_does_not_load(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear" in message_of(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty; copy it again"),
        (b"not a checkpoint at all", "not safetensors or a file of torch.save"),
        (b"\x00" * 100, "not safetensors or a file of torch.save"),
        (struct.pack("<Q", 2**60) + b"{}", "not safetensors"),
        (b"\x80\x04garbage", "is damaged, cut short or not"),
        (b"PK\x03\x04garbage", "is damaged or cut short"),
        (b"\x80", "is damaged, cut short or not"),
    ],
)
def test_garbage(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    assert problem in message_of(tmp_path / "a.pt")


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_torn_files(kind: str, tmp_path: Path) -> None:
    if kind == "safetensors":
        save_file(STATE, tmp_path / "a")
    else:
        torch.save(STATE, tmp_path / "a", _use_new_zipfile_serialization=kind == "zip")
    whole = (tmp_path / "a").read_bytes()
    for size in range(1, len(whole), max(1, len(whole) // 40)):
        (tmp_path / "torn").write_bytes(whole[:size])
        message_of(tmp_path / "torn")


def test_a_packed_archive_is_refused(tmp_path: Path) -> None:
    """torch.save never compresses; what does could unpack to any size."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000)
    assert "is a compressed archive" in message_of(tmp_path / "a.pt")


def test_names_in_an_archive_are_not_used_as_paths(tmp_path: Path) -> None:
    """A file of torch.save is an archive, and whatever its parts are called, none of them is written anywhere."""
    torch.save(STATE, tmp_path / "whole.pt")
    folder = tmp_path / "in" / "side"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(folder / "a.pt", "w") as archive:
        for name in whole.namelist():
            archive.writestr(name.replace("whole/", "../out/", 1), whole.read(name))
        archive.writestr("../../sprung", b"")
        archive.writestr(f"{tmp_path}/sprung", b"")
    before = sorted(tmp_path.rglob("*"))
    with contextlib.suppress(CheckpointError):
        read_checkpoint(folder / "a.pt")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ([1, 2], "holds list, expected a state dict"),
        (torch.ones(2), "holds Tensor, expected a state dict"),
        ({"epoch": 3}, "holds no tensors"),
        ({}, "holds no tensors"),
        ({1: torch.ones(2)}, "has a tensor named 1, expected text"),
        ({"model": STATE, "state_dict": STATE}, "holds several state dicts, state_dict, model"),
    ],
)
def test_a_file_without_a_state_dict_is_refused(saved: Any, problem: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "a.pt")
    assert problem in message_of(tmp_path / "a.pt")


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    assert "is missing" in message_of(tmp_path / "absent.pt")
    assert "is a directory without config.json and weights" in message_of(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "zero_to_fp32.py").touch()
    assert f"python {tmp_path / 'deep' / 'zero_to_fp32.py'} {tmp_path / 'deep'} JOINED" in message_of(tmp_path / "deep")
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()
    command = f"accelerate merge-weights {tmp_path / 'fsdp' / 'pytorch_model_fsdp_0'} JOINED"
    assert command in message_of(tmp_path / "fsdp")
    os.mkfifo(tmp_path / "pipe")
    assert "is not a plain file" in message_of(tmp_path / "pipe")


# Hugging Face directories


def directory(path: Path, files: dict[str, dict[str, Tensor]], config: Any = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "t5"} if config is None else config))
    for name, tensors in files.items():
        save_file(tensors, path / name) if name.endswith("safetensors") else torch.save(tensors, path / name)
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_directory(name: str, tmp_path: Path) -> None:
    found = read_checkpoint(directory(tmp_path / "d", {name: {f"model.{k}": v for k, v in STATE.items()}}))
    assert set(found.tensors) == {f"model.{k}" for k in STATE}, "prefixes stay"
    assert found.hf_config == {"model_type": "t5"}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix: str, tmp_path: Path) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2)]
    parts = [dict([item]) for item in STATE.items()]
    path = directory(tmp_path / "d", dict(zip(names, parts, strict=True)))
    index = path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(STATE, names, strict=True))}))
    assert is_state(read_checkpoint(path).tensors)
    (path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{names[1]} not found; copy every shard"):
        read_checkpoint(path)


def test_shards_of_accelerate_without_a_config(tmp_path: Path) -> None:
    """A folder of save_state, and the index by itself; what is no model lies beside."""
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, (key, tensor) in zip(names, STATE.items(), strict=True):
        save_file({f"_orig_mod.{key}": tensor}, tmp_path / name)
    (tmp_path / "random_states_0.pkl").write_bytes(b"never read")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"_orig_mod.{k}": n for k, n in zip(STATE, names, strict=True)}}))
    for path in (tmp_path, index):
        found = read_checkpoint(path)
        assert is_state(found.tensors)
        assert list(found.files) == names
        assert found.hf_config is None


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_folder_of_lightning(place: str, tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text("layers: 6")
    (tmp_path / place).mkdir(exist_ok=True)
    saved = {"state_dict": {f"model.{k}": t for k, t in STATE.items()}, "hparams": argparse.Namespace(), "loops": {}}
    torch.save(saved, tmp_path / place / "epoch=3-step=400.ckpt")
    found = read_checkpoint(tmp_path)
    assert is_state(found.tensors)
    assert list(found.files) == ["epoch=3-step=400.ckpt"]
    torch.save(saved, tmp_path / place / "last.ckpt")
    assert "holds 2 checkpoints" in message_of(tmp_path)
    assert "last.ckpt; give one of them" in message_of(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "a/b", ""])
def test_shards_stay_inside(name: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "outside.safetensors")
    path = directory(tmp_path / "d", {})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="expected files in the same directory"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
def test_a_bad_index(content: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "d", {})
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


# Memory

SIZE = 96 * 1024**2

READER = """
import sys
from pathlib import Path
import torch
from tfexport.importing._files import read_checkpoint
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
for small, large in zip(sys.argv[1::2], sys.argv[2::2]):
    read_checkpoint(Path(small))
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = peak()
    found = read_checkpoint(Path(large))
    print(peak() - before, float(found.tensors["weight"].max()), peak() - before)
    del found
"""


def test_reading_takes_the_memory_of_the_weights_once(tmp_path: Path) -> None:
    """Compare the kernel's peak of resident memory, in a process that has read a small file before."""
    paths = []
    for suffix, write in (("safetensors", save_file), ("pt", torch.save)):
        paths += [tmp_path / f"small.{suffix}", tmp_path / f"large.{suffix}"]
        write({"weight": torch.ones(3)}, paths[-2])
        write({"weight": torch.full((SIZE // 4,), 2.0)}, paths[-1])
    done = subprocess.run([sys.executable, "-c", READER, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        read, largest, used = map(float, line.split())
        assert largest == 2
        assert max(read, used) * 1024 < 1.25 * SIZE


def test_an_old_file_that_does_not_list_a_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    weights = {"a": torch.ones(3), "view": torch.arange(10.0)[2:5], "none": torch.empty(0), "b": torch.ones(2)}
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert read_checkpoint(path).tensors.keys() == weights.keys()
    with path.open("rb") as file:
        for _ in range(4):
            for _opcode in pickletools.genops(file):
                pass
        start, keys, values = file.tell(), pickle.load(file), file.read()
    for number in range(len(keys)):
        listed = pickle.dumps([*keys[:number], *keys[number + 1 :]], protocol=2)
        (tmp_path / "bad.pt").write_bytes(path.read_bytes()[:start] + listed + values)
        with pytest.raises(CheckpointError):
            read_checkpoint(tmp_path / "bad.pt")
