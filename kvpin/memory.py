"""How much memory this process may take: less than a tmpfs shows as free when a control group sets a limit.

Memory of a tmpfs counts against the control group that touches it. A container whose /dev/shm is larger than its
memory limit would lose a process to the kernel's OOM killer, and that may be the engine.
"""

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """What can be had without swapping or reaching a limit, in bytes. None: the system doesn't say."""
    host = [line.split()[1] for line in _text(proc / "meminfo").splitlines() if line.startswith("MemAvailable:")]
    known = [*(int(kib) * 1024 for kib in host), *_cgroup_bytes(proc, cgroups)]
    return max(0, min(known)) if known else None


def _cgroup_bytes(proc: Path, cgroups: Path) -> list[int]:
    """What is left of every memory limit from this process's group up to the root's."""
    left: list[int] = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's; its own group is then the mount's root.
        for directory in (group, *group.parents):
            left += _left_bytes(directory, *names)
            if directory == root:
                break
    return left


def _left_bytes(directory: Path, limit_file: str, usage_file: str, cache_field: str) -> list[int]:
    limit, usage = _text(directory / limit_file).strip(), _text(directory / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return []  # "max", or no such file
    fields = dict(line.split()[:2] for line in _text(directory / "memory.stat").splitlines() if " " in line)
    return [int(limit) - int(usage) + int(fields.get(cache_field, "0"))]  # cached files give way


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
