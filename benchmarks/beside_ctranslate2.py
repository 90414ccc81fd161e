#!/usr/bin/env python
"""Decoding beside CTranslate2, on the same random weights, in one run.

Needs `pip install -e .[export,cpu] ctranslate2`. Outputs are compared before
times; then the two take turns, and what counts is the median of the ratios.
Times are of the whole call, the encoder included, a step's being a call's
divided by the new tokens.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec
from torch import Tensor

import tfexport
from tfexport.config import ExportConfig
from tfexport.graph.export import export_bundle
from tfexport.models.attention import MultiHeadAttention
from tfexport.models.presets import build_preset
from tfexport.models.transformer import Block, Stack, Transformer


def array(tensor: Tensor) -> np.ndarray:
    """Return a parameter as float32."""
    return tensor.detach().float().numpy()


def fill_linear(spec: common_spec.LinearSpec, *layers: Any) -> None:
    """Fill one linear layer with several, stacked."""
    spec.weight = np.concatenate([array(layer.weight) for layer in layers])
    if layers[0].bias is not None:
        spec.bias = np.concatenate([array(layer.bias) for layer in layers])


def fill_norm(spec: common_spec.LayerNormSpec, norm: Any) -> None:
    """Fill a layer norm."""
    spec.gamma, spec.beta = array(norm.weight), array(norm.bias)


def fill_attention(spec: Any, attention: MultiHeadAttention, norm: Any, *, is_cross: bool) -> None:
    """Fill an attention: query, key and value stacked, or key and value for cross-attention."""
    if is_cross:
        fill_linear(spec.linear[0], attention.q)
        fill_linear(spec.linear[1], attention.k, attention.v)
    else:
        fill_linear(spec.linear[0], attention.q, attention.k, attention.v)
    fill_linear(spec.linear[-1], attention.o)
    fill_norm(spec.layer_norm, norm)


def fill_stack(spec: Any, stack: Stack) -> None:
    """Fill an encoder or a decoder."""
    embeddings = spec.embeddings
    (embeddings[0] if isinstance(embeddings, list) else embeddings).weight = array(stack.embed.weight)
    assert stack.pos is not None
    spec.position_encodings.encodings = array(stack.pos)
    for layer, block in zip(spec.layer, stack.layers, strict=True):
        assert isinstance(block, Block)
        norms = [block.norm1, block.norm2]
        fill_attention(layer.self_attention, block.self, norms.pop(0), is_cross=False)
        if hasattr(block, "cross"):
            fill_attention(layer.attention, block.cross, norms.pop(0), is_cross=True)
            norms.append(block.norm3)
        fill_linear(layer.ffn.linear_0, block.ffn.fc1)
        fill_linear(layer.ffn.linear_1, block.ffn.fc2)
        fill_norm(layer.ffn.layer_norm, norms.pop())


def to_ctranslate2(model: Transformer, directory: Path) -> None:
    """Write a post-norm, ReLU transformer as a CTranslate2 model whose tokens are its ids."""
    config = model.config
    assert config.decoder is not None
    assert model.dec is not None
    assert model.out is not None
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder.layers, config.decoder.layers),
        config.encoder.num_heads,
        pre_norm=False,
        activation=common_spec.Activation.RELU,
    )
    fill_stack(spec.encoder, model.enc)
    fill_stack(spec.decoder, model.dec)
    fill_linear(spec.decoder.projection, model.out)
    tokens = [str(i) for i in range(config.source_vocab)]
    special = {config.tokens.start: "<s>", config.tokens.eos: "</s>"}
    tokens = [special.get(i, token) for i, token in enumerate(tokens)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.decoder_start_token = "<s>"
    spec.config.unk_token = "3"
    spec.validate()
    spec.optimize()
    directory.mkdir()
    spec.save(str(directory))


def clock(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@click.command(help=__doc__)
@click.option("--preset", default="paper-base", show_default=True)
@click.option("--batch-size", default=1, show_default=True)
@click.option("--source-length", default=32, show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--num-beams", default=1, show_default=True)
@click.option("--form", type=click.Choice(["static", "concat"]), default="static", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write the result here.")
def main(
    preset: str, batch_size: int, source_length: int, new_tokens: int, num_beams: int, form: str, rounds: int,
    threads: int, output: Path | None,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        to_ctranslate2(build_preset(preset), folder / "ctranslate2")
        export_bundle(f"preset:{preset}", folder / "bundle", ExportConfig(), verify=False)
        ours = tfexport.load(folder / "bundle", form=form, threads=threads)
        theirs = ctranslate2.Translator(str(folder / "ctranslate2"), inter_threads=1, intra_threads=threads)
        sources = np.random.default_rng(0).integers(4, ours.spec.source_vocab, (batch_size, source_length)).tolist()
        words = [[str(token) for token in source] for source in sources]

        def run_ours() -> list[list[int]]:
            found = ours.generate_ids(
                sources, num_beams=num_beams, min_new_tokens=new_tokens, max_new_tokens=new_tokens
            )
            return [list(best[0].token_ids) for best in found]

        def run_theirs() -> list[list[int]]:
            found = theirs.translate_batch(
                words, beam_size=num_beams, min_decoding_length=new_tokens, max_decoding_length=new_tokens
            )
            return [[int(token) for token in best.hypotheses[0]] for best in found]

        ids = np.array(sources)
        mask = np.ones_like(ids, dtype=bool)
        equal = sum(a == b for a, b in zip(run_ours(), run_theirs(), strict=True))
        pairs = [(clock(run_ours), clock(run_theirs)) for _ in range(rounds + 2)][2:]
        encode = statistics.median(clock(lambda: ours.session.encode(ids, mask)) for _ in range(rounds))
    tokens = batch_size * new_tokens
    result = {
        "setting": {"preset": preset, "form": form, "batch_size": batch_size, "source_length": source_length,
                    "new_tokens": new_tokens, "num_beams": num_beams, "precision": "fp32", "threads": threads},
        "equal_outputs": f"{equal} of {batch_size}",
        "tfexport_ms_per_step": 1e3 * statistics.median(a for a, _ in pairs) / new_tokens,
        "ctranslate2_ms_per_step": 1e3 * statistics.median(b for _, b in pairs) / new_tokens,
        "tfexport_encode_ms": 1e3 * encode,
        "tfexport_tokens_per_second": tokens / statistics.median(a for a, _ in pairs),
        "time_ratio": statistics.median(a / b for a, b in pairs),
        "rounds": rounds,
        "versions": {name: version(name) for name in ("tfexport", "onnxruntime", "ctranslate2", "numpy")},
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
    }  # fmt: skip
    click.echo(json.dumps(result, indent=2))
    if output:
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
