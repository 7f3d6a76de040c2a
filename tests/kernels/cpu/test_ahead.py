"""The process that compiles attention while its parent imports transformers.

Each test runs in a new interpreter of one thread, as the fork server has it, with a kernel that is
compiled as soon as the test says so.
"""

import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("numba")

SETUP = """
import os, select, socket, sys, time
from pathlib import Path
import jitney.kernels.cpu.attention_kernel as kernels
from jitney.kernels.cpu import ahead
folder = Path(sys.argv[1])
def compile_it(*dtypes):
    (folder / "begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / "done").write_text(repr(dtypes))
kernels.attention_kernels = compile_it
ours, theirs = socket.socketpair()
assert not [name for name in sys.modules if name.startswith("transformers.")]
ahead.compile_ahead()
"""


def run(tmp_path, code: str) -> str:
    command = [sys.executable, "-c", SETUP + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_forked_later_waits_for_the_kernel_once(tmp_path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    ahead.wait_for_compiler()
    assert (folder / "done").exists()
    ahead.wait_for_compiler()  # at once
    os._exit(7)
time.sleep(0.2)
assert os.waitpid(pid, os.WNOHANG)[0] == 0, "the engine did not wait"
(folder / "go").touch()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(tmp_path, code) == "7\n"
    assert (tmp_path / "done").read_text() == "(torch.bfloat16, torch.bfloat16)"


def test_the_process_holds_no_socket_of_its_parent(tmp_path) -> None:
    """Else the front would learn of the fork server's end only when the kernel is compiled."""
    code = """
theirs.close()
print(select.select([ours], [], [], 60)[0] == [ours], (folder / "done").exists())
(folder / "go").touch()
"""
    assert run(tmp_path, code) == "True False\n"


def test_it_ends_with_its_parent(tmp_path) -> None:
    code = """
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
while not (folder / "begun").exists():  # by then it has asked the kernel for that
    time.sleep(0.01)
print(children, flush=True)
os._exit(0)
"""
    child = int(run(tmp_path, code))
    ends = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert not (tmp_path / "done").exists()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_a_kernel_to_wait_for_nothing_waits(tmp_path) -> None:
    code = """
ahead.wait_for_compiler.__globals__["_end_of_compiler"] = None
ahead.wait_for_compiler()
print((folder / "done").exists())
"""
    assert run(tmp_path, code) == "False\n"
