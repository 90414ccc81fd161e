"""Hugging Face transformers with torch.compile: `generate` over a static cache and a compiled forward."""

from __future__ import annotations

from typing import Any

from comparison.workers.marian import Marian
from comparison.workers.protocol import Call, Sources, serve


class Compiled(Marian):
    """The same model, compiled for the sizes of each call."""

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Decode all sources as one batch; the first call compiles."""
        import torch

        # Anew for each combination of sizes: code for all sizes is slower, and after some sizes torch gives up.
        torch.compiler.reset()
        self.model.forward = torch.compile(type(self.model).forward.__get__(self.model), dynamic=False)
        return super().call(sources, num_beams, new_tokens)

    def options(self) -> dict[str, Any]:
        """Ask for a cache of fixed size, so that a step's sizes do not change."""
        return {"cache_implementation": "static"}


if __name__ == "__main__":
    serve(Compiled())
