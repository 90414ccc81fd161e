#!/usr/bin/env python
"""Train models/dates: dates as people write them in many languages → ISO 8601.

Needs `pip install -e .[export,dev]`. Interrupted training goes on from the last
checkpoint when the same command is run again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from dates_corpus import FIRST, LAST, LOCALES, Example, Format, draw, formats, roughen
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from tfexport.contract import TokenIds
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.text.config import TextConfig, TextSample

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)
WARMUP_STEPS = 200
Batch = tuple[Tensor, Tensor, Tensor]


def build_tokenizer(forms: Sequence[Format], samples: int = 60_000) -> Tokenizer:
    """Make a tokenizer of characters from those that the formats write, in both cases."""
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    # NFKC turns typographic spaces and full-width digits into plain ones; direction marks say nothing.
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex("[\u200e\u200f]"), "")])
    texts = (draw(rng, tuple(forms), held_out_dates=False).text for _ in range(samples))
    seen = {c for text in texts for cased in (text, text.lower(), text.upper()) for c in cased}
    normal = set(tokenizer.normalizer.normalize_str("".join(sorted(seen))))
    vocabulary = SPECIAL + sorted(normal | set("0123456789-"))
    tokenizer.model = models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def model_config(vocab: int) -> TransformerConfig:
    """Describe the model: small, pre-norm, one table for both sides and the output."""
    stack = {"num_heads": 4, "d_ff": 384, "norm_place": "pre", "final_norm": True}
    return TransformerConfig(
        d_model=128,
        source_vocab=vocab,
        target_vocab=vocab,
        max_source_length=64,
        max_target_length=16,
        encoder=StackConfig(layers=3, **stack),  # type: ignore[arg-type]
        decoder=StackConfig(layers=2, **stack),  # type: ignore[arg-type]
        tokens=TOKENS,
        embedding_scale=math.sqrt(128),
        tie_embeddings=True,
        tie_output=True,
        output_bias=False,
        dropout=0.0,
    )


def make_batch(tokenizer: Tokenizer, texts: Sequence[str], isos: Sequence[str]) -> Batch:
    """Encode and pad: source ids [batch, source_len], target inputs and labels [batch, 11]."""
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    longest = max(map(len, sources))
    source = torch.tensor([ids + [TOKENS.pad] * (longest - len(ids)) for ids in sources])
    target = torch.tensor([e.ids for e in tokenizer.encode_batch(list(isos), add_special_tokens=False)])
    start = torch.full((len(texts), 1), TOKENS.start)
    end = torch.full((len(texts), 1), TOKENS.eos)
    return source, torch.cat((start, target), 1), torch.cat((target, end), 1)


def training_batch(tokenizer: Tokenizer, forms: tuple[Format, ...], seed: int, step: int, size: int) -> Batch:
    """Draw the batch of one step; the same seed and step give the same batch."""
    rng = np.random.default_rng((seed, step))
    examples = [draw(rng, forms, held_out_dates=False) for _ in range(size)]
    return make_batch(tokenizer, [roughen(e.text, rng) for e in examples], [e.iso for e in examples])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise linearly, fall as a cosine."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    return peak * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def read_dates(model: Transformer, tokenizer: Tokenizer, examples: Sequence[Example]) -> list[str]:
    """Decode greedily, in batches; leaves the model in eval mode."""
    texts = [example.text for example in examples]
    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    found = decode(EagerSession(model), sources, DecodeConfig(), batch_size=250)
    return [tokenizer.decode(list(best.token_ids)) for (best,) in found]


def recorded_texts(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> TextConfig:
    """Say what the training makes of texts, with its own functions: every bundle is compared with that."""
    samples = []
    with torch.no_grad():
        for text in texts:
            source, _, _ = make_batch(tokenizer, [text], [""])
            target = torch.tensor([[TOKENS.start]])
            mask = torch.ones_like(source, dtype=torch.bool)
            while target[0, -1] != TOKENS.eos:
                logits = model(source, mask, target)
                target = torch.cat((target, logits[:, -1:].argmax(-1)), 1)
            said = target[0, 1:].tolist()
            output = tokenizer.decode(said)
            samples.append(
                TextSample(text=text, source_ids=tuple(source[0].tolist()), target_ids=tuple(said), output=output)
            )
    return TextConfig(samples=tuple(samples))


def evaluation_set(forms: Sequence[Format], per_locale: int, seed: int) -> list[Example]:
    """Draw `per_locale` distinct held-out dates for every locale that has one of `forms`."""
    rng = np.random.default_rng((seed, 1))
    examples: dict[str, Example] = {}
    for locale in LOCALES:
        own = tuple(form for form in forms if form.locale == locale)
        drawn: dict[str, Example] = {}
        while own and len(drawn) < per_locale:
            example = draw(rng, own, held_out_dates=True)
            drawn[example.text] = example
        examples |= {f"{locale} {text}": example for text, example in drawn.items()}
    return list(examples.values())


def accuracy(examples: Sequence[Example], read: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the share of exact matches in per cent, over all and per locale."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for example, iso in zip(examples, read, strict=True):
        hits[example.format.locale].append(example.iso == iso)
    every = [hit for values in hits.values() for hit in values]
    return 100 * float(np.mean(every)), {name: 100 * float(np.mean(values)) for name, values in hits.items()}


def train(output: Path, steps: int, batch_size: int, peak: float, seed: int) -> tuple[Transformer, Tokenizer, float]:
    """Train, or go on training, and return model, tokenizer and minutes spent."""
    torch.manual_seed(seed)
    forms = tuple(form for form in formats() if not form.held_out)
    tokenizer = build_tokenizer(forms)
    model = Transformer(model_config(tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=peak, betas=(0.9, 0.98), weight_decay=0.01
    )
    checkpoint, first, spent = output / "training.pt", 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent = state["step"], state["minutes"]
        click.echo(f"going on from step {first}")
    check = evaluation_set(forms, 10, seed)
    model.train()
    began, losses = time.monotonic(), []
    with click.progressbar(
        range(first, steps),
        label="training",
        item_show_func=lambda _: f"loss {np.mean(losses[-50:]):.4f}" if losses else "",
    ) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            source, target, labels = training_batch(tokenizer, forms, seed, step, batch_size)
            logits = model(source, source != TOKENS.pad, target)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if (step + 1) % 250 == 0 or step + 1 == steps:
                minutes = spent + (time.monotonic() - began) / 60
                exact, _ = accuracy(check, read_dates(model, tokenizer, check))
                click.echo(
                    f"\nstep {step + 1}: loss {np.mean(losses[-50:]):.4f}, held-out exact {exact:.2f} %, "
                    f"{minutes:.1f} min"
                )
                model.train()
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "minutes": minutes,
                }
                torch.save(state, checkpoint.with_suffix(".tmp"))
                os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return model.eval(), tokenizer, spent + (time.monotonic() - began) / 60


def write_card(
    path: Path, seen: tuple[float, dict[str, float]], unseen: tuple[float, dict[str, float]], facts: str
) -> None:
    """Write the model card."""
    rows = "\n".join(
        f"| {locale} | {seen[1][locale]:.1f} | {f'{unseen[1][locale]:.1f}' if locale in unseen[1] else '–'} |"
        for locale in LOCALES
    )
    path.write_text(
        f"""# dates

Reads a date as people write it and answers with ISO 8601: `Dienstag, 3. März 2026` → `2026-03-03`.
It comes with tfexport so that parity, precision and beam figures mean something.

## Data

{len(formats())} CLDR patterns of {len(LOCALES)} locales, written by Babel; dates from {FIRST} to {LAST}.
The script is `scripts/train_dates.py`, the corpus `scripts/dates_corpus.py`.

- Two-digit years are left out: between 1900 and 2100 they name several dates.
- What reads as two dates is left out: `3/4/2026` is in April in Spain and in March in the United States.
  `13/4/2026` has one reading and is kept. `03/04/2026`, with zeros, is written so only where the day
  comes first, so it means 3 April.
- Training text is sometimes in small or capital letters, or without commas; held-out text is as CLDR writes it.
- Digits are 0–9 in every locale, and years are Gregorian, also in Thai and Arabic.
- Other wordings ("the third of March", "tomorrow") are beyond it: it answers with some date all the same.

## Exact match on held-out data, greedy, in per cent

One date in twenty is held out, in every format; {sum(form.held_out for form in formats())} pairs of locale and
pattern are held out with all their dates.

| locale | held-out dates | held-out dates in held-out formats |
|---|---|---|
| **all** | **{seen[0]:.2f}** | **{unseen[0]:.2f}** |
{rows}

`heldout.tsv` holds a part of the first column's examples: text, ISO date, locale, pattern.

## Model

{facts}
""",
        encoding="utf-8",
    )


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=Path("models/dates"), show_default=True)
@click.option("--steps", default=3600, show_default=True)
@click.option("--batch-size", default=256, show_default=True)
@click.option("--learning-rate", "peak", default=2e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--per-locale", default=300, show_default=True, help="Held-out dates a locale in the evaluation.")
def main(output: Path, steps: int, batch_size: int, peak: float, seed: int, per_locale: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    model, tokenizer, minutes = train(output, steps, batch_size, peak, seed)
    seen = evaluation_set([form for form in formats() if not form.held_out], per_locale, seed)
    unseen = evaluation_set([form for form in formats() if form.held_out], per_locale, seed)
    seen_accuracy = accuracy(seen, read_dates(model, tokenizer, seen))
    unseen_accuracy = accuracy(unseen, read_dates(model, tokenizer, unseen))
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    tokenizer.save(str(output / "tokenizer.json"))
    text = recorded_texts(model, tokenizer, [example.text for example in seen[:: len(seen) // 24]])
    (output / "text.json").write_text(json.dumps(text.to_dict(), ensure_ascii=False) + "\n", "utf-8")
    every_fifth = seen[::5]
    lines = [f"{e.text}\t{e.iso}\t{e.format.locale}\t{e.format.pattern}\n" for e in every_fifth]
    (output / "heldout.tsv").write_text("".join(lines), encoding="utf-8")
    count = sum(p.numel() for p in model.parameters())
    facts = (
        f"{count:,} parameters: d_model 128, 3 encoder and 2 decoder layers, 4 heads, pre-norm, one tied table of "
        f"{tokenizer.get_vocab_size()} characters.\nTrained {steps} steps of {batch_size} examples with seed {seed} "
        f"in {minutes:.0f} minutes on {torch.get_num_threads()} CPU threads (torch {torch.__version__})."
    )
    write_card(output / "README.md", seen_accuracy, unseen_accuracy, facts)
    click.echo(f"exact match: held-out dates {seen_accuracy[0]:.2f} %, held-out formats {unseen_accuracy[0]:.2f} %")


if __name__ == "__main__":
    main()
