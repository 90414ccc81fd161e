"""Run the model itself in PyTorch, as the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.bundle.bundle import Bundle
from tfexport.contract import HIDDEN_STATES, WEIGHTS, AlignmentHeads, ModelSpec
from tfexport.errors import BackendError, BundleError
from tfexport.nn.cache import Cross, Source, empty_buffers, flattened, paired, row_cache
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_weights
from tfexport.nn.eager import EagerModel, align
from tfexport.nn.source import encoder_inputs
from tfexport.nn.transformer import Transformer
from tfexport.precision import Accuracy
from tfexport.runtime.checked import CheckedAligner, CheckedScoring
from tfexport.runtime.registry import Graphs, LoadOptions
from tfexport.runtime.session import Candidates, Floats, Ids, Limits, Prompts, close_up, given_candidates, rows_of
from tfexport.runtime.shortlist import Shortlist
from tfexport.runtime.sources import Array, Sources

# Initial cache capacity in tokens; it doubles when full.
FIRST_CAPACITY = 32


class EagerSession(CheckedAligner):
    """A model in PyTorch, on the device of its weights, which must not change."""

    backend = "eager"

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec | None = None,
        *,
        alignment: AlignmentHeads | None = None,
        shortlist: Shortlist | None = None,
    ) -> None:
        """Create a session for a `Transformer`, or a module with its methods and a spec."""
        self.shortlist = shortlist
        self.has_alignment, self._alignment = alignment is not None, alignment
        self.spec = spec or model_spec(cast(Transformer, model).config, "fp32")
        self.accuracy: Accuracy = self.spec.precision
        self.limits = shortlist.limits(Limits.of(self.spec)) if shortlist else Limits.of(self.spec)
        self._model: nn.Module | None = model.eval()

    @property
    def _is_open(self) -> bool:
        return self._model is not None

    def _batch(self, width: int) -> EagerBatch:
        return EagerBatch(self, width)

    @torch.inference_mode()
    def _encode(self, sources: Sources, output: str) -> Floats:
        model = self.open_model()
        states = model.hidden_states(*encoder_inputs(sources.kind, _inputs(model, *sources.inputs.values())))
        if output != HIDDEN_STATES:
            states = model.classify(states, *_inputs(model, sources.mask))
        found: Floats = states.float().cpu().numpy()
        return found

    @torch.inference_mode()
    def _align(self, sources: Sources, target_ids: Ids) -> Floats:
        model = self.open_model()
        assert self._alignment is not None
        *inputs, ids = _inputs(model, *sources.inputs.values(), target_ids)
        weights: Floats = align(model, self._alignment, self.spec, inputs, ids).cpu().numpy()
        return weights

    def close(self) -> None:
        """Release the model."""
        self._model = None

    def open_model(self) -> Any:
        """Return the module; raise `BackendError` if the session is closed."""
        self._check_open()
        return self._model


class EagerBatch(CheckedScoring):
    """Sources being decoded in PyTorch, on the model's device."""

    def __init__(self, session: EagerSession, width: int) -> None:
        super().__init__(session.spec, width)
        self._session = session
        self._device = next(session.open_model().parameters()).device
        self._source_mask = self._tensor(np.empty((0, 0), np.bool_))
        self._kind, self._capacity = session.spec.cache, FIRST_CAPACITY
        self._cross: list[Tensor] = []  # keys and values of each layer, [sources, heads, source_len, …]
        self._may_follow = self._tensor(np.empty((0, session.spec.vocab), np.bool_))  # with a shortlist
        self._past: list[Tensor] = []  # of each layer, keys and values [rows, heads, capacity, …] or a state

    @torch.inference_mode()
    def _add(self, sources: Sources, prompts: Prompts) -> None:
        new, mask = len(sources), self._tensor(sources.mask)
        x, x_mask = encoder_inputs(sources.kind, [self._tensor(array) for array in sources.inputs.values()])
        cross = flattened(self._session.open_model().encode(x, Source(x_mask)))
        first, length = self.lengths.size, max(sources.source_len, self._source_mask.shape[1])
        if not self._cross:
            self._cross, self._source_mask = cross, mask
            self._past = empty_buffers(self._kind, 0, self._capacity, cross[0])
        else:
            pairs = zip(self._cross, cross, strict=True)
            self._cross = [torch.cat([_grown(part, (len(part), -1, length, -1)) for part in pair]) for pair in pairs]
            self._source_mask = torch.cat([_grown(part, (-1, length)) for part in (self._source_mask, mask)])
        if shortlist := self._session.shortlist:
            self._may_follow = torch.cat((self._may_follow, self._tensor(np.stack(shortlist.masks(sources)))))
        self._grow_past(first + new * self.width)
        self.lengths = np.concatenate((self.lengths, np.zeros(new * self.width, np.int64)))
        self._read(first, prompts)

    @torch.inference_mode()
    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        logits = self._run(slice(None), slice(None), target_ids[:, None])
        token_ids = _best(logits, num_candidates)
        return Candidates(
            token_ids.cpu().numpy(),
            logits.gather(1, token_ids).cpu().numpy(),
            logits.logsumexp(1).cpu().numpy(),
        )

    @torch.inference_mode()
    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        logits = self._run(slice(None), slice(None), target_ids[:, None])
        return given_candidates(next_ids, logits.cpu().numpy(), logits.logsumexp(1).cpu().numpy())

    @torch.inference_mode()
    def _reorder(self, rows: Ids) -> None:
        self._past = self._take(self._past, rows)

    @torch.inference_mode()
    def _remove(self, sources: Ids) -> None:
        remaining = close_up(self.lengths.size // self.width, sources)
        rows = rows_of(remaining, self.width)
        self.lengths = self.lengths[rows]
        self._past, self._cross = self._take(self._past, rows), self._take(self._cross, remaining)
        self._source_mask = self._source_mask.index_select(0, self._tensor(remaining))
        if self._session.shortlist:
            self._may_follow = self._may_follow.index_select(0, self._tensor(remaining))

    def _read(self, first: int, prompts: Prompts) -> None:
        # The last token of a prompt is read by the first step; equally long prompts are read together.
        for length, group in groupby(prompts, len):
            ids = np.repeat([prompt[:-1] for prompt in group], self.width, 0).astype(np.int64)
            last = first + len(ids)
            if length > 1:
                self._run(slice(first // self.width, last // self.width), slice(first, last), ids)
            first = last

    def _run(self, sources: slice, rows: slice, target_ids: Ids) -> Tensor:
        """Read tokens of some rows; return the logits of the last, float32 [rows, vocab]."""
        lengths, ids = self.lengths[rows], self._tensor(target_ids)
        if (needed := int(lengths.max()) + target_ids.shape[1]) > self._capacity:
            self._capacity = max(2 * self._capacity, needed)
            self._grow_past(len(self.lengths))
        cache = row_cache(self._kind, [part[rows] for part in self._past], ids, self._tensor(lengths))
        cross = Cross(paired([part[sources] for part in self._cross]), self._source_mask[sources])
        logits: Tensor = self._session.open_model().decode_step(ids, cross, cache).float()
        self.lengths[rows] += target_ids.shape[1]
        if self._session.shortlist:
            logits = logits.where(self._may_follow[sources].repeat_interleave(self.width, 0), -torch.inf)
        return logits

    def _grow_past(self, rows: int) -> None:
        shapes = self._kind.shapes(rows, self._capacity)
        self._past = [_grown(part, shape) for part, shape in zip(self._past, shapes, strict=True)]

    def _take(self, caches: Sequence[Tensor], rows: Ids) -> list[Tensor]:
        places = self._tensor(rows)
        return [part.index_select(0, places) for part in caches]

    def _tensor(self, array: Array) -> Tensor:
        return torch.tensor(array, device=self._device)


def _inputs(model: nn.Module, *arrays: Array) -> list[Tensor]:
    device = next(model.parameters()).device
    return [torch.tensor(array, device=device) for array in arrays]


def _best(logits: Tensor, k: int) -> Tensor:
    if k == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    values, ids = logits.topk(k)
    # topk picks any of equal logits, so if the last place is contested, use a stable sort.
    if ((logits >= values[:, -1:]).sum(1) > k).any():
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _grown(part: Tensor, shape: Sequence[int]) -> Tensor:
    # Zeros, because masked places must be finite. A size of -1 stays.
    added = [(0, 0 if size < 0 else size - old) for old, size in zip(part.shape, shape, strict=True)]
    numbers = [number for pair in added[::-1] for number in pair]
    while numbers and not numbers[-1]:  # PyTorch 2.9 cannot pad a dimension of size 0 by 0
        del numbers[-2:]
    return F.pad(part, numbers)


@torch.inference_mode()
def full_outputs(model: EagerModel, sources: Sources, target_ids: Ids | None = None) -> Floats:
    """Return the logits or hidden states of all positions, from a model on the CPU."""
    inputs = encoder_inputs(sources.kind, [torch.from_numpy(array) for array in sources.inputs.values()])
    targets = () if target_ids is None else (torch.from_numpy(target_ids),)
    outputs: Floats = model(*inputs, *targets).float().numpy()
    return outputs


def open_bundle(bundle: Bundle, options: LoadOptions) -> EagerSession:
    """Open the eager model of a bundle."""
    if options.variant is not None:
        raise BackendError(
            f"eager: decoder variant {options.variant} is a graph, which this backend does not run; leave it out"
        )
    manifest = bundle.manifest
    shortlist = Graphs.of(bundle).shortlist()
    return EagerSession(load_eager_model(bundle), manifest.spec, alignment=manifest.alignment, shortlist=shortlist)


def load_eager_model(bundle: Bundle) -> Transformer:
    """Build the eager model from the float weights of a bundle."""
    if bundle.manifest.quantization is not None:
        raise BundleError(
            f"{bundle.path}: has {bundle.manifest.accuracy} weights for ONNX Runtime and no eager model; "
            "use --backend ort, or export it again with --precision fp32"
        )
    if bundle.manifest.config is None:
        raise BundleError(f"{bundle.path}: holds graphs only, no eager model; use --backend ort")
    return load_weights(bundle.file(WEIGHTS), bundle.manifest.config)


def probe(library: str, model: str) -> dict[str, str]:
    """Multiply two matrices on the CPU; return the problem by device, or ""."""
    product = torch.ones(2, 3) @ torch.ones(3, 2)
    return {"cpu": "" if (product == 3).all() else f"{library} computes wrongly: {product.tolist()}"}
