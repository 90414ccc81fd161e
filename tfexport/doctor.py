"""Find out what is installed, which backends really work, and how to repair what does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

# Each backend is tried in a process of its own: a broken native library may take its process down, and tfexport
# itself stays free of it. A probe prints {device: "" when it works, else the reason}.
_EAGER_PROBE = """
import json, torch

product = torch.ones(2, 3) @ torch.ones(3, 2)
print(json.dumps({"cpu": "" if (product == 3).all() else f"computes wrongly: {product.tolist()}"}))
"""
_ORT_PROBE = """
import json, sys
import numpy, onnxruntime

if not hasattr(onnxruntime, "InferenceSession"):
    sys.exit("hollow: the module is there, its library is not")
onnxruntime.set_default_logger_severity(4)
found = {}
providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
for device, provider in providers.items():
    if provider in onnxruntime.get_available_providers():
        try:
            session = onnxruntime.InferenceSession(bytes.fromhex(sys.argv[1]), providers=[provider])
            (result,) = session.run(None, {"x": numpy.array([1, 2], numpy.float32)})
            got = session.get_providers()
            right = provider in got and result.tolist() == [2, 4]
            found[device] = "" if right else f"asked for {provider}, got {got} and {result.tolist()}"
        except Exception as error:
            found[device] = str(error)
print(json.dumps(found))
"""
# y = x + x on float32 [2], ONNX IR 8, opset 18: written out so that the probe does not need the onnx package.
ADD_MODEL = bytes.fromhex(
    "08083a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020802620f0a0179120a0a08080112040a02080242040a001012"
)
_PROBES = {"eager": ("torch", "export", [_EAGER_PROBE]), "ort": ("onnxruntime", "cpu", [_ORT_PROBE, ADD_MODEL.hex()])}
_TIMEOUT_S = 120
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*?>=([\d.]+)[^;]*(?:;.*extra == [\"'](\w+)[\"'])?")


@dataclass(frozen=True)
class Library:
    """One library that tfexport can use.

    Attributes:
        name: of its distribution.
        extra: of tfexport that brings it; empty for the core.
        minimum: oldest version that fits.
        version: installed version, None when it is not installed.
        install: the command that installs it.
    """

    name: str
    extra: str
    minimum: str
    version: str | None
    install: str


@dataclass(frozen=True)
class Backend:
    """One backend on one device.

    Attributes:
        name: "eager" or "ort".
        device: "cpu" or "cuda".
        problem: why it does not work; empty when a session was made and computed rightly.
    """

    name: str
    device: str
    problem: str


@dataclass(frozen=True)
class Problem:
    """Something wrong, and the one line that repairs it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """All that was found on this machine."""

    tfexport: str
    python: str
    system: str
    libraries: tuple[Library, ...]
    backends: tuple[Backend, ...]
    problems: tuple[Problem, ...]

    @property
    def works(self) -> bool:
        """Whether at least one backend works."""
        return any(not backend.problem for backend in self.backends)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {**asdict(self), "works": self.works}

    def lines(self) -> list[str]:
        """Write everything for the terminal."""
        installed = [
            f"  {library.name:<20} {library.version}" if library.version
            else f"  {library.name:<20} {'not installed':<16} {library.install}"
            for library in self.libraries
        ]  # fmt: skip
        # A session on the GPU is found here, but OrtSession does not ask for one yet: better said than silent.
        works = {"cpu": "works", "cuda": "works, but this version of tfexport generates on the CPU"}
        backends = [f"  {b.name:<6} {b.device:<13} {b.problem or works[b.device]}" for b in self.backends]
        problems = [line for p in self.problems for line in (f"  {p.what}", f"    → {p.fix}")]
        return [
            f"tfexport {self.tfexport}, Python {self.python}, {self.system}",
            *("", "Libraries", *installed),
            *("", "Backends", *(backends or ["  none"])),
            *("", "Problems", *(problems or ["  none"])),
        ]


def diagnose() -> Diagnosis:
    """Look at the installed libraries and try every backend that is there."""
    libraries = _libraries()
    problems = [*_version_problems(libraries), *_onnxruntime_problems()]
    backends: list[Backend] = []
    for name, (module, extra, probe) in _PROBES.items():
        if importlib.util.find_spec(module) is None:
            continue
        tried = [Backend(name, device, problem) for device, problem in _run(probe).items()]
        backends += tried
        problems += [
            Problem(f"{module} on {b.device} does not work: {b.problem}", _repair(module, extra, b.device))
            for b in tried
            if b.problem
        ]
    if not any(not backend.problem for backend in backends):
        problems.append(Problem("no backend works, so no bundle can run", "pip install 'tfexport[cpu]'"))
    return Diagnosis(
        tfexport=importlib.metadata.version("tfexport"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        libraries=tuple(libraries),
        backends=tuple(backends),
        problems=tuple(problems),
    )


def _libraries() -> list[Library]:
    """Read from tfexport's own metadata what each extra asks for."""
    found = []
    for requirement in importlib.metadata.requires("tfexport") or ():
        match = _REQUIREMENT.match(requirement)
        if match is None or match[3] == "dev":
            continue
        try:
            version = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            version = None
        found.append(Library(match[1], match[3] or "", match[2], version, _install(match[1], match[3] or "")))
    return found


def _install(name: str, extra: str) -> str:
    if not extra:
        return "pip install --upgrade tfexport"
    # Installing the one over the other breaks both.
    other = {"onnxruntime": "onnxruntime-gpu", "onnxruntime-gpu": "onnxruntime"}.get(name)
    return f"{f'pip uninstall -y {other} && ' if other else ''}pip install 'tfexport[{extra}]'"


def _version_problems(libraries: list[Library]) -> list[Problem]:
    problems = []
    for library in libraries:
        if library.version is None:
            if not library.extra:
                problems.append(
                    Problem(f"{library.name} is not installed, and nothing works without it", library.install)
                )
        elif _numbers(library.version) < _numbers(library.minimum):
            what = f"{library.name} is {library.version}, expected {library.minimum} or newer"
            problems.append(Problem(what, f"pip install --upgrade '{library.name}>={library.minimum}'"))
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _onnxruntime_problems() -> list[Problem]:
    """Find several distributions that have written over one another; pip does not notice."""
    names = sorted(set(importlib.metadata.packages_distributions().get("onnxruntime", ())))
    if len(names) < 2:
        return []
    what = f"{' and '.join(names)} are installed together and write the same files, so either may be broken"
    return [Problem(what, f"pip uninstall -y {' '.join(names)} && pip install 'tfexport[cpu]'  (or [gpu])")]


def _repair(module: str, extra: str, device: str) -> str:
    if device == "cuda":
        return "install the CUDA and cuDNN versions that this build asks for, or use the CPU"
    names = "onnxruntime onnxruntime-gpu" if module == "onnxruntime" else module
    return f"pip uninstall -y {names} && pip install --force-reinstall 'tfexport[{extra}]'"


def _run(probe: list[str]) -> dict[str, str]:
    """Run a probe and return device → problem; a probe that dies counts against the CPU."""
    try:
        done = subprocess.run(  # noqa: S603 - our own constant, our own interpreter
            [sys.executable, "-P", "-c", *probe], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"cpu": f"no answer within {_TIMEOUT_S} s"}
    if done.returncode < 0:
        return {"cpu": f"crashed with signal {-done.returncode}"}
    if done.returncode:
        return {"cpu": done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"}
    found: dict[str, str] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return {device: " ".join(problem.split()) for device, problem in found.items()}
