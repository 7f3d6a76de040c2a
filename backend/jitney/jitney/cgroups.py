"""The memory and CPU time that this process may use: those of the machine, or less if its control
groups have limits.

Control groups form trees. Version 2 has one tree, in which every process is in one group. Version 1
has a tree for each controller (memory, cpu), and a process is in one group of each. A machine can
have both versions. A process is bound by the limits of its group and of every group above it.

``/proc/self/cgroup`` names the groups of this process, and ``/proc/self/mountinfo`` the folders
where the trees are mounted. A process in a container sees its own group as the top of the tree. A
service that systemd has started is some levels below the top.

Called by ``machine``, and by ``jitney doctor``: no torch here. The files are described in
docs.kernel.org/admin-guide/cgroup-v2 and cgroup-v1.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_PROC = Path("/proc/self")


class _Mount(NamedTuple):
    """A folder where a tree of groups, or a part of it, is mounted."""

    folder: Path
    root: PurePosixPath
    """The group whose files stand in ``folder``."""
    is_version_2: bool
    controllers: frozenset[str]
    """The controllers of a tree of version 1. The set has the mount's other options too."""


def free_memory(proc: Path = _PROC) -> int:
    """Bytes that this process can still allocate."""
    free_on_host = psutil.virtual_memory().available
    left = memory_left(proc)
    return free_on_host if left is None else min(free_on_host, left)


def memory_left(proc: Path = _PROC) -> int | None:
    """Bytes that the groups of this process may still allocate. None: they have no limit."""
    left = []
    for group in _groups("memory", proc):
        limit = _memory_limit(group)
        if limit is not None:
            left.append(max(0, limit - _memory_used(group)))
    return min(left, default=None)


def cpu_quota(proc: Path = _PROC) -> int | None:
    """CPU time that the groups of this process may use, in cores, rounded up. None: no limit."""
    quotas = []
    for group in _groups("cpu", proc):
        # Version 2: "<quota> <period>" in microseconds, or "max <period>" without a limit.
        text = _read(group / "cpu.max")
        if not text:
            # Version 1: a file for each, and a quota of -1 without a limit.
            text = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        found = re.fullmatch(r"(\d+) (\d+)", text)
        if found is not None:
            quota = int(found[1])
            period = int(found[2])
            quotas.append(max(1, math.ceil(quota / period)))
    return min(quotas, default=None)


def _memory_limit(group: Path) -> int | None:
    """Bytes. None: this group has no limit."""
    limits = []
    # memory.max and memory.high are of version 2: "max" without a limit. Above memory.high the
    # kernel refuses nothing, but slows the process down, in the end to a standstill.
    # memory.limit_in_bytes is of version 1: without a limit, a number larger than any memory.
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        text = _read(group / name)
        if text.isdigit():
            limits.append(int(text))
    # Version 1 also gives the lowest limit of this group and of all above it. A container cannot
    # see the files of those above.
    inherited = _memory_stat(group, "hierarchical_memory_limit")
    if inherited is not None:
        limits.append(inherited)
    return min(limits, default=None)


def _memory_used(group: Path) -> int:
    """Bytes in use, without cached pages of files that were not used lately: the kernel frees those
    when memory is needed."""
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    # The number must count the groups below this one too. In version 2 ``inactive_file`` does. In
    # version 1 only ``total_inactive_file`` does, which version 2 does not have.
    reclaimable = _memory_stat(group, "total_inactive_file")
    if reclaimable is None:
        reclaimable = _memory_stat(group, "inactive_file")
    return int(used or 0) - (reclaimable or 0)


def _memory_stat(group: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return None if found is None else int(found[1])


# ------------------------------------------------------------------------------- groups


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """The folders of this process's groups in the trees that have the controller, and of all groups
    above them that can be seen."""
    own_groups = _own_groups(proc)
    for mount in _mounts(proc):
        if mount.is_version_2:
            group = own_groups.get("")
        elif controller in mount.controllers:
            group = own_groups.get(controller)
        else:
            group = None
        if group is not None:
            yield from _upwards(mount, group)


def _upwards(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """The folders of the group and of all groups above it, up to the mount."""
    folder = mount.folder
    # If the group lies outside the mounted part of the tree, only the mount itself can be read.
    if group.is_relative_to(mount.root) and ".." not in group.parts:
        folder = mount.folder / group.relative_to(mount.root)
    while folder != mount.folder:
        yield folder
        folder = folder.parent
    yield mount.folder


def _own_groups(proc: Path) -> dict[str, PurePosixPath]:
    """Controller -> this process's group in its tree of version 1. The key of version 2 is ""."""
    groups = {}
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(group)
    return groups


def _mounts(proc: Path) -> Iterator[_Mount]:
    """Every mount of a tree of groups, from proc_pid_mountinfo(5)."""
    for line in _read(proc / "mountinfo").splitlines():
        before_dash, _, after_dash = line.partition(" - ")
        fields = before_dash.split()
        # Behind the dash: the file system, the source, which may be empty, and the options.
        kind = after_dash.split()[0]
        options = after_dash.split()[-1]
        if kind in ("cgroup", "cgroup2"):
            yield _Mount(
                folder=Path(_unescaped(fields[4])),
                root=PurePosixPath(_unescaped(fields[3])),
                is_version_2=kind == "cgroup2",
                controllers=frozenset(options.split(",")),
            )


def _unescaped(path: str) -> str:
    """The path that mountinfo writes with a space as ``\\040``, and so on."""
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), path)


def _read(path: Path) -> str:
    """The file's text, or an empty string where there is no such file: no limit is set there."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
