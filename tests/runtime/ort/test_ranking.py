"""Greedy steps without scores, which rank the vocabulary in 8 bits, find the tokens of the fp32 product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.runtime.exported import Once
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import DECODER
from tfexport.decode.loop import Loop
from tfexport.decode.offline import decode
from tfexport.decode.request import check_requests
from tfexport.export import export_bundle, ranking
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import GreedySteps, MultiStep

VOCAB, NEW_TOKENS = 300, 18
CONFIG = tiny.config(target_vocab=VOCAB)
TEXTS = np.random.default_rng(0).integers(3, tiny.VOCAB, (7, 6)).tolist()
for number, text in enumerate(TEXTS):
    del text[: number % 4]


def table_of(model: Transformer) -> torch.Tensor:
    return dict(model.named_parameters())["out.weight"]


def keep(table: torch.Tensor, model: Transformer) -> None:
    """Leave the random weights as they are."""


def repeat(table: torch.Tensor, model: Transformer) -> None:
    """Give the same logits to each three tokens."""
    table[1::3], table[2::3] = table[::3], table[::3]
    if (bias := dict(model.named_parameters()).get("out.bias")) is not None:
        bias[1::3], bias[2::3] = bias[::3].clone(), bias[::3].clone()


def nudge(table: torch.Tensor, model: Transformer) -> None:
    """Give logits to each three tokens that 8 bits cannot tell apart; the last one is often the best."""
    repeat(table, model)
    table[1::3] *= 1 + 1e-4
    table[2::3] *= 1 + 2e-4


def hide(table: torch.Tensor, model: Transformer) -> None:
    """Let 8 bits see only an input that is always 0, and rank all tokens wrongly."""
    table[:, 0] = torch.linspace(-1000, 1000, VOCAB)
    last = model.get_submodule("dec.layers.1.norm3")
    last.weight[0] = last.bias[0] = 0  # type: ignore[index, operator]


@contextmanager
def low_threshold() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "LEAST_WEIGHTS", 0)
        yield


PLANTED = {plant.__name__: plant for plant in (keep, repeat, nudge, hide)}
Pair = tuple[OrtSession, EagerSession]


@pytest.fixture(scope="module")
def open_pair(once: Once) -> Callable[..., Pair]:
    """Return a function that exports a planted model and opens it in ONNX Runtime and in PyTorch."""

    def opened(name: str, **changes: Any) -> Pair:
        model = tiny.model(replace(CONFIG, **changes), dtype=torch.float32)
        with torch.no_grad():
            PLANTED[name](table_of(model), model)

        def make(path: Path) -> None:
            directory = path.with_name(f"{path.name}-model")
            save_model(model, directory)
            with low_threshold():
                export_bundle(str(directory), path, ExportConfig(variants=("contrib",)))

        path = once(f"ranking-{name}-{'-'.join(map(str, changes.values()))}", make)
        return OrtSession(Graphs.of(open_bundle(path)), "contrib", threads=1), EagerSession(model)

    return opened


def token_ids(session: Any, config: DecodeConfig, *, scores: bool, **arguments: Any) -> list[tuple[int, ...]]:
    found = decode(session, TEXTS, replace(config, return_scores=scores), batch_size=3, **arguments)
    assert all((best.score is None) == (best.log_prob is None) == (not scores) for (best,) in found)
    return [best.token_ids for (best,) in found]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"min_new_tokens": 9},
    {"forced_bos_token_id": 3},
    {"eos_token_id": (2, 13, 20)},
    {"suppress_tokens": (5, 60, 7), "bad_words_ids": ((15,), (160,))},
    {"suppress_tokens": tuple(range(100, 116))},
    {"forced_eos_token_id": (9, 8), "eos_token_id": (2, 9), "min_length": 6},
    {"no_repeat_ngram_size": 2},
    {"max_time": 60.0},
]


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("output_bias", [True, False])
def test_tokens_are_those_of_the_full_product(name: str, output_bias: bool, open_pair: Callable[..., Pair]) -> None:
    session, eager = open_pair(name, output_bias=output_bias)
    graphs = session._graphs
    for options in OPTIONS:
        graphs.num_ranked = graphs.num_unproven = 0
        config = DecodeConfig(max_new_tokens=NEW_TOKENS, **options)
        prefixes = None if "forced_bos_token_id" in options else [[5, 6], [], [7], [], [8], [], [9]]
        found = token_ids(session, config, scores=False, prefixes=prefixes)
        assert found == token_ids(session, config, scores=True, prefixes=prefixes)
        assert found == token_ids(eager, config, scores=False, prefixes=prefixes)
        if "no_repeat_ngram_size" not in options and len(options.get("suppress_tokens", ())) < 16:
            assert graphs.num_ranked > 0
            share = graphs.num_unproven / graphs.num_ranked
            assert share == 1 if name in ("repeat", "hide") else share < 0.5


def test_steps_that_prove_nothing_are_given_up(open_pair: Callable[..., Pair]) -> None:
    session, _ = open_pair("hide")
    graphs, config = session._graphs, DecodeConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    expected = token_ids(session, config, scores=True)
    assert graphs.skips_scores
    for _ in range(3):
        assert token_ids(session, config, scores=False) == expected
    assert not graphs.skips_scores
    assert graphs.num_ranked < 2 * len(TEXTS) * NEW_TOKENS


def test_a_request_with_scores_gives_all_rows_their_own_answers(open_pair: Callable[..., Pair]) -> None:
    session, _ = open_pair("keep")
    configs = [DecodeConfig(max_new_tokens=NEW_TOKENS, return_scores=scores) for scores in (True, False)]
    alone = [decode(session, TEXTS, config) for config in configs]
    requests = [check_requests(session, TEXTS, config) for config in configs]
    loop, found = Loop(session, 4), dict[int, Any]()
    loop.submit([request for pair in zip(*requests, strict=True) for request in pair])
    while loop.is_busy:
        found |= {update.request.id: update.outcome for update in loop.step() if update.outcome is not None}
    for each, expected in zip(requests, alone, strict=True):
        for request, (best,) in zip(each, expected, strict=True):
            (one,) = found[request.id]
            assert one.token_ids == best.token_ids
            assert one.score == (None if best.score is None else pytest.approx(best.score, abs=1e-5))


def test_rows_with_nan_fail_without_the_others(open_pair: Callable[..., Pair]) -> None:
    session, _ = open_pair("keep")
    batch, start = session.batch(), np.full(3, 1)
    batch.add(tiny.sources(np.array([[4, 5], [6, 7], [8, 9]]), np.ones((3, 2), np.bool_)), [[1]] * 3)
    batch._cross[0][1] = np.nan  # type: ignore[attr-defined]
    assert isinstance(batch, MultiStep)
    found = batch.multi_step(start, GreedySteps(1, 1, needs_scores=False))
    assert np.isnan(found.logits[0, :, 0]).tolist() == [False, True, False]
    again = session.batch()
    again.add(tiny.sources(np.array([[4, 5], [8, 9]]), np.ones((2, 2), np.bool_)), [[1]] * 2)
    assert found.token_ids[0, [0, 2]].tolist() == again.step(start[:2], 1).token_ids.tolist()


@pytest.mark.parametrize(
    ("threshold", "changes", "precision", "ranks"),
    [
        (0, {}, "fp32", True),
        (VOCAB * 32 + 1, {}, "fp32", False),
        (0, {"target_vocab": 40}, "fp32", False),
        (0, {"logit_scale": 0.5}, "fp32", False),
        (0, {"d_model": 64}, "int8", False),
    ],
)
def test_large_plain_projections_in_fp32_are_ranked(
    threshold: int,
    changes: dict[str, Any],
    precision: Any,
    ranks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "LEAST_WEIGHTS", threshold)
    save_model(tiny.model(replace(CONFIG, **changes), dtype=torch.float32), tmp_path / "model")
    config = ExportConfig(precision=precision, variants=("contrib",))
    bundle = export_bundle(str(tmp_path / "model"), tmp_path / "bundle", config)
    session = OrtSession(Graphs.of(bundle), "contrib", threads=1)
    assert session._graphs.skips_scores == ranks
    assert "without_scores" not in {tensor.name for tensor in bundle.manifest.graphs[DECODER["contrib"]].inputs}
