"""Decode the same texts with several bundles in turns: what they say, how fast, and whether it depends on the batch."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sacrebleu.metrics import CHRF

import tfexport
from tfexport.model.result import Result

BUNDLES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"precision": "int8"},
    "int8, throughput": {"precision": "int8", "optimize_for": "throughput"},
    "int4": {"precision": "int4"},
}
BATCH, BEAMS = 32, 4
# Each way to decode: texts at once and beams.
ALONE, GREEDY, BEAM, BEAM_ALONE = (1, 1), (BATCH, 1), (BATCH, BEAMS), (1, BEAMS)
HEAD = """| bundle | MB | exact, greedy | exact, beam 4 | chrF, greedy | chrF, beam 4 | alone as in a batch, \
greedy and beam 4 | tokens/s alone | tokens/s, batch 32 | tokens/s, batch 32, beam 4 |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True)
class Text:
    """A source, and what it should become."""

    source: str
    reference: str


@dataclass
class Found:
    """What one bundle said in one way, text by text, and the processor's seconds of a token in each round."""

    results: list[Result] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """What was said."""
        return [result.text for result in self.results]


Everything = dict[str, dict[tuple[int, int], Found]]


def compare(models: Mapping[str, tfexport.Model], texts: Sequence[Text], *, alone: int, rounds: int) -> Everything:
    """Decode all texts in batches, and the first `alone` one at a time; each round a part of them, bundle by bundle."""
    found: Everything = {name: defaultdict(Found) for name in models}
    for turn in range(rounds):
        for (batch, beams), count in ((ALONE, alone), (BEAM_ALONE, alone), (GREEDY, len(texts)), (BEAM, len(texts))):
            part = [text.source for text in texts[turn * count // rounds : (turn + 1) * count // rounds]]
            for name, model in models.items():
                model.generate(part[:batch], batch_size=batch, num_beams=beams)
                began = time.process_time()
                results = model.generate(part, batch_size=batch, num_beams=beams)
                took = time.process_time() - began
                way = found[name][batch, beams]
                way.results += results
                way.seconds.append(took / sum(len(result.token_ids) for result in results))
    return found


def report(found: Everything, sizes: Mapping[str, int], references: Sequence[str]) -> str:
    """Write the table; a speed has the median of its rounds, and in brackets how often that of the first bundle."""
    first, rows = next(iter(found.values())), [HEAD]
    for name, ways in found.items():
        cells = [name, f"{sizes[name] / 1e6:.1f}"]
        cells += [f"{_exact(ways[way].texts, references):.2f} %" for way in (GREEDY, BEAM)]
        cells += [f"{CHRF().corpus_score(ways[way].texts, [references]).score:.2f}" for way in (GREEDY, BEAM)]
        same = [_exact(ways[one].texts, ways[many].texts) for one, many in ((ALONE, GREEDY), (BEAM_ALONE, BEAM))]
        cells.append(", ".join(f"{share:.2f} %" for share in same))
        for way in (ALONE, GREEDY, BEAM):
            times = [one / own for one, own in zip(first[way].seconds, ways[way].seconds, strict=True)]
            cells.append(f"{1 / statistics.median(ways[way].seconds):,.0f} ({statistics.median(times):.2f})")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _exact(said: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the share of equal texts in per cent, as far as `said` goes."""
    return 100 * float(np.mean([one == other for one, other in zip(said, wanted, strict=False)]))
