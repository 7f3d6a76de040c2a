"""How a program is started with arguments that stand on no command line."""

import logging
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from jitney_server import group_guard, stacks
from jitney_server import launch as module
from jitney_server.launch import launch
from jitney_server.stacks import STACK_BYTES

from tests.real_server.client import wait_until

PROGRAM = "import sys; print(*sys.argv[1:], flush=True); sys.stdin.read()"
COMMAND = [sys.executable, "-c", PROGRAM, "--plain=1"]
SECRET = ["--key=3f9a", "--other=77aa"]


def start(environment: dict[str, str]) -> tuple[str, str]:
    """What the program got, and what its command line shows while it runs."""
    with launch(
        COMMAND, SECRET, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        got = process.stdout.readline().decode()
        shown = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
        process.stdin.close()
        assert process.wait(60) == 0
    return got, shown


def test_the_program_gets_what_its_command_line_does_not_show(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got, shown = start({"JITNEY_ARGUMENT": "another", "EMPTY": ""})
    assert got == "--plain=1 --key=3f9a --other=77aa\n"
    if "visible to every local user" in caplog.text:
        pytest.skip("this system does not allow to look into a child")
    assert "--plain=1" in shown
    assert "3f9a" not in shown
    assert "77aa" not in shown


@pytest.mark.parametrize("how", ["not traced", "memory closed"])
def test_where_that_is_not_allowed_it_is_started_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError

    if how == "not traced":
        monkeypatch.setattr(module, "_TRACED", "import os; os._exit(99)")
    else:
        monkeypatch.setattr(module, "_redirect_arguments", fail)
    with caplog.at_level(logging.WARNING):
        got, shown = start({})
    assert got == "--plain=1 --key=3f9a --other=77aa\n"
    assert "3f9a" in shown
    assert "visible to every local user" in caplog.text


def test_without_a_secret_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TRACED", "import os; os._exit(99)")
    with caplog.at_level(logging.WARNING), launch(["/bin/true"], [], {}) as process:
        assert process.wait(60) == 0
    assert caplog.text == ""


STACK = """
import ctypes, resource
libc = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(64)
size = ctypes.c_size_t()
libc.pthread_getattr_default_np(attributes)
libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
print(*resource.getrlimit(resource.RLIMIT_STACK), size.value)
"""
MIB = 1 << 20


@pytest.mark.parametrize("how", ["hidden", "open"])
@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (8 * MIB, resource.RLIM_INFINITY, 128 * MIB),
        (8 * MIB, 16 * MIB, 16 * MIB),
        (256 * MIB, 512 * MIB, 256 * MIB),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 128 * MIB),
    ],
)
def test_threads_get_large_stacks(
    monkeypatch: pytest.MonkeyPatch, how: str, soft: int, hard: int, expected: int
) -> None:
    """Triton puts what some requests send on the stack of a thread."""
    if how == "open":
        monkeypatch.setattr(module, "_TRACED", "import os; os._exit(99)")
    own_hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if own_hard != resource.RLIM_INFINITY:
        pytest.skip("the stack is limited here")
    # Of a process between: a hard limit cannot be raised again.
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_STACK, ({soft}, {hard}))"
    start = f"""
import sys
from jitney_server import launch as module
module._TRACED = {module._TRACED!r}
sys.exit(module.launch([sys.executable, "-c", {STACK!r}], [], {{}}).wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", limits + start], stdout=subprocess.PIPE, text=True, check=True
    )
    soft_then, hard_then, of_a_thread = map(int, done.stdout.split())
    assert (soft_then, hard_then) == (expected, hard)
    assert of_a_thread == expected


def test_what_a_large_stack_does_not_shield_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(which: int) -> tuple[int, int]:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        return (8 * MIB, 16 * MIB) if which == resource.RLIMIT_STACK else unlimited

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert "of over 8 MiB, or JSON nested more than 125,203 deep" in stacks.risk_of_large_requests()


@pytest.mark.parametrize("why", ["overcommit", "address space"])
def test_stacks_are_usual_where_they_count_in_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """A hundred threads would take 12 GiB."""

    def limits(which: int) -> tuple[int, int]:
        if which == resource.RLIMIT_STACK:
            return (8 * MIB, resource.RLIM_INFINITY)
        return (64 << 30 if why == "address space" else resource.RLIM_INFINITY,) * 2

    never = tmp_path / "overcommit"
    never.write_text("2\n" if why == "overcommit" else "0\n", encoding="ascii")
    monkeypatch.setattr(stacks, "_OVERCOMMIT", never)
    monkeypatch.setattr(resource, "getrlimit", limits)
    assert stacks.stack_bytes() == 8 * MIB


# A server that starts a thread, and a model's process once its limit has changed.
SERVER_OF_STUBS = f"""
import resource, subprocess, sys, threading, time
own = resource.getrlimit(resource.RLIMIT_STACK)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
deadline = time.monotonic() + 60
while resource.getrlimit(resource.RLIMIT_STACK) == own and time.monotonic() < deadline:
    time.sleep(0.01)
print(own[0], flush=True)
STACK = {STACK!r}
exec(STACK)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", STACK])
"""


def test_what_a_server_starts_gets_usual_stacks() -> None:
    usual, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if stacks.stack_bytes() != STACK_BYTES or usual == resource.RLIM_INFINITY:
        pytest.skip("the stack is limited here, or is large anyhow")
    command = [sys.executable, "-c", SERVER_OF_STUBS]
    with launch(command, [], os.environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        group_guard.guard_group(process.pid)
        assert process.stdout is not None
        lines = process.stdout.read().decode().splitlines()
    assert lines == [
        f"{STACK_BYTES}",
        f"{usual} {hard} {STACK_BYTES}",
        f"{usual} {hard} {usual}",
    ]


PARENT = """
import sys
from jitney_server import launch as module
if sys.argv[1] == "open":
    module._TRACED = "import os; os._exit(99)"
process = module.launch(["/bin/sleep", "600"], [], {})
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.parametrize("how", ["hidden", "open"])
def test_the_program_ends_with_its_parent(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        started = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: started.name() == "sleep")
        parent.kill()
    try:
        assert psutil.wait_procs([started], 60)[1] == []
    finally:
        if started.is_running():
            started.kill()


@pytest.mark.parametrize("program", [module._TRACED, module._UNTRACED])
def test_a_program_whose_parent_was_killed_before_it_was_bound_does_not_start(
    program: str, tmp_path: Path
) -> None:
    somebody_else = "1"
    touched = tmp_path / "started"
    command = [*module.python_program(program), "9", somebody_else, "/usr/bin/touch", str(touched)]
    assert subprocess.run(command, check=False).returncode == 98
    assert not touched.exists()


def test_the_program_outlives_a_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        process = pool.submit(
            launch, COMMAND, [], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ).result()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"--plain=1\n"
        process.stdin.close()
        assert process.wait(60) == 0


# A server with a model's process that heeds no signal but SIGKILL.
SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stub = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(stub.pid, flush=True)
time.sleep(3600)
"""
LAUNCHER = """
import os, subprocess, sys, time
from jitney_server.group_guard import guard_group
from jitney_server.launch import launch
command = [sys.executable, "-c", sys.argv[1]]
server = launch(command, [], os.environ, stdout=subprocess.PIPE, start_new_session=True)
guard_group(server.pid)
print(server.pid, server.stdout.readline().decode(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("killed", ["launcher", "server"])
def test_what_a_killed_server_has_started_ends_too(killed: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        server, stub = map(psutil.Process, map(int, launcher.stdout.readline().split()))
        try:
            assert stub.is_running()
            os.kill(launcher.pid if killed == "launcher" else server.pid, signal.SIGKILL)
            wait_until(lambda: has_ended(stub))
            assert has_ended(server)
        finally:
            launcher.kill()
            if not has_ended(stub):
                stub.kill()


def test_the_guard_knows_its_server_before_the_launcher_goes_on() -> None:
    """Once the launcher goes on, it may collect a server that has ended, and its id be used again
    for another process. That one's group would be killed."""
    look = """
import os
def fork():
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            print(os.readlink(f"/proc/self/fd/{name}"), flush=True)
    os._exit(0)
os.fork = fork
"""
    command = [*module.python_program(look + group_guard._GUARD), str(os.getpid()), "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "pidfd" in done.stdout


def has_ended(process: psutil.Process) -> bool:
    """Who takes over an orphan may collect it late."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
