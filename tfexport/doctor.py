"""Check the installed libraries, try every backend, and suggest repairs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tfexport._io.extras import extra_command, install_command, repair_command, replacing_command
from tfexport.runtime import registry
from tfexport.runtime.cpu import instruction_sets
from tfexport.runtime.probes import describe_int8, find_gpus, find_unused_providers, run_probe
from tfexport.runtime.registry import Requirement

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*?>=([\d.]+)[^;]*(?:;.*extra == [\"'](\w+)[\"'])?")


@dataclass(frozen=True)
class Library:
    """A library that tfexport can use; the extra of the core is ""."""

    name: str
    extra: str
    minimum: str
    version: str | None
    install: str


@dataclass(frozen=True)
class Backend:
    """The result of trying a backend on "cpu", "cuda" or, if GPU-only, "gpu"."""

    name: str
    device: str
    problem: str
    library: str

    def status(self) -> str:
        """Return the problem, or how to select the backend on the command line."""
        option = {"cuda": ", used with --device cuda", "gpu": f", used with --backend {self.name}"}
        return self.problem or "works" + option.get(self.device, "")


@dataclass(frozen=True)
class Problem:
    """A problem and the command that repairs it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """The findings on this machine."""

    tfexport: str
    python: str
    system: str
    instruction_sets: tuple[str, ...]
    int8_products: str
    libraries: tuple[Library, ...]
    gpus: tuple[dict[str, Any], ...]
    backends: tuple[Backend, ...]
    problems: tuple[Problem, ...]
    unused_providers: tuple[str, ...] = ()  # of ONNX Runtime

    @property
    def works(self) -> bool:
        """Whether at least one backend works."""
        return any(not backend.problem for backend in self.backends)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON values."""
        return {**asdict(self), "works": self.works}

    def lines(self) -> list[str]:
        """Format the findings for the terminal."""
        missing = f"{'not installed':<16}"
        installed = [f"  {one.name:<20} {one.version or f'{missing} {one.install}'}" for one in self.libraries]
        backends = [f"  {b.name:<6} {b.device:<5} {b.library:<13} {b.status()}" for b in self.backends]
        gpus = [f"  {gpu['name']}, compute capability {gpu['compute_capability']}" for gpu in self.gpus]
        if self.unused_providers:
            unused = ", ".join(self.unused_providers)
            backends.append(f"  onnxruntime also offers {unused}, which tfexport does not use")
        problems = [line for p in self.problems for line in (f"  {p.what}", f"    → {p.fix}")]
        return [
            f"tfexport {self.tfexport}, Python {self.python}, {self.system}",
            f"CPU instruction sets: {' '.join(self.instruction_sets)}",
            *([f"8-bit products in ONNX Runtime: {self.int8_products}"] if self.int8_products else []),
            # Several extras may require the same library.
            *("", "Libraries", *dict.fromkeys(installed)),
            *("", "GPUs", *(gpus or ["  none"])),
            *("", "Backends", *(backends or ["  none"])),
            *("", "Problems", *(problems or ["  none"])),
        ]


def diagnose() -> Diagnosis:
    """Check the installed libraries and try every available backend."""
    libraries = list(_libraries())
    problems = [*_version_problems(libraries), *_onnxruntime_problems()]
    gpus, no_gpu = find_gpus()
    backends: list[Backend] = []
    for backend in registry.backends():
        for library in backend.requirements:
            if importlib.util.find_spec(library.module) is None:
                continue
            found = run_probe(backend, library)
            tried = [Backend(backend.name, device, problem, library.name) for device, problem in found.items()]
            backends += tried
            # A GPU-only backend on a machine without a GPU is not a problem.
            problems += [_problem(library, b) for b in tried if b.problem and not (b.device == "gpu" and no_gpu)]
    if not any(not backend.problem for backend in backends):
        problems.append(Problem("no backend works, so no bundle can run", extra_command("cpu")))
    has_onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    return Diagnosis(
        tfexport=importlib.metadata.version("tfexport"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        instruction_sets=tuple(instruction_sets()),
        int8_products=describe_int8() if has_onnxruntime else "",
        libraries=tuple(libraries),
        gpus=tuple(gpus),
        backends=tuple(backends),
        problems=tuple(problems),
        unused_providers=tuple(find_unused_providers()) if has_onnxruntime else (),
    )


def _problem(library: Requirement, backend: Backend) -> Problem:
    subject = f"{library.name} on {backend.device} does not work"
    what, _, remedy = backend.problem.rpartition("; ")
    if backend.device != "cpu" and what:  # messages of tfexport end with the remedy
        return Problem(f"{subject}: {what}", remedy)
    return Problem(f"{subject}: {backend.problem}", repair_command(library.module, library.name))


def _libraries() -> Iterator[Library]:
    for requirement in importlib.metadata.requires("tfexport") or ():
        match = _REQUIREMENT.match(requirement)
        if match is None or match[3] == "dev":
            continue
        name, minimum, extra = match[1], match[2], match[3] or ""
        version = None
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
        yield Library(name, extra, minimum, version, replacing_command(extra))


def _version_problems(libraries: list[Library]) -> Iterator[Problem]:
    for library in libraries:
        if library.version is None and not library.extra:
            yield Problem(f"{library.name} is not installed, and nothing works without it", library.install)
        elif library.version is not None and _numbers(library.version) < _numbers(library.minimum):
            what = f"{library.name} is {library.version}, expected {library.minimum} or newer"
            yield Problem(what, f"pip install --upgrade '{library.name}>={library.minimum}'")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _onnxruntime_problems() -> list[Problem]:
    # pip does not notice if several distributions install the same files.
    names = sorted(set(importlib.metadata.packages_distributions().get("onnxruntime", ())))
    if len(names) < 2:
        return []
    what = f"{' and '.join(names)} are installed together and write the same files, so either may be broken"
    return [Problem(what, f"pip uninstall -y {' '.join(names)} && {install_command('onnxruntime')}")]
