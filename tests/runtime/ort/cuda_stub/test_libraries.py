"""The CUDA libraries that onnxruntime-gpu is refused for and those that it is not, laid out as wheels lay them out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.runtime.ort.cuda_stub.build import CORE, PROVIDER
from tests.runtime.ort.cuda_stub.conftest import StubGpu
from tfexport.runtime.ort._providers import needed

OPEN = """
import sys
sys.path += sys.argv[1:]
from tfexport.errors import BackendError
from tfexport.runtime.ort._providers import prepare_cuda
try:
    prepare_cuda()
except BackendError as error:
    print(error)
"""
DRIVER = "libcuda.so.1"


def opened(gpu: StubGpu, libraries: Path, *site_packages: Path) -> str:
    """Look for a GPU and its libraries, and return what is said of them."""
    done = gpu.run("-c", OPEN, *map(str, site_packages), libraries=libraries)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def toolkit(gpu: StubGpu) -> list[str]:
    """Return the libraries of the CUDA toolkit that the provider is linked to."""
    return [name for name in needed(gpu.wheel / PROVIDER) if name.startswith("libcu") and name != DRIVER]


def absent(gpu: StubGpu, libraries: Path) -> list[str]:
    """Return those of the toolkit that this machine has not got; skip where it has all."""
    look = "import sys; from tfexport.runtime.ort import _providers as l; print(*l.load_libraries(sys.argv[1:]))"
    found = gpu.run("-c", look, *toolkit(gpu), libraries=libraries).stdout.split()
    if not found:
        pytest.skip("the CUDA toolkit is installed, so nothing is missing")
    return found


def copied(gpu: StubGpu, names: Iterable[str], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*names, CORE):
        shutil.copy(gpu.libraries / name, folder)
    return folder


def test_the_libraries_that_it_is_linked_to_are_enough(stub_gpu: StubGpu) -> None:
    assert opened(stub_gpu, stub_gpu.libraries) == ""


def test_missing_libraries_are_named_with_the_searched_places(stub_gpu: StubGpu, tmp_path: Path) -> None:
    system = copied(stub_gpu, [DRIVER], tmp_path / "system")
    missing = absent(stub_gpu, system)[0]
    others = [name for name in toolkit(stub_gpu) if name != missing]
    copied(stub_gpu, others, tmp_path / "site-packages" / "nvidia" / "cu13" / "lib")
    output = opened(stub_gpu, system, tmp_path / "site-packages")
    assert f"and cannot load {missing} (looked in LD_LIBRARY_PATH, the system's folders and nvidia/*/lib and" in output
    assert str(tmp_path / "site-packages") in output
    assert output.rstrip().endswith("); pip install 'tfexport[gpu]', or use device cpu")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.28.0", "1.29.0", "1.30.0"])
def test_older_versions_need_only_the_libraries_they_are_linked_to(
    version: str, stub_gpu_of: Callable[[str], StubGpu]
) -> None:
    gpu = stub_gpu_of(version)
    assert not any("cufft" in name or "nvrtc" in name for name in toolkit(gpu))
    assert opened(gpu, gpu.libraries) == ""
