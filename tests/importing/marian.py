"""Models in Marian's own files, and what Marian computes with them, in NumPy and float64.

Names, formulas and files follow Marian's sources, in `src`: `models/transformer.h`, `rnn/cells.h`, `common/binary.cpp`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

Array = NDArray[Any]
D, FFN, HEADS, VOCAB = 16, 24, 2, 40
OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "enc-depth": 2,
    "dec-depth": 2,
    "dim-emb": D,
    "dim-vocabs": [VOCAB, VOCAB],
    "transformer-heads": HEADS,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-train-positions": False,
    "tied-embeddings": False,
    "tied-embeddings-all": True,
    "tied-embeddings-src": False,
    "version": "v1.11.0",
}
OPTIONS_NAME = "special:model.yml"
AVERAGE = {"transformer-decoder-autoreg": "average-attention", "transformer-dim-ffn": FFN, "transformer-dim-aan": FFN}
SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}


def random_weights(options: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Return random float32 weights under Marian's names."""
    made = _Weights(options, seed)
    made.add_side("encoder", range(1, options["enc-depth"] + 1))
    made.add_side("decoder", options.get("transformer-tied-layers") or range(1, options["dec-depth"] + 1))
    for table in ["Wemb"] if options["tied-embeddings-all"] else ["encoder_Wemb", "decoder_Wemb"]:
        made.add_matrix(table, VOCAB, D)
    if not (options["tied-embeddings"] or options["tied-embeddings-all"]):
        made.add_matrix("decoder_ff_logit_out_Wt", VOCAB, D)
    made.add_matrix("decoder_ff_logit_out_b", 1, VOCAB)
    if options["transformer-train-positions"]:
        made.add_matrix("Wpos", 64, D)
    return made.found


class _Weights:
    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self.before, self.after, self.top, self.embedding = (
            options[f"transformer-{name}"].replace("d", "").replace("a", "")
            for name in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
        )
        self.kind = options["transformer-decoder-autoreg"]
        self.rng, self.found = np.random.default_rng(seed), dict[str, Array]()

    def add_matrix(self, name: str, rows: int, columns: int) -> None:
        self.found[name] = self.rng.normal(0, 0.3, (rows, columns)).astype(np.float32)

    def add_side(self, side: str, layers: Iterable[int]) -> None:
        for i in {*layers}:
            layer = f"{side}_l{i}"
            if side == "decoder" and self.kind == "rnn":
                self.add_matrix(f"{layer}_rnn_W", D, D)
                self.add_dense(f"{layer}_rnn", "f")
                self.add_norms(f"{layer}_rnn", f"{layer}_rnn_ffn")
            elif side == "decoder" and self.kind == "average-attention":
                self.add_dense(f"{layer}_aan", "1", columns=FFN)
                self.add_dense(f"{layer}_aan", "2", rows=FFN)
                for gate in "if":
                    self.add_dense(f"{layer}_aan", gate)
                self.add_norms("", f"{layer}_aan_ffn")
            else:
                self.add_attention(f"{layer}_self")
            if side == "decoder":
                self.add_attention(f"{layer}_context")
            self.add_dense(f"{layer}_ffn", "1", columns=FFN)
            self.add_dense(f"{layer}_ffn", "2", rows=FFN)
            self.add_norms(f"{layer}_ffn_ffn", f"{layer}_ffn_ffn")
        self.add_norm(f"{side}_top", self.top)
        self.add_norm(f"{side}_emb", self.embedding, "_pre")

    def add_attention(self, name: str) -> None:
        for part in "qkvo":
            self.add_dense(name, part)
        self.add_norms(f"{name}_Wo", f"{name}_Wo")

    def add_dense(self, name: str, part: str, rows: int = D, columns: int = D) -> None:
        self.add_matrix(f"{name}_W{part}", rows, columns)
        self.add_matrix(f"{name}_b{part}", 1, columns)

    def add_norms(self, before: str, after: str) -> None:
        self.add_norm(before, self.before, "_pre")
        self.add_norm(after, self.after)

    def add_norm(self, name: str, operation: str, suffix: str = "") -> None:
        if operation:
            kind = "rms" if operation == "r" else "ln"
            self.found[f"{name}_{kind}_scale{suffix}"] = self.rng.uniform(0.5, 1.5, (1, D)).astype(np.float32)
        if operation == "n":
            self.add_matrix(f"{name}_ln_bias{suffix}", 1, D)


def positions(length: int, width: int) -> Array:
    """Return the vectors that are added to embeddings, [length, width]."""
    rates = np.exp(np.arange(width // 2) * -(np.log(10_000) / (width // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate((np.sin(angles), np.cos(angles)), 1)


class Quantized(NamedTuple):
    """Whole numbers, and the factor that the values were multiplied by."""

    whole: Array
    factor: float

    @classmethod
    def of(cls, values: Array) -> Quantized:
        factor = float(np.float32(127 / np.abs(values).max()))
        return cls(np.rint(values * factor).astype(np.int8), factor)

    @property
    def values(self) -> Array:
        return self.whole / np.float32(self.factor)


def write_npz(path: Path, options: Mapping[str, Any], weights: Mapping[str, Array]) -> Path:
    """Write model.npz; the options are a text that ends with zeros."""
    with path.open("wb") as file:
        np.savez(file, **{**weights, OPTIONS_NAME: _text(options)})
    return path


def write_bin(
    path: Path, options: Mapping[str, Any], weights: Mapping[str, Array | Quantized], types: Mapping[str, int]
) -> Path:
    """Write a .bin file; `types` are numbers of item types by name, in which two branches of Marian differ."""
    headers, names, shapes, data = b"", b"", b"", b""
    for name, item in {**weights, OPTIONS_NAME: _text(options)}.items():
        array, kind = (item.whole, "quantized") if isinstance(item, Quantized) else (item, item.dtype.name)
        shape = array.shape
        raw = (array.T if kind == "quantized" and "Wemb" not in name else array).tobytes()
        raw += struct.pack("<f", item.factor) if isinstance(item, Quantized) else b""
        raw += b"\0" * (-len(raw) % 256)
        headers += struct.pack("<4Q", len(name) + 1, types[kind], len(shape), len(raw))
        names += name.encode() + b"\0"
        shapes += struct.pack(f"<{len(shape)}i", *shape)
        data += raw
    start = struct.pack("<2Q", 1, len(weights) + 1) + headers + names + shapes
    padding = -(len(start) + 8) % 256
    path.write_bytes(start + struct.pack("<Q", padding) + b"\0" * padding + data)
    return path


def _text(options: Mapping[str, Any]) -> Array:
    raw = yaml.safe_dump(dict(options)).encode() + b"\0"
    return np.frombuffer(raw + b"\0" * (-len(raw) % 256), np.int8)


class Marian:
    """What Marian computes for one sentence."""

    def __init__(self, options: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.options = options
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.is_trained = bool(options["transformer-train-positions"])

    def logits(self, source: Sequence[int], target: Sequence[int]) -> Array:
        """Return logits [target_len + 1, vocab]: those of the first token, then those after each target token."""
        context = self._encode(source)
        rows = self._table("decoder")[list(target)]
        x = self._placed(np.concatenate((np.zeros((1, D)), rows)), "decoder")
        for i in self.options.get("transformer-tied-layers") or range(1, self.options["dec-depth"] + 1):
            name = f"decoder_l{i}"
            if self.options["transformer-decoder-autoreg"] == "rnn":
                x = self._around(x, f"{name}_rnn", f"{name}_rnn_ffn", lambda y, name=name: self._ssru(y, f"{name}_rnn"))
            elif self.options["transformer-decoder-autoreg"] == "average-attention":
                x = self._around(x, "", f"{name}_aan_ffn", lambda y, name=name: self._average(y, f"{name}_aan"))
            else:
                mask = np.tril(np.ones((len(x), len(x))))
                x = self._attention(x, None, f"{name}_self", mask)
            x = self._attention(x, context, f"{name}_context", np.ones((len(x), len(context))))
            x = self._ffn(x, f"{name}_ffn")
        x = self._top(x, "decoder")
        table = self.w.get("decoder_ff_logit_out_Wt", self._table("decoder"))
        return x @ table.T + self.w["decoder_ff_logit_out_b"]

    def translate(self, source: Sequence[int], most: int, tokens: Collection[int] = range(VOCAB)) -> list[int]:
        """Decode greedily with only these tokens, without the unknown one, up to the end token 0."""
        found: list[int] = []
        excluded = [token for token in range(VOCAB) if token == 1 or token not in tokens]
        while len(found) < most and found[-1:] != [0]:
            last = self.logits(source, found)[-1]
            last[excluded] = -np.inf
            found.append(int(last.argmax()))
        return found

    def _encode(self, source: Sequence[int]) -> Array:
        x = self._placed(self._table("encoder")[list(source)], "encoder")
        for i in range(1, self.options["enc-depth"] + 1):
            x = self._attention(x, None, f"encoder_l{i}_self", np.ones((len(x), len(x))))
            x = self._ffn(x, f"encoder_l{i}_ffn")
        return self._top(x, "encoder")

    def _table(self, side: str) -> Array:
        return self.w["Wemb" if "Wemb" in self.w else f"{side}_Wemb"]

    def _placed(self, x: Array, side: str) -> Array:
        x = x + self.w["Wpos"][: len(x)] if self.is_trained else np.sqrt(D) * x + positions(len(x), D)
        return self._norms(x, f"{side}_emb", self.options["transformer-postprocess-emb"], "_pre")

    def _top(self, x: Array, side: str) -> Array:
        return self._norms(x, f"{side}_top", self.options["transformer-postprocess-top"], "")

    def _norms(self, x: Array, name: str, operations: str, suffix: str, before: Array | None = None) -> Array:
        for operation in operations:
            if operation == "a":
                assert before is not None
                x = x + before
            elif operation == "n":
                centered = x - x.mean(-1, keepdims=True)
                scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
                x = scaled * self.w[f"{name}_ln_scale{suffix}"] + self.w[f"{name}_ln_bias{suffix}"]
            elif operation == "r":
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.w[f"{name}_rms_scale{suffix}"]
        return x

    def _around(self, x: Array, before: str, after: str, run: Callable[[Array], Array]) -> Array:
        y = run(self._norms(x, before, self.options["transformer-preprocess"], "_pre"))
        return self._norms(y, after, self.options["transformer-postprocess"], "", x)

    def _attention(self, x: Array, context: Array | None, name: str, mask: Array) -> Array:
        def run(y: Array) -> Array:
            read = y if context is None else context
            q, k, v = (self._dense(z, name, part) for z, part in ((y, "q"), (read, "k"), (read, "v")))
            heads = []
            for head in range(HEADS):
                part = slice(head * D // HEADS, (head + 1) * D // HEADS)
                scores = q[:, part] @ k[:, part].T / np.sqrt(D // HEADS)
                weights = np.exp(scores - scores.max(-1, keepdims=True)) * mask
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            return self._dense(np.concatenate(heads, 1), name, "o")

        return self._around(x, f"{name}_Wo", f"{name}_Wo", run)

    def _ffn(self, x: Array, name: str) -> Array:
        def run(y: Array) -> Array:
            return self._dense(
                _ACTIVATIONS[self.options["transformer-ffn-activation"]](self._dense(y, name, "1")), name, "2"
            )

        return self._around(x, f"{name}_ffn", f"{name}_ffn", run)

    def _ssru(self, x: Array, name: str) -> Array:
        state, found = np.zeros(D), []
        for row in x:
            forget = _sigmoid(row @ self.w[f"{name}_Wf"] + self.w[f"{name}_bf"][0])
            state = forget * state + (1 - forget) * (row @ self.w[f"{name}_W"])
            found.append(np.maximum(state, 0))
        return np.stack(found)

    def _average(self, x: Array, name: str) -> Array:
        swish = _ACTIVATIONS["swish"]
        means = np.stack([x[: end + 1].mean(0) for end in range(len(x))])
        y = self._dense(swish(self._dense(means, name, "1")), name, "2")
        return _sigmoid(self._dense(x, name, "i")) * x + _sigmoid(self._dense(y, name, "f")) * y

    def _dense(self, x: Array, name: str, part: str) -> Array:
        return x @ self.w[f"{name}_W{part}"] + self.w[f"{name}_b{part}"]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "swish": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
}
