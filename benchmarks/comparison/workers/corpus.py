"""tfexport, whose texts end by themselves: many sources in batches of 32."""

from __future__ import annotations

from typing import Any

from comparison.workers.ours import Ours
from comparison.workers.protocol import Call, Sources, serve

BATCH_SIZE = 32


class Corpus(Ours):
    """A bundle that decodes a corpus as a user has it decoded."""

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Decode all sources, each to its end, `new_tokens` at most."""

        def generate() -> Any:
            return self.model.generate_ids(
                sources, batch_size=BATCH_SIZE, num_beams=num_beams, max_new_tokens=new_tokens
            )

        return generate


if __name__ == "__main__":
    serve(Corpus())
