"""Build a wheel for every Python of one platform."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from compile import FLAGS, compile_library


class Compile(build_py):
    """Compile the libraries next to the Python module."""

    def run(self) -> None:
        """Copy the module and compile."""
        super().run()
        for kernels in FLAGS:
            compile_library(kernels, Path(self.build_lib) / "tfexport_native")


class Wheel(bdist_wheel):
    """Name the platform but no version of Python, because ctypes needs none."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


class Compiled(Distribution):
    """A distribution that is not pure Python."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel depends on the platform."""
        return True


setup(cmdclass={"build_py": Compile, "bdist_wheel": Wheel}, distclass=Compiled)
