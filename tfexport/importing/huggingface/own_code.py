"""Compare a Hugging Face directory with transformers itself, in float64."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.bundle.status import HUGGING_FACE
from tfexport.errors import BackendError, ParityError, shortened
from tfexport.importing.huggingface.tokenizer import need_transformers
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.layout.layout import Layout
from tfexport.importing.reference.certificate import Certificate, uncompared
from tfexport.importing.reference.compare import BASELINES, Comparator, compare_lengths, tolerance
from tfexport.importing.reference.lengths import LENGTHS, IdRange, run_row
from tfexport.importing.reference.original import Original, to_float64
from tfexport.importing.reference.outputs import ReferenceOutputs, draw_batch
from tfexport.nn.config import TransformerConfig

_SHORT = 24  # tokens of the longest padded row
_LONG = (64, 256, LENGTHS[-1])  # tokens of the single rows, as far as the model accepts them
_NEW_TOKENS = 16
_ROUNDED = 1e-5  # error of folds whose results are rounded to the dtype of the weights
_BYTES = 16  # per parameter: the checkpoint, and one model in float64


def prove(path: Path, hf_config: Mapping[str, Any], layout: Layout, canonical: Canonical) -> Certificate:
    """Compare logits and greedy texts with those of transformers.

    Raises:
        BackendError: transformers is not installed, or cannot run the model.
        ParityError: Outputs differ.
    """
    needed = _BYTES * sum(tensor.numel() for tensor in canonical.tensors.values())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise BackendError(f"that needs {needed} bytes of memory, this machine has {memory}")
    transformers = need_transformers(path)
    try:
        with _quiet(transformers):
            reference, texts, notes = _run(transformers, path, hf_config, layout, canonical.config)
    except Exception as error:
        raise BackendError(f"transformers cannot run it ({type(error).__name__}: {str(error)[:300]})") from error
    wanted, config = tolerance(reference), canonical.config
    comparator = Comparator(canonical, reference)
    found = comparator.compare(config)
    problems = [] if found.passed(wanted) else [f"the {found.stage(wanted)} differs: error {found.worst:.1e}"]
    if not problems and (differs := _differing_texts(comparator, reference, texts, wanted)):
        problems = [f"{differs} of {len(texts)} greedy texts differ"]
    if problems:
        raise ParityError(
            f"outputs differ from {HUGGING_FACE}: {'; '.join([*problems, *notes])}; expected an error of at most "
            f"{wanted:.0e}",
            subject=str(path),
            remedy="correct config.json or --set, or import it unproven with --no-compare",
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
        unverified=tuple(uncompared(config, *lengths)),
    )


def _run(
    transformers: Any, path: Path, hf_config: Mapping[str, Any], layout: Layout, config: TransformerConfig
) -> tuple[ReferenceOutputs, Tensor, list[str]]:
    """Return outputs for random ids, greedy texts, and notes about the weights."""
    model, loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        path,
        local_files_only=True,
        trust_remote_code=False,
        weights_only=True,
        dtype=torch.float32,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    model.eval()
    # transformers 5 scales the logits of UMT5 regardless of its config.json, unlike transformers 4 and the training.
    model.config.tie_word_embeddings = hf_config.get("tie_word_embeddings", True)
    generator, pad = torch.Generator().manual_seed(0), config.tokens.pad
    assert config.target_vocab is not None
    assert config.max_target_length is not None
    limits = ((config.source_vocab, config.max_source_length), (config.target_vocab, config.max_target_length))
    sides = [IdRange(vocab, pad, min(_SHORT, most), most) for vocab, most in limits]
    inputs = dict[str, Any]()
    for name, side in zip(("source", "target"), sides, strict=True):
        inputs[f"{name}_ids"], inputs[f"{name}_mask"] = draw_batch(side.vocab, side.short, pad, generator)
    original = Original(_forward, _encode, inputs, config.target_vocab)
    rounded = original.run(model)
    to_float64(model)
    results: dict[str, Any] = original.run(model)
    errors = [float((rounded[name] - x).abs().max() / x.abs().max()) for name, x in results.items()]
    rows = []
    for lengths in dict.fromkeys(tuple(min(length, side.longest) for side in sides) for length in _LONG):
        ids = [side.draw((1, length), generator) for side, length in zip(sides, lengths, strict=True)]
        rows.append(run_row(partial(original.run_row, model), ids))
    reference = ReferenceOutputs(
        **inputs,
        **results,
        # A family that computes parts in float32 may differ by twice its error in float32, which grows with depth.
        baseline=max(2 * max(errors), _ROUNDED) / BASELINES if layout.baseline else 0.0,
        long=tuple(row for row in rows if row is not None),
    )
    names = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
    model.generation_config = transformers.GenerationConfig(
        **{name: getattr(model.generation_config, name) for name in names},
        pad_token_id=pad,
        suppress_tokens=[pad],
        max_new_tokens=_NEW_TOKENS,
        use_cache=False,  # fails for a T5 with more layers in its decoder than in its encoder
    )
    mask = inputs["source_mask"].long()
    texts = model.generate(inputs["source_ids"], attention_mask=mask)
    notes = {name: sorted(loaded[f"{name}_keys"])[:8] for name in ("missing", "mismatched", "unexpected")}
    return reference, texts, [f"{name} weights {shortened(keys)}" for name, keys in notes.items() if keys]


@torch.inference_mode()
def _differing_texts(comparator: Comparator, reference: ReferenceOutputs, texts: Tensor, wanted: float) -> int:
    """Return how many greedy texts of transformers are not those of the model."""
    pad, ids = comparator.config.tokens.pad, texts[:, 1:]
    found = comparator.model(reference.source_ids, reference.source_mask, texts[:, :-1]).log_softmax(-1)
    found[..., pad] = -torch.inf
    behind = found.amax(-1) - found.gather(-1, ids[..., None])[..., 0]
    return int(((behind > wanted * comparator.scale) & (ids != pad)).any(1).sum())


def _forward(model: Any, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
    found: Tensor = model(source_ids, source_mask.long(), decoder_input_ids=target_ids, use_cache=False).logits
    return found


def _encode(model: Any, source_ids: Tensor, source_mask: Tensor) -> Tensor:
    found: Tensor = model.get_encoder()(source_ids, source_mask.long()).last_hidden_state
    return found


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
