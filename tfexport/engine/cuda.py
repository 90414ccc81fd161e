"""CUDA as far as engines need it, through cuda-python: which GPUs there are, memory, streams, events and graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfexport.errors import BackendError

REMEDY = "pip install 'cuda-python>=12.6'"


@dataclass(frozen=True)
class Gpu:
    """One GPU that the driver offers.

    Attributes:
        index: the CUDA ordinal, from 0, among those that CUDA_VISIBLE_DEVICES leaves.
        name: such as "NVIDIA GeForce RTX 4090".
        compute_capability: "8.9".
        memory_bytes: of the whole device.
        driver_version: newest CUDA version that the driver runs, "13.0".
    """

    index: int
    name: str
    compute_capability: str
    memory_bytes: int
    driver_version: str


def find_gpus() -> list[Gpu]:
    """List the GPUs; none where cuda-python or the driver is missing or finds no device.

    Safe everywhere: this asks the driver alone, and creates no context.
    """
    return _probe()[0]


def need_gpu() -> Gpu:
    """Return the first GPU, which engines are built for and run on.

    Raises:
        BackendError: there is none; says why.
    """
    gpus, reason = _probe()
    if not gpus:
        raise BackendError(f"cuda: no GPU can be used here: {reason}")
    return gpus[0]


def _probe() -> tuple[list[Gpu], str]:
    """Ask the driver for its devices; without any, say why."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return [], f"cuda-python is not installed; {REMEDY}"
    try:
        return _list_gpus(driver), "the driver finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    except BackendError as error:
        return [], f"{error}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    except RuntimeError:  # what the bindings raise where libcuda is not found
        return [], "the NVIDIA driver is not installed; install it or choose another backend"


def _list_gpus(driver: Any) -> list[Gpu]:
    def ask(name: str, *arguments: Any) -> Any:
        code, *values = getattr(driver, name)(*arguments)
        if code.value:
            raise BackendError(f"{name} failed with {code.name}")
        return values[0] if values else None

    ask("cuInit", 0)
    version = ask("cuDriverGetVersion")
    kind = driver.CUdevice_attribute
    major = kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    found = []
    for index in range(ask("cuDeviceGetCount")):
        device = ask("cuDeviceGet", index)
        found.append(
            Gpu(
                index=index,
                name=ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
                compute_capability=f"{ask('cuDeviceGetAttribute', major, device)}."
                f"{ask('cuDeviceGetAttribute', minor, device)}",
                memory_bytes=int(ask("cuDeviceTotalMem", device)),
                driver_version=f"{version // 1000}.{version % 1000 // 10}",
            )
        )
    return found
