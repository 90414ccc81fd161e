"""CTranslate2: `Translator.translate_batch` on the CPU with a given number of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comparison.workers.protocol import Call, Sources, System, serve

# Its names of the precisions. int8 means 8-bit weights and activations, quantised by row, sums in float32.
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}


class Translator(System):
    """A CTranslate2 model whose tokens are the ids in decimal, but for those that start and end a text."""

    libraries = ("ctranslate2", "numpy")

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Write the weights as a CTranslate2 model, quantised when the precision is int8."""
        from comparison.converters import write_ctranslate2

        write_ctranslate2(weights, target, None if precision == "fp32" else COMPUTE_TYPES[precision])

    def import_library(self) -> None:
        """Import ctranslate2."""
        import ctranslate2  # noqa: F401

    def load(self, folder: Path, precision: str, threads: int | None) -> None:
        """Load the model; one batch at a time uses all threads."""
        import ctranslate2

        self.translator = ctranslate2.Translator(
            str(folder),
            device="cpu",
            compute_type=COMPUTE_TYPES[precision],
            inter_threads=1,
            intra_threads=threads or 0,
        )
        words = json.loads(next(folder.glob("*vocabulary.json")).read_text())
        self.ids = {word: token for token, word in enumerate(words)}

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Decode all sources as one batch; writing ids as words is not timed."""
        words = [[str(token) for token in source] for source in sources]

        def translate() -> Any:
            found = self.translator.translate_batch(
                words,
                beam_size=num_beams,
                min_decoding_length=new_tokens,
                max_decoding_length=new_tokens,
                max_input_length=0,
            )
            return [best.hypotheses[0] for best in found]

        return translate

    def tokens(self, found: Any) -> list[list[int]]:
        """Read the words as ids."""
        return [[self.ids[word] for word in words] for words in found]


if __name__ == "__main__":
    serve(Translator())
