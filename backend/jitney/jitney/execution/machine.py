"""What this process may use of the machine: cores and memory, with the limits of its cgroup.

A container sees the host's figures in most places; the limits that bind it stand in the cgroup
files (docs.kernel.org/admin-guide/cgroup-v2). Only ``runner.load_runner`` asks.
"""

import math
import os
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """CPU cores that this process may run on: its affinity, and its CPU quota rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(device: torch.device, cgroup: Path = _CGROUP) -> int:
    """Bytes that could be allocated on ``device`` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        # File pages that nobody maps count as used but are given back under pressure.
        reclaimable = _stat(cgroup, "inactive_file")
        free = min(free, max(0, int(limit) - int(used) + reclaimable))
    return free


def _read(path: Path) -> str:
    """The file's text, or an empty string where there is no such file: no limit is set there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(cgroup: Path, name: str) -> int:
    """One value of ``memory.stat``; 0 if it is not there."""
    for line in _read(cgroup / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
