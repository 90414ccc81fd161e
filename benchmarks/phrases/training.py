"""Train a model that translates phrases: tokenizer, model, steps, checkpoints."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

from tfexport.contract import TokenIds
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.transformer import Transformer

from .corpus import Pair, draw_pair, language_token
from .templates import LANGUAGES

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)
VOCAB, LONGEST = 6000, 128
# The rate falls as a cosine that ends at HORIZON; training may end before.
WARMUP_STEPS, HORIZON = 300, 3600
# Pairs are drawn so many batches at a time and sorted by length, so that little is padding.
POOL = 32
Batch = tuple[Tensor, Tensor, Tensor]


def build_tokenizer(seed: int, samples: int = 40_000) -> Tokenizer:
    """Train byte-level BPE on both sides of pairs, each digit a token of its own."""
    rng = np.random.default_rng((seed, 2))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(LANGUAGES),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = (draw_pair(rng, held_out=False) for _ in range(samples))
    texts = (text for pair in pairs for text in (pair.source.partition(">")[2], pair.target))
    tokenizer.train_from_iterator(texts, trainer)
    # Not special: a text has to be able to say them.
    tokenizer.add_tokens([AddedToken(language_token(language), normalized=False) for language in LANGUAGES])
    return tokenizer


def model_config(vocab: int) -> TransformerConfig:
    """Describe the model: pre-norm, one table for both sides and the output."""
    stack = StackConfig(layers=3, num_heads=4, d_ff=768, norm_place="pre", final_norm=True)
    return TransformerConfig(
        d_model=256,
        source_vocab=vocab,
        target_vocab=vocab,
        max_source_length=LONGEST,
        max_target_length=LONGEST,
        encoder=stack,
        decoder=stack,
        tokens=TOKENS,
        embedding_scale=16.0,
        tie_embeddings=True,
        tie_output=True,
        output_bias=False,
        dropout=0.0,
    )


def batches(tokenizer: Tokenizer, seed: int, first: int, last: int, size: int) -> Iterator[Batch]:
    """Yield the batches of the steps from `first` to `last`; the same seed and step give the same batch."""
    for pool in range(first // POOL, (last + POOL - 1) // POOL):
        rng = np.random.default_rng((seed, 3, pool))
        pairs = [draw_pair(rng, held_out=False) for _ in range(POOL * size)]
        sources = [encoding.ids for encoding in tokenizer.encode_batch([p.source for p in pairs])]
        targets = [encoding.ids for encoding in tokenizer.encode_batch([p.target for p in pairs])]
        order = sorted(range(len(pairs)), key=lambda i: (len(targets[i]), len(sources[i])))
        for turn, place in enumerate(rng.permutation(POOL)):
            if first <= pool * POOL + turn < last:
                chosen = order[place * size : (place + 1) * size]
                yield _pad([sources[i] for i in chosen], [targets[i] for i in chosen])


def _pad(sources: Sequence[list[int]], targets: Sequence[list[int]]) -> Batch:
    """Return source ids [batch, source_len], target inputs and labels [batch, target_len]."""
    longest, length = max(map(len, sources)), max(map(len, targets))
    source = torch.tensor([ids + [TOKENS.pad] * (longest - len(ids)) for ids in sources])
    pads = [[TOKENS.pad] * (length - len(ids)) for ids in targets]
    inputs = torch.tensor([[TOKENS.start, *ids, *pad] for ids, pad in zip(targets, pads, strict=True)])
    labels = torch.tensor([[*ids, TOKENS.eos, *pad] for ids, pad in zip(targets, pads, strict=True)])
    return source, inputs, labels


def learning_rate(step: int, peak: float) -> float:
    """Rise linearly, fall as a cosine."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    return peak * 0.5 * (1 + math.cos(math.pi * (min(step, HORIZON) - WARMUP_STEPS) / (HORIZON - WARMUP_STEPS)))


def train(
    folder: Path, steps: int, size: int, peak: float, seed: int, progress: Callable[[str], None]
) -> tuple[Transformer, Tokenizer, float]:
    """Train, or go on with what is in `folder`.

    Returns:
        The model in eval mode, its tokenizer, and the processor's minutes spent.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    saved, checkpoint = folder / "tokenizer.json", folder / "training.pt"
    if not saved.exists():
        build_tokenizer(seed).save(str(saved))
    tokenizer = Tokenizer.from_file(str(saved))
    model = Transformer(model_config(tokenizer.get_vocab_size()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    first, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent = state["step"], state["minutes"]
        progress(f"going on from step {first}")
    model.train()
    began, losses = time.process_time(), []
    for step, (source, inputs, labels) in enumerate(batches(tokenizer, seed, first, steps, size), first):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak)
        loss = _loss(model, source, inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            minutes = spent + (time.process_time() - began) / 60
            progress(f"step {step + 1}: loss {np.mean(losses[-100:]):.4f}, {minutes:.1f} min of the processor")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "minutes": minutes}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return model.eval(), tokenizer, spent + (time.process_time() - began) / 60


def _loss(model: Transformer, source: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    # Products in bfloat16 take half the time where the processor has them; weights and sums stay float32.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(source, source != TOKENS.pad, inputs)
    logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=TOKENS.pad)


def save(folder: Path, model: Transformer) -> None:
    """Write the model directory beside its tokenizer."""
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")


def held_out(count: int, seed: int) -> list[Pair]:
    """Draw distinct pairs of phrases that training never saw, in any languages."""
    rng = np.random.default_rng((seed, 1))
    found: dict[str, Pair] = {}
    while len(found) < count:
        pair = draw_pair(rng, held_out=True)
        found[pair.source] = pair
    return list(found.values())
