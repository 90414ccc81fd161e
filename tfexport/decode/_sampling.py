"""Draw tokens at random, reproducibly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.decode.request import Request
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Ids


class Sampler:
    """A sampler for the distribution after temperature, top_k and top_p.

    Each row has its own generator, seeded with (seed, place of the text, sample), and takes one number per token, so
    a draw does not depend on other rows.

    Attributes:
        wanted: number of best candidates that it draws from.
    """

    def __init__(self, config: DecodeConfig, vocab: int) -> None:
        self.wanted = config.top_k or vocab
        self._config = config
        self._generators: list[np.random.Generator] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Append a row with its own seed for each request."""
        for request in requests:
            place = request.text if request.place is None else request.place
            self._generators.append(np.random.default_rng((request.config.seed, place, request.sample)))

    def keep(self, rows: Ids) -> None:
        """Remove all rows except `rows`, int64 [new rows]."""
        self._generators = [self._generators[row] for row in rows.tolist()]

    def draw(self, log_probs: Floats) -> tuple[Ids, Floats]:
        """Draw a candidate for each row.

        Args:
            log_probs: float32 [rows, num_candidates], best first.

        Returns:
            Column of the candidate, int64 [rows], and the log-probability that it was drawn with, float32 [rows].
        """
        probabilities = distribution(log_probs[:, : self.wanted], self._config)
        cumulative = probabilities.cumsum(1)
        draws = np.array([generator.random() for generator in self._generators])
        columns: Ids = (cumulative > draws[:, None] * cumulative[:, -1:]).argmax(1)
        return columns, np.log(probabilities[np.arange(len(columns)), columns]).astype(np.float32)


def distribution(log_probs: Floats, config: DecodeConfig) -> NDArray[np.float64]:
    """Return the distribution that a sample is drawn from.

    Temperature, top_k and top_p apply in this order, as in Hugging Face `generate`. If candidates are equal at the
    k-th place, the session chooses: on the CPU those with the lowest ids.

    Args:
        log_probs: of the top_k best candidates, up to a constant, float32 [rows, num_candidates], best first.
        config: only temperature and top_p are used.

    Returns:
        float64 [rows, num_candidates]; each row sums to 1.
    """
    scaled = log_probs.astype(np.float64) / config.temperature
    weights = np.exp(scaled - scaled[:, :1])
    probabilities: NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
    if config.top_p < 1:
        tail = probabilities[:, ::-1].cumsum(1)[:, ::-1]
        dropped = tail <= 1 - config.top_p
        dropped[:, 0] = False
        probabilities = np.where(dropped, 0, probabilities)
        probabilities /= probabilities.sum(1, keepdims=True)
    return probabilities
