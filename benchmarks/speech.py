#!/usr/bin/env python
"""Compare the speed of Whisper sizes, with random weights, with transformers, CTranslate2 and optimum-onnx.

Every system runs in its own process: tfexport and transformers in this environment, the others in that of --python,
with click, ctranslate2, optimum-onnx, onnxruntime and transformers 4, which also writes the models. Outputs are
compared before times. Then all systems take turns; a ratio is the median over rounds of the peer's time over ours, for
a whole call: features of 30 s in, 64 greedy tokens out. The result is a table in Markdown.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
PEERS = {"transformers": ("fp32",), "ctranslate2": ("fp32", "int8"), "optimum-onnx": ("fp32",)}
START, END = [50258, 50259, 50359, 50363], 50257  # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>
FILE = Path(__file__).resolve()


def checkpoint(folder: Path, size: str) -> None:
    """Write a random model as transformers does, with a vocabulary of the right size."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

    width, layers, heads = SIZES[size]
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=51865, d_model=width, **sides))
    with torch.no_grad():  # larger weights, so that texts differ between sources
        for name, parameter in model.named_parameters():
            parameter.mul_(1.6 if parameter.dim() > 1 and "embed_positions" not in name else 1)
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(END)}))
    tokenizer = WhisperTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tasks = "translate transcribe startoflm startofprev nospeech notimestamps".split()
    words = ["endoftext", "startoftranscript", "en", *(f"l{number}" for number in range(98)), *tasks]
    names = [f"<|{word}|>" for word in (*words, *(f"{0.02 * step:.2f}" for step in range(1501)))]
    tokenizer.add_special_tokens({"additional_special_tokens": [n for n in names if n not in tokenizer.get_vocab()]})
    tokenizer.save_pretrained(folder)


def features(batch: int) -> Any:
    """Return features like speech that ends in silence, float32 [batch, 80, 3000]."""
    rng, window = np.random.default_rng(0), np.hanning(15) / np.hanning(15).sum()
    noise = rng.normal(0, 0.8, (8, 80, 3000))
    found = np.stack([[np.convolve(band, window, "same") for band in bands] for bands in noise])
    for row in range(8):
        found[row, :, int(3000 * (0.3 + 0.08 * row)) :] = -0.6
    return found[:batch].astype(np.float32)


def worker(system: str, folder: Path, precision: str, threads: int, new: int) -> Callable[[int], list[list[int]]]:
    """Load a system; return a function that decodes a batch."""
    options = {"max_new_tokens": new, "min_new_tokens": new}
    if system == "tfexport":
        import tfexport

        model = tfexport.load(folder / f"bundle-{precision}", threads=threads)

        def ours(batch: int) -> list[list[int]]:
            sources, prefixes = list(features(batch).transpose(0, 2, 1)), [START[1:]] * batch
            own = {"decoder_start_token_id": START[0], "begin_suppress_tokens": ()}
            found = model.generate_ids(sources, prefixes=prefixes, batch_size=batch, **options, **own)
            return [list(best[0].token_ids[len(START) - 1 :]) for best in found]

        return ours
    if system == "ctranslate2":
        import ctranslate2

        kind = {"fp32": "float32"}.get(precision, precision)
        whisper = ctranslate2.models.Whisper(
            str(folder / f"ct2-{precision}"), intra_threads=threads, inter_threads=1, compute_type=kind
        )
        limits = {"max_length": 2 * new, "beam_size": 1, "suppress_blank": False, "suppress_tokens": [END]}

        def theirs(batch: int) -> list[list[int]]:
            view = ctranslate2.StorageView.from_array(features(batch))
            return [list(found.sequences_ids[0]) for found in whisper.generate(view, [START] * batch, **limits)]

        return theirs
    import torch
    import transformers

    torch.set_num_threads(threads)
    if system == "transformers":
        loaded: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "hf").eval()
    else:
        import onnxruntime
        from optimum.onnxruntime import ORTModelForSpeechSeq2Seq

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = threads
        loaded = ORTModelForSpeechSeq2Seq.from_pretrained(folder / "optimum", session_options=session)

    @torch.inference_mode()
    def generated(batch: int) -> list[list[int]]:
        prompt, unset = torch.tensor([START] * batch), {"begin_suppress_tokens": None, "suppress_tokens": [END]}
        inputs = torch.from_numpy(features(batch))
        ids = transformers.GenerationMixin.generate(loaded, inputs, decoder_input_ids=prompt, **options, **unset)
        return ids[:, len(START) :].tolist()  # type: ignore[no-any-return]

    return generated


def convert(folder: Path, precision: str, python: str) -> None:
    """Write the model in the format of every system."""
    tfexport, model = str(Path(sys.executable).with_name("tfexport")), folder / "model"
    if not model.exists():
        subprocess.run([tfexport, "import", folder / "hf", "--output", model, "--no-compare"], check=True)
    bundle = folder / f"bundle-{precision}"
    command = [tfexport, "onnx", model, "--output", bundle, "--variants", "contrib", "--precision", precision]
    subprocess.run(
        [*command, "--force", "--no-verify"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kind = {"fp32": "float32"}.get(precision, precision)
    code = f"from ctranslate2.converters import TransformersConverter as C; C({str(folder / 'hf')!r}).convert("
    subprocess.run([python, "-c", f"{code}{str(folder / f'ct2-{precision}')!r}, quantization={kind!r}, force=True)"])
    if precision == "fp32":
        code = "from optimum.onnxruntime import ORTModelForSpeechSeq2Seq as M; M.from_pretrained("
        code += f"{str(folder / 'hf')!r}, export=True).save_pretrained({str(folder / 'optimum')!r})"
        subprocess.run([python, "-c", code])


class Peer:
    """A system in its own process."""

    def __init__(self, python: str, *arguments: object) -> None:
        code = [python, str(FILE), "work", *map(str, arguments)]
        self._process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask(0)

    def ask(self, batch: int) -> dict[str, Any]:
        """Decode a batch; return its ids and seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@click.group()
def main() -> None:
    """Measure, or answer requests for one system."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("size", type=click.Choice(tuple(SIZES)))
def write(folder: Path, size: str) -> None:
    """Write a random model."""
    checkpoint(folder, size)


@main.command()
@click.argument("arguments", nargs=-1)
def work(arguments: tuple[str, ...]) -> None:
    """Answer requests of a measurement."""
    system, folder, precision, threads, new = arguments
    run = worker(system, Path(folder), precision, int(threads), int(new))
    for line in sys.stdin:
        began = time.perf_counter()
        ids = run(int(line)) if int(line) else []
        print(json.dumps({"seconds": time.perf_counter() - began, "ids": ids}), flush=True)


@main.command()
@click.option("--python", required=True, help="Python of the environment with the peers.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/speech"), show_default=True)
@click.option("--size", "sizes", multiple=True, default=tuple(SIZES), type=click.Choice(tuple(SIZES)))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--new", type=int, default=64, show_default=True, help="Tokens of each text.")
def measure(
    python: str, output: Path, sizes: tuple[str, ...], batches: tuple[int, ...], threads: int, rounds: int, new: int
) -> None:
    """Print a row for each size, precision and batch."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    click.echo("| size | precision | batch | ours, ms | peer | peer's time / ours (lowest to highest) | equal texts |")
    click.echo("|---|---|---|---|---|---|---|")
    for size in sizes:
        (folder := output / size).mkdir(parents=True, exist_ok=True)
        if not (folder / "hf" / "config.json").exists():
            subprocess.run([python, FILE, "write", folder / "hf", size], check=True)
        for precision in ("fp32", "int8"):
            convert(folder, precision, python)
            names = ["tfexport", *(name for name, precisions in PEERS.items() if precision in precisions)]
            homes = {"tfexport": sys.executable, "transformers": sys.executable}
            peers = {n: Peer(homes.get(n, python), n, folder.resolve(), precision, threads, new) for n in names}
            for batch in batches:
                ids = {name: peer.ask(batch)["ids"] for name, peer in peers.items()}
                times: dict[str, list[float]] = {name: [] for name in names}
                for turn in range(rounds):
                    for name in names[:: 1 if turn % 2 else -1]:
                        times[name].append(peers[name].ask(batch)["seconds"])
                for name in names[1:]:
                    ratios = [peer / own for peer, own in zip(times[name], times["tfexport"], strict=True)]
                    equal = sum(mine == other for mine, other in zip(ids["tfexport"], ids[name], strict=True))
                    shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    own = f"{1000 * statistics.median(times['tfexport']):.0f}"
                    click.echo(f"| {size} | {precision} | {batch} | {own} | {name} | {shown} | {equal} of {batch} |")
            for peer in peers.values():
                peer.close()


if __name__ == "__main__":
    main()
