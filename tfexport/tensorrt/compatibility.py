"""Check whether an engine can be used on this machine with this bundle.

TensorRT binds a plan to its exact version and GPU model, unless the plan was built to be compatible. TensorRT-RTX binds
a plan to its version and the compute capabilities that it was built for (see "Engine portability" in its manual).
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tfexport.bundle.bundle import Bundle
from tfexport.bundle.contents import stale_sources
from tfexport.tensorrt._library import INSTALL, MODULES, NAMED, installed_targets, unlisted
from tfexport.tensorrt._manifest import EngineManifest
from tfexport.tensorrt.config import OPTION_NAMES, EngineConfig, Target
from tfexport.tensorrt.cuda import Gpu, find_gpus


@dataclass(frozen=True, kw_only=True)
class Machine:
    """System and architecture (as in `platform`), library versions and GPU."""

    system: str
    architecture: str
    libraries: Mapping[Target, str]
    gpu: Gpu | None


@dataclass(frozen=True)
class Incompatibility:
    """One reason why an engine cannot be used, with its remedy."""

    field: str
    built: str
    here: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: built with {self.built}, here is {self.here}"


def this_machine(number: int = 0) -> Machine:
    """Describe this machine and a GPU without a library or a CUDA context."""
    distributions = importlib.metadata.packages_distributions()
    libraries = {
        target: importlib.metadata.version(names[0])
        for target in installed_targets()
        if (names := distributions.get(MODULES[target]))
    }
    gpu = next(iter(find_gpus()[number:]), None)
    return Machine(system=platform.system(), architecture=platform.machine(), libraries=libraries, gpu=gpu)


def incompatibilities(manifest: EngineManifest, bundle: Bundle, machine: Machine) -> list[Incompatibility]:
    """List every reason why an engine cannot be used with a bundle on a machine."""
    return [
        *_source_problems(manifest, bundle, machine.gpu),
        *_library_problems(manifest, bundle.path, machine),
        *_machine_problems(manifest, bundle.path, machine),
    ]


def explain(found: Sequence[Incompatibility]) -> str:
    """Join incompatibilities and their distinct remedies in one line."""
    remedies = dict.fromkeys(each.remedy for each in found)
    return "; ".join([*map(str, found), *remedies])


def rebuild_command(bundle: Path, config: EngineConfig, gpu: Gpu | None = None) -> str:
    """Return the command that builds an engine again with the same options on a GPU."""
    words = ["tfexport", "trt", str(bundle), *(["--device", f"cuda:{gpu.index}"] if gpu and gpu.index else [])]
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        option = OPTION_NAMES.get(field.name, "--" + field.name.replace("_", "-"))
        if value is True:
            words.append(option)
        elif field.name == "capacities":
            words += [option, ",".join(map(str, value))] if value else []
        elif isinstance(value, tuple):
            words += [word for item in value for word in (option, item)]
        elif value != field.default:
            words += [option, str(value)]
    return shlex.join([*words, "--force"])


def _rebuild(bundle: Path, config: EngineConfig, gpu: Gpu | None) -> str:
    return f"build it again with: {rebuild_command(bundle, config, gpu)}"


def _source_problems(manifest: EngineManifest, bundle: Bundle, gpu: Gpu | None) -> Iterator[Incompatibility]:
    for name in stale_sources(manifest.sources, bundle.manifest.files):
        entry = bundle.manifest.files.get(name)
        built, now = manifest.sources[name], f"sha256 {entry.sha256[:12]}…" if entry else "no such file"
        yield Incompatibility(name, f"sha256 {built[:12]}…", now, _rebuild(bundle.path, manifest.config, gpu))


def _library_problems(manifest: EngineManifest, bundle: Path, machine: Machine) -> Iterator[Incompatibility]:
    target = manifest.config.target
    assert target is not None
    version = machine.libraries.get(target)
    if version is None:
        installed = ", ".join(machine.libraries) or "none"
        yield Incompatibility("target", target, f"{installed} installed", f"install it with: {INSTALL[target]}")
    elif not _version_fits(manifest, version):
        remedy = _rebuild(bundle, manifest.config, machine.gpu)
        yield Incompatibility(f"{target} version", manifest.library_version, version, remedy)


def _version_fits(manifest: EngineManifest, version: str) -> bool:
    built, now = _numbers(manifest.library_version), _numbers(version)
    same_major = built[0] == now[0] or (built[0], now[0]) == (10, 11)
    is_newer = manifest.config.version_compatible and same_major and now >= built
    return is_newer or version == manifest.library_version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)


def _machine_problems(manifest: EngineManifest, bundle: Path, machine: Machine) -> Iterator[Incompatibility]:
    config, built, gpu = manifest.config, manifest.machine, machine.gpu
    built_gpu = f"{built.gpu} ({built.compute_capability})"
    systems = (f"{built.system} {built.architecture}", f"{machine.system} {machine.architecture}")
    if config.target == "tensorrt" and systems[0] != systems[1]:
        yield Incompatibility("system", *systems, _rebuild(bundle, config, gpu))
    if gpu is None:
        wanted = ", ".join(config.compute_capabilities) or built_gpu
        yield Incompatibility("GPU", wanted, "none that can be used", "run tfexport doctor for the reason")
        return
    capability, capabilities = gpu.compute_capability, config.compute_capabilities
    here = f"{capability} ({gpu.name})"
    if config.target == "tensorrt-rtx" and capability not in capabilities:
        # An unnamed capability can only be built by itself, on a GPU that has it.
        others = tuple(each for each in capabilities if each in NAMED and capability in NAMED)
        wider = _rebuild(bundle, replace(config, compute_capabilities=(*others, capability)), gpu)
        if capability not in NAMED:
            wider = f"tensorrt-rtx {unlisted(capability)}; to try it, {wider}"
        yield Incompatibility("compute capability", ", ".join(capabilities), here, wider)
    if config.target == "tensorrt" and not _gpu_fits(manifest, gpu):
        level = config.hardware_compatibility
        compatible = "" if level == "none" else f", compatible with {level}"
        yield Incompatibility("GPU", f"{built_gpu}{compatible}", here, _rebuild(bundle, config, gpu))


def _gpu_fits(manifest: EngineManifest, gpu: Gpu) -> bool:
    level, built = manifest.config.hardware_compatibility, manifest.machine
    if level == "ampere_plus":
        return _numbers(gpu.compute_capability) >= (8, 0)
    if level == "same_compute_capability":
        return gpu.compute_capability == built.compute_capability
    return (gpu.name, gpu.compute_capability) == (built.gpu, built.compute_capability)
