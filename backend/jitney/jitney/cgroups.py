"""The memory and CPU time that this process may use: the machine's, below the limits of its control
groups.

A process is in a group of one hierarchy (version 2), or of one for each controller (version 1); a
machine can have both. The limits of all groups above it hold too. Where they are comes from
``/proc/self/cgroup`` and ``/proc/self/mountinfo``: a container sees its own group as the top, a
service of systemd is some levels below it.

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
    """A hierarchy of groups, or a part of it, as a folder."""

    folder: Path
    root: PurePosixPath
    """The group that ``folder`` is."""
    is_version_2: bool
    controllers: frozenset[str]
    """Of version 1. Among them are the mount's other options."""


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
    """Cores whose whole time the groups of this process may use, rounded up. None: all."""
    quotas = []
    for group in _groups("cpu", proc):
        # Version 2: "<quota> <period>" in microseconds, or "max <period>" without a limit. Version
        # 1: one file each, and a quota of -1 without a limit.
        text = _read(group / "cpu.max") or " ".join(
            (_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
        )
        found = re.fullmatch(r"(\d+) (\d+)", text)
        if found is not None:
            quota = int(found[1])
            period = int(found[2])
            quotas.append(max(1, math.ceil(quota / period)))
    return min(quotas, default=None)


def _memory_limit(group: Path) -> int | None:
    limits = []
    # memory.high: above it the kernel does not refuse, but slows the process down until it stands.
    # memory.limit_in_bytes: of version 1, where no limit is a number beyond any memory.
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        text = _read(group / name)
        if text.isdigit():
            limits.append(int(text))
    # Version 1: the lowest limit of this group and those above it, which a container cannot see.
    inherited = _memory_stat(group, "hierarchical_memory_limit")
    if inherited is not None:
        limits.append(inherited)
    return min(limits, default=None)


def _memory_used(group: Path) -> int:
    """Bytes in use, without pages of files that were not used lately: those are freed when
    needed."""
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    # The file of version 1 has both; its ``inactive_file`` is without the groups below.
    reclaimable = _memory_stat(group, "total_inactive_file")
    if reclaimable is None:
        reclaimable = _memory_stat(group, "inactive_file")
    return int(used or 0) - (reclaimable or 0)


def _memory_stat(group: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return None if found is None else int(found[1])


# ------------------------------------------------------------------------------- groups


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """The folders of this process's groups that can limit what ``controller`` counts, and of all
    groups above them that can be seen."""
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
    folder = mount.folder
    # A group outside of what is mounted cannot be seen. The mount's top is the nearest.
    if group.is_relative_to(mount.root) and ".." not in group.parts:
        folder = mount.folder / group.relative_to(mount.root)
    while folder != mount.folder:
        yield folder
        folder = folder.parent
    yield mount.folder


def _own_groups(proc: Path) -> dict[str, PurePosixPath]:
    """This process's group of each controller of version 1, and under "" that of version 2."""
    groups = {}
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(group)
    return groups


def _mounts(proc: Path) -> Iterator[_Mount]:
    """Every mount of a hierarchy, as proc_pid_mountinfo(5) has it."""
    for line in _read(proc / "mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        fields = place.split()
        kind = source.split()[0]
        options = source.split()[-1]  # the field between them may be empty
        if kind in ("cgroup", "cgroup2"):
            yield _Mount(
                folder=Path(_unescaped(fields[4])),
                root=PurePosixPath(_unescaped(fields[3])),
                is_version_2=kind == "cgroup2",
                controllers=frozenset(options.split(",")),
            )


def _unescaped(path: str) -> str:
    """A path of mountinfo, in which a space is ``\\040``."""
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), path)


def _read(path: Path) -> str:
    """The file's text, or an empty string where there is no such file: no limit is set there."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
