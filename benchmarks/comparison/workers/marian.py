"""Hugging Face transformers: `generate` of a Marian model, eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison.workers.protocol import Call, Sources, System, serve


class Marian(System):
    """`MarianMTModel` with its default attention."""

    libraries: tuple[str, ...] = ("transformers", "torch")

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Write the weights as a Marian model."""
        from comparison.converters import write_marian

        write_marian(weights, target)

    def import_library(self) -> None:
        """Import torch and the model's class."""
        import torch  # noqa: F401
        from transformers import MarianMTModel  # noqa: F401

    def load(self, folder: Path, precision: str, threads: int | None) -> None:
        """Load the model in float32."""
        import torch
        from transformers import MarianMTModel

        if threads:
            torch.set_num_threads(threads)
        self.model = MarianMTModel.from_pretrained(folder).eval()

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Decode all sources as one batch; making the tensors is not timed."""
        import torch

        ids = torch.tensor(sources)
        mask = torch.ones_like(ids)

        def generate() -> Any:
            found = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=num_beams,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                **self.options(),
            )
            return found[:, 1:].tolist()

        return generate

    def options(self) -> dict[str, Any]:
        """Return what else `generate` is given."""
        return {}

    def tokens(self, found: Any) -> list[list[int]]:
        """Return the ids, which are there already."""
        return list(found)


if __name__ == "__main__":
    serve(Marian())
