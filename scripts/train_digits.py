#!/usr/bin/env python
"""Train models/digits: spoken English digits → digits.

Needs espeak-ng and `pip install -e .[export,cpu,dev]`. Interrupted synthesis and training go on from the last
checkpoint when the same command is run again.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
import wave
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import digits_corpus as corpus
import numpy as np
import onnxruntime
import torch
from digits_corpus import AUDIO, Recording, recordings
from espeak import Synthesizer
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

import tfexport
from tfexport.bundle.processor import ProcessorConfig
from tfexport.contract import TokenIds
from tfexport.decode.offline import decode
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig, StackConfig, TransformerConfig
from tfexport.nn.directory import load_model
from tfexport.nn.source import length_mask
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)
STEP_S = 0.08  # of the time tokens
TIMES = [f"<{STEP_S * i:.2f}>" for i in range(round(AUDIO.max_seconds / STEP_S))]
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *TIMES, *"0123456789"))}
CONVOLUTION = ConvolutionConfig(kernel=5, stride=2, padding=2, channels=128, activation="relu")
FEATURES = FeaturesConfig(dim=AUDIO.feature_dim, convolutions=(CONVOLUTION, CONVOLUTION))
OBSERVED = "enc.norm", "dec.layers.1.cross.q", "dec.layers.1.cross.k"
STEPS_PER_DIGIT = 100  # until longer strings are trained
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def model_config() -> TransformerConfig:
    """Describe the model: two convolutions that halve the frames, then a small pre-norm transformer."""
    stack: dict[str, Any] = {"num_heads": 4, "d_ff": 256, "norm_place": "pre", "final_norm": True}
    return TransformerConfig(
        d_model=128,
        features=FEATURES,
        target_vocab=len(VOCABULARY),
        max_source_length=256,
        max_target_length=2 * corpus.MAX_DIGITS + 4,
        encoder=StackConfig(layers=2, embedding_scale=1.0, **stack),
        decoder=StackConfig(layers=2, **stack),
        tokens=TOKENS,
        embedding_scale=math.sqrt(128),
    )


def build_tokenizer() -> Tokenizer:
    """Make a tokenizer of digits."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *TIMES])
    return tokenizer


def make_batch(examples: Sequence[Recording]) -> Batch:
    """Pad: features [batch, frames, dim], mask [batch, frames], target [batch, target_len], spoken [batch, source_len].

    The target has the time of each digit before the digit. `spoken` is the number of the digit that is spoken at each
    position of the encoder, -1 before the first.
    """
    lengths = torch.tensor([len(each.features) for each in examples])
    features = torch.zeros(len(examples), int(lengths.max()), AUDIO.feature_dim)
    target = torch.full((len(examples), 2 * max(len(each.digits) for each in examples) + 2), TOKENS.pad)
    spoken = torch.empty(len(examples), FEATURES.source.positions(features.shape[1]), dtype=torch.long)
    for row, each in enumerate(examples):
        features[row, : len(each.features)] = torch.from_numpy(each.features)
        times = [TIMES[int(start / STEP_S)] for start in each.starts]
        tokens = ["<s>", *(token for pair in zip(times, each.digits, strict=True) for token in pair), "</s>"]
        target[row, : len(tokens)] = torch.tensor([VOCABULARY[token] for token in tokens])
        seconds = np.arange(spoken.shape[1]) * 4 * AUDIO.hop / AUDIO.rate
        spoken[row] = torch.from_numpy(np.searchsorted(each.starts, seconds, "right") - 1)
    return features, length_mask(lengths, features.shape[1]), target, spoken


def move(example: Recording, rng: np.random.Generator) -> Recording:
    """Put up to 3 s of its first frame before every second recording, so that digits at late times are not rare."""
    count = int(rng.integers(300)) if rng.random() < 0.5 else 0
    features = np.concatenate((example.features[:1].repeat(count, 0), example.features))[-AUDIO.max_frames :]
    features = (features - features.mean(0)) / features.std(0)
    moved = len(features) - len(example.features)
    return replace(example, features=features, starts=example.starts + moved * AUDIO.hop / AUDIO.rate)


def training_batch(examples: Sequence[Recording], size: int, seed: int, step: int) -> Batch:
    """Return recordings of about equal length, short strings first; two bands of each are hidden."""
    rng, longest = np.random.default_rng((seed, step)), 1 + step // STEPS_PER_DIGIT
    allowed = [each for each in examples if len(each.digits) <= longest]
    drawn = [allowed[i] for i in rng.integers(len(allowed), size=16 * size)]
    first = size * int(rng.integers(16))
    chosen = sorted(drawn, key=lambda each: len(each.features))[first : first + size]
    batch = make_batch([move(each, rng) for each in chosen])
    for row in batch[0]:
        for low, width in zip(rng.integers(AUDIO.feature_dim, size=2), rng.integers(8, size=2), strict=True):
            row[:, low : low + width] = 0
    return batch


class Trainer:
    """The model, its optimizer, and a second output that learns the digit at each of the encoder's positions.

    One head of the decoder learns to attend to the digit that is written next. Without these two, training takes much
    longer.
    """

    def __init__(self, steps: int, peak: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.done, self.minutes = 0, 0.0
        self.model = Transformer(model_config())
        self.digit = nn.Linear(self.model.config.d_model, len(VOCABULARY))
        modules = self.model, self.digit
        self.weights = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, peak, total_steps=steps + 1, pct_start=0.05, cycle_momentum=False
        )
        self._outputs: dict[str, Tensor] = {}
        for name in OBSERVED:
            self.model.get_submodule(name).register_forward_hook(
                lambda module, inputs, output, name=name: self._outputs.update({name: output})
            )

    def step(self, features: Tensor, mask: Tensor, target: Tensor, spoken: Tensor) -> float:
        """Do one step and return the loss of the tokens."""
        began = time.monotonic()
        logits = self.model.train()(features, mask, target[:, :-1])
        loss = F.cross_entropy(logits.mT, target[:, 1:], ignore_index=TOKENS.pad, label_smoothing=0.1)
        states, query, key = (self._outputs[name].view(len(target), -1, self.digit.in_features) for name in OBSERVED)
        is_padding = ~length_mask(FEATURES.source.positions(mask.sum(1)), spoken.shape[1])
        digits = target[:, 2::2].gather(1, spoken.clamp(min=0)).masked_fill(is_padding | (spoken < 0), TOKENS.pad)
        at_positions = F.cross_entropy(self.digit(states).mT, digits, ignore_index=TOKENS.pad)
        width = self.model.config.d_k("decoder")
        scores = query[..., :width] @ key[..., :width].mT / math.sqrt(width)  # of the first head
        weights = scores.masked_fill(is_padding[:, None], -torch.inf).softmax(-1)
        is_next = (torch.arange(target.shape[1] - 1) // 2)[:, None] == spoken[:, None]
        is_next &= (target[:, 1:] >= len(SPECIAL))[..., None]
        guidance = -(weights * is_next).sum(-1)[is_next.any(-1)].clamp(min=1e-6).log().mean()
        self.optimizer.zero_grad()
        (loss + at_positions + guidance).backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.done, self.minutes = self.done + 1, self.minutes + (time.monotonic() - began) / 60
        return loss.item()

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "digit", "optimizer", "schedule")}

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({**state, "done": self.done, "minutes": self.minutes}, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Read a checkpoint."""
        state = torch.load(path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.done, self.minutes = state["done"], state["minutes"]


def train(cache: Path, trainer: Trainer, examples: Sequence[Recording], steps: int, size: int, seed: int) -> None:
    """Train, or go on from the checkpoint in the cache."""
    checkpoint, losses = cache / "training.pt", list[float]()
    if checkpoint.exists():
        trainer.load(checkpoint)
        click.echo(f"going on from step {trainer.done}")
    while trainer.done < steps:
        losses.append(trainer.step(*training_batch(examples, size, seed, trainer.done)))
        if trainer.done % 250 == 0:
            trainer.save(checkpoint)
            check = recordings(cache, "strings", corpus.CHUNK)[:200]
            exact, loss = share(read(trainer.model, check), check), np.mean(losses[-100:])
            click.echo(f"step {trainer.done}: loss {loss:.4f}, exact {exact:.1f} %, {trainer.minutes:.1f} min")


def read(model: Transformer, examples: Sequence[Recording]) -> list[str]:
    """Decode greedily with PyTorch; leaves the model in eval mode."""
    found = decode(EagerSession(model.eval()), [each.features for each in examples], DecodeConfig(), batch_size=50)
    tokenizer = build_tokenizer()
    return [tokenizer.decode(list(best.token_ids)) for (best,) in found]


def share(answers: Sequence[str], examples: Sequence[Recording]) -> float:
    """Return the share of exact answers in per cent."""
    return 100 * float(np.mean([answer == each.digits for answer, each in zip(answers, examples, strict=True)]))


def measure(output: Path, cache: Path, count: int) -> str:
    """Return tables of exact answers and of the agreement of ONNX and int8 with PyTorch."""
    model = load_model(output)
    lines = ["| held out | exact | without noise | with noise | 2–4 digits | 5–8 digits |", "|---" * 6 + "|"]
    for name in corpus.CONDITIONS:
        examples = recordings(cache, name, count)
        answers = read(model, examples)
        noisy = np.array([math.isfinite(each.snr_db) for each in examples])
        short = np.array([len(each.digits) <= 4 for each in examples])
        chosen = (map(int, np.flatnonzero(rows)) for rows in (noisy | True, ~noisy, noisy, short, ~short))
        cells = (np.mean([answers[i] == examples[i].digits for i in rows]) for rows in chosen)
        lines.append(f"| {name} | {' | '.join(f'{100 * cell:.1f}' for cell in cells)} |")
    lines += ["", "| bundle | same as PyTorch | exact |", "|---" * 3 + "|"]
    examples = recordings(cache, "strings", count)
    answers = read(model, examples)
    for precision in ("fp32", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            export_bundle(str(output), Path(folder) / "digits", ExportConfig(precision=precision), verify=False)
            with tfexport.load(Path(folder) / "digits", backend="ort") as loaded:
                texts = [result.text for result in loaded.generate([each.features for each in examples])]
        same = 100 * np.mean([text == answer for text, answer in zip(texts, answers, strict=True)])
        lines.append(f"| {precision} | {same:.1f} | {share(texts, examples):.1f} |")
    return "\n".join(lines)


def save(model: Transformer, output: Path) -> None:
    """Write the model directory; weights are stored in float16."""
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().half().contiguous() for name, p in model.named_parameters()}
    save_file(weights, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    (output / "processor.json").write_text(json.dumps(ProcessorConfig(audio=AUDIO).to_dict(), indent=2) + "\n")
    build_tokenizer().save(str(output / "tokenizer.json"))


def write_samples(folder: Path, seed: int) -> None:
    """Write recordings of held-out strings in held-out voices, of 2, 4, 6 and 8 digits; the names are the digits."""
    folder.mkdir(exist_ok=True)
    synthesizer = Synthesizer()
    rng, missing = np.random.default_rng((seed, 1)), set(range(2, corpus.MAX_DIGITS + 1, 2))
    while missing:
        digits, text, voice, speed = corpus.draw(rng, corpus.ACCENTS, corpus.HELD_OUT_VOICES, held_out=True)
        speech, _ = synthesizer.speak(text, voice, speed)
        samples, rate, *_ = corpus.record(speech, synthesizer.rate, rng)
        if rate == min(corpus.RATES) and len(digits) in missing:
            missing.remove(len(digits))
            with wave.open(str(folder / f"{digits}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes((samples * 2**15).astype("<i2").tobytes())


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=Path("models/digits"), show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/digits-training"), show_default=True)
@click.option("--recordings", "count", default=16_000, show_default=True, help="Recordings of the training.")
@click.option("--held-out", default=1000, show_default=True, help="Recordings of each condition.")
@click.option("--steps", default=2500, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--learning-rate", "peak", default=2e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    output: Path, cache: Path, count: int, held_out: int, steps: int, batch_size: int, peak: float, seed: int
) -> None:
    trainer = Trainer(steps, peak, seed)
    train(cache, trainer, recordings(cache, "train", count), steps, batch_size, seed)
    save(trainer.model, output)
    write_samples(output / "samples", seed)
    espeak = subprocess.run(["espeak-ng", "--version"], check=True, capture_output=True, text=True).stdout
    click.echo(measure(output, cache, held_out))
    click.echo(
        f"\n{sum(p.numel() for p in trainer.model.parameters()):,} parameters. Trained {steps} steps of {batch_size} "
        f"recordings, of {count:,}, with seed {seed} in {trainer.minutes:.0f} minutes on {torch.get_num_threads()} CPU "
        f"threads (torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, espeak-ng {espeak.split()[3]})."
    )


if __name__ == "__main__":
    main()
