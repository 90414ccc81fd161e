"""Compare a Hugging Face directory with transformers itself, in float64."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from tfexport._io.extras import install_command
from tfexport.bundle.status import HUGGING_FACE
from tfexport.errors import BackendError, ParityError, raise_all
from tfexport.importing.huggingface import Family
from tfexport.importing.huggingface.tokenizer import need_transformers
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.layout.layout import Layout
from tfexport.importing.reference.certificate import Certificate, uncompared
from tfexport.importing.reference.compare import BASELINES, Comparator, compare_lengths, tolerance
from tfexport.importing.reference.lengths import LENGTHS, FrameRange, IdRange, PixelRange, run_row
from tfexport.importing.reference.original import Original
from tfexport.importing.reference.outputs import ReferenceOutputs, draw_batch
from tfexport.nn.config import TransformerConfig
from tfexport.nn.eager import to_float64
from tfexport.nn.source import length_mask

_LONG = (64, 256, LENGTHS[-1])  # tokens of the single rows, as far as the model accepts them
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_BYTES = 16  # per parameter: the checkpoint, and one model in float64


def prove(
    path: Path,
    family: Family,
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layout: Layout,
    canonical: Canonical,
) -> Certificate:
    """Compare with transformers; raise BackendError if it cannot run the model."""
    transformers = need_transformers(path)
    if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 1]:  # 5.0 scales all logits of T5
        raise BackendError(f"the installed transformers is older than 5.1; {install_command('transformers')}")
    task = "SpeechSeq2Seq" if family.features else "ImageTextToText" if family.image else "Seq2SeqLM"
    kind = getattr(transformers, f"AutoModelFor{task}")
    verbosity = transformers.utils.logging.get_verbosity()
    try:
        transformers.utils.logging.set_verbosity_error()
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            _check_sizes(transformers, kind, path, tensors)
            options = {**_LOCAL, "weights_only": True, "dtype": torch.float32, "attn_implementation": "eager"}
            model = kind.from_pretrained(path, **options)
            family.repair(model)
            # transformers 5.3 to 5.23 scale the logits of UMT5 regardless of config.json, unlike 4 and the training.
            model.config.tie_word_embeddings = hf_config.get("tie_word_embeddings", True)
            reference, texts = _run(model.eval(), family, layout, canonical.config, transformers)
            model.to("meta")  # frees its memory, although the module has reference cycles
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


def _check_sizes(transformers: Any, kind: Any, path: Path, tensors: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        empty = kind.from_config(transformers.AutoConfig.from_pretrained(path, **_LOCAL))
    stored = transformers.core_model_loading.revert_weight_conversion(empty, empty.state_dict())
    problems = [
        f"{name} is {list(tensors[name].shape)}, config.json describes {list(tensor.shape)}"
        for name, tensor in stored.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    raise_all(ParityError, str(path), problems[:8], remedy="correct config.json, or import it with --no-compare")
    needed = _BYTES * sum(parameter.numel() for parameter in empty.parameters())
    if needed > (memory := psutil.virtual_memory().total):
        raise BackendError(f"that needs {needed} bytes of memory, this machine has {memory}")


class _Together:
    """Run a batch of token ids at once."""

    encode: Any = staticmethod(lambda model, ids, mask: model.get_encoder()(ids, mask.long()).last_hidden_state)

    def logits(self, model: Any, ids: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
        return model(ids, mask.long(), decoder_input_ids=target_ids, use_cache=False).logits  # type: ignore[no-any-return]

    def generate(self, model: Any, ids: Tensor, mask: Tensor, pad: int) -> Tensor:
        return model.generate(ids, attention_mask=mask.long())  # type: ignore[no-any-return]


class _Alone:
    """Run each source of features alone.

    The encoders of transformers are not independent of padding.
    """

    encode: Any = None

    def __init__(self, arrange: Callable[[Tensor], Tensor], generate: Callable[..., Tensor]) -> None:
        self.arrange, self._generate = arrange, generate

    def logits(self, model: Any, features: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
        rows = zip(self._rows(model, features, mask), target_ids, strict=True)
        return torch.cat([model(x, decoder_input_ids=ids[None], use_cache=False).logits for x, ids in rows])

    def generate(self, model: Any, features: Tensor, mask: Tensor, pad: int) -> Tensor:
        texts = [self._generate(model, x)[0] for x in self._rows(model, features, mask)]
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad)

    def _rows(self, model: Any, features: Tensor, mask: Tensor) -> list[Tensor]:
        wide, lengths = features.to(model.dtype), mask.sum(1).tolist()
        return [self.arrange(row[None, :length]) for row, length in zip(wide, lengths, strict=True)]


class _Pictures:
    """Run a batch of images at once."""

    encode: Any = staticmethod(lambda model, x, mask: model.get_encoder()(x.to(model.dtype)).last_hidden_state)

    def logits(self, model: Any, pixels: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
        return model(pixels.to(model.dtype), decoder_input_ids=target_ids, use_cache=False).logits  # type: ignore[no-any-return]

    def generate(self, model: Any, pixels: Tensor, mask: Tensor, pad: int) -> Tensor:
        return model.generate(pixels.to(model.dtype))  # type: ignore[no-any-return]


def _draw(side: IdRange | FrameRange | PixelRange, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw three rows of uneven length, or images, and their mask."""
    if isinstance(side, IdRange):
        return draw_batch(side.vocab, side.short, side.pad, generator)
    if isinstance(side, PixelRange):
        return side.draw((3, side.short), generator), torch.ones(3, side.short, dtype=torch.bool)
    features = side.draw((3, side.short), generator)
    lengths = [features.shape[1], *(side.source.least_frames(n) for n in (side.short // 2 + 1, 1))]
    return features, length_mask(torch.tensor(lengths), features.shape[1])


def _run(
    model: Any, family: Family, layout: Layout, config: TransformerConfig, transformers: Any
) -> tuple[ReferenceOutputs, Tensor]:
    """Return outputs for random sources, and greedy texts."""
    generator, pad = torch.Generator().manual_seed(0), config.tokens.pad
    limits = (config.source_vocab, config.max_source_length), (config.target_vocab or 0, config.max_target_length or 0)
    sides: list[IdRange | FrameRange | PixelRange] = [
        IdRange(vocab, pad, min(24, most), most) for vocab, most in limits
    ]
    caller: _Together | _Alone | _Pictures = _Together()
    if config.features:
        # Not the method of the model, because that of Whisper adds a prompt.
        caller = _Alone(family.arrange, transformers.GenerationMixin.generate)
        sides[0] = FrameRange(config.features.source, min(24, config.max_source_length), config.max_source_length)
    elif config.image:
        source = config.image.source
        caller, sides[0] = _Pictures(), PixelRange(source, source.positions, source.positions)
    inputs: dict[str, Any] = {}
    for name, side in zip(("source", "target"), sides, strict=True):
        inputs[f"{name}_ids"], inputs[f"{name}_mask"] = _draw(side, generator)
    original = Original(caller.logits, caller.encode, inputs, config.target_vocab)
    rounded = original.run(model)
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
    return reference, caller.generate(model, reference.source_ids, reference.source_mask, pad)


@torch.inference_mode()
def _differing_texts(comparator: Comparator, reference: ReferenceOutputs, texts: Tensor, wanted: float) -> int:
    """Return how many greedy texts of transformers are not those of the model."""
    pad, ids = comparator.config.tokens.pad, texts[:, 1:]
    found = comparator.model(reference.source_ids, reference.source_mask, texts[:, :-1]).log_softmax(-1)
    found[..., pad] = -torch.inf
    margin = found.amax(-1) - found.gather(-1, ids[..., None])[..., 0]  # by which another token is better
    return int(((margin > wanted * comparator.scale) & (ids != pad)).any(1).sum())
