"""A run in bulk over a cluster: Ray Data hands parts to workers, each with the model, and this process joins them.

Ray Data's own checkpoints (`ray.data.checkpoint`) note rows by an id and write files in no order; here parts are what
is kept, as in a run on one machine, so that the two go on with one another's work.
Source: https://docs.ray.io/en/latest/data/api/doc/ray.data.Dataset.map.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import ray
import ray.data

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.decode import Decoder
from tfexport.bulk.formats.format import Format, Part
from tfexport.bulk.formats.registry import need_format, open_source
from tfexport.bulk.job import PartStore
from tfexport.bulk.places.find import find_place
from tfexport.bulk.progress import Meter, Progress, Summary
from tfexport.bulk.task import Task, check_unchanged, prepared, read_texts
from tfexport.bundle.bundle import open_bundle
from tfexport.config import Config
from tfexport.errors import BackendError, ConfigError, TfexportError, raised_by
from tfexport.generation import DecodeConfig
from tfexport.model.load import load, load_tokenizer
from tfexport.model.model import bundle_sha256

# Pieces of work that Ray Data keeps account of; each has a part, or several where there are more.
_MAX_BLOCKS = 4096


class Workers(Config, subject="workers"):
    """The processes of a cluster that decode.

    Attributes:
        least: that there are.
        most: that there may be, where the cluster has room; None for as many as `least`.
        cpus: that each reserves; on the CPU also its threads.
        gpus: that each reserves, such as 0.5 where two share one.
        backend: as `tfexport.load` takes it.
        device: the same.
        engine: the same.
    """

    least: int = 1
    most: int | None = None
    cpus: int = 1
    gpus: float = 0.0
    backend: str = "auto"
    device: str = "cpu"
    engine: str | None = None

    def _problems(self) -> Iterator[str]:
        if self.least < 1:
            yield f"least is {self.least}, expected 1 or more"
        if self.most is not None and self.most < self.least:
            yield f"most is {self.most}, expected {self.least} or more, or None"
        if self.cpus < 1:
            yield f"cpus is {self.cpus}, expected 1 or more"
        if self.gpus < 0:
            yield f"gpus is {self.gpus}, expected 0 or more"

    def load_options(self) -> dict[str, Any]:
        """Return what `tfexport.load` is called with."""
        return {
            "backend": self.backend, "device": self.device, "engine": self.engine, "threads": self.cpus
        }  # fmt: skip


def generate_file(
    bundle: str | PathLike[str],
    source: str | PathLike[str],
    target: str | PathLike[str],
    config: BulkConfig | None = None,
    *,
    workers: Workers | None = None,
    report: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Summary:
    """Generate for every row of a file on the cluster that `ray.init` has connected to.

    What is written, and how a run is gone on with, is that of `tfexport.bulk.run.generate_file`; either goes on with
    parts of the other. A worker that dies is replaced and its part decoded again.

    Args:
        bundle: path that this process and every worker opens.
        source: path or URI of the input, which all of them read.
        target: of the output; workers write the parts beside it, this process writes the rest.
        config: of the run; None for the defaults.
        workers: that decode; None for one.
        report: told what happens.
        on_progress: told how far the run is, whenever a part is finished.
        options: fields of `DecodeConfig`, as `Model.generate` takes them.

    Raises:
        ConfigError: options that are unknown, out of range or contradictory, or `ray.init` was not called.
        InputError: lists what is broken in the input, or the output cannot be written, or is another run's.
        BundleError: another process writes the output, or the bundle is missing or damaged.
        BackendError: the backend failed on a worker, or Ray did; what is done is kept.
    """
    config, workers = config or BulkConfig(), workers or Workers()
    if not ray.is_initialized():
        raise ConfigError("generate_file: there is no cluster; call ray.init first")
    path = str(bundle)
    with _plain_errors():
        # What this process cannot know without the backend, a worker says.
        asked = ray.remote(num_cpus=workers.cpus, num_gpus=workers.gpus)(_ask).remote(path, workers, config, options)
        decoding, sha256, backend = ray.get(asked)
    tokenizer = load_tokenizer(open_bundle(Path(path), weights=False))
    assert tokenizer is not None  # or the worker would have refused
    with prepared(source, target, config, decoding, tokenizer, sha256, backend, report) as task:
        num_left = sum(part.count for part in task.missing)
        meter = Meter(task.scan.num_rows, task.scan.num_rows - num_left, on_progress)
        with _plain_errors():
            for row in _decoded(task, path, source, target, config, decoding, workers):
                meter.add(row["count"])
        rate = meter.rate()
        report(f"joining {task.scan.num_rows:,} rows into {task.target.name}")
        return Summary(task.scan.num_rows, num_left, task.finish(), rate)


def _ask(
    bundle: str, workers: Workers, config: BulkConfig, options: Mapping[str, Any]
) -> tuple[DecodeConfig, str, str]:
    """Return, on a worker, how is decoded, what the bundle is and what runs it; refuses what a run would refuse."""
    with load(bundle, **workers.load_options()) as model:
        decoder = Decoder(model, config, model.decoding(**options))
        return decoder.decoding, bundle_sha256(model), model.session.backend


class _Worker:
    """Decodes parts, and keeps each before it tells of it."""

    def __init__(
        self,
        bundle: str,
        source: str,
        form: Format,
        target: str,
        column: str,
        stamp: tuple[int, int],
        config: BulkConfig,
        decoding: DecodeConfig,
        workers: Workers,
    ) -> None:
        self._decoder = Decoder(load(bundle, **workers.load_options()), config, decoding)
        self._source = open_source(find_place(source), form)
        self._store = PartStore(find_place(target).parts)
        self._column, self._stamp = column, stamp

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = Part(**{field.name: int(row[field.name]) for field in dataclasses.fields(Part)})
        answers = self._decoder.answers(read_texts(self._source, part, self._column), part.first)
        check_unchanged(self._source.place, self._stamp, self._store.name)
        self._store.write(part, answers)
        return {"count": part.count}


def _decoded(
    task: Task,
    bundle: str,
    source: str | PathLike[str],
    target: str | PathLike[str],
    config: BulkConfig,
    decoding: DecodeConfig,
    workers: Workers,
) -> Iterator[dict[str, Any]]:
    """Yield the number of rows of each part as it is kept."""
    if not task.missing:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    parts = ray.data.from_items(
        [dataclasses.asdict(part) for part in task.missing], override_num_blocks=min(len(task.missing), _MAX_BLOCKS)
    )
    arguments = {
        "bundle": bundle,
        "source": str(source),
        "form": need_format(source, "input"),
        "target": str(target),
        "column": task.column,
        "stamp": task.stamp,
        "config": config,
        "decoding": decoding,
        "workers": workers,
    }
    decoded = parts.map(
        _Worker,
        fn_constructor_kwargs=arguments,
        compute=ray.data.ActorPoolStrategy(min_size=workers.least, max_size=workers.most or workers.least),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    )
    yield from decoded.iter_rows()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what was raised on a worker as if it were raised here.

    Raises:
        TfexportError: that of the worker; BackendError where Ray itself failed.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        found: BaseException | None = error
        while found is not None and (type(found).__module__.startswith("ray.") or not isinstance(found, TfexportError)):
            found = getattr(found, "cause", None) or found.__cause__
        if found is not None:
            raise found from None
        raise BackendError(f"Ray has failed ({raised_by(error)}); what is done is kept, run again to go on") from error
