"""optimum-onnx: `ORTModelForSeq2SeqLM.generate` on its own export of the Marian model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from comparison.workers.marian import Marian
from comparison.workers.protocol import serve


class Optimum(Marian):
    """The decoder with past, as the exporter writes it and the model class loads it by default."""

    libraries = ("optimum-onnx", "transformers", "onnxruntime", "torch")

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Write the weights as a Marian model and export that."""
        from optimum.exporters.onnx import main_export

        with tempfile.TemporaryDirectory() as scratch:
            marian = Path(scratch) / "marian"
            super().convert(weights, marian, precision)
            main_export(
                str(marian),
                target,
                task="text2text-generation-with-past",
                library_name="transformers",
                do_validation=False,
            )

    def import_library(self) -> None:
        """Import the model's class."""
        from optimum.onnxruntime import ORTModelForSeq2SeqLM  # noqa: F401

    def load(self, folder: Path, precision: str, threads: int | None) -> None:
        """Load the graphs with ONNX Runtime's own number of threads."""
        from optimum.onnxruntime import ORTModelForSeq2SeqLM

        self.model = ORTModelForSeq2SeqLM.from_pretrained(folder)


if __name__ == "__main__":
    serve(Optimum())
