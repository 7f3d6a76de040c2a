"""The machine's packet filter, lent to a container engine and put back as it was.

An engine adds chains, sets the policy of forwarding and turns forwarding on; it takes none of that
away when it ends.
"""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_TABLES = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}
_SWITCHES = (
    Path("/proc/sys/net/ipv4/ip_forward"),
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables"),
)


@contextlib.contextmanager
def lent(wanted: bool = True) -> Iterator[bool]:
    """Whether an engine is to use the kernel's packet filter, until the block ends: if it is
    wanted and there is one."""
    use = wanted and works()
    tables = {name: saved(name) for name in _TABLES} if use else {}
    switches = {path: path.read_text() for path in _SWITCHES if path.exists()}
    try:
        yield use
    finally:
        for text in tables.values():
            subprocess.run(["iptables-restore", "--wait"], input=text, text=True, check=True)
        for path, value in switches.items():
            path.write_text(value)


def works() -> bool:
    """Whether an engine's kinds of rules can be made here: none is left behind."""
    if shutil.which("iptables") is None:
        return False
    rules = (
        ["-t", "nat", "-A", "{chain}", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "RETURN"],
        ["-t", "nat", "-A", "{chain}", "-s", "192.0.2.0/24", "-j", "MASQUERADE"],
        ["-A", "{chain}", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"],
    )
    chain = "JITNEY-PROBE"
    with contextlib.ExitStack() as stack:
        for table in _TABLES:
            if not _iptables("-t", table, "-N", chain):
                return False
            stack.callback(_iptables, "-t", table, "-X", chain)
            stack.callback(_iptables, "-t", table, "-F", chain)
        return all(_iptables(*(word.format(chain=chain) for word in rule)) for rule in rules)


def saved(table: str) -> str:
    """A table as ``iptables-restore`` takes it; an empty one if there is none yet."""
    done = subprocess.run(
        ["iptables-save", "--table", table], capture_output=True, text=True, check=True
    )
    if f"*{table}" in done.stdout:
        return done.stdout
    chains = "".join(f":{chain} ACCEPT [0:0]\n" for chain in _TABLES[table])
    return f"*{table}\n{chains}COMMIT\n"


def rules() -> list[str]:
    """Every chain and rule there is, without the counters; tables that are empty are not told from
    those that are missing."""
    if shutil.which("iptables-save") is None:
        return []
    done = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True)
    lines = [re.sub(r" \[\d+:\d+\]$", "", line) for line in done.stdout.splitlines()]
    return [line for line in lines if re.match(r"-A|:\S+ (?!ACCEPT)", line)]


def _iptables(*words: str) -> bool:
    return (
        subprocess.run(["iptables", "--wait", *words], capture_output=True, check=False).returncode
        == 0
    )
