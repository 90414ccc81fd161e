"""Load TensorRT-RTX, which builds without a GPU."""

import pytest

from tfexport.tensorrt._library import Library, load_library
from tfexport.tensorrt.cuda import find_gpus

no_gpu = pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")


@pytest.fixture(scope="session")
def rtx() -> Library:
    pytest.importorskip("tensorrt_rtx")
    return load_library("tensorrt-rtx")
