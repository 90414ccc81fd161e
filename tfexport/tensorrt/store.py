"""Add, open, choose and load the engines of a bundle.

Each engine is a folder that is replaced atomically:

    engines/tensorrt-rtx-static-fp16/
        engine.json            manifest: options, plans, library version and GPU
        engine.json.sig        signature of the manifest, optional
        encoder.plan           one plan per graph; size and sha256 are in engine.json
        build.log              messages of the library during the build, and kernels
        layers.json            what the library's inspector reports of each plan, if there was a GPU
        kernels/               kernels compiled by TensorRT-RTX, see `tfexport.tensorrt._kernels`
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tfexport._io import atomic
from tfexport._io.device_memory import check_fits
from tfexport._io.names import ENGINE_MANIFEST, ENGINE_SIGNATURE, KERNELS
from tfexport._io.sealed_directory import changed_problems, file_problems, foreign_problems, read_manifest, written
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport._io.system import open_plain
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.contents import EngineFiles, recover_kernels
from tfexport.bundle.manifest import ENGINES
from tfexport.contract import ENCODER, REORDER
from tfexport.errors import BundleError, EngineError, raise_all
from tfexport.tensorrt._library import Library, Log, load_library
from tfexport.tensorrt._manifest import EngineManifest, PlanEntry
from tfexport.tensorrt.compatibility import Machine, explain, incompatibilities, rebuild_command, this_machine
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.inspector import num_attentions, num_fused

_REMEDY = "copy it again from its source or build it again with tfexport trt"


@dataclass(frozen=True)
class EngineBundle:
    """An engine in a bundle; its files have the sizes that the manifest lists."""

    name: str
    path: Path
    manifest: EngineManifest

    def read_plan(self, name: str) -> bytes:
        """Read a plan; raise `EngineError` if its sha256 differs."""
        plan = self.manifest.plans[name]
        file = self.path / plan.file
        try:
            with open_plain(file) as stream:
                raw = stream.read(plan.bytes + 1)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if len(raw) != plan.bytes or hashlib.sha256(raw).hexdigest() != plan.sha256:
            raise EngineError(f"engine {self.path}: {plan.file} was changed (its sha256 differs); {_REMEDY}")
        return raw

    def check_plans(self) -> None:
        """Check the sha256 of all plans and the log; raise `EngineError` with all changes."""
        try:
            problems = changed_problems(self.path, self.manifest.files)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        raise_all(EngineError, f"engine {self.path}", problems, remedy=_REMEDY)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"name": self.name, "path": str(self.path), "manifest": self.manifest.to_dict()}

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        plans = self.manifest.plans
        size = sum(plan.bytes for plan in plans.values())
        version = f"{self.manifest.config.target} {self.manifest.library_version}"
        rows = [("plan", "MB", "layers", "kernels", "fused attention"), *(_row(*plan) for plan in plans.items())]
        width = max(len(name) for name in plans)
        table = (
            f"  {name:<{width}}" + "".join(f"{cell:>9}" for cell in cells) + f"  {fused}"
            for name, *cells, fused in rows
        )
        return [f"{self.path}: {version}, {', '.join(plans)}, {size / 1e6:.1f} MB", *map(str.rstrip, table)]


@dataclass(frozen=True)
class LoadedEngine:
    """An engine in device memory."""

    manifest: EngineManifest
    library: Library
    plans: Mapping[str, Any]  # `ICudaEngine` by plan name, used by one session
    path: Path
    log: Log  # of the runtime; explains later failures
    runtime: Any  # must live as long as its plans


def engine_names(bundle: Path) -> list[str]:
    """List engines, valid or not; restore those that an interrupted write moved aside."""
    folder = bundle / ENGINES
    try:
        if not os.path.lexists(folder):
            return []
        for missing in atomic.aside(folder):
            atomic.restore(missing)
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise EngineError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error


def open_engine(bundle: Path, name: str, trusted_keys: TrustedKeys | None = None) -> EngineBundle:
    """Read an engine's manifest and check its signature, and the sizes of its files."""
    names = engine_names(bundle)
    if name not in names:
        raise EngineError(f"{bundle}: has no engine {name[:80]!r}, it has {', '.join(names) or 'none'}")
    return _read(bundle / ENGINES / name, trusted_keys)


def choose_engine(bundle: Bundle, name: str | None, machine: Machine) -> EngineBundle:
    """Return the named or only usable engine; raise `EngineError` with all problems."""
    if name is not None:
        engine = open_engine(bundle.path, name, bundle.trusted_keys)
        if found := incompatibilities(engine.manifest, bundle, machine):
            raise EngineError(f"engine {name}: {explain(found)}")
        return engine
    usable, refused = [], []
    for each in engine_names(bundle.path):
        try:
            usable.append(choose_engine(bundle, each, machine))
        except EngineError as error:
            refused.append(str(error))
    if len(usable) == 1:
        return usable[0]
    if usable:
        names = ", ".join(engine.name for engine in usable)
        raise EngineError(f"{bundle.path}: has several engines for this machine: {names}; choose one with --engine")
    if refused:
        raise EngineError(f"{bundle.path}: has no engine that can be used here: {' | '.join(refused)}")
    raise EngineError(f"{bundle.path}: has no engines; build one with: tfexport trt {bundle.path}")


def load_engine(bundle: Bundle, name: str | None = None, number: int = 0) -> LoadedEngine:
    """Load an engine of a bundle onto a GPU, after checking that it fits."""
    machine = this_machine(number)
    stored = choose_engine(bundle, name, machine)
    config = stored.manifest.config
    library = load_library(config.target)
    # The version of the loaded library is more reliable than the package's metadata.
    machine = replace(machine, libraries={library.target: library.version})
    if found := incompatibilities(stored.manifest, bundle, machine):
        raise EngineError(f"engine {stored.name}: {explain(found)}")
    log, cuda, needed = library.listen(), Cuda(number), sum(plan.bytes for plan in stored.manifest.plans.values())
    with cuda.current():
        remedy = "build it with fewer --capacities or narrower --weights"
        check_fits(f"engine {stored.name}", f"cuda:{number}", needed, cuda.memory(), remedy)
        runtime = library.runtime(log)
        if config.version_compatible:
            runtime.engine_host_code_allowed = True  # version-compatible plans contain host code
        rebuild = rebuild_command(bundle.path, config, machine.gpu)
        plans = {plan: _deserialize(runtime, library, log, stored, plan, rebuild) for plan in stored.manifest.plans}
    return LoadedEngine(stored.manifest, library, plans, stored.path, log, runtime)


@contextmanager
def add_engine(bundle: Path, name: str, *, force: bool, key: SigningKey | None = None) -> Iterator[Path]:
    """Yield a folder for an engine, and publish it at the end if it is complete."""
    target = bundle / ENGINES / name
    check = partial(_check_replaceable, target=target, force=force)
    try:
        with written(target, f"engine {target}", check, remedy="make the bundle writable") as draft:
            yield draft
            _read(draft)
            if key:
                (draft / ENGINE_SIGNATURE).write_bytes(key.sign((draft / ENGINE_MANIFEST).read_bytes()))
    finally:
        with suppress(OSError):  # the folder still contains engines
            target.parent.rmdir()


def validity_problem(trt: Any, validity: Any, diagnostics: Any) -> str | None:
    """Explain a result of `get_engine_validity`; None if the plan can be loaded."""
    if validity != trt.EngineValidity.INVALID:
        return None
    members = trt.EngineInvalidityDiagnostics.__members__
    names = [name for name, member in members.items() if int(diagnostics) & int(member)]
    return f"invalid, {', '.join(names) or 'without a reason'}"


def _row(name: str, plan: PlanEntry) -> tuple[str, ...]:
    attentions = num_attentions(plan.layers, selects=name not in (ENCODER, REORDER)) * len(plan.profiles)
    fused = f"{num_fused(plan.kernels)} of {attentions}" if attentions and plan.kernels else ""
    sizes = f"{plan.bytes / 1e6:.1f}", str(sum(plan.layers.values())), str(sum(plan.kernels.values()) or "unknown")
    return name, *sizes, fused


def _read(path: Path, trusted_keys: TrustedKeys | None = None) -> EngineBundle:
    subject = f"engine {path}"
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise EngineError(f"{subject}: is not a directory; remove it")
        raw = read_manifest(path, ENGINE_MANIFEST)
        if trusted_keys is not None and (problem := trusted_keys.problem(path / ENGINE_MANIFEST, raw)):
            raise EngineError(f"{subject}: {problem}")
        manifest = EngineManifest.from_bytes(raw)
        files = manifest.files
        problems = file_problems(path, files, ENGINE_MANIFEST, unread=files, without=KERNELS)
    except BundleError as error:
        raise EngineError(*error.problems, subject=subject, remedy=error.remedy or _REMEDY) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    raise_all(EngineError, subject, problems, remedy=_REMEDY)
    return EngineBundle(path.name, path, manifest)


def _check_replaceable(folder: Path, target: Path, force: bool) -> None:
    # `folder` is the target itself, or its contents after they were moved aside.
    if not force:
        raise EngineError(f"engine {target} exists; replace it with --force")
    if folder == target:
        recover_kernels(target)
    try:
        own = EngineFiles.read(folder).names(folder)
    except BundleError as error:
        raise EngineError(f"{target} is not an engine ({error}), so --force does not replace it; remove it") from error
    problems = foreign_problems(folder, own)
    raise_all(EngineError, f"{target} holds more than an engine", problems, remedy="remove that first")


def _deserialize(runtime: Any, library: Library, log: Log, stored: EngineBundle, plan: str, rebuild: str) -> Any:
    raw = stored.read_plan(plan)
    log.records.clear()
    reason = None
    if hasattr(runtime, "get_engine_validity"):
        reason = validity_problem(library.trt, *runtime.get_engine_validity(raw))
    engine = None if reason else runtime.deserialize_cuda_engine(raw)
    if engine is None:
        config = stored.manifest.config
        remedy = library.unlisted(config.compute_capabilities)
        remedy = remedy or f"build it again with: {rebuild}"
        raise EngineError(f"engine {stored.name}: {library} refuses {plan}.plan: {reason or log.reason()}; {remedy}")
    return engine


def _unreadable(path: Path, error: OSError) -> EngineError:
    file = f"{Path(os.fsdecode(error.filename)).name} " if error.filename else ""
    return EngineError(f"engine {path}: {file}cannot be read ({error.strerror}); check its permissions")
