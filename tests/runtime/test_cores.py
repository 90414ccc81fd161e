"""Cores that a process may use: hyperthreads, affinity and quotas of containers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfexport.runtime.cpu import available_cores, share_cores

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(not ALLOWED, reason="this system has no affinity or quotas")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a file system in which every cpu is a core of its own, without a quota."""
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def siblings(root: Path, cpu: int, content: str) -> None:
    write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{content}\n")


def test_every_cpu_that_the_process_may_use_counts(root: Path) -> None:
    assert available_cores(root) == len(ALLOWED)
    for cpu in ALLOWED:
        siblings(root, cpu, str(cpu))
    assert available_cores(root) == len(ALLOWED)


def test_hyperthreads_of_a_core_count_once(root: Path) -> None:
    for cpu in ALLOWED:
        siblings(root, cpu, "0-63")
    assert available_cores(root) == 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("190000 100000", 1), ("", None)],
)
def test_a_quota_is_a_limit_rounded_down(root: Path, quota: str, cores: int | None) -> None:
    write(root / "sys/fs/cgroup/cpu.max", quota + "\n")
    assert available_cores(root) == (cores or len(ALLOWED))


def test_the_quota_of_a_parent_group_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/one/app\n")
    write(root / "sys/fs/cgroup/pods/one/app/cpu.max", "max 100000\n")
    write(root / "sys/fs/cgroup/pods/cpu.max", "100000 100000\n")
    assert available_cores(root) == 1


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("150000", 1)])
def test_a_quota_of_the_first_version_of_control_groups(root: Path, quota: str, cores: int | None) -> None:
    write(root / "proc/self/cgroup", "4:memory:/docker/x\n3:cpuset:/\n2:cpu,cpuacct:/docker/x\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{quota}\n")  # the container sees its own group as the root
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert available_cores(root) == (cores or len(ALLOWED))


@pytest.mark.parametrize(("processes", "cores"), [(1, len(ALLOWED)), (2, max(1, len(ALLOWED) // 2)), (10_000, 1)])
def test_processes_share_the_cores(root: Path, monkeypatch: pytest.MonkeyPatch, processes: int, cores: int) -> None:
    monkeypatch.setattr("tfexport.runtime.cpu._sharing", 1)
    share_cores(processes)
    assert available_cores(root) == cores


def test_this_machine_has_at_least_one_core() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    code = (
        f"import os, tfexport.runtime.cpu as c; os.sched_setaffinity(0, {{{ALLOWED[0]}}}); print(c.available_cores())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"
