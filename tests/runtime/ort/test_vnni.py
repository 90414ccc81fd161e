"""CPUs whose products of 8 bits may not fit are told to take another instruction."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tfexport.runtime.ort.vnni import multiplies_exactly

X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("fpu avx2 fma", False),
        ("avx512f avx512bw", False),
        ("avx2 avx_vnni", True),
        ("avx512f avx512_vnni amx_int8", True),
    ],
)
def test_x86_multiplies_exactly_by_vnni(flags: str, exact: bool, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cores = "".join(f"processor\t: {core}\nflags\t\t: {flags}\nbugs\t\t: \n" for core in range(2))
    (tmp_path / "proc/cpuinfo").write_text(cores)
    assert multiplies_exactly(tmp_path) == (exact or not X86)


def test_x86_of_which_nothing_is_told_counts_as_old(tmp_path: Path) -> None:
    assert multiplies_exactly(tmp_path) == (not X86)
