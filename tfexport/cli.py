"""The command line: each command opens, makes one call into the library and prints."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from tfexport.bench.config import BenchConfig, Scenario
from tfexport.checkpoint.config import ImportConfig
from tfexport.decode.config import DecodeConfig
from tfexport.errors import BenchError, InputError, ParityError, TfexportError, printable, raise_all
from tfexport.graph.config import ExportConfig
from tfexport.spec import CONCAT_OPSETS, Backend, Device, Form
from tfexport.trt.config import EngineConfig

if TYPE_CHECKING:
    from tfexport.model import Pooling

F = TypeVar("F", bound=Callable[..., Any])

EXIT_ERROR, EXIT_PARITY, EXIT_INTERRUPTED = 1, 2, 130
# The extra that brings a module which tfexport imports only when it is needed.
_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "yaml": "export",
}
# `tfexport` alone shows its help; before click 8.2 that is no error.
_NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
_DECODE_HELP = {
    "max_new_tokens": "Most tokens to generate; as many as the model takes when not given.",
    "min_new_tokens": "Fewest tokens before the text may end.",
    "num_beams": "Beams of beam search; 1 is greedy.",
    "length_penalty": "Exponent of the length in a beam's score; above 0 prefers longer texts.",
    "early_stopping": "End beams at num-beams texts (true), when better is unlikely (false) or impossible (never).",
    "no_repeat_ngram_size": "Never repeat a sequence of so many tokens; 0 allows it.",
    "repetition_penalty": "Divide the score of tokens that are there already; 1 changes nothing.",
    "do_sample": "Draw tokens at random instead of taking the best.",
    "temperature": "Flatten (above 1) or sharpen (below 1) what is drawn from.",
    "top_k": "Draw from so many best tokens; 0 from all.",
    "top_p": "Draw from the fewest best tokens that have this probability together.",
    "num_return_sequences": "Texts to return for each input, best first.",
    "forced_bos_token_id": "Id that every text begins with.",
    "suppress_tokens": "Ids never to generate, such as 3,17.",
    "seed": "Of sampling; the same seed draws the same texts.",
}


class _Commands(click.Group):
    """All commands, and the one place where an error becomes one line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit: 0, 1 for an error, 2 when parity fails and for nothing else, 130 on Ctrl-C."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except TfexportError as error:
            click.echo(f"error: {error}", err=True)
            code = EXIT_PARITY if isinstance(error, ParityError) else EXIT_ERROR
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            click.echo(
                f"error: this needs {error.name}, which is not installed; pip install 'tfexport[{extra}]'", err=True
            )
            code = EXIT_ERROR
        except click.ClickException as error:
            if isinstance(error, _NO_COMMAND):
                error.show()
            else:
                click.echo(f"error: {_one_line(error)}", err=True)
            code = EXIT_ERROR
        except OSError as error:
            if error.filename is not None:
                raise
            # What is left in the buffer would fail once more, with a trace, when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"error: standard output cannot be written: {error.strerror}; redirect it elsewhere", err=True)
            code = EXIT_ERROR
        except click.Abort:
            click.echo("interrupted", err=True)
            code = EXIT_INTERRUPTED
        sys.exit(code)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name, which may be two words."""
        two = " ".join(args[:2])
        return (two, self.commands[two], args[2:]) if two in self.commands else super().resolve_command(ctx, args)


def _one_line(error: click.ClickException) -> str:
    """Spell wrong usage, and where the right one is written."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    advice = f" See {context.command_path} --help." if context else ""
    return printable(" ".join(error.format_message().split()) + advice)


class _List(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Values separated by commas."""

    def __init__(self, item: click.ParamType) -> None:  # type: ignore[type-arg]
        self.item = item
        self.name = f"{item.name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())


_PATH = click.Path(path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
_device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where ONNX Runtime computes."
)
_engine_option = click.option(
    "--engine", help="TensorRT engine of the bundle; the only one that fits here when not given."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _decode_options(command: F) -> F:
    """Add one option for each field of DecodeConfig, with its default."""
    for field in reversed(dataclasses.fields(DecodeConfig)):
        name, default = "--" + field.name.replace("_", "-"), field.default
        kind: Any = int if default is None else type(default)
        more: dict[str, Any] = {"type": kind, "default": default}
        if field.name == "early_stopping":
            more = {"type": click.Choice(["true", "false", "never"]), "default": "false", "callback": _early_stopping}
        elif kind is tuple:
            more = {"type": _List(click.INT), "default": default, "show_default": False}
        elif kind is bool:
            more = {"is_flag": True}
        command = click.option(name, help=_DECODE_HELP[field.name], **more)(command)
    return command


def _early_stopping(_context: click.Context, _parameter: click.Parameter, value: str) -> bool | str:
    return {"true": True, "false": False}.get(value, value)


def _text_options(command: F) -> F:
    """Add what every command takes that reads texts and runs a bundle."""
    for add in (
        click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Texts to run together."),
        click.option("--backend", type=click.Choice(get_args(Backend)), default="auto", help="What runs the bundle."),
        _engine_option,
        _device_option,
        click.option(
            "--output", type=_PATH, help="File to write, whole or not at all; standard output when not given."
        ),
        click.option("--input", "source", type=_INPUT, help="File with one text a line; - is standard input."),
        click.argument("texts", nargs=-1, metavar="[TEXT]..."),
        click.argument("bundle", type=_PATH),
    ):
        command = add(command)
    return command


@click.group(cls=_Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tfexport")
def main() -> None:
    """Take a from-scratch encoder-decoder transformer from PyTorch to production."""


@main.command("import")
@click.argument("checkpoint", type=_PATH)
@click.option("--output", type=_PATH, required=True, help="Model directory to make.")
@click.option(
    "--layout", default=ImportConfig.layout, help="auto, the name of a built-in layout, or a layout file (YAML)."
)
@click.option("--golden", type=_PATH, help="What the original model computes, as recorded beside its code.")
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads, which no shape tells.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A switch or token id, such as norm_eps=1e-6."
)
@click.option("--tokenizer", type=_PATH, help="tokenizer.json, SentencePiece model, or a list with one token a line.")
@click.option("--builtin/--no-builtin", default=ImportConfig.builtin, help="Let auto propose the built-in layouts.")
@click.option("--accept-unverified", is_flag=True, help="Take what auto proposes without a golden.")
@click.option("--force", is_flag=True, help="Replace a model directory that is there, once the new one is whole.")
def import_(
    checkpoint: Path, output: Path, golden: Path | None, tokenizer: Path | None, force: bool, **config: Any
) -> None:
    """Import CHECKPOINT, the weights of another implementation, as a model directory.

    CHECKPOINT is a state dict in a safetensors file or a file of torch.save, or a Hugging Face directory of Marian,
    BART or T5. With --golden the import is accepted only when the original's outputs are reproduced.
    """
    settings = ImportConfig(**config)
    from tfexport.checkpoint.importer import import_checkpoint

    imported = import_checkpoint(
        checkpoint, output, settings, golden=golden, tokenizer=tokenizer, force=force, report=_report
    )
    click.echo(printable(f"{output}: {imported.summary()}"))
    for line in imported.certificate.unverified:
        click.echo(printable(f"unverified: {line}"))


@main.command()
@click.argument("source")
@click.option("--output", type=_PATH, required=True, help="Bundle directory to make.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]),
    default=ExportConfig.precision,
    help="Of the weights; int8 and int4 are for ONNX Runtime on the CPU.",
)
@click.option(
    "--optimize-for",
    type=click.Choice(["latency", "throughput"]),
    default=ExportConfig.optimize_for,
    help="What int8 is fast at: single texts, which then depend on no other, or large batches.",
)
@click.option(
    "--forms",
    type=_List(click.Choice(get_args(Form))),
    default=",".join(ExportConfig.forms),
    help="Of the decoder: concat is portable, static is for engines and GPUs, contrib is for ONNX Runtime on the CPU.",
)
@click.option(
    "--opset",
    type=click.IntRange(CONCAT_OPSETS[0], CONCAT_OPSETS[-1]),
    default=ExportConfig.opset,
    help="Of the encoder and all forms but static.",
)
@click.option("--max-source-length", type=int, help="Most source tokens; the model's limit when not given.")
@click.option("--max-target-length", type=int, help="Most target tokens; the model's limit when not given.")
@click.option("--seed", default=ExportConfig.seed, help="Of a preset's random weights.")
@click.option("--verify/--no-verify", default=True, help="Compare every stage with PyTorch before writing.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there, once the new one is whole.")
def onnx(source: str, output: Path, verify: bool, force: bool, **config: Any) -> None:
    """Export SOURCE as a bundle of ONNX graphs.

    SOURCE is a model directory (config.json, model.safetensors, optional tokenizer.json) or preset:NAME.
    """
    settings = ExportConfig(**config)
    from tfexport.export import export_bundle

    bundle = export_bundle(source, output, settings, verify=verify, force=force, report=_report)
    proof = "verified" if verify else "not verified"
    click.echo(printable(f"{output}: {bundle.manifest.kind}, {settings.precision}, {proof}"))


@main.command()
@click.argument("bundle", type=_PATH)
@click.option(
    "--target",
    type=click.Choice(["auto", "tensorrt", "tensorrt-rtx"]),
    default="auto",
    callback=lambda _context, _parameter, value: None if value == "auto" else value,
    help="Library to build with; auto takes tensorrt where it is installed and a GPU is there, else tensorrt-rtx.",
)
@click.option(
    "--form",
    type=click.Choice(["static", "concat"]),
    help="Of the decoder; static where the library takes it and the bundle has it when not given.",
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="The bundle's own when not given.")
@click.option(
    "--weights", type=click.Choice(["int8", "int4", "fp8"]), help="Store the matrices of linear maps in fewer bits."
)
@click.option("--max-batch", default=EngineConfig.max_batch, help="Most sources, and most hypotheses, at once.")
@click.option("--max-source-length", type=int, help="Most source tokens; the bundle's limit when not given.")
@click.option("--max-target-length", type=int, help="Most target tokens; the bundle's limit when not given.")
@click.option("--minShapes", "min_shapes", default="", show_default=False, help="Smallest shapes, as in trtexec.")
@click.option("--optShapes", "opt_shapes", default="", show_default=False, help="Shapes to tune for, as in trtexec.")
@click.option("--maxShapes", "max_shapes", default="", show_default=False, help="Largest shapes, as in trtexec.")
@click.option("--workspace", "workspace_mib", type=int, help="Scratch memory of a layer in MiB.")
@click.option("--builder-optimization-level", type=int, help="0 to 5; higher builds longer for faster engines.")
@click.option("--timing-cache", help="Directory of kernel timings, read and written (tensorrt).")
@click.option("--version-compatible", is_flag=True, help="Let newer versions load the engines (tensorrt).")
@click.option(
    "--hardware-compatibility-level",
    "hardware_compatibility",
    type=click.Choice(["none", "ampere_plus", "same_compute_capability"]),
    default=EngineConfig.hardware_compatibility,
    help="Which other GPUs may run the engines (tensorrt).",
)
@click.option(
    "--compute-capability",
    "compute_capabilities",
    multiple=True,
    help="GPUs to build for, such as 8.9; may be given several times (tensorrt-rtx).",
)
@click.option("--strip-weights", is_flag=True, help="Leave the weights out; loading takes them from the bundle.")
@click.option("--refit", is_flag=True, help="Let the weights be replaced.")
@click.option("--dry-run", is_flag=True, help="Show profiles, memory and flags; build and write nothing.")
@click.option("--force", is_flag=True, help="Replace an engine that is there, once the new one is whole.")
@_json_option
def trt(bundle: Path, dry_run: bool, force: bool, as_json: bool, **config: Any) -> None:
    """Build TensorRT engines from BUNDLE and put them into it.

    An engine is named by target, form, precision and weights, and lies in engines/ of the bundle.
    """
    settings = EngineConfig(**config)
    from tfexport.build import build_engines, forecast_engines

    if dry_run:
        forecast = forecast_engines(bundle, settings, report=_report)
        _print(forecast.to_dict(), forecast.lines(), as_json)
        return
    with _build_progress() as (report, on_progress):
        built = build_engines(bundle, settings, force=force, report=report, on_progress=on_progress)
    _print(built.to_dict(), built.lines(), as_json)


@main.command()
@_text_options
@click.option("--prefix", help="Text that every output begins with.")
@_json_option
@_decode_options
def generate(
    bundle: Path,
    texts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
    backend: Backend,
    engine: str | None,
    device: Device,
    batch_size: int,
    prefix: str | None,
    as_json: bool,
    **decode: Any,
) -> None:
    """Write what the model answers to each TEXT, one a line.

    Without TEXT and --input it reads standard input. Several texts for one input are written as number of the
    input, score and text, separated by tabs. A line break inside a text is written as a space, except with --json.
    """
    DecodeConfig(**decode)
    inputs = _inputs(texts, source)
    from tfexport.model import load

    prefixes = None if prefix is None else [prefix] * len(inputs)
    with (
        load(bundle, backend=backend, device=device, engine=engine) as model,
        _lines_to(output) as write,
        _progress(len(inputs), batch_size) as tick,
    ):
        if not model.spec.has_decoder:
            raise InputError(f"{bundle}: is an encoder alone and generates no text; use tfexport embed {bundle}")
        results = model.generate(inputs, prefixes=prefixes, batch_size=batch_size, on_progress=tick, **decode)
        for number, result in enumerate(results):
            index = number // decode["num_return_sequences"]
            if as_json:
                write(_json({"index": index, "input": inputs[index], **dataclasses.asdict(result)}))
            else:
                text = " ".join(result.text.splitlines())
                write(text if decode["num_return_sequences"] == 1 else f"{index + 1}\t{result.score:z.4f}\t{text}")


@main.command()
@_text_options
@click.option("--pooling", type=click.Choice(["mean", "cls"]), default="mean", help="How tokens become one vector.")
@click.option("--normalize/--no-normalize", default=True, help="Scale every vector to length 1.")
def embed(
    bundle: Path,
    texts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
    backend: Backend,
    engine: str | None,
    device: Device,
    batch_size: int,
    pooling: Pooling,
    normalize: bool,
) -> None:
    """Write the vector of each TEXT with an encoder-only bundle, one JSON object a line."""
    inputs = _inputs(texts, source)
    from tfexport.model import load

    with load(bundle, backend=backend, device=device, engine=engine) as model, _lines_to(output) as write:
        vectors = model.embed(inputs, pooling=pooling, normalize=normalize, batch_size=batch_size)
        for index, (text, vector) in enumerate(zip(inputs, vectors, strict=True)):
            write(_json({"index": index, "input": text, "embedding": vector.tolist()}))


@main.command()
@click.argument("bundle", type=_PATH)
@click.option("--against", type=_PATH, help="Model directory that the bundle was made from.")
@click.option("--samples", default=100, help="Random sequences to decode for each form and method.")
@click.option("--seed", default=0, help="Of the sequences.")
@click.option("--backend", type=click.Choice(["ort", "trt"]), default="ort", help="Compare the graphs, or an engine.")
@_engine_option
@_device_option
@_json_option
def verify(
    bundle: Path,
    against: Path | None,
    samples: int,
    seed: int,
    backend: Literal["ort", "trt"],
    engine: str | None,
    device: Device,
    as_json: bool,
) -> None:
    """Compare every stage of BUNDLE with PyTorch; exit with 2 when one differs."""
    from tfexport.verify import VerifyConfig, verify_bundle

    config = VerifyConfig(samples=samples, seed=seed)
    result = verify_bundle(
        bundle, against=against, config=config, backend=backend, device=device, engine=engine, report=_report
    )
    _print(result.to_dict(), result.lines(), as_json)
    click.get_current_context().exit(0 if result.passed else EXIT_PARITY)


_SIZES = _List(click.INT)


@main.command()
@click.argument("bundle", type=_PATH)
@click.option(
    "--scenario",
    type=click.Choice(get_args(Scenario)),
    default=BenchConfig.scenario,
    help="One request at a time, batches, requests that arrive at --rate, or all combinations of sizes.",
)
@click.option(
    "--backend", type=click.Choice(get_args(Backend)), default=BenchConfig.backend, help="What runs the bundle."
)
@_device_option
@_engine_option
@click.option("--batch-size", type=_SIZES, default=(), show_default=False, help="Texts decoded together.")
@click.option("--source-length", type=_SIZES, default=(), show_default=False, help="Tokens of each random source.")
@click.option("--target-length", type=_SIZES, default=(), show_default=False, help="New tokens, exactly so many.")
@click.option("--num-beams", default=BenchConfig.num_beams, help="Beams of beam search; 1 is greedy.")
@click.option("--input", "source", type=_INPUT, help="File with one text a line instead of random sources.")
@click.option("--rate", type=float, help="Requests a second of the server scenario.")
@click.option("--duration", type=float, help="Seconds to measure in each process, for each combination in a sweep.")
@click.option("--processes", default=BenchConfig.processes, help="Fresh processes to measure in, one after the other.")
@click.option("--seed", default=BenchConfig.seed, help="Of the random sources and arrivals.")
@click.option("--verify/--no-verify", default=True, help="Refuse a bundle that PyTorch does not agree with.")
@click.option("--json", "json_file", type=_PATH, help="File to write the whole report to.")
@click.option("--html", "html_file", type=_PATH, help="Page to write, with plots.")
def bench(
    bundle: Path, source: Path | None, verify: bool, json_file: Path | None, html_file: Path | None, **config: Any
) -> None:
    """Measure how fast BUNDLE generates, in what time and memory.

    `tfexport bench compare` compares two reports.
    """
    settings = BenchConfig(**config)
    if json_file and html_file and json_file.resolve() == html_file.resolve():
        raise click.UsageError("--json and --html are the same file; choose two.")
    texts = None if source is None else _inputs((), source)
    from tfexport.bench.page import render
    from tfexport.bench.run import bench_bundle
    from tfexport.bench.table import lines
    from tfexport.files.text import write_whole

    with ExitStack() as stack:
        json_lines = stack.enter_context(write_whole(json_file)) if json_file else []
        html_lines = stack.enter_context(write_whole(html_file)) if html_file else []
        result = bench_bundle(bundle, settings, texts=texts, verify=verify, report=_report)
        json_lines.append(json.dumps(result, indent=2, allow_nan=False))
        html_lines.append(render(result).rstrip())
        click.echo("\n".join(map(printable, lines(result))))


@main.command("bench compare")
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
@click.option("--fail-if", multiple=True, help="Change to refuse, such as 'output_token_throughput<-5%'; repeatable.")
@click.option(
    "--vary", type=_List(click.STRING), default=(), show_default=False, help="What may differ, such as backend,threads."
)
def bench_compare(first: Path, second: Path, fail_if: tuple[str, ...], vary: tuple[str, ...]) -> None:
    """Compare the reports FIRST and SECOND of `tfexport bench --json`; exit with 1 when a --fail-if holds.

    A bundle named compare is measured as ./compare.
    """
    from tfexport.bench.compare import Condition, compare, read_result

    conditions = [Condition.parse(text) for text in fail_if]
    found = compare(read_result(first), read_result(second), conditions, vary)
    click.echo("\n".join(map(printable, found.lines)))
    raise_all(BenchError, "bench compare", found.failures)


@main.command()
@click.argument("path", type=_PATH)
@_json_option
def inspect(path: Path, as_json: bool) -> None:
    """Show what a bundle, a model directory or an .onnx file holds."""
    from tfexport.inspect import describe, inspect_path

    found = inspect_path(path)
    _print(found, describe(found), as_json)


@main.command()
@_json_option
def doctor(as_json: bool) -> None:
    """Show what is installed, which backends work and how to repair the rest; exit with 1 when none works."""
    from tfexport.doctor import diagnose

    found = diagnose()
    _print(found.to_dict(), found.lines(), as_json)
    click.get_current_context().exit(0 if found.works else EXIT_ERROR)


def _inputs(texts: Sequence[str], source: Path | None) -> list[str]:
    from tfexport.files.text import read_lines

    if texts and source:
        raise click.UsageError("TEXT and --input were both given; choose one.")
    if texts:
        return list(texts)
    if source is None and sys.stdin.isatty():
        raise click.UsageError("No text was given; add TEXT, or --input FILE, or pipe one text a line.")
    if source is None or str(source) == "-":
        return read_lines(sys.stdin.buffer, "standard input")
    with source.open("rb") as stream:
        return read_lines(stream, str(source))


@contextmanager
def _lines_to(output: Path | None) -> Iterator[Callable[[str], None]]:
    from tfexport.files.text import write_whole

    if output is None:
        yield click.echo
    else:
        with write_whole(output) as lines:
            yield lines.append


@contextmanager
def _progress(length: int, batch_size: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on a terminal when there is more than one batch."""
    if length <= batch_size or not sys.stderr.isatty():
        yield None
    else:
        with click.progressbar(length=length, label="generating", file=sys.stderr) as bar:
            yield bar.update


@contextmanager
def _build_progress() -> Iterator[tuple[Callable[[str], None], Callable[[float], None]]]:
    """Show a bar on a terminal, and lines elsewhere."""
    if not sys.stderr.isatty():
        yield _report, lambda done: None
        return
    steps = 1000
    with click.progressbar(length=steps, label="preparing", file=sys.stderr) as bar:

        def report(line: str) -> None:
            bar.label = printable(line)
            bar.render_progress()

        yield report, lambda done: bar.update(int(done * steps) - bar.pos)


def _report(line: str) -> None:
    click.echo(printable(line), err=True)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _print(value: Any, lines: Sequence[str], as_json: bool) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else "\n".join(lines))
