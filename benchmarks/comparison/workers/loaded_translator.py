"""CTranslate2 under load: one `Translator` for all callers, which takes one batch for each group of threads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from comparison.lengths import LONGEST
from comparison.workers.load import Ids
from comparison.workers.loaded import LoadServer
from comparison.workers.protocol import answer_requests
from comparison.workers.translator import COMPUTE_TYPES


class Translator:
    """A CTranslate2 model whose tokens are the ids in decimal."""

    libraries = ("ctranslate2", "numpy")

    def load(self, folder: Path, precision: str, threads: int) -> None:
        """Load the model; cores that a batch leaves free compute another one."""
        import ctranslate2

        self.translator = ctranslate2.Translator(
            str(folder),
            device="cpu",
            compute_type=COMPUTE_TYPES[precision],
            inter_threads=max(1, len(os.sched_getaffinity(0)) // threads),
            intra_threads=threads,
        )
        words = json.loads(next(folder.glob("*vocabulary.json")).read_text())
        self.ids = {word: token for token, word in enumerate(words)}

    def decode(self, sources: list[Ids]) -> list[Ids]:
        """Decode a batch; the ends of texts are left out."""
        found = self.translator.translate_batch(
            [[str(token) for token in source] for source in sources],
            beam_size=1,
            max_decoding_length=LONGEST,
            max_input_length=0,
        )
        return [[self.ids[word] for word in best.hypotheses[0]] for best in found]


if __name__ == "__main__":
    answer_requests(LoadServer(Translator()))
