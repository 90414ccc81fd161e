"""A student with a recurrent decoder, trained in half a minute, writes the same texts at every stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tfexport
from tests import tiny
from tests.runtime.exported import Once
from tests.runtime.test_contract import BACKENDS
from tfexport.contract import TokenIds
from tfexport.decode.offline import decode
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer

# Tokens: 4 special ones, 10 digits, 3 orders, 31 days, 12 months and 100 years.
DIGIT, ORDER, DAY, MONTH, YEAR, VOCAB = 4, 14, 17, 48, 60, 160
CONFIG = replace(
    tiny.config(d_model=64, source_vocab=VOCAB, target_vocab=VOCAB, decoder={"mixer": "ssru"}),
    tokens=TokenIds(pad=0, start=1, eos=2, unk=3),
    embedding_scale=8.0,
)


def draw(count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return dates in three orders, and their digits: 17.3.2026 is 20260317 and the end."""
    rng, sources, targets = np.random.default_rng(seed), [], []
    for day, month, year, order in zip(*(rng.integers(0, n, count) for n in (31, 12, 100, 3)), strict=True):
        parts = [DAY + day, MONTH + month, YEAR + year]
        sources.append([int(ORDER + order), *map(int, parts[order:] + parts[:order])])
        targets.append([DIGIT + int(digit) for digit in f"{2000 + year}{month + 1:02}{day + 1:02}"] + [2])
    return sources, targets


def trained() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    optimizer = torch.optim.Adam((one for one in model.parameters() if one.requires_grad), lr=2e-3)
    for step in range(800):
        source, labels = map(torch.tensor, draw(128, step))
        start = labels.new_full((len(labels), 1), CONFIG.tokens.start)
        logits = model(source, torch.ones_like(source, dtype=torch.bool), torch.cat((start, labels[:, :-1]), 1))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow
def test_a_trained_student_is_the_same_at_every_stage(once: Once, tmp_path_factory: pytest.TempPathFactory) -> None:
    model, (sources, targets) = trained(), draw(200, seed=10**6)
    for backend, make in BACKENDS.items():
        for beams in (1, 3):
            found = decode(make(model, once), sources, DecodeConfig(max_new_tokens=9, num_beams=beams), batch_size=64)
            assert [list(best.token_ids) for (best,) in found] == targets, backend
    folder = tmp_path_factory.mktemp("student")
    save_model(model, folder / "model")
    for precision in ("int8", "int4"):
        export_bundle(str(folder / "model"), folder / precision, ExportConfig(precision=precision))
        with tfexport.load(folder / precision, threads=1) as student:
            results = student.generate_ids(sources, max_new_tokens=9)
        right = [list(one.token_ids) == wanted for (one,), wanted in zip(results, targets, strict=True)]
        assert np.mean(right) > 0.97, precision
