"""Residual sums with a factor: on x, on what is added, on both, and DeepNet's, which has another one for each side."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves
from tests.importing.detect.test_match import check, recorded
from tfexport.importing.detect.search import Budget, detect
from tfexport.importing.reference.certificate import certify
from tfexport.nn.switches import Value

# What no test here is about; it is given, so that few combinations are run.
GIVEN: dict[str, Value] = {
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "relu",
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "attention_scale": "d_k ** -0.5",
}
Factors = tuple[float, float]


class Sums(nn.Module):
    """Adds a · x and b · f(x), with other numbers in the encoder than in the decoder."""

    def __init__(self, encoder: Factors, decoder: Factors, *, is_pre: bool) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("w_q", "w_k", "w_v", "w_o")})

        def layer(*mixers: str) -> Tree:
            norms = {f"norm{i}": nn.LayerNorm(D) for i in range(1, len(mixers) + 2)}
            network = nn.Sequential(nn.Linear(D, 40), nn.ReLU(), nn.Linear(40, D))
            return Tree(**{name: attention() for name in mixers}, **norms, mlp=network)

        self.factors, self.is_pre = (encoder, decoder), is_pre
        self.src, self.tgt = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.register_buffer("positions", waves())
        self.encoder, self.decoder = layers(lambda: layer("attn")), layers(lambda: layer("attn", "cross"))
        self.head = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.w_o(attend(part.w_q(x), part.w_k(memory), part.w_v(memory), seen))

        def run(x: Tensor, memory: Tensor | None, seen: Tensor) -> Tensor:
            a, b = self.factors[memory is not None]
            for layer in self.encoder if memory is None else self.decoder:
                for place, norm in enumerate((layer.norm1, layer.norm2, getattr(layer, "norm3", None))):
                    if norm is None:
                        break
                    y = norm(x) if self.is_pre else x
                    if place == 0:
                        y = mix(layer.attn, y, y, seen)
                    elif place == 1 and memory is not None:
                        y = mix(layer.cross, y, memory, keep[:, None])
                    else:
                        y = layer.mlp(y)
                    x = a * x + b * y if self.is_pre else norm(a * x + b * y)
            return x

        table = self.get_buffer("positions")
        memory = run(self.src(source) + table[: source.shape[1]], None, keep[:, None])
        x = self.tgt(target) + table[: target.shape[1]]
        return self.head(run(x, memory, causal(target)))


ROOT = math.sqrt(0.5)
DEEPNET = (0.81 * 32 ** (1 / 16), 1.0), (6**0.25, 1.0)


@pytest.mark.parametrize(
    ("factors", "is_pre", "scales", "fold"),
    [
        (((0.5, 1.0),) * 2, True, (0.5, 0.5), ""),
        (((1.0, 0.5),) * 2, True, (1.0, 1.0), "mul 0.5"),
        (((ROOT, ROOT),) * 2, True, (ROOT, ROOT), f"mul {ROOT!r}"),
        (DEEPNET, False, (DEEPNET[0][0], DEEPNET[1][0]), ""),
    ],
    ids=["on x", "on what is added", "on both", "DeepNet"],
)
def test_factors_of_residual_sums_are_found(
    factors: tuple[Factors, Factors], is_pre: bool, scales: tuple[float, float], fold: str, tmp_path: Path
) -> None:
    reference = recorded(
        lambda: Sums(*factors, is_pre=is_pre), tmp_path / "g", source_vocab=SOURCE, target_vocab=TARGET
    )
    layout, canonical = check(
        reference, detect(reference.state, reference, [], budget=Budget(3_000), settings=GIVEN), within=1e-13
    )
    assert canonical.config.decoder is not None
    sides = canonical.config.encoder, canonical.config.decoder
    assert tuple(side.residual_scale for side in sides) == pytest.approx(scales, rel=1e-14)
    outputs = [line for line in layout.map if " -> " in line and ("fc2" in line or ".o." in line.split(" -> ")[1])]
    assert outputs
    assert all(line.endswith(fold) for line in outputs), outputs
    certificate = certify(canonical, reference, "found")
    assert certificate.proven
    changes = certificate.switches["enc.residual_scale"], certificate.switches["dec.residual_scale"]
    assert all(changed.error > 0.01 for changed in changes)
