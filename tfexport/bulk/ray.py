"""Run a file through a model on a cluster: Ray Data gives the parts to workers.

Checkpoints of Ray Data (`ray.data.checkpoint`) do not preserve the order of rows. Parts are therefore saved as in a run
on one machine, and each kind of run can resume the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import ray
import ray.data

from tfexport.bulk._job import Meter, Part, Store, run_job
from tfexport.bulk.config import BulkConfig, Progress, Summary
from tfexport.bulk.run import Decoder, decoding_of, reader_of
from tfexport.bundle.bundle import open_bundle
from tfexport.config import Config, Ge, Help
from tfexport.errors import BackendError, ConfigError, TfexportError, raised_by
from tfexport.generation import DecodeConfig
from tfexport.model.load import load, load_processor, load_tokenizer
from tfexport.model.model import bundle_sha256

_MAX_BLOCKS = 4096  # with more parts, a block of Ray Data has several parts


class Workers(Config, subject="workers"):
    """Processes of the cluster that decode, with options of `tfexport.load`."""

    least: Annotated[int, Ge(1), Help("Minimum number of workers.")] = 1
    most: Annotated[int | None, Help("Maximum number, if the cluster has room; by default `least`.")] = None
    cpus: Annotated[int, Ge(1), Help("Cores that a worker reserves; on the CPU also its number of threads.")] = 1
    gpus: Annotated[float, Ge(0), Help("GPUs that a worker reserves, such as 0.5 if two workers share one.")] = 0.0
    backend: str = "auto"
    device: str = "cpu"
    engine: str | None = None

    def _problems(self) -> Iterator[str]:
        if self.most is not None and self.most < self.least:
            yield f"most is {self.most}, expected {self.least} or more, or None"

    def load_options(self) -> dict[str, Any]:
        """Return keyword arguments of `tfexport.load`."""
        return {"backend": self.backend, "device": self.device, "engine": self.engine, "threads": self.cpus}


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
    """Generate for every row of a file, on the cluster that `ray.init` connected to.

    Arguments, outputs and errors are those of `tfexport.bulk.run.generate_file`, except for `bundle`, a path that this
    process and every worker can open, and `workers`. This process reads `source`; workers read and write parts next to
    `target`. If a worker dies, another one decodes its part again. Raises `BackendError` if Ray fails.
    """
    config, workers, path = config or BulkConfig(), workers or Workers(), str(bundle)
    if not ray.is_initialized():
        raise ConfigError("generate_file: there is no cluster; call ray.init first")
    with _plain_errors():
        # A worker runs the checks, because this process may lack the backend.
        check = ray.remote(num_cpus=workers.cpus, num_gpus=workers.gpus)(_check)
        decoding, sha256, backend = ray.get(check.remote(path, str(target), workers, config, options))
    opened = open_bundle(Path(path), weights=False)
    tokenizer, processor = load_tokenizer(opened), load_processor(opened)
    assert tokenizer is not None  # otherwise `_check` has raised
    reader = reader_of(opened.manifest.spec, tokenizer, processor)

    def decode(_store: Store, missing: Sequence[Part], meter: Meter) -> None:
        if not missing:
            return
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows, num_blocks = [dataclasses.asdict(part) for part in missing], min(len(missing), _MAX_BLOCKS)
        decoded = ray.data.from_items(rows, override_num_blocks=num_blocks).map(
            _Worker,
            fn_constructor_args=(path, str(target), config, decoding, workers),
            compute=ray.data.ActorPoolStrategy(min_size=workers.least, max_size=workers.most or workers.least),
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
        )
        with _plain_errors():
            for row in decoded.iter_rows():
                meter.add(row["count"])

    return run_job(source, target, config, decoding, reader, sha256, backend, decode, report, on_progress)


def _check(
    bundle: str, target: str, workers: Workers, config: BulkConfig, options: Mapping[str, Any]
) -> tuple[DecodeConfig, str, str]:
    with load(bundle, **workers.load_options()) as model:
        decoder = Decoder(model, config, decoding_of(model, target, options))
        return decoder.decoding, bundle_sha256(model), model.session.backend


class _Worker:
    def __init__(self, bundle: str, target: str, config: BulkConfig, decoding: DecodeConfig, workers: Workers) -> None:
        self._decoder = Decoder(load(bundle, **workers.load_options()), config, decoding)
        self._store = Store(target, config, decoding)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = Part(**{name: int(value) for name, value in row.items()})
        self._decoder.decode(self._store, part)
        return {"count": part.count}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a worker's `TfexportError`, or `BackendError` if Ray itself failed."""
    try:
        yield
    except ray.exceptions.RayError as error:
        found: BaseException | None = error
        while found is not None and (type(found).__module__.startswith("ray.") or not isinstance(found, TfexportError)):
            found = getattr(found, "cause", None) or found.__cause__
        if found is not None:
            raise found from None
        raise BackendError(f"Ray failed ({raised_by(error)}); finished parts are kept, run again to resume") from error
