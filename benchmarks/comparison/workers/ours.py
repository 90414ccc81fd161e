"""tfexport: a bundle with default settings, as `tfexport.load` opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison.workers.protocol import Call, Sources, System, serve


class Ours(System):
    """A bundle; the folder is made by the command `tfexport onnx`, not by `convert`."""

    libraries = ("tfexport", "onnxruntime", "numpy")

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Refuse: bundles come from the command line, as a user makes them."""
        raise NotImplementedError("bundles are made by tfexport onnx")

    def import_library(self) -> None:
        """Import tfexport and what it loads late."""
        import onnxruntime  # noqa: F401

        import tfexport

        _ = tfexport.load

    def load(self, folder: Path, precision: str, threads: int | None) -> None:
        """Open the bundle and load its graphs."""
        import tfexport

        self.model = tfexport.load(folder, threads=threads)

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Decode all sources as one batch."""

        def generate() -> Any:
            return self.model.generate_ids(
                sources,
                batch_size=len(sources),
                num_beams=num_beams,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )

        return generate

    def tokens(self, found: Any) -> list[list[int]]:
        """Take the best hypotheses."""
        return [list(hypotheses[0].token_ids) for hypotheses in found]


if __name__ == "__main__":
    serve(Ours())
