"""How many threads of the CPU a bundle is run with, where nobody says a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport._arguments import is_whole
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.step_weights import step_weight_bytes
from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS
from tfexport.runtime.cores import available_cores

# Decoders that read fewer bytes of weights a step take one thread. The products of such a step are so small that ONNX
# Runtime gives each to one thread anyway, and the others wait awake until the next step: they take the time of a core
# each and give nothing. Measured with onnxruntime 1.31.1 on two cores of an EPYC, the least of hundreds to thousands of
# steps: with 0.7 to 9.3 MB, each at 1, 8 and 32 rows, a step of two threads took 0.95 to 1.08 of the time of one
# thread's; with 15 MB 1.00, 0.97 and 0.88; at one row with 40 and 45 MB 0.68, with 154 MB 0.35. docs/generation.md has
# all of them.
ONE_THREAD_BELOW = 8 * 2**20


@dataclass(frozen=True)
class Threads:
    """Threads of one call on the CPU.

    Attributes:
        encoder: that encode sources and align.
        decoder: that take the decoder's steps.
    """

    encoder: int
    decoder: int


def choose_threads(threads: int | Literal["auto"] | None, bundle: Bundle) -> Threads | None:
    """Return the threads for a bundle.

    Args:
        threads: for both graphs; "auto" to give the encoder all cores that are available, since its products
            are as many times larger as sources have tokens and its threads sleep between its runs, and the decoder
            all or one; None to leave it to ONNX Runtime, which keeps a thread on each core that it finds.
        bundle: to run.
    """
    if threads is None:
        return None
    if is_whole(threads):
        return Threads(int(threads), int(threads))
    cores = available_cores()
    is_small = bundle.manifest.spec.has_decoder and _step_bytes(bundle) < ONE_THREAD_BELOW
    return Threads(cores, 1 if is_small else cores)


def threads_of(threads: Threads | int | None) -> tuple[int | None, int | None]:
    """Return those of encoder and decoder; a number is for both, None for as many as ONNX Runtime finds cores."""
    return (threads.encoder, threads.decoder) if isinstance(threads, Threads) else (threads, threads)


def _step_bytes(bundle: Bundle) -> int:
    """Return what a step reads; of a module of the user's own all weights, the encoder's too."""
    known = step_weight_bytes(bundle)
    files = bundle.manifest.files
    return sum(files[name].bytes for name in (WEIGHTS, QUANTIZED_WEIGHTS) if name in files) if known is None else known
