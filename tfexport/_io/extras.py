"""Map optional imports to the extra or package that provides them."""

from __future__ import annotations

# The extra that brings a module.
_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "yaml": "export",
    "onnxruntime": "cpu",
    "tensorrt": "trt",
    "tensorrt_rtx": "rtx",
    "fastapi": "serve",
    "httptools": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "ray": "ray",
    "cryptography": "sign",
    "pyarrow": "bulk",
    "transformers": "hf",
    "httpx": "bench",
    "jinja2": "bench",
    "matplotlib": "bench",
}
# Packages for a module that no extra brings by itself.
_PACKAGES = {"cuda": "'cuda-python>=12.6'", "sentencepiece": "sentencepiece protobuf"}
# Two distributions that write the same files, so that installing the one over the other breaks both.
_RIVALS = {"cpu": "onnxruntime-gpu", "gpu": "onnxruntime"}


def install_command(module: str) -> str:
    """Return the command that installs a module; "" for one that tfexport does not ask for."""
    if module in _PACKAGES:
        choice = " ('cuda-python<13' for drivers older than 580)" if module == "cuda" else ""
        return f"pip install {_PACKAGES[module]}{choice}"
    choice = " (or [gpu], never both)" if module == "onnxruntime" else ""
    return f"{extra_command(_EXTRAS[module])}{choice}" if module in _EXTRAS else ""


def older_cuda_command(major: int) -> str:
    """Return the command that installs cuda-python for a CUDA before `major`; "" if tfexport supports none."""
    return f"pip install 'cuda-python<{major}'" if major > 12 else ""


def extra_command(extra: str, version: str = "") -> str:
    """Return the command that installs an extra of tfexport, of any version or of one; "" is the core."""
    pin = f"=={version}" if version else ""
    return f"pip install 'tfexport[{extra}]{pin}'" if extra else "pip install --upgrade tfexport"


def replacing_command(extra: str) -> str:
    """Return the command that installs an extra in place of the one that it conflicts with."""
    rival = _RIVALS.get(extra)
    return f"pip uninstall -y {rival} && {extra_command(extra)}" if rival else extra_command(extra)


def repair_command(module: str, distribution: str) -> str:
    """Return the command that reinstalls a broken module, which `distribution` provides."""
    names = " ".join(reversed(_RIVALS.values())) if module == "onnxruntime" else distribution
    return f"pip uninstall -y {names} && pip install --force-reinstall 'tfexport[{_EXTRAS[module]}]'"
