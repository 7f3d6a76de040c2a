"""The limits of control groups, from files as the kernel writes them."""

from pathlib import Path

import psutil
import pytest
import torch
from jitney import cgroups
from jitney.execution import machine

_MIB = 1 << 20
_NO_LIMIT_OF_VERSION_1 = 9223372036854771712


class Machine:
    """A machine with no hierarchy of groups mounted yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        self._mounts = [
            "23 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw",
            "24 1 0:5 / /x rw -  rw",
        ]
        self.say(groups=[])

    def say(self, groups: list[str]) -> None:
        """Which groups the process is in, as lines of /proc/self/cgroup."""
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in groups))
        (self.proc / "mountinfo").write_text("".join(f"{line}\n" for line in self._mounts))

    def mount(self, kind: str, name: str, options: str = "rw", root: str = "/") -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        shown = str(folder).replace(" ", "\\040")
        self._mounts.append(
            f"31 23 0:28 {root} {shown} rw,nosuid shared:9 - {kind} {kind} {options}"
        )
        return folder


@pytest.fixture
def fake(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def limit_2(group: Path, limit: str, used: int, inactive: int = 0) -> None:
    """A group of version 2."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def limit_1(
    group: Path, limit: int, used: int, inactive: int = 0, inherited: int | None = None
) -> None:
    """A group of version 1."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    lowest = limit if inherited is None else inherited
    (group / "memory.stat").write_text(
        f"inactive_file 1\nhierarchical_memory_limit {lowest}\ntotal_inactive_file {inactive}\n"
    )


def test_a_container_of_version_2_is_at_the_top(fake: Machine) -> None:
    top = fake.mount("cgroup2", "sys")
    fake.say(["0::/"])
    limit_2(top, limit="1000000", used=400_000, inactive=50_000)
    assert cgroups.memory_left(fake.proc) == 650_000
    limit_2(top, limit="max", used=400_000)
    assert cgroups.memory_left(fake.proc) is None


def test_a_service_of_systemd_is_below_the_top(fake: Machine) -> None:
    """MemoryMax; the top itself has no such file."""
    top = fake.mount("cgroup2", "sys", options="rw,nsdelegate,memory_recursiveprot")
    fake.say(["0::/system.slice/jitney.service"])
    limit_2(top / "system.slice", limit="max", used=9 * _MIB)
    limit_2(top / "system.slice" / "jitney.service", limit=str(5 * _MIB), used=2 * _MIB)
    assert cgroups.memory_left(fake.proc) == 3 * _MIB


def test_every_group_above_limits_too(fake: Machine) -> None:
    """What others use there counts."""
    top = fake.mount("cgroup2", "sys")
    fake.say(["0::/a.slice/b.slice/own"])
    limit_2(top / "a.slice", limit=str(100 * _MIB), used=99 * _MIB)
    limit_2(top / "a.slice" / "b.slice", limit="max", used=10 * _MIB)
    limit_2(top / "a.slice" / "b.slice" / "own", limit=str(50 * _MIB), used=10 * _MIB)
    assert cgroups.memory_left(fake.proc) == _MIB
    limit_2(top / "a.slice", limit=str(98 * _MIB), used=99 * _MIB)
    assert cgroups.memory_left(fake.proc) == 0


def test_a_limit_that_slows_down_is_a_limit(fake: Machine) -> None:
    """MemoryHigh."""
    top = fake.mount("cgroup2", "sys")
    fake.say(["0::/own"])
    limit_2(top / "own", limit="max", used=_MIB)
    (top / "own" / "memory.high").write_text(f"{3 * _MIB}\n")
    assert cgroups.memory_left(fake.proc) == 2 * _MIB


def test_version_1(fake: Machine) -> None:
    fake.mount("cgroup", "cpu", options="rw,cpu,cpuacct")
    memory = fake.mount("cgroup", "memory", options="rw,memory")
    fake.mount("cgroup2", "unified")
    fake.say(["4:memory:/docker/own", "2:cpu,cpuacct:/elsewhere", "1:name=systemd:/", "0::/"])
    limit_1(memory, limit=_NO_LIMIT_OF_VERSION_1, used=500 * _MIB)
    limit_1(memory / "docker", limit=_NO_LIMIT_OF_VERSION_1, used=200 * _MIB)
    limit_1(memory / "docker" / "own", limit=8 * _MIB, used=4 * _MIB, inactive=_MIB)
    assert cgroups.memory_left(fake.proc) == 5 * _MIB


def test_a_container_of_version_1_sees_its_own_group_as_the_top(fake: Machine) -> None:
    """What is mounted is its group. Of the groups above it, it sees the lowest limit."""
    memory = fake.mount("cgroup", "memory", options="rw,memory", root="/kubepods/own")
    fake.say(["4:memory:/kubepods/own"])
    limit_1(memory, limit=_NO_LIMIT_OF_VERSION_1, used=4 * _MIB, inherited=6 * _MIB)
    assert cgroups.memory_left(fake.proc) == 2 * _MIB


@pytest.mark.parametrize("group", ["/../../other", "/not/mounted"])
def test_a_group_that_is_not_in_sight_is_the_top(fake: Machine, group: str) -> None:
    top = fake.mount("cgroup2", "sys", root="/mounted" if group == "/not/mounted" else "/")
    fake.say([f"0::{group}"])
    limit_2(top, limit=str(4 * _MIB), used=_MIB)
    assert cgroups.memory_left(fake.proc) == 3 * _MIB


def test_a_path_with_a_space(fake: Machine) -> None:
    top = fake.mount("cgroup2", "control groups")
    fake.say(["0::/own ü"])
    limit_2(top / "own ü", limit=str(4 * _MIB), used=_MIB)
    assert cgroups.memory_left(fake.proc) == 3 * _MIB


def test_cpu_time_of_version_2_and_of_those_above(fake: Machine) -> None:
    top = fake.mount("cgroup2", "sys")
    fake.say(["0::/slice/own"])
    (top / "slice" / "own").mkdir(parents=True)
    assert cgroups.cpu_quota(fake.proc) is None
    (top / "slice" / "own" / "cpu.max").write_text("max 100000\n")
    assert cgroups.cpu_quota(fake.proc) is None
    (top / "slice" / "cpu.max").write_text("150000 100000\n")
    assert cgroups.cpu_quota(fake.proc) == 2


def test_cpu_time_of_version_1(fake: Machine) -> None:
    cpu = fake.mount("cgroup", "cpu", options="rw,cpu,cpuacct")
    fake.say(["2:cpu,cpuacct:/own"])
    (cpu / "own").mkdir()
    (cpu / "own" / "cpu.cfs_period_us").write_text("100000\n")
    (cpu / "own" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroups.cpu_quota(fake.proc) is None
    (cpu / "own" / "cpu.cfs_quota_us").write_text("250000\n")
    assert cgroups.cpu_quota(fake.proc) == 3


def test_a_machine_without_groups_has_what_is_free(tmp_path: Path) -> None:
    assert cgroups.memory_left(tmp_path) is None
    assert cgroups.cpu_quota(tmp_path) is None
    assert cgroups.free_memory(tmp_path) > 0


def test_a_limit_lowers_what_a_cache_is_a_share_of(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(cgroups, "memory_left", lambda proc: 650_000)
    assert machine.available_memory(cpu) == 650_000
    monkeypatch.setattr(cgroups, "memory_left", lambda proc: 1 << 60)
    assert _MIB < machine.available_memory(cpu) <= psutil.virtual_memory().total
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 1)
    assert machine.available_cores() == 1
