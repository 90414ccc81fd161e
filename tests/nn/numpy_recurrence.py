"""A transformer with a recurrent decoder in NumPy, from the formulas of the papers, for one text at a time.

Encoder, cross-attention and norms: arXiv:1706.03762. SSRU: https://aclanthology.org/D19-5632, §3.1. Average attention:
arXiv:1805.00631.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.nn.transformer import Transformer

Floats = NDArray[np.float64]
Hypothesis = tuple[float, list[int]]  # sum of log-probabilities, and tokens


class NumpyRecurrence:
    """The post-norm model of `tests.tiny.config` with a recurrent decoder, in float64."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self._arrays = {name: p.detach().double().numpy() for name, p in model.named_parameters()}

    def encode(self, source: Sequence[int]) -> Floats:
        """Return the states of a source without padding, [source_len, d_model]."""
        x = self._arrays["enc.embed.weight"][source] + self._arrays["enc.pos"][: len(source)]
        for layer in range(self.config.encoder.layers):
            name = f"enc.layers.{layer}"
            x = self._norm(x + self._attention(x, x, f"{name}.self", self.config.encoder.num_heads), f"{name}.norm1")
            x = self._norm(x + self._feed_forward(x, f"{name}.ffn"), f"{name}.norm2")
        return x

    def logits(self, states: Floats, target: Sequence[int]) -> Floats:
        """Return the logits after each token of a target, [target_len, vocab]."""
        side = self.config.stack("decoder")
        memory: list[list[Floats]] = [[] for _ in range(side.layers)]
        found = []
        for position, token in enumerate(target):
            x = self._arrays["dec.embed.weight"][[token]] + self._arrays["dec.pos"][[position]]
            for layer in range(side.layers):
                name = f"dec.layers.{layer}"
                mix = self._ssru if side.mixer == "ssru" else self._average
                x = self._norm(x + mix(x, memory[layer], f"{name}.self"), f"{name}.norm1")
                x = self._norm(x + self._attention(x, states, f"{name}.cross", side.num_heads), f"{name}.norm2")
                x = self._norm(x + self._feed_forward(x, f"{name}.ffn"), f"{name}.norm3")
            found.append(self._linear(x, "out")[0])
        return np.array(found)

    def greedy(self, source: Sequence[int], length: int) -> list[int]:
        """Return the best next tokens, up to the end or a number of tokens."""
        (best,) = self.beams(source, length, 1)[:1]
        return best[1]

    def beams(self, source: Sequence[int], length: int, width: int) -> list[Hypothesis]:
        """Search with `width` beams until as many have ended, best first and without a length penalty."""
        states, tokens = self.encode(source), self.config.tokens
        running: list[Hypothesis] = [(0.0, [])]
        ended: list[Hypothesis] = []
        for _ in range(length):
            grown: list[Hypothesis] = []
            for total, ids in running:
                logits = self.logits(states, [tokens.start, *ids])[-1]
                log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                grown += [(total + float(log_probs[token]), [*ids, int(token)]) for token in range(logits.size)]
            grown.sort(key=lambda one: -one[0])
            ended += [one for one in grown[:width] if one[1][-1] == tokens.eos]
            running = [one for one in grown[: 2 * width] if one[1][-1] != tokens.eos][:width]
            if len(ended) >= width:
                running = []
                break
        return sorted(ended + running, key=lambda one: -one[0])[:width]

    def _ssru(self, x: Floats, memory: list[Floats], name: str) -> Floats:
        forget = _sigmoid(self._linear(x, f"{name}.forget"))
        memory.append(forget * (memory[-1] if memory else 0) + (1 - forget) * self._linear(x, f"{name}.update"))
        return np.maximum(memory[-1], 0)

    def _average(self, x: Floats, memory: list[Floats], name: str) -> Floats:
        memory.append(x)
        y = self._feed_forward(np.mean(memory, 0), f"{name}.ffn")
        return _sigmoid(self._linear(x, f"{name}.input")) * x + _sigmoid(self._linear(y, f"{name}.forget")) * y

    def _linear(self, x: Floats, name: str) -> Floats:
        product: Floats = x @ self._arrays[f"{name}.weight"].T
        return product + self._arrays.get(f"{name}.bias", 0)

    def _norm(self, x: Floats, name: str) -> Floats:
        centered = x - x.mean(1, keepdims=True)
        scaled: Floats = centered / np.sqrt((centered**2).mean(1, keepdims=True) + self.config.norm_eps)
        return scaled * self._arrays[f"{name}.weight"] + self._arrays[f"{name}.bias"]

    def _feed_forward(self, x: Floats, name: str) -> Floats:
        return self._linear(np.maximum(self._linear(x, f"{name}.fc1"), 0), f"{name}.fc2")

    def _attention(self, x: Floats, read: Floats, name: str, heads: int) -> Floats:
        query, key, value = (
            np.split(self._linear(part, f"{name}.{letter}"), heads, 1)
            for part, letter in ((x, "q"), (read, "k"), (read, "v"))
        )
        contexts = []
        for q, k, v in zip(query, key, value, strict=True):
            scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
            contexts.append(scores / scores.sum(1, keepdims=True) @ v)
        return self._linear(np.concatenate(contexts, 1), f"{name}.o")


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))
