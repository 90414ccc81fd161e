"""Record and read reference outputs of the original model.

A safetensors file stores the tensors by name; those of mappings have the prefixes `state.`, `attribute.` and `real.`.
Its metadata has texts (`text`) and checksums of weights (`weights`) as JSON, and that of the contents (`sha256`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tfexport._io.atomic import whole_file
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import parse_json, plain_problem
from tfexport.contract import Head
from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.importing._files import snapshot, tensor_problems, unmapped
from tfexport.importing.reference.lengths import (
    LENGTHS,
    LONG,
    FrameRange,
    IdRange,
    LongRow,
    read_rows,
    record_rows,
    write_rows,
)
from tfexport.importing.reference.original import Original, copied, hidden_tables, least_frames
from tfexport.importing.reference.texts import RecordedTexts, record_texts
from tfexport.importing.reference.weights import randomize, tensor_sums
from tfexport.nn.eager import to_float64
from tfexport.sources import FeatureSource
from tfexport.text.config import TextConfig

STATE, ATTRIBUTE, REAL = "state.", "attribute.", "real."
_INPUTS, _RESULTS = ("source_ids", "source_mask", "target_ids", "target_mask"), ("logits", "hidden_states")
_FORMER = {"source_keep": "source_mask", "target_keep": "target_mask"}  # names in older files
_MAX_BYTES = 1024**3  # of inputs and outputs, without the state dict
_PLAIN: dict[str, type] = {"heads": int, "pad_source": int, "pad_target": int, "baseline": float, "long_error": str}


@dataclass(frozen=True, kw_only=True)
class ReferenceOutputs:
    """Inputs and float64 outputs of a model; encoder-only models have no targets.

    Inputs are padded on the right. In masks, True is a token or frame.
    """

    source_ids: Tensor  # int64 [batch, source_len], or float32: features [batch, frames, dim] or pixels [batch, …]
    source_mask: Tensor  # bool [batch, source_len or frames]
    target_ids: Tensor | None = None  # int64 [batch, target_len]
    target_mask: Tensor | None = None  # bool [batch, target_len]
    # Log-probabilities or logits, float64 [batch, target_len, vocab]; of a head [batch(, source_len), labels].
    logits: Tensor | None = None
    hidden_states: Tensor | None = None  # of the encoder, float64 [batch, source_len, d_model]
    heads: int | None = None
    pad_source: int | None = None
    pad_target: int | None = None
    baseline: float = 0.0  # relative error of the outputs, if the original computes parts in float32
    state: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # that computed the outputs
    attributes: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # outside of the state dict, by name
    real: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # outputs with the model's own weights
    text: TextConfig | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)  # ids of pad, start and eos, as far as given
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)  # checksums of the model's own tensors
    long: tuple[LongRow, ...] = field(default=(), repr=False)  # up to the length limits of the model
    long_error: str | None = None  # that ended longer rows and does not look like a length limit
    file: FileEntry | None = None

    def __post_init__(self) -> None:
        raise_all(CheckpointError, "reference outputs", _problems(self))

    def known_tokens(self) -> dict[str, int]:
        """Return the recorded ids as settings, such as tokens.eos."""
        end = self.text.recorded_end if self.text else None
        tokens = ({} if end is None else {"eos": end}) | dict(self.tokens)
        return {f"tokens.{name}": value for name, value in tokens.items()}

    @property
    def head(self) -> Head:
        """The head of an encoder-only model that the logits belong to."""
        if self.logits is None or self.target_ids is not None:
            return "none"
        return "token" if self.logits.dim() == 3 else "sequence"

    def with_real_weights(self) -> ReferenceOutputs | None:
        """Return the outputs of the checkpoint's own weights, or None if not recorded."""
        if not self.real:
            return None
        results = {name: self.real.get(name) for name in _RESULTS}
        return replace(self, **results, state={}, attributes={}, real={}, long=(), file=None)  # type: ignore[arg-type]


def read_reference(path: Path | str) -> ReferenceOutputs:
    """Read a reference file that `record_reference` has written."""
    path = Path(path)
    try:
        if problem := plain_problem(path):
            raise CheckpointError(f"{path}: {problem}; record one with tfexport.record_reference")
        with snapshot(path) as (copy, file_sum), safe_open(copy, "pt") as file:
            metadata = dict(file.metadata() or {})
            names = list(file.keys())
            _check_names(path, names, {name: file.get_slice(name) for name in names if not name.startswith(STATE)})
            stored = {name: unmapped(file.get_tensor(name)) for name in names}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except CheckpointError:
        raise
    except Exception as error:  # also PyTorch errors about unsupported dtypes
        raise CheckpointError(f"{path}: is not a safetensors file or cut short ({error}); record it again") from error
    raise_all(CheckpointError, str(path), tensor_problems(stored, file_sum.bytes))
    if metadata.pop("sha256", None) not in (None, _contents_sum(stored, metadata)):
        raise CheckpointError(f"{path}: has changed since it was recorded; copy it or record it again")
    tensors = {_FORMER.get(name, name): tensor for name, tensor in stored.items()}
    state, attributes, real, long = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (STATE, ATTRIBUTE, REAL, LONG)
    )
    # The file format does not keep the order of the state dict.
    order = metadata.get("state_order", "").split("\n")
    if tensors["source_ids"].dim() > 3:
        raise CheckpointError(f"{path}: source_ids are images, expected token ids or features; record it again")
    try:
        fields: dict[str, Any] = {name: tensors.get(name) for name in (*_INPUTS, *_RESULTS)}
        return ReferenceOutputs(
            **fields,
            **_read_metadata(metadata),
            state={name: state[name] for name in order} if set(order) == set(state) else state,
            attributes=attributes,
            real=real,
            long=read_rows(long),
            file=file_sum,
        )
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def record_reference(
    model: nn.Module,
    forward: Callable[..., Tensor],
    path: Path | str,
    *,
    source_vocab: int | None = None,
    features: int | None = None,
    target_vocab: int | None = None,
    num_labels: int | None = None,
    heads: int | None = None,
    pad_source: int | None = None,
    pad_target: int | None = None,
    start: int | None = None,
    end: int | None = None,
    encode: Callable[..., Tensor] | None = None,
    source_len: int = 9,
    target_len: int = 7,
    max_source_len: int = LENGTHS[-1],
    max_target_len: int = LENGTHS[-1],
    seed: int = 0,
    texts: RecordedTexts | None = None,
    force: bool = False,
) -> ReferenceOutputs:
    """Record the outputs of a model for `tfexport import --reference`.

    Two copies of the model run in eval mode and float64 on three rows of uneven length. One copy has random parameters,
    and its state dict is stored with its outputs. It also runs single rows up to the longest that the model accepts.
    The other copy has the model's own weights.

    Args:
        model: original model; it is not modified.
        forward: called as `forward(model, source_ids, source_mask, target_ids)` with int64 [batch, source_len], bool
            [batch, source_len] (True = token) and int64 [batch, target_len], padded on the right. It makes the masks as
            in training and returns logits or log-probabilities [batch, target_len, target_vocab]. `target_ids` are the
            inputs of the decoder and begin with the start token. If the decoder starts from a vector instead of a
            token, `forward` leaves the first id out, which is then recorded as `pad_target`. For an encoder-only model
            it is called without `target_ids` and returns states [batch, source_len, d_model], or the logits of a head:
            [batch, num_labels], or [batch, source_len, num_labels].
        path: file to write.
        source_vocab: number of source ids, if the encoder reads ids.
        features: number of features of a frame, if the encoder reads features, which `forward` gets as float64 [batch,
            frames, features] with the mask of the frames. Needs `target_vocab`; `encode` and `texts` are not compared.
        target_vocab: number of target ids; None for an encoder-only model.
        num_labels: number of labels of an encoder-only model with a head, if `forward` returns its logits.
        heads: number of attention heads, which shapes do not show.
        pad_source: padding id of sources, never drawn as a token. None pads with 0 and leaves `tokens.pad` open.
        pad_target: padding id of targets, never drawn as a token. None pads with `pad_source`.
        start: id that targets begin with; None takes that of `texts`.
        end: id that ends a target; None takes that of `texts`.
        encode: called as `encode(model, source_ids, source_mask)`; returns the states of the encoder, [batch,
            source_len, d_model]. With them, a failed import reports which side is wrong.
        source_len: length of the longest source in the three rows; 4 times as many frames of features.
        target_len: length of the longest target in the three rows.
        max_source_len: length of the longest source to try in single rows.
        max_target_len: length of the longest target to try in single rows.
        seed: seed of the ids and the random parameters.
        texts: sample texts and your own code around the model. Without them, the tokenizer is not verified.
        force: replace an existing file after the new one is complete.

    Returns:
        The recorded outputs, as `read_reference` reads them.

    Raises:
        CheckpointError: The file exists or cannot be written, the model cannot be copied, or its outputs have a wrong
            shape, are not finite, differ between runs or depend on later tokens.
    """
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{path} exists; use force=True or choose another name")
    kinds: tuple[tuple[str, Any, Any], ...] = (("model", model, nn.Module), ("texts", texts, RecordedTexts | None))
    wrong = [f"{name} is {shortened(value)}" for name, value, kind in kinds if not isinstance(value, kind)]
    raise_all(CheckpointError, "reference", wrong, remedy="give a torch.nn.Module, and RecordedTexts or None")
    tokens = _tokens(pad_source, start, end, texts)
    if features is not None and (target_vocab is None or encode is not None or texts is not None):
        raise CheckpointError("reference: features need target_vocab, and neither encode nor texts")
    if (source_vocab is None) == (features is None):
        raise CheckpointError("reference: source_vocab and features are both given or missing; give one of them")
    sizes = (("source_vocab", source_vocab), ("target_vocab", target_vocab), ("heads", heads))
    ids = [("pad_source", pad_source, source_vocab), ("pad_target", pad_target, target_vocab)]
    ids += [("start", tokens.get("start"), target_vocab), ("end", tokens.get("eos"), target_vocab)]
    numbers: list[tuple[str, Any, int, Any]] = [(name, value, 1, None) for name, value in sizes]
    numbers += [(name, value, 0, vocab if isinstance(vocab, int) else None) for name, value, vocab in ids]
    wrong = [
        f"{name} is {shortened(value)}, expected {least} or more{'' if limit is None else f', below {limit}'}"
        for name, value, least, limit in numbers
        if value is not None and not (isinstance(value, Integral) and least <= int(value) < (limit or math.inf))
    ]
    raise_all(CheckpointError, "reference", wrong)
    pad_source = pad_source or 0
    pad_target = pad_source if pad_target is None else pad_target
    generator = torch.Generator().manual_seed(seed)
    randomized, own = copied(model), copied(model)
    targets = dict[str, Tensor]()
    source = IdRange(source_vocab or 3, pad_source, source_len, max_source_len)
    drawn = draw_batch(source.vocab, source_len, pad_source, generator)
    if target_vocab is not None:
        targets["target_ids"], targets["target_mask"] = draw_batch(target_vocab, target_len, pad_target, generator)
    sides: list[IdRange | FrameRange] = [source]
    if features is not None:
        sides = [FrameRange(FeatureSource(dim=features), 4 * source_len, max_source_len)]
        fewest = least_frames(forward, randomized, features, targets["target_ids"][:1])
        drawn = draw_frames(features, [4 * source_len, 2 * source_len + 1, fewest], generator)
    inputs = {"source_ids": drawn[0], "source_mask": drawn[1], **targets}
    original = Original(forward, encode, inputs, target_vocab, num_labels)
    randomize(randomized, generator)
    state = {
        name: value.detach().clone() for name, value in randomized.state_dict().items() if isinstance(value, Tensor)
    }
    attributes = hidden_tables(randomized, state)
    to_float64(randomized)
    to_float64(own)
    results = original.run(randomized)
    original.check(randomized, results, pad_target)
    first_target = None
    if target_vocab is not None:
        sides.append(IdRange(target_vocab, pad_target, target_len, max_target_len))
        first_target = pad_target if bool((inputs["target_ids"][:, 0] == pad_target).all()) else None
    baseline = original.baseline(randomized, results)
    long, long_error = record_rows(partial(original.run_row, randomized), sides, generator, first_target)
    reference = ReferenceOutputs(
        **inputs,
        **results,
        heads=heads,
        pad_source=None if source_vocab is None else pad_source,
        pad_target=pad_target if target_vocab is not None else None,
        baseline=baseline,
        state=state,
        attributes=attributes,
        real=original.run(own),
        text=record_texts(own, forward, texts, source_vocab, target_vocab) if texts and source_vocab else None,
        tokens=tokens,
        weights=tensor_sums(model.state_dict()),
        long=long,
        long_error=long_error,
        file=None,
    )
    write_reference(reference, path)
    return reference


def write_reference(reference: ReferenceOutputs, path: Path) -> None:
    """Write reference outputs; the file is complete or does not exist."""
    tensors = {name: getattr(reference, name) for name in (*_INPUTS, *_RESULTS)}
    tensors |= write_rows(reference.long)
    for prefix, more in ((STATE, reference.state), (ATTRIBUTE, reference.attributes), (REAL, reference.real)):
        tensors |= {prefix + name: tensor for name, tensor in more.items()}
    # safetensors cannot store tensors that share memory.
    stored = {name: x.detach().contiguous().clone() for name, x in tensors.items() if x is not None}
    metadata = {name: str(value) for name in _PLAIN if (value := getattr(reference, name)) is not None}
    metadata["compute_dtype"] = "float64"
    if reference.state:
        metadata["state_order"] = "\n".join(reference.state)
    if reference.text:
        metadata["text"] = json.dumps(reference.text.to_dict(), ensure_ascii=False)
    if reference.tokens:
        metadata["tokens"] = json.dumps(dict(reference.tokens))
    if reference.weights:
        metadata["weights"] = json.dumps(dict(reference.weights))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as draft:
            save_file(stored, draft, metadata={**metadata, "sha256": _contents_sum(stored, metadata)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def _contents_sum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    listed = json.dumps([tensor_sums(tensors), dict(metadata)], sort_keys=True)
    return hashlib.sha256(listed.encode()).hexdigest()


def _tokens(pad: int | None, start: int | None, end: int | None, texts: RecordedTexts | None) -> dict[str, int]:
    others = (texts.start, texts.end) if texts else (None, None)
    both = list(zip(("start", "end"), (start, end), others, strict=True))
    raise_all(
        CheckpointError,
        "reference",
        [
            f"{name} is {ours}, that of texts is {theirs}"
            for name, ours, theirs in both
            if ours is not None and theirs is not None and ours != theirs
        ],
        remedy="give one of them",
    )
    start, end = (theirs if ours is None else ours for _, ours, theirs in both)
    return {name: value for name, value in (("pad", pad), ("start", start), ("eos", end)) if value is not None}


def draw_batch(vocab: int, length: int, pad: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw three rows of ids and their mask."""
    if vocab < 3 or length < 2 or not 0 <= pad < vocab:
        got = f"vocabulary {vocab}, length {length}, padding id {pad}"
        raise CheckpointError(f"reference: {got}; expected at least 3, at least 2, and an id of the vocabulary")
    # Attention over a single token returns that token, regardless of heads, scales, queries and keys. So a search can
    # decide everything else on the last row first.
    lengths = torch.tensor([length, length // 2 + 1, 1])
    keep = torch.arange(length)[None] < lengths[:, None]
    ids = IdRange(vocab, pad, length, length).draw((3, length), generator)
    return torch.where(keep, ids, pad), keep


def draw_frames(dim: int, lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw features float32 [rows, frames, dim], 0 at padding, and their mask."""
    keep = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return torch.randn((*keep.shape, dim), generator=generator) * keep[:, :, None], keep


def _check_names(path: Path, names: list[str], slices: Mapping[str, Any]) -> None:
    known = {*_INPUTS, *_RESULTS, *(REAL + name for name in _RESULTS), *_FORMER}
    inputs = [_FORMER.get(name, name) for name in names]
    others = [name for name in names if name not in known and not name.startswith((STATE, ATTRIBUTE, LONG))]
    problems = [f"unknown tensor {shortened(name)}" for name in others]
    problems += [f"missing tensor {name}" for name in ("source_ids", "source_mask") if name not in inputs]
    problems += [f"tensor {name} is there twice, under a former name too" for name in _INPUTS if inputs.count(name) > 1]
    size = sum(8 * torch.Size(part.get_shape()).numel() for part in slices.values())
    if size > _MAX_BYTES:
        problems.append(f"inputs and outputs take {size} bytes, the limit is {_MAX_BYTES}; record fewer, shorter rows")
    raise_all(CheckpointError, str(path), problems)


def _read_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    found, problems = dict[str, Any](), list[str]()
    for name in [name for name in (*_PLAIN, "text", "tokens", "weights") if name in metadata]:
        try:
            found[name] = _PLAIN[name](metadata[name]) if name in _PLAIN else parse_json(metadata[name].encode())
        except ValueError as error:
            problems.append(f"{name} is {shortened(metadata[name])} ({error})")
    weights = found.get("weights", {})
    if not isinstance(weights, dict) or not all(isinstance(value, str) for value in weights.values()):
        problems.append(f"weights is {shortened(weights)}, expected checksums by name")
    tokens = found.get("tokens", {})
    if not isinstance(tokens, dict) or not tokens.keys() <= {"pad", "start", "eos"}:
        problems.append(f"tokens is {shortened(tokens)}, expected ids of pad, start and eos")
    elif not all(type(value) is int and value >= 0 for value in tokens.values()):
        problems.append(f"tokens is {shortened(tokens)}, expected ids of 0 or more")
    if metadata.get("compute_dtype", "float64") != "float64":
        problems.append(f"compute_dtype is {shortened(metadata['compute_dtype'])}, expected float64")
    raise_all(CheckpointError, "metadata", problems, remedy="record it again")
    return found | ({"text": TextConfig.from_dict(found["text"], subject="text")} if "text" in found else {})


def _problems(reference: ReferenceOutputs) -> list[str]:
    problems = [
        *_side_problems("source", reference.source_ids, reference.source_mask, reference.pad_source),
        *_side_problems("target", reference.target_ids, reference.target_mask, reference.pad_target),
    ]
    if reference.target_ids is not None and reference.logits is None:
        problems.append("logits are missing; record them with target_ids")
    if reference.logits is None and reference.hidden_states is None:
        problems.append("logits and hidden_states are missing; record one of them")
    if reference.heads is not None and reference.heads < 1:
        problems.append(f"heads is {reference.heads}, expected 1 or more")
    if not 0 <= reference.baseline < 1e-3:  # NaN too
        problems.append(f"baseline is {reference.baseline}, expected 0 to 1e-3, so that the outputs can prove a layout")
    if not problems:
        for results in ({name: getattr(reference, name) for name in _RESULTS}, reference.real):
            problems += _result_problems(reference, results)
    if not problems:
        outputs = reference.hidden_states if reference.logits is None else reference.logits
        assert outputs is not None
        for number, row in enumerate(reference.long):
            found = row.problems(has_targets=reference.target_ids is not None, width=outputs.shape[-1])
            problems += [f"long row {number}: {problem}" for problem in found]
    return problems


def _side_problems(side: str, ids: Tensor | None, keep: Tensor | None, pad: int | None) -> list[str]:
    if ids is None or keep is None:
        return [] if ids is keep else [f"one of {side}_ids and {side}_mask is missing"]
    kinds = [(torch.int64, 2)] if side == "target" else [(torch.int64, 2), (torch.float32, 3), (torch.float32, 4)]
    # Pixels have no axis of positions.
    is_fitting = keep.shape == ids.shape[:2] if ids.dim() < 4 else keep.dim() == 2 and len(keep) == len(ids)
    if (ids.dtype, ids.dim()) not in kinds or keep.dtype != torch.bool or not is_fitting:
        got = f"{side}_ids is {ids.dtype} {list(ids.shape)} and {side}_mask {keep.dtype} {list(keep.shape)}"
        return [f"{got}, expected int64 and bool of one shape [batch, {side}_len]"]
    if not ids.numel():
        return [f"{side}_ids is empty"]
    problems = [f"{side}_ids has negative ids"] if ids.dim() == 2 and int(ids.min()) < 0 else []
    if pad is not None and pad < 0:
        problems.append(f"pad_{side} is {pad}, expected 0 or more")
    if not bool(keep[:, 0].all()) or bool((keep[:, 1:] & ~keep[:, :-1]).any()):
        problems.append(f"{side}_mask is not tokens and then padding; pad on the right, after at least one token")
    return problems


def _result_problems(reference: ReferenceOutputs, results: Mapping[str, Tensor | None]) -> list[str]:
    problems = []
    for name, result in results.items():
        keep = reference.source_mask if name == "hidden_states" else reference.target_mask
        keep = reference.source_mask if keep is None else keep
        if result is None:
            continue
        keep = keep[:, 0] if name == "logits" and reference.head == "sequence" else keep
        if result.dtype != torch.float64 or result.shape[:-1] != keep.shape:
            expected = f"torch.float64 [{', '.join(map(str, keep.shape))}, …]"
            problems.append(f"{name} is {result.dtype} {list(result.shape)}, expected {expected}")
        elif not bool(result[keep].isfinite().all()):
            problems.append(f"{name} holds NaN or infinity outside of padding; fix the original model or its masks")
    return problems
