"""The reference backend: the canonical transformer itself, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfexport.bundle.bundle import Bundle
from tfexport.errors import BackendError, BundleError
from tfexport.models.cache import ConcatCache, KeyValue
from tfexport.models.config import model_spec
from tfexport.models.directory import load_weights
from tfexport.models.source import CrossCache, PaddedSource
from tfexport.models.transformer import Transformer
from tfexport.runtime.registry import Graphs, OpenOptions
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.spec import WEIGHTS, Accuracy, ModelSpec


@dataclass
class EagerState:
    """A batch being decoded; the tensors lie on the model's device.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
        source_mask: bool [batch, source_len].
        cross: a layer's keys and values of the source, [batch, heads, source_len, …].
        past: a layer's keys and values so far, [rows, heads, past_len, …].
    """

    batch: int
    rows: int
    past_len: int
    source_mask: Tensor
    cross: list[KeyValue]
    past: list[KeyValue]


class EagerSession:
    """A `Transformer` in PyTorch, on whatever device its weights are.

    It holds the model and no state of its own, so threads may share it. The
    model is put into eval mode and must not be changed while the session lives.
    """

    backend = "eager"
    max_rows: int | None = None
    max_candidates: int | None = None

    def __init__(self, model: Transformer, spec: ModelSpec | None = None) -> None:
        """Take a model; `spec` None means that of its configuration in fp32."""
        self.spec = spec or model_spec(model.config, "fp32")
        self.accuracy: Accuracy = self.spec.precision
        self._model: Transformer | None = model.eval()
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def encode(self, source_ids: Ids, source_mask: Mask) -> EagerState:
        """Encode a batch and make room for one row a source.

        Args:
            source_ids: int64 [batch, source_len], padded on the right.
            source_mask: bool [batch, source_len], True = token.

        Raises:
            InputError: shapes, ids or lengths that the model cannot take.
            BackendError: the model is an encoder alone, or the session is closed.
        """
        model = self._open()
        if not self.spec.has_decoder:
            raise BackendError("encode: this model is an encoder alone and cannot generate; use hidden_states")
        check_source(self.spec, source_ids, source_mask)
        ids, mask = self._tensor(source_ids), self._tensor(source_mask)
        batch = source_ids.shape[0]
        return EagerState(batch, batch, 0, mask, model.encode(ids, PaddedSource(mask)), model.empty_cache(ids).past)

    @torch.inference_mode()
    def step(self, state: EagerState, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens and grow the cache in place.

        Args:
            state: from `encode`; past_len grows by target_len.
            target_ids: int64 [rows, target_len]; more than one for a prefix.
            num_candidates: best tokens wanted a row, 1 … vocab.

        Raises:
            InputError: past_len + target_len is above the model's limit.
            BackendError: the session is closed.
        """
        model = self._open()
        check_target(self.spec, state, target_ids, num_candidates)
        ids = self._tensor(target_ids)
        cache, cross = ConcatCache(state.past, ids), CrossCache(state.cross, state.source_mask)
        logits = model.decode_step(ids, cross, cache).float()
        state.past = cache.present
        state.past_len += target_ids.shape[1]
        token_ids = _best(logits, num_candidates)
        return Candidates(
            token_ids.cpu().numpy(),
            logits.gather(1, token_ids).cpu().numpy(),
            logits.logsumexp(1).cpu().numpy(),
        )

    @torch.inference_mode()
    def reorder(self, state: EagerState, rows: Ids) -> None:
        """Let row r continue what row rows[r] was, in place.

        Args:
            state: changed in place.
            rows: int64 [new_rows], the beams of each source that stays side by side.

        Raises:
            InputError: rows that are out of range or mix sources.
        """
        kept = check_rows(state, rows)
        state.past = _take(state.past, self._tensor(rows))
        # Sources may come in any order, so their number alone does not tell whether they moved.
        if not np.array_equal(kept, np.arange(state.batch)):
            sources = self._tensor(kept)
            state.cross = _take(state.cross, sources)
            state.source_mask = state.source_mask.index_select(0, sources)
        state.batch, state.rows = kept.size, rows.size

    @torch.inference_mode()
    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone.

        Args:
            source_ids: int64 [batch, source_len], padded on the right.
            source_mask: bool [batch, source_len], True = token.

        Returns:
            float32 [batch, source_len, d_model].

        Raises:
            InputError: shapes, ids or lengths that the model cannot take.
            BackendError: the model has a decoder, or the session is closed.
        """
        model = self._open()
        if self.spec.has_decoder:
            raise BackendError("hidden_states: this model has a decoder; only an encoder alone gives hidden states")
        check_source(self.spec, source_ids, source_mask)
        hidden = model.hidden_states(self._tensor(source_ids), self._tensor(source_mask))
        array: Floats = hidden.float().cpu().numpy()
        return array

    def close(self) -> None:
        """Let go of the model; the session cannot be used afterwards."""
        self._model = None

    def _open(self) -> Transformer:
        if self._model is None:
            raise BackendError("eager: this session is closed; create a new one")
        return self._model

    def _tensor(self, array: Ids | Mask) -> Tensor:
        return torch.tensor(array, device=self._device)


def _best(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k best of `logits` [rows, vocab], equal ones in order of id, int64 [rows, k]."""
    values, ids = logits.topk(k)
    # topk picks among equals as it likes, so where the last place is contested only a stable sort will do.
    if ((logits >= values[:, -1:]).sum(1) > k).any():
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _take(caches: Sequence[KeyValue], rows: Tensor) -> list[KeyValue]:
    return [KeyValue(cache.key.index_select(0, rows), cache.value.index_select(0, rows)) for cache in caches]


@torch.inference_mode()
def full_logits(model: Transformer, source_ids: Ids, source_mask: Mask, target_ids: Ids) -> Floats:
    """Compute every position at once, without a cache: what the model was trained as.

    Args:
        model: on the CPU, in eval mode.
        source_ids: int64 [batch, source_len].
        source_mask: bool [batch, source_len].
        target_ids: int64 [batch, target_len].

    Returns:
        Logits, float32 [batch, target_len, vocab].
    """
    inputs = (torch.from_numpy(array) for array in (source_ids, source_mask, target_ids))
    logits: Floats = model(*inputs).float().numpy()
    return logits


def open_bundle(bundle: Bundle, options: OpenOptions) -> EagerSession:
    """Open the eager model of a bundle; see `tfexport.runtime.registry.Home`."""
    if options.form is not None:
        raise BackendError(f"eager: form {options.form} belongs to graphs; leave it out")
    return EagerSession(load_eager_model(bundle), bundle.manifest.spec)


def rungs(graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, Any]]:
    """Yield nothing: this is what the others are compared with."""
    return iter(())


def load_eager_model(bundle: Bundle) -> Transformer:
    """Rebuild the eager model from a bundle's weight file, in float32.

    Raises:
        BundleError: the bundle holds graphs only, or narrower weights.
    """
    if bundle.manifest.quantization is not None:
        raise BundleError(
            f"{bundle.path}: holds {bundle.manifest.accuracy} weights for ONNX Runtime and no eager model; "
            "use --backend ort, or export it again with --precision fp32"
        )
    if bundle.manifest.config is None:
        raise BundleError(f"{bundle.path}: holds graphs only, no eager model; use --backend ort")
    return load_weights(bundle.file(WEIGHTS), bundle.manifest.config)


def probe(library: str, model: bytes) -> dict[str, str]:
    """Multiply two matrices, with no graph; return "" under "cpu" where that is right, else what is wrong."""
    product = torch.ones(2, 3) @ torch.ones(3, 2)
    return {"cpu": "" if (product == 3).all() else f"{library} computes wrongly: {product.tolist()}"}
