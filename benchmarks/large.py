#!/usr/bin/env python
"""Where time and memory go with a large vocabulary, a long target and a long source.

The models have the sizes of preset:paper-base and random weights, but for the vocabulary and the limits: 4,096 source
and 2,048 target tokens. Times are those of the processor, one thread, so that others on the machine change little;
memory is what the process has of its own, and the most that it ever had. One case a line.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np

import tfexport
from tfexport.runtime.sources import pad_sources

VOCABULARIES, PRECISIONS = (32_000, 250_000), ("fp32", "int8")
# Sources, rows of each, source tokens, target tokens.
CASES = ((1, 1, 32, 40), (1, 4, 32, 40), (8, 1, 32, 40), (8, 4, 32, 40), (1, 1, 4096, 40), (4, 1, 4096, 40),
         (8, 1, 32, 2047))  # fmt: skip


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def make(folder: Path) -> None:
    """Write models and bundles into FOLDER; those that are there stay."""
    import torch  # here, so that what is measured has the memory of a process that only decodes

    from tfexport.export import export_bundle
    from tfexport.export.config import ExportConfig
    from tfexport.nn.directory import save_model
    from tfexport.nn.presets import preset
    from tfexport.nn.transformer import Transformer

    for vocab in VOCABULARIES:
        sizes = {"source_vocab": vocab, "target_vocab": vocab, "max_source_length": 4096, "max_target_length": 2048}
        source = folder / str(vocab)
        if not source.exists():
            torch.manual_seed(0)
            save_model(Transformer(dataclasses.replace(preset("paper-base"), **sizes)), source)
        for precision in PRECISIONS:
            bundle = folder / f"{vocab}-{precision}"
            if not bundle.exists():
                export_bundle(
                    str(source), bundle, ExportConfig(precision=precision, variants=("contrib",)), verify=False
                )


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def measure(folder: Path) -> None:
    """Run every case on every bundle in FOLDER, each in a process of its own."""
    for bundle in sorted(path for path in folder.iterdir() if (path / "manifest.json").exists()):
        for numbers in CASES:
            subprocess.run([sys.executable, __file__, "case", str(bundle), *map(str, numbers)], check=True)


@main.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("numbers", type=int, nargs=4, metavar="SOURCES WIDTH SOURCE TARGET")
def case(bundle: Path, numbers: tuple[int, int, int, int]) -> None:
    """Decode so many SOURCES with WIDTH rows each, of SOURCE and TARGET tokens; more than a row is a beam search's."""
    sources, width, source_len, target_len = numbers
    rng = np.random.default_rng(0)
    with tfexport.load(bundle, threads=1) as model:
        batch = model.session.batch(width)
        ids = rng.integers(4, model.spec.source_vocab, (sources, source_len))
        began = time.process_time()
        batch.add(pad_sources(model.spec.source, ids.tolist()), [[1]] * sources)
        encode_s, held_mb = time.process_time() - began, _memory_mb("RssAnon")
        took = []
        for token_ids in rng.integers(4, model.spec.vocab, (target_len, sources * width)):
            began = time.process_time()
            batch.step(token_ids, 2 * width if width > 1 else 1)
            took.append(1e3 * (time.process_time() - began))
    steps = {first: statistics.median(took[first : first + 32]) for first in (8, 128, 512, 1024, 2000)
             if first + 32 <= target_len}  # fmt: skip
    print(json.dumps({
        "bundle": bundle.name, "sources": sources, "rows": width, "source": source_len,
        "encode_s": round(encode_s, 2), "held_mb": held_mb,
        "step_ms": {first: round(ms, 2) for first, ms in steps.items()}, "slowest_ms": round(max(took[1:]), 1),
        "end_mb": _memory_mb("RssAnon"), "most_mb": _memory_mb("VmHWM"),
    }), flush=True)  # fmt: skip


def _memory_mb(what: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(what)
    )
    return round(int(line.split()[1]) * 1024 / 1e6)


if __name__ == "__main__":
    main()
