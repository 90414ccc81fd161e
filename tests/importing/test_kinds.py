"""Kinds of tensors and of values that hold no plain weights: one line that names each, before anything is searched."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.importing.detect.test_work import work
from tests.importing.layout.test_apply import IDENTITY, state
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.layout import render_layout
from tfexport.nn.directory import load_model


def quietly(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds that PyTorch calls prototypes, or will drop
        return make()


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "fp8": (lambda: torch.ones(4, 4).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn, expected torch.float64, "),
    "fp8_scale": (lambda: torch.ones(4).to(torch.float8_e8m0fnu), "is torch.float8_e8m0fnu, expected torch.float64, "),
    "meta": (
        lambda: torch.empty(4, device="meta"),
        "is on the device meta and has no values, expected plain weights; ",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "is nested, rows of unequal length, expected plain weights; save each row ",
    ),
    "coo": (
        lambda: torch.eye(3).to_sparse(),
        "is sparse (torch.sparse_coo), expected plain weights; save its to_dense",
    ),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "is sparse (torch.sparse_csr), expected plain weights; save its to_"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "is quantized (torch.qint8), expected plain weights; save its dequantize()",
    ),
    "expanded": (
        lambda: torch.ones(1).expand(10**6, 10**6),
        "is expanded to [1000000, 1000000], larger than the whole file, expected stored values; save its ",
    ),
}


def message_of(path: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        import_checkpoint(path, path.with_name("out"))
    return str(caught.value)


def test_all_unsupported_tensors_are_named_with_the_remedy(tmp_path: Path) -> None:
    tensors = {f"layers.0.{name}": quietly(make) for name, (make, _) in KINDS.items()}
    torch.save({**tensors, "plain": torch.ones(2)}, tmp_path / "a.pt")
    message = quietly(lambda: message_of(tmp_path / "a.pt"))  # type: ignore[arg-type, return-value]
    assert message.startswith(f"{tmp_path / 'a.pt'}: layers.0.")
    for name, (_, problem) in KINDS.items():
        assert f"layers.0.{name} {problem}" in message
    assert "plain " not in message.replace("expected plain weights", "")


def test_a_jagged_tensor_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library says it of a pickle that names one, in a process that has made none itself."""
    monkeypatch.setattr("torch._weights_only_unpickler._get_user_allowed_globals", dict)
    (tmp_path / "a.pt").write_bytes(b"\x80\x02ctorch.nested._internal.nested_tensor\n_rebuild_njt\n.")
    assert "holds nested jagged tensors, expected plain tensors; save them dense and whole" in message_of(
        tmp_path / "a.pt"
    )


def test_an_expanded_tensor_loads_with_its_values(tmp_path: Path) -> None:
    """A bias that one number stands for, and a mask that nobody reads."""
    weights = state()
    weights["enc.layers.0.norm1.bias"] = torch.full((1,), 0.25).expand(32)
    torch.save({**weights, "mask": torch.ones(1, dtype=torch.bool).expand(10**5, 10**5)}, tmp_path / "a.pt")
    (tmp_path / "i.yaml").write_text(render_layout(IDENTITY) + "ignore: [mask]\n")
    config = ImportConfig(layout=str(tmp_path / "i.yaml"), heads=4)
    import_checkpoint(tmp_path / "a.pt", tmp_path / "m", config)
    found = dict(load_model(tmp_path / "m").named_parameters())
    assert torch.equal(found["enc.layers.0.norm1.bias"], torch.full((32,), 0.25))


@pytest.mark.parametrize("name", ["a\nb", "a\udc80", "a\0", "\u202ea"])
def test_names_that_are_not_text_are_refused(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2)}, tmp_path / "a.pt")
    assert "expected text; save the state dict alone" in message_of(tmp_path / "a.pt")


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_four_times_the_keys_take_four_times_the_work(kind: str, tmp_path: Path) -> None:
    """Count the work of refusing parts of layers that belong to no model, and limit the message."""
    counts = []
    for number in (8, 400, 1600):  # the first loads what is loaded once
        path = tmp_path / f"{number}.{kind}"
        tensors = {f"encoder.layers.{i // 40}.part{i % 40}.weight": torch.full((2, 2), float(i)) for i in range(number)}
        save_file(tensors, path) if kind == "safetensors" else torch.save(tensors, path)
        messages: list[str] = []
        counts.append(work(lambda path=path, output=messages: output.append(message_of(path))))  # type: ignore[misc]
        assert len(messages[0]) < 3000
    assert counts[2] < 6 * counts[1]


# Values of a config.json


ODD: tuple[Any, ...] = ([], {"a": []}, -1, True, "\ud800", 2**70)


@pytest.mark.parametrize("model_type", ["bart", "t5", "odd"])
def test_unexpected_values_of_a_config_are_one_line(model_type: str, tmp_path: Path) -> None:
    """Of every key that is read; lists and objects cannot be looked up as names."""
    keys = [
        *("model_type", "activation_function", "feed_forward_proj", "scale_embedding", "tie_word_embeddings"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_heads", "max_position_embeddings", "n_positions"),
        *("pad_token_id", "eos_token_id", "decoder_start_token_id", "bos_token_id", "unk_token_id", "num_beams"),
        *("layer_norm_epsilon", "relative_attention_max_distance", "scale_decoder_outputs", "vocab_size", "do_sample"),
        *("bad_words_ids", "forced_bos_token_id", "suppress_tokens", "length_penalty", "architectures"),
    ]
    usual = {
        "model_type": model_type,
        "activation_function": "gelu",
        "encoder_attention_heads": 4,
        "vocab_size": 8,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **({"num_heads": 4, "feed_forward_proj": "relu"} if model_type == "t5" else {}),
    }
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"model.shared.weight": torch.ones(8, 4)}, folder / "model.safetensors")
    for key in keys:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps({**usual, key: value}))
            message_of(folder)
