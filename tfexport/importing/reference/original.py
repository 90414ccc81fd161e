"""Run the original model for its reference outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfexport.errors import CheckpointError, raised_by

_MAX_LEAST = 64  # frames to try
_CAUSAL = 1e-4  # largest difference that float32 may cause between runs that should be equal


@dataclass(frozen=True)
class Original:
    """The user's code around a model, and the inputs to run it on."""

    forward: Callable[..., Tensor]
    encode: Callable[..., Tensor] | None
    inputs: Mapping[str, Tensor]
    target_vocab: int | None
    num_labels: int | None = None

    @torch.no_grad()
    def run(self, model: nn.Module, target_ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs for the inputs, or for other targets, by name."""
        source = (_wide(self.inputs["source_ids"]), self.inputs["source_mask"])
        if self.target_vocab is None:
            outputs = _outputs("forward", self.forward, model, source, self.num_labels)
            if self.num_labels is None:
                return {"hidden_states": outputs}
            results = {"logits": outputs}
        else:
            inputs = (*source, self.inputs["target_ids"] if target_ids is None else target_ids)
            results = {"logits": _outputs("forward", self.forward, model, inputs, self.target_vocab)}
        if self.encode is not None:
            results["hidden_states"] = _outputs("encode", self.encode, model, source, None)
        return results

    @torch.no_grad()
    def run_row(self, model: nn.Module, source_ids: Tensor, *target_ids: Tensor) -> Tensor:
        """Return the outputs for one row without padding."""
        mask = torch.ones(source_ids.shape[:2], dtype=torch.bool)
        return self.forward(model, _wide(source_ids), mask, *target_ids)

    def check(self, model: nn.Module, results: Mapping[str, Tensor], pad: int) -> None:
        """Raise if outputs differ between runs or depend on later tokens."""
        again = self.run(model)
        if any(not torch.equal(again[name].nan_to_num(), result.nan_to_num()) for name, result in results.items()):
            raise CheckpointError("reference: two runs differ; disable dropout and everything else that is random")
        self._check_padding(model, next(iter(results.values())))
        if self.target_vocab is None:
            return
        last, first = (self._changed_logits(model, position) for position in (-1, 0))
        if float((last - results["logits"])[:1, :-1].abs().max()) > _CAUSAL:
            problem = "outputs of earlier positions change with the last target token"
            raise CheckpointError(f"reference: {problem}; give the decoder its causal mask in your forward")
        # If the first id changes nothing, the decoder starts without a token.
        keep = self.inputs["target_mask"]
        if torch.equal(first[keep], results["logits"][keep]):
            self.inputs["target_ids"][:, 0] = pad

    @torch.no_grad()
    def _check_padding(self, model: nn.Module, result: Tensor) -> None:
        source_ids, mask, *targets = (self.inputs[name][1:2] for name in self.inputs if name != "target_mask")
        keep, length = self.inputs.get("target_mask", self.inputs["source_mask"])[1], int(mask.sum())
        try:
            alone = self.forward(model, _wide(source_ids[:, :length]), mask[:, :length], *targets)[0]
        except Exception:  # noqa: BLE001 - a model of one length refuses others with any error
            return
        if float((alone - result[1, : len(alone)])[keep[: len(alone)]].abs().max()) > _CAUSAL:
            problem = "outputs change with the padding after a source"
            remedy = "use source_mask in your forward, or give the id that your code masks as pad_source"
            raise CheckpointError(problem, subject="reference", remedy=remedy)

    def _changed_logits(self, model: nn.Module, position: int) -> Tensor:
        ids = self.inputs["target_ids"].clone()
        ids[:, position] = (ids[:, position] + 1) % (self.target_vocab or 1)
        return self.run(model, ids)["logits"]

    def baseline(self, model: nn.Module, results: Mapping[str, Tensor]) -> float:
        """Estimate the error of parts of the original that compute in float32."""
        # Weights change by a billionth, and by twice that. Float64 outputs deviate from a line by the square of that,
        # but float32 rounding makes them jump by its own precision.
        start = [parameter.detach().clone() for parameter in model.parameters()]

        @torch.no_grad()
        def moved(moves: list[Tensor], steps: int) -> dict[str, Tensor]:
            for parameter, origin, move in zip(model.parameters(), start, moves, strict=True):
                parameter.copy_(origin + steps * move)
            return self.run(model)

        worst = 0.0
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            moves = [1e-9 * torch.randn(p.shape, generator=generator, dtype=torch.float64) * p for p in start]
            once, twice = moved(moves, 1), moved(moves, 2)
            for name, result in results.items():
                keep = self.inputs["target_mask" if name == "logits" and self.target_vocab else "source_mask"]
                keep = keep[:, 0] if result.dim() == 2 else keep  # a pooled head
                bend = (twice[name] - 2 * once[name] + result)[keep].abs().max()
                worst = max(worst, float(bend / result[keep].abs().max()))
        with torch.no_grad():
            for parameter, origin in zip(model.parameters(), start, strict=True):
                parameter.copy_(origin)
        return worst


def _outputs(
    name: str, function: Callable[..., object], model: nn.Module, inputs: Sequence[Tensor], width: int | None
) -> Tensor:
    """Call a function of the user and check the shape of its result."""
    ids, names = inputs[-1], zip(("source_ids", "source_mask", "target_ids"), inputs, strict=False)
    try:
        result = function(model, *inputs)
    except Exception as error:
        called = ", ".join(f"{argument} {list(tensor.shape)}" for argument, tensor in names)
        problem = f"{raised_by(error)}, called as {name}(model, {called})"
        remedy = "correct its arguments, or source_vocab, target_vocab and lengths"
        raise CheckpointError(problem, subject=f"reference: {name}", remedy=remedy) from error
    shape, sizes = list(result.shape) if isinstance(result, Tensor) else [], [list(ids.shape)]
    sizes += [[len(ids)]] if len(inputs) == 2 and width else []  # the logits of a head
    if not isinstance(result, Tensor) or shape[:-1] not in sizes or width not in (None, shape[-1]):
        got = shape or type(result).__name__
        expected = " or ".join(str([*size, "d_model" if width is None else width]) for size in sizes)
        remedy = "reshape it" if width else "reshape it, or give num_labels for a head"
        raise CheckpointError(f"returns {got}, expected {expected}", subject=f"reference: {name}", remedy=remedy)
    return result.detach().double().cpu().clone()


def _wide(source: Tensor) -> Tensor:
    """Return features as float64, and ids as they are."""
    return source.double() if source.is_floating_point() else source


@torch.no_grad()
def least_frames(forward: Callable[..., object], model: nn.Module, dim: int, target_ids: Tensor) -> int:
    """Return the smallest number of frames that a model takes, which is one position."""
    wide = copied(model).double()
    for frames in range(1, _MAX_LEAST + 1):
        features = torch.zeros(1, frames, dim, dtype=torch.float64)
        try:
            forward(wide, features, torch.ones(1, frames, dtype=torch.bool), target_ids)
        except Exception as error:  # noqa: BLE001 - a model refuses too few frames with any error
            refused = raised_by(error)
        else:
            return frames
    problem = f"forward fails for 1 to {_MAX_LEAST} frames of {dim} features ({refused})"
    raise CheckpointError(problem, subject="reference", remedy="correct its arguments or the number of features")


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode."""
    try:
        return copy.deepcopy(model).cpu().eval()
    except (RuntimeError, TypeError) as error:
        remedy = "build a second one and load the state dict into it"
        raise CheckpointError(f"reference: the model cannot be copied ({error}); {remedy}") from error


def hidden_tables(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tables of a model that its state dict lacks, by name."""
    own = (
        (f"{prefix}.{name}".removeprefix("."), value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
    )
    return {
        name: value.detach().cpu().clone()
        for name, value in (*model.named_buffers(), *own)
        if isinstance(value, Tensor) and name not in state and value.is_floating_point() and value.dim() >= 2
    }
