"""Make a small bundle with an engine whose plans are fake."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bundle.made import make
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.signature import SigningKey
from tfexport._io.strict_json import seal
from tfexport.bundle.bundle import Bundle
from tfexport.contract import ModelSpec
from tfexport.tensorrt._manifest import BuildMachine, EngineManifest, PlanEntry
from tfexport.tensorrt.build._profiles import make_profiles
from tfexport.tensorrt.compatibility import Machine
from tfexport.tensorrt.config import EngineConfig, EngineLimits, cache_aliases, engine_key, plan_contract
from tfexport.tensorrt.cuda import Gpu
from tfexport.tensorrt.store import add_engine

PLANS = {"encoder": b"encoder plan", "decoder_static": b"decoder plan", "reorder": b"reorder plan"}
LOG = b"INFO built\n"
RTX = EngineConfig(
    target="tensorrt-rtx",
    variant="static",
    precision="fp32",
    max_source_length=16,
    max_target_length=16,
    capacities=(16,),
    compute_capabilities=("8.6", "8.9"),
)
TENSORRT = replace(RTX, target="tensorrt", compute_capabilities=())
L4 = Gpu(index=0, name="NVIDIA L4", compute_capability="8.9", memory_bytes=24 << 30, driver_version="13.0")
# A machine where both engines below may be used.
MACHINE = Machine(
    system="Linux",
    architecture="x86_64",
    libraries={"tensorrt-rtx": "1.7.1.116", "tensorrt": "10.13.3.9"},
    gpu=L4,
)


def entry(name: str, spec: ModelSpec, data: bytes) -> PlanEntry:
    contract = plan_contract(name, spec, "static")
    return PlanEntry(
        file=f"{name}.plan",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        inputs=contract.inputs,
        outputs=contract.outputs,
        aliases=cache_aliases(name, spec, "static"),
        profiles=make_profiles(spec, "static", RTX).engines[name],
        layers={"MATRIX_MULTIPLY": 3},
    )


def manifest(bundle: Bundle, config: EngineConfig = RTX, **changes: Any) -> EngineManifest:
    """Describe an engine of a bundle that `make` made, as a build would."""
    target = config.target or "tensorrt-rtx"
    facts: dict[str, Any] = {
        "format_version": 1,
        "library_version": MACHINE.libraries[target],
        "config": config,
        "limits": EngineLimits(
            max_batch=32, max_source_length=16, max_target_length=16, max_candidates=10, capacities=(16,)
        ),
        "flags": ("noTF32",),
        "machine": BuildMachine(
            system="Linux", architecture="x86_64", gpu=L4.name, compute_capability=L4.compute_capability, driver="13.0"
        ),
        "sources": {
            name: bundle.manifest.files[name].sha256
            for name in ("encoder.onnx", "decoder_static.onnx", "weights.safetensors", "tokenizer.json")
        },
        "plans": {name: entry(name, bundle.manifest.spec, data) for name, data in PLANS.items()},
        "versions": {"tfexport": "0.1.0", "onnx": "1.21.0"},
        "log": FileEntry(bytes=len(LOG), sha256=hashlib.sha256(LOG).hexdigest()),
    }
    return EngineManifest(**facts | changes)


def store(
    bundle: Bundle,
    engine: EngineManifest,
    plans: Mapping[str, bytes] = PLANS,
    *,
    force: bool = False,
    key: SigningKey | None = None,
) -> Path:
    """Put an engine into a bundle and return its folder."""
    name = engine_key(engine.config)
    with add_engine(bundle.path, name, force=force, key=key) as folder:
        for plan, data in plans.items():
            (folder / f"{plan}.plan").write_bytes(data)
        (folder / "engine.json").write_bytes(engine.to_bytes())
        (folder / "build.log").write_bytes(LOG)
    return bundle.path / "engines" / name


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change engine.json and make its own sum right again, as an attacker would."""
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["self_sha256"]
    change(data)
    path.write_bytes(seal(data))


def flip(path: Path) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


__all__ = ["L4", "MACHINE", "PLANS", "RTX", "TENSORRT", "edit", "entry", "flip", "make", "manifest", "store"]
