"""What memory can be had: the tightest of the host and of every control group above this process."""

from pathlib import Path

import pytest

from kvpin.memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    directory = tmp_path / "proc"
    (directory / "self").mkdir(parents=True)
    (directory / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    1024000 kB\n")
    return directory


def write_group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups_it_is_what_the_host_has(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 1000 * MIB


def test_the_tightest_group_of_version_2_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/app\n")
    cgroups = tmp_path / "cgroup"
    write_group(cgroups / "pod" / "app", memory__max="max", memory__current=str(10 * MIB))
    write_group(
        cgroups / "pod",
        memory__max=str(100 * MIB),
        memory__current=str(60 * MIB),
        memory__stat=f"anon 1\ninactive_file {20 * MIB}",
    )
    assert available_bytes(proc, cgroups) == 60 * MIB  # cached files give way


def test_groups_of_version_1_in_a_container_whose_path_is_the_hosts(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("9:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n")
    cgroups = tmp_path / "cgroup"
    write_group(
        cgroups / "memory",
        memory__limit_in_bytes=str(100 * MIB),
        memory__usage_in_bytes=str(90 * MIB),
        memory__stat="total_inactive_file 0",
    )
    assert available_bytes(proc, cgroups) == 10 * MIB


def test_a_group_over_its_limit_has_nothing(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    write_group(tmp_path / "cgroup", memory__max="100", memory__current="200")
    assert available_bytes(proc, tmp_path / "cgroup") == 0


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
