"""Compare a Hugging Face directory with transformers itself, in float64."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.bundle.status import HUGGING_FACE
from tfexport.errors import BackendError, ParityError, raise_all
from tfexport.importing.huggingface.tokenizer import need_transformers
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.layout.layout import Layout
from tfexport.importing.reference.certificate import Certificate, uncompared
from tfexport.importing.reference.compare import BASELINES, Comparator, compare_lengths, tolerance
from tfexport.importing.reference.lengths import LENGTHS, IdRange, run_row
from tfexport.importing.reference.original import Original
from tfexport.importing.reference.outputs import ReferenceOutputs, draw_batch
from tfexport.nn.config import TransformerConfig
from tfexport.nn.eager import to_float64

_LONG = (64, 256, LENGTHS[-1])  # tokens of the single rows, as far as the model accepts them
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_BYTES = 16  # per parameter: the checkpoint, and one model in float64


def prove(
    path: Path, hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout, canonical: Canonical
) -> Certificate:
    """Compare with transformers; raise BackendError if it cannot run the model."""
    transformers = need_transformers(path)
    verbosity = transformers.utils.logging.get_verbosity()
    try:
        transformers.utils.logging.set_verbosity_error()
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            _check_sizes(transformers, path, tensors)
            reference, texts = _run(transformers, path, hf_config, layout, canonical.config)
    except (BackendError, ParityError):
        raise
    except Exception as error:
        raise BackendError(f"transformers cannot run it ({type(error).__name__}: {str(error)[:300]})") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    comparator, wanted = Comparator(canonical, reference), tolerance(reference)
    found = comparator.compare(canonical.config)
    differing = _differing_texts(comparator, reference, texts, wanted)
    if differing or not found.passed(wanted):
        raise ParityError(
            f"{path}: differs from {HUGGING_FACE} in {differing} of {len(texts)} greedy texts; the error of the "
            f"{found.stage(wanted)} is {found.worst:.1e}, expected at most {wanted:.0e}; correct config.json or --set, "
            "or import it unproven with --no-compare"
        )
    lengths = compare_lengths(comparator, canonical, reference, found.worst, wanted)
    return Certificate(
        layout=layout.name,
        proven=True,
        author=HUGGING_FACE,
        author_version=f"transformers {transformers.__version__}",
        error=found.worst,
        tolerance=wanted,
        rows=len(reference.source_ids) + len(reference.long),
        source_tokens=lengths[0],
        target_tokens=lengths[1],
        unverified=tuple(uncompared(canonical.config, *lengths)),
    )


def _check_sizes(transformers: Any, path: Path, tensors: Mapping[str, Tensor]) -> None:
    config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
    with torch.device("meta"):
        empty = transformers.AutoModelForSeq2SeqLM.from_config(config)
    problems = [
        f"{name} is {list(tensors[name].shape)}, config.json describes {list(tensor.shape)}"
        for name, tensor in empty.state_dict().items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    raise_all(ParityError, str(path), problems[:8], remedy="correct config.json, or import it with --no-compare")
    needed = _BYTES * sum(parameter.numel() for parameter in empty.parameters())
    if needed > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise BackendError(f"that needs {needed} bytes of memory, this machine has {memory}")


def _run(
    transformers: Any, path: Path, hf_config: Mapping[str, Any], layout: Layout, config: TransformerConfig
) -> tuple[ReferenceOutputs, Tensor]:
    """Return outputs for random ids, and greedy texts."""
    options = {**_LOCAL, "weights_only": True, "dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, **options)
    # transformers 5 scales the logits of UMT5 regardless of its config.json, unlike transformers 4 and the training.
    model.config.tie_word_embeddings = hf_config.get("tie_word_embeddings", True)
    generator, pad = torch.Generator().manual_seed(0), config.tokens.pad
    limits = (config.source_vocab, config.max_source_length), (config.target_vocab or 0, config.max_target_length or 0)
    sides = [IdRange(vocab, pad, min(24, most), most) for vocab, most in limits]
    inputs: dict[str, Any] = {}
    for name, side in zip(("source", "target"), sides, strict=True):
        inputs[f"{name}_ids"], inputs[f"{name}_mask"] = draw_batch(side.vocab, side.short, pad, generator)
    original = Original(
        lambda model, ids, mask, target: model(ids, mask.long(), decoder_input_ids=target, use_cache=False).logits,
        lambda model, ids, mask: model.get_encoder()(ids, mask.long()).last_hidden_state,
        inputs,
        config.target_vocab,
    )
    rounded = original.run(model.eval())
    to_float64(model)
    results: dict[str, Any] = original.run(model)
    # A family that computes parts in float32 may differ by twice its error in float32, which grows with depth.
    errors = [float((rounded[name] - x).abs().max() / x.abs().max()) for name, x in results.items()]
    baseline = max(2 * max(errors), 1e-5) / BASELINES if layout.baseline else 0.0
    lengths = dict.fromkeys(tuple(min(length, side.longest) for side in sides) for length in _LONG)
    ids = [[side.draw((1, n), generator) for side, n in zip(sides, both, strict=True)] for both in lengths]
    rows = [run_row(partial(original.run_row, model), each) for each in ids]
    reference = ReferenceOutputs(**inputs, **results, baseline=baseline, long=tuple(row for row in rows if row))
    names = ["bos_token_id", "eos_token_id", "decoder_start_token_id"]
    tokens = {name: getattr(model.generation_config, name) for name in names} | {"pad_token_id": pad}
    # With a cache, it fails for a T5 with more layers in its decoder than in its encoder.
    settings = {"suppress_tokens": [pad], "max_new_tokens": 16, "use_cache": False}
    model.generation_config = transformers.GenerationConfig(**tokens, **settings)
    texts = model.generate(reference.source_ids, attention_mask=reference.source_mask.long())
    model.to("meta")  # frees its memory, although the module has reference cycles
    return reference, texts


@torch.inference_mode()
def _differing_texts(comparator: Comparator, reference: ReferenceOutputs, texts: Tensor, wanted: float) -> int:
    """Return how many greedy texts of transformers are not those of the model."""
    pad, ids = comparator.config.tokens.pad, texts[:, 1:]
    found = comparator.model(reference.source_ids, reference.source_mask, texts[:, :-1]).log_softmax(-1)
    found[..., pad] = -torch.inf
    margin = found.amax(-1) - found.gather(-1, ids[..., None])[..., 0]  # by which another token is better
    return int(((margin > wanted * comparator.scale) & (ids != pad)).any(1).sum())
