"""Train a small model on both tasks; a quarter of an hour on a core."""

from __future__ import annotations

import math
import time
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from copying.tasks import CODE, CORRECTION, TOKENS, VOCAB, Pair, draw
from tfexport.models.config import StackConfig, TransformerConfig
from tfexport.models.directory import save_model
from tfexport.models.transformer import Transformer

D_MODEL, HEADS = 128, 4
MAX_LENGTH = 256
SHORT, LONG = 6, 40
_PEAK, _WARMUP = 1.5e-3, 200


def small_config() -> TransformerConfig:
    """Describe the model."""
    stack = StackConfig(layers=2, num_heads=HEADS, d_ff=2 * D_MODEL, norm_place="pre", final_norm=True)
    return TransformerConfig(
        d_model=D_MODEL,
        source_vocab=VOCAB,
        target_vocab=VOCAB,
        max_source_length=MAX_LENGTH,
        max_target_length=MAX_LENGTH,
        encoder=stack,
        decoder=stack,
        tokens=TOKENS,
        embedding_scale=math.sqrt(D_MODEL),
        tie_embeddings=True,
        tie_output=True,
        dropout=0.0,
    )


def train(output: Path, steps: int, batch_size: int, seed: int) -> None:
    """Train and write a model directory."""
    torch.manual_seed(seed)
    model = Transformer(small_config())
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=_PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        rise, fall = (step + 1) / _WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = _PEAK * min(rise, fall)
        rng = np.random.default_rng((seed, step))
        # Texts of one length and task together: little is padded. Short ones first, which are learned sooner.
        longest = min(LONG, SHORT + 2 + 2 * LONG * step // steps)
        size = int(rng.integers(SHORT, longest + 1))
        task = (CORRECTION, CODE)[step % 2]
        source, target, labels = _batch([draw(task, rng, size, size) for _ in range(batch_size)])
        logits = model(source, source != TOKENS.pad, target)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=TOKENS.pad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step % 50 < 2:
            spent = (time.monotonic() - began) / 60
            click.echo(f"step {step}, task {task}, {size} words: loss {loss.item():.4f}, {spent:.1f} min")
        if step % 500 == 499:
            save_model(model, output, force=True)
    save_model(model, output, force=True)


def _batch(pairs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    sources = _padded([source for source, _ in pairs])
    inputs = _padded([[TOKENS.start, *target] for _, target in pairs])
    return sources, inputs, _padded([[*target, TOKENS.eos] for _, target in pairs])


def _padded(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [TOKENS.pad] * (longest - len(row)) for row in rows])
