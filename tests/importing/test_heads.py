"""Classifiers and taggers, from a user's module to labels: import, export and serving."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tfexport
from tests.command import run
from tests.serve.http.served import serving
from tests.serve.http.test_refusals import check
from tests.tiny import word_tokenizer
from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import Imported, import_checkpoint
from tfexport.importing.reference.outputs import record_reference

VOCAB, D, HEADS, LENGTH = 29, 64, 4, 40
LABELS = ("no", "yes", "perhaps")


class Net(nn.Module):
    """An encoder with a head, as users write them; `pooling` is None for a tagger."""

    def __init__(self, pooling: str | None) -> None:
        super().__init__()
        self.pooling = pooling
        self.tokens, self.places = nn.Embedding(VOCAB, D, padding_idx=0), nn.Embedding(LENGTH, D)
        layer = nn.TransformerEncoderLayer(D, HEADS, 40, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(D, len(LABELS))

    def forward(self, ids: Tensor) -> Tensor:
        blank = ids == 0
        x = self.encoder(self.tokens(ids) + self.places.weight[: ids.shape[1]], src_key_padding_mask=blank)
        if self.pooling == "mean":
            x = (x * ~blank[:, :, None]).sum(1) / (~blank).sum(1, keepdim=True)
        elif self.pooling == "max":
            x = x.masked_fill(blank[:, :, None], -1e9).amax(1)
        elif self.pooling == "cls":
            x = x[:, 0]
        return self.classifier(x)  # type: ignore[no-any-return]


def record(net: nn.Module, path: Path, **options: Any) -> None:
    options = {"num_labels": len(LABELS), "heads": HEADS, "pad_source": 0} | options
    record_reference(net, lambda net, ids, _: net(ids), path, source_vocab=VOCAB, force=True, **options)


def recorded(pooling: str | None, folder: Path) -> Net:
    torch.manual_seed(0)
    net = Net(pooling).eval()
    torch.save(net.state_dict(), folder / "net.pt")
    record(net, folder / "reference")
    return net


def imported(folder: Path, **options: Any) -> Imported:
    word_tokenizer(["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(4, VOCAB))]).save(str(folder / "words"))
    files = {"reference": folder / "reference", "tokenizer": folder / "words"}
    return import_checkpoint(folder / "net.pt", folder / "model", ImportConfig(**options), force=True, **files)


@pytest.mark.parametrize("pooling", ["mean", pytest.param("max", marks=pytest.mark.slow), "cls", None])
def test_a_head_is_proven_exported_and_served(pooling: str | None, tmp_path: Path) -> None:
    net, found = recorded(pooling, tmp_path), imported(tmp_path, labels=LABELS)
    assert (found.certificate.proven, found.certificate.source_tokens) == (True, LENGTH)
    assert (found.config.head, found.config.pooling) == ("sequence" if pooling else "token", pooling or "mean")
    assert not [line for line in found.certificate.unverified if "k.bias" not in line and "tokenizer" not in line]
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, VOCAB, length).tolist() for length in (1, LENGTH, *rng.integers(2, LENGTH, 10))]
    with torch.no_grad():
        expected = [net(torch.tensor([row]))[0].numpy() for row in rows]
    tolerances = {"fp32": 1e-5} | ({"fp16": 0.02, "int8": 0.1} if pooling in ("mean", None) else {})
    for precision, tolerance in tolerances.items():
        export_bundle(str(tmp_path / "model"), tmp_path / precision, ExportConfig(precision=precision))  # type: ignore[arg-type]
        with tfexport.load(tmp_path / precision) as model:
            np.testing.assert_array_equal(model.embed(rows), model.embed(rows, pooling=found.config.pooling))
            for size in (1, 12):
                for one, row, logits in zip(model.classify(rows, batch_size=size), rows, expected, strict=True):
                    np.testing.assert_allclose(one.logits, logits, atol=tolerance)
                    best = np.take(LABELS, one.logits.argmax(-1)).tolist()
                    assert (one.label, list(one.token_ids)) == (best if pooling else tuple(best), row)
    texts = [" ".join(f"w{max(token, 4)}" for token in row) for row in rows]
    printed = [json.loads(line) for line in run("classify", tmp_path / "fp32", *texts, "--json").stdout.splitlines()]
    assert all(label in run("inspect", tmp_path / "fp32").stdout for label in LABELS)
    asyncio.run(check_server(tmp_path / "fp32", texts, printed))


async def check_server(bundle: Path, texts: list[str], printed: list[dict[str, Any]]) -> None:
    async with serving(bundle) as served:
        assert (await served.client.get("/v2/models/dates")).json()["parameters"]["labels"] == list(LABELS)
        for text, one in zip(texts, printed, strict=True):
            for data in ({"text_input": text}, {"input_ids": one["token_ids"]}):
                answer = (await served.post("classify", data)).json()
                assert {name: answer[name] for name in ("label", "token_ids")}.items() <= one.items()
                np.testing.assert_allclose(answer["logits"], one["logits"], atol=1e-6)
        check(await served.post("classify", {"input_ids": [VOCAB]}), 400, "expected ids")


def test_wrong_heads_are_not_proven(tmp_path: Path) -> None:
    class Deep(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).tanh()

    recorded("mean", tmp_path)
    for wrong in (LABELS[:2], ("a", "a", "b"), ("a", "b", "c\n")):
        with pytest.raises(ConfigError, match="labels"):
            imported(tmp_path, labels=wrong)
    assert imported(tmp_path).config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    weights = torch.load(tmp_path / "net.pt")
    torch.save(weights | {"classifier.weight": weights["classifier.weight"] * 1.01}, tmp_path / "net.pt")
    with pytest.raises(ParityError, match="other weights"):
        imported(tmp_path)
    for number in (4, None):
        with pytest.raises(CheckpointError, match="expected"):
            record(Net("mean"), tmp_path / "other", num_labels=number)
    record(Deep("mean"), tmp_path / "reference")
    with pytest.raises(ParityError):
        imported(tmp_path, search_budget=300)


def test_labels_of_config_json_and_states_without_the_head(tmp_path: Path) -> None:
    net = recorded(None, tmp_path)
    (tmp_path / "hf").mkdir()
    torch.save(net.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    config = {"model_type": "mine", "id2label": {str(number): label for number, label in enumerate(LABELS)}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    found = import_checkpoint(tmp_path / "hf", tmp_path / "a", reference=tmp_path / "reference")
    assert (found.config.labels, found.config.head) == (LABELS, "token")
    net.classifier.forward = lambda states: states  # type: ignore[method-assign, assignment]
    record(net, tmp_path / "reference", num_labels=None)
    with pytest.raises(ParityError, match=r"classifier.*num_labels"):
        imported(tmp_path)
    alone = imported(tmp_path, ignore=("classifier.*",))
    assert (alone.config.head, alone.certificate.proven, alone.certificate.source_tokens) == ("none", True, LENGTH)
