"""Compare the texts and times of two bundles for the same inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfexport.bundle.bundle import open_bundle
from tfexport.errors import InputError
from tfexport.model.load import load

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ComparedOutputs:
    """How many outputs of the second bundle differ.

    Attributes:
        texts: number of inputs.
        changed: inputs whose text differs.
        seconds: time of all inputs with each bundle, one run after a first batch.
        examples: the first inputs that differ, each with both outputs.
    """

    texts: int
    changed: int
    seconds: tuple[float, float]
    examples: tuple[tuple[str, str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Describe the result in lines for people."""
        share, (first, second) = self.changed / self.texts, self.seconds
        shown = (line for example in self.examples for line in ("", *example))
        return [
            f"outputs: {self.changed:,} of {self.texts:,} texts differ ({share:.1%})",
            f"time: {first:.2f} → {second:.2f} s",
            *shown,
        ]


def compare_outputs(
    bundles: tuple[Path, Path],
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    loading: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ComparedOutputs:
    """Generate a text for each input with two bundles, one after the other.

    Raises InputError if a bundle reads no text, and the errors of `tfexport.load` and `Model.generate`.
    """
    without = [str(bundle) for bundle in bundles if not open_bundle(bundle).manifest.has_tokenizer]
    if without:
        raise InputError(f"{' and '.join(without)}: no tokenizer, so texts cannot be read; compare bundles with one")
    outputs, seconds = [], []
    for bundle in bundles:
        with load(bundle, **loading) as model:
            model.generate(texts[:batch_size], batch_size=batch_size, **options)
            began = time.perf_counter()
            found = model.generate(texts, batch_size=batch_size, **options)
            seconds.append(time.perf_counter() - began)
            outputs.append([result.text or "" for result in found])
    differing = [row for row in zip(texts, *outputs, strict=True) if row[1] != row[2]]
    return ComparedOutputs(
        texts=len(texts),
        changed=len(differing),
        seconds=(seconds[0], seconds[1]),
        examples=tuple(differing[:_SHOWN]),
    )
