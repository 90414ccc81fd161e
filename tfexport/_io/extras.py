"""Map optional imports to the extra or package that provides them."""

from __future__ import annotations

_EXTRAS = {
    module: extra
    for extra, modules in {
        "export": "torch onnx onnx_ir onnxscript safetensors yaml",
        "cpu": "onnxruntime",
        "trt": "tensorrt",
        "rtx": "tensorrt_rtx",
        "serve": "fastapi httptools pydantic starlette uvicorn prometheus_client",
        "ray": "ray",
        "sign": "cryptography",
        "bulk": "pyarrow",
        "hf": "transformers",
        "hub": "huggingface_hub",
        "audio": "soundfile",
        "image": "PIL",
        "bench": "httpx jinja2 matplotlib psutil",
    }.items()
    for module in modules.split()
}
# Modules that no extra installs.
_PACKAGES = {
    "cuda": "'cuda-python>=12.6' ('cuda-python<13' for drivers older than 580)",
    "sentencepiece": "sentencepiece protobuf",
    "tfexport_native": "tfexport-native",
}
# Distributions that install the same files, so that having both breaks both.
_RIVALS = {"cpu": "onnxruntime-gpu", "gpu": "onnxruntime"}


def install_command(module: str) -> str:
    """Return the command that installs a module; "" if tfexport does not use it."""
    if module in _PACKAGES:
        return f"pip install {_PACKAGES[module]}"
    hint = " (or [gpu], never both)" if module == "onnxruntime" else ""
    return f"{extra_command(_EXTRAS[module])}{hint}" if module in _EXTRAS else ""


def older_cuda_command(major: int) -> str:
    """Return the command that installs a cuda-python below `major`; "" if unsupported."""
    return f"pip install 'cuda-python<{major}'" if major > 12 else ""


def extra_command(extra: str, version: str = "") -> str:
    """Return the command that installs an extra of tfexport; "" is the core package."""
    pin = f"=={version}" if version else ""
    return f"pip install 'tfexport[{extra}]{pin}'" if extra else "pip install --upgrade tfexport"


def replacing_command(extra: str) -> str:
    """Return the command that replaces a conflicting distribution by an extra."""
    rival = _RIVALS.get(extra)
    return f"pip uninstall -y {rival} && {extra_command(extra)}" if rival else extra_command(extra)


def repair_command(module: str, distribution: str) -> str:
    """Return the command that reinstalls a broken module of `distribution`."""
    if module not in _EXTRAS:
        return f"pip install --force-reinstall {_PACKAGES[module]}"
    names = " ".join(reversed(_RIVALS.values())) if module == "onnxruntime" else distribution
    return f"pip uninstall -y {names} && pip install --force-reinstall 'tfexport[{_EXTRAS[module]}]'"
