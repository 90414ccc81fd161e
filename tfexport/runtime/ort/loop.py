"""The loop graph in ONNX Runtime: one run for a whole batch of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfexport.contract import (
    GENERATED_IDS,
    GENERATED_LENGTHS,
    LOG_PROBS,
    LOOP,
    MAX_NEW_TOKENS,
    SOURCE_IDS,
    SOURCE_MASK,
    ModelSpec,
)
from tfexport.errors import BackendError, first_line
from tfexport.runtime.ort.device import OrtDevice
from tfexport.runtime.session import Floats, Ids, Mask, check_source


class Generated(NamedTuple):
    """What the loop graph gives.

    Attributes:
        ids: int64 [batch, generated_len], padding behind the end of a row.
        lengths: tokens of each row, int64 [batch].
        log_probs: Σ log p of each row, float32 [batch].
    """

    ids: Ids
    lengths: Ids
    log_probs: Floats


class OrtLoop:
    """The loop graph of a bundle, on the CPU."""

    def __init__(self, graphs: Mapping[str, Path], spec: ModelSpec, threads: int | None = None) -> None:
        """Load the graph; `threads` None is as many as ONNX Runtime finds cores.

        Raises:
            BackendError: it does not load.
        """
        self._spec, path = spec, graphs[LOOP]
        self._graph = OrtDevice("cpu").load(path, path.name, threads)

    def generate(self, source_ids: Ids, source_mask: Mask, max_new_tokens: int = 0) -> Generated:
        """Generate for a batch.

        Args:
            source_ids: int64 [batch, source_len].
            source_mask: bool [batch, source_len].
            max_new_tokens: most tokens of a text; 0 for as many as the graph generates by itself.

        Raises:
            InputError: the source is none that the model takes.
            BackendError: the graph failed.
        """
        check_source(self._spec, source_ids, source_mask)
        given = {SOURCE_IDS: source_ids, SOURCE_MASK: source_mask, MAX_NEW_TOKENS: np.array([max_new_tokens])}
        try:
            return Generated(*self._graph.run([GENERATED_IDS, GENERATED_LENGTHS, LOG_PROBS], given))
        except Exception as error:
            raise BackendError(f"ort: the graph failed while running: {first_line(error)}") from error
