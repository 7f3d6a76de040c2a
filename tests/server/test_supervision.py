"""What the supervisor repairs, and when, over a server that is a record, with a clock of its own.

Real processes are in `test_serve.py`, `tests/compose/test_entrypoint.py` and `tests/real_server`.
"""

import itertools
import threading
import time
import types
from collections.abc import Callable
from typing import cast

import pytest
from jitney.errors import LoadError
from jitney_server import starting_stubs, supervision
from jitney_server.admin import Admin, ModelState, NoAnswerError, RefusedCallError
from jitney_server.connections import HangUp
from jitney_server.ports import ServerPorts
from jitney_server.supervision import Supervisor


class FakeProcess:
    """One of a model: ``file`` is empty once it is a zombie."""

    def __init__(self, pid: int, model: str) -> None:
        self.pid = pid
        self.file = f"/models/{model}/1/model.py"

    def cmdline(self) -> list[str]:
        return ["…/triton_python_backend_stub", self.file] if self.file else []

    def kill(self) -> None:
        self.file = ""

    def status(self) -> str:
        return "sleeping" if self.file else "zombie"


class FakeServer:
    """A server of two models. Loads, starts and unloads fail while the fields say so."""

    pid = 1
    ports = ServerPorts(8000, 8001, 8002)

    def __init__(self) -> None:
        self.processes = [FakeProcess(10, "chat"), FakeProcess(11, "embed")]
        self.states = {"chat": "READY", "embed": "READY"}
        self.alive = self.ready = self.answers = True
        self.load_error: Exception | None = None
        self.broken = ""
        """A model that cannot be loaded, whatever is tried."""
        self.unload_error: Exception | None = None
        self.has_metrics = True
        self.starts = 0
        self.loads: list[str] = []
        self.hung_up = self.requests = 0
        self.connections = 5
        self.may_hang_up = True

    @property
    def admin(self) -> Admin:
        return cast("Admin", self)

    def is_alive(self) -> bool:
        return self.alive

    def is_ready(self) -> bool:
        return self.ready

    def is_answering(self, name: str) -> bool:
        return self.answers

    def model_states(self) -> dict[str, ModelState]:
        return {name: ModelState(state, "") for name, state in self.states.items()}

    def metrics(self) -> str:
        if not self.has_metrics:
            raise NoAnswerError("connection refused")
        return f'jitney_running_requests{{model="chat"}} {self.requests}\n'

    def unload(self, name: str) -> None:
        if self.unload_error:
            raise self.unload_error
        self.states[name] = "UNAVAILABLE"

    def load(self, name: str, timeout_s: float) -> None:
        self.loads.append(name)
        if self.load_error:
            raise self.load_error
        if name == self.broken:
            raise RefusedCallError("weights.bin is truncated")
        self.states[name] = "READY"
        self.processes.append(FakeProcess(20 + len(self.loads), name))

    def restart(self) -> None:
        self.starts += 1
        if self.load_error:
            raise LoadError("one model failed to load")
        self.__dict__.update(FakeServer().__dict__, starts=self.starts, loads=self.loads)


Run = Callable[[float], str]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    made = FakeServer()
    for module in (supervision, starting_stubs):
        monkeypatch.setattr(module, "model_processes", lambda pid: made.processes)

    def hang_up(pid: int, ports: list[int]) -> HangUp:
        assert (pid, ports) == (1, [8000, 8001])
        made.hung_up += 1
        return HangUp(made.connections, made.may_hang_up)

    monkeypatch.setattr(supervision, "hang_up", hang_up)
    return made


@pytest.fixture
def clock() -> types.SimpleNamespace:
    return types.SimpleNamespace(now=1000.0)


@pytest.fixture
def said() -> list[str]:
    return []


def supervise(
    server: FakeServer, clock: types.SimpleNamespace, said: list[str], most: int | None = None
) -> Run:
    """A function that takes a turn every half second for so many seconds, or until it gives up."""
    supervisor = Supervisor(server, said.append, most_repairs=most, clock=lambda: clock.now)

    def run(seconds: float) -> str:
        ends = clock.now + seconds
        while clock.now < ends:
            clock.now += 0.5
            if given_up := supervisor.turn():
                return given_up
        return ""

    return run


def test_only_the_model_whose_process_ended_is_loaded_again(server, clock, said) -> None:
    run = supervise(server, clock, said)
    assert run(60) == ""
    assert server.loads == []
    server.processes[0].kill()
    run(2)
    assert server.loads == ["chat"]
    assert server.states["chat"] == "READY"
    assert server.starts == 0
    run(60)
    assert server.loads == ["chat"], "its zombie stays and is no news"


def test_clients_of_a_language_model_are_hung_up_on(server, clock, said) -> None:
    """Their streams may be stuck in the server; what is closed is said. ``embed`` has no metrics:
    its requests get the server's error."""
    run = supervise(server, clock, said)
    server.processes[1].kill()
    run(2)
    assert (server.loads, server.hung_up) == (["embed"], 0)
    server.processes[0].kill()
    run(2)
    assert (server.loads, server.hung_up) == (["embed", "chat"], 1)
    assert "5 connections are closed: streams of model chat may be stuck" in said


def test_clients_are_hung_up_on_if_an_unloaded_model_has_no_metrics(server, clock, said) -> None:
    """Without streams it is unloaded at once, and HTTP clients still wait for their answers."""
    metrics = server.metrics
    server.metrics = lambda: metrics() if server.states["chat"] == "READY" else ""
    run = supervise(server, clock, said)
    server.processes[0].kill()
    run(2)
    assert server.hung_up == 1


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it holds within ten seconds."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends and not condition():
        time.sleep(0.005)
    return condition()


def test_a_model_that_dies_while_another_one_loads_is_noticed(
    server, clock, said, monkeypatch
) -> None:
    """Its clients must not wait for the end of that load."""
    monkeypatch.setattr(supervision, "_LOOK_S", 0.01)
    noticed: list[bool] = []
    load = server.load

    def slow_load(name: str, timeout_s: float) -> None:
        if name == "embed":
            server.processes[0].kill()
            noticed.append(wait_until(lambda: server.hung_up == 1))
        load(name, timeout_s)

    server.load = slow_load
    run = supervise(server, clock, said)
    server.processes[1].kill()
    run(10)
    assert noticed == [True]
    assert server.loads == ["embed", "chat"]


@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_load_whose_process_ends_unnoticed_is_given_up(
    server, clock, said, monkeypatch, is_its_own: bool
) -> None:
    """But not for a process that was killed before, or that is another model's."""
    monkeypatch.setattr(supervision, "_LOOK_S", 0.01)
    monkeypatch.setattr(starting_stubs, "_LOOK_S", 0.01)
    monkeypatch.setattr(starting_stubs, "_ENDED_S", 0.1)
    is_over = threading.Event()
    load = server.load

    def load_for_ever(name: str, timeout_s: float) -> None:
        if not is_its_own:
            server.processes[0].kill()
            assert wait_until(lambda: server.hung_up == 1)
            time.sleep(0.5)
            load(name, timeout_s)
            return
        process = FakeProcess(30, name)
        server.processes.append(process)
        process.kill()
        is_over.wait(30)

    server.load = load_for_ever
    run = supervise(server, clock, said)
    server.processes[1].kill()
    run(2)
    is_over.set()
    assert server.starts == is_its_own
    assert any("its process has ended" in line for line in said) == is_its_own


def test_what_must_not_wait_is_done_while_a_model_loads(server, clock, said, monkeypatch) -> None:
    """A gateway that has ended meanwhile is started again."""
    monkeypatch.setattr(supervision, "_LOOK_S", 0.01)
    done = threading.Event()
    load = server.load

    def slow_load(name: str, timeout_s: float) -> None:
        assert done.wait(30)
        load(name, timeout_s)

    server.load = slow_load
    supervisor = Supervisor(server, said.append, clock=lambda: clock.now, meanwhile=done.set)
    server.processes[1].kill()
    for _ in range(20):
        clock.now += 0.5
        supervisor.turn()
    assert server.loads == ["embed"]


def test_a_load_that_loses_its_connection_to_a_hang_up_is_asked_for_again(
    server, clock, said, monkeypatch
) -> None:
    monkeypatch.setattr(supervision, "_LOOK_S", 0.01)
    load = server.load

    def cut_load(name: str, timeout_s: float) -> None:
        if server.hung_up == 0:
            server.processes[0].kill()
            assert wait_until(lambda: server.hung_up == 1)
            server.loads.append(name)
            raise NoAnswerError("connection closed")
        load(name, timeout_s)

    server.load = cut_load
    run = supervise(server, clock, said)
    server.processes[1].kill()
    run(10)
    assert server.loads == ["embed", "embed", "chat"]
    assert server.starts == 0


def test_a_model_that_dies_while_it_is_asked_is_noticed(server, clock, said, monkeypatch) -> None:
    monkeypatch.setattr(supervision, "_LOOK_S", 0.01)
    noticed: list[bool] = []

    def is_answering(name: str) -> bool:
        if not noticed:
            server.processes[0].kill()
            noticed.append(wait_until(lambda: server.hung_up == 1))
        return False

    server.is_answering = is_answering
    run = supervise(server, clock, said)
    run(7)
    assert noticed == [True]
    assert server.loads == ["chat"]


def test_nobody_is_asked_while_a_process_may_have_ended(server, clock, said) -> None:
    """The question may take seconds, in which clients of that process wait."""
    asked: list[float] = []

    def is_answering(name: str) -> bool:
        asked.append(clock.now)
        return True

    server.is_answering = is_answering
    run = supervise(server, clock, said)
    run(4.5)
    server.processes[0].kill()
    run(0.5)  # now it is time to ask
    assert (asked, server.loads) == ([], [])
    run(0.5)
    assert (asked, server.loads) == ([], ["chat"])


def test_where_nobody_may_be_hung_up_on_the_server_is_started_again(server, clock, said) -> None:
    run = supervise(server, clock, said)
    server.may_hang_up = False
    server.requests = 2
    server.processes[0].kill()
    run(2)
    assert (server.loads, server.starts) == ([], 1)


def test_clients_that_have_all_gone_are_no_reason_to_start_the_server_again(
    server, clock, said
) -> None:
    run = supervise(server, clock, said)
    server.connections = 0
    server.requests = 2
    server.processes[0].kill()
    run(2)
    assert (server.loads, server.starts) == (["chat"], 0)


def test_a_server_without_metrics_is_not_started_again_for_one_model(server, clock, said) -> None:
    """Nobody knows whether the model has streams. So its clients are hung up on; where that is not
    allowed, only another server ends their streams."""
    server.has_metrics = False
    run = supervise(server, clock, said)
    server.processes[1].kill()
    run(2)
    assert (server.loads, server.hung_up, server.starts) == (["embed"], 1, 0)
    server.may_hang_up = False
    server.processes[0].kill()
    run(2)
    assert (server.loads, server.starts) == (["embed"], 1)


def test_without_metrics_it_is_said_once_that_hangs_are_not_noticed(server, clock, said) -> None:
    server.has_metrics = server.answers = False
    run = supervise(server, clock, said)
    run(60)
    assert said == ["the server gives no metrics: a model that hangs is not noticed"]
    assert (server.loads, server.starts) == ([], 0)


def test_a_server_that_once_gives_no_metrics_has_some(server, clock, said) -> None:
    """Nothing is said of it, and who is known to be no language model has no streams to end."""
    run = supervise(server, clock, said)
    run(11)
    server.has_metrics = False
    server.processes[1].kill()
    run(6)
    assert (server.loads, server.hung_up, server.starts) == (["embed"], 0, 0)
    server.has_metrics = True
    run(11)
    assert [line for line in said if "gives no metrics" in line] == []


def test_a_model_that_cannot_be_loaded_holds_up_no_other(server, clock, said) -> None:
    run = supervise(server, clock, said)
    server.broken = "chat"
    server.processes[0].kill()
    server.processes[1].kill()
    run(10)
    assert server.loads[:2] == ["chat", "embed"]
    assert server.states["embed"] == "READY"
    assert server.loads.count("chat") > 1, "it is tried again"


def test_what_somebody_unloads_stays_unloaded(server, clock, said) -> None:
    """The server ends that process itself; it may be seen on its way."""
    run = supervise(server, clock, said)
    server.states["chat"] = "UNLOADING"
    server.processes[0].kill()
    run(60)
    assert (server.loads, said) == ([], [])


def test_a_model_that_does_not_answer_is_killed_and_loaded_again(server, clock, said) -> None:
    run = supervise(server, clock, said)
    server.answers = False
    run(11)
    assert server.loads == [], "once or twice is no proof"
    hung = server.processes[0]
    run(5)
    server.answers = True
    assert hung.file == ""
    assert server.loads == ["chat"]
    assert "model chat does not answer" in said
    run(60)
    assert server.loads == ["chat"]


def test_repairs_have_growing_pauses(server, clock, said) -> None:
    run = supervise(server, clock, said)
    server.load_error = RefusedCallError("weights.bin is truncated")
    server.processes[0].kill()
    run(1)
    assert server.states["chat"] == "UNAVAILABLE", "its readiness is withdrawn at once"
    tries = [clock.now]
    for _ in range(1200):
        before = len(server.loads)
        run(0.5)
        if len(server.loads) > before:
            tries.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(gaps[7:]) == {60}
    assert server.starts == 0, "another server would hear the same reason"
    assert server.states["embed"] == "READY"
    server.load_error = None
    run(61)
    assert server.states["chat"] == "READY"


@pytest.mark.parametrize("error", [NoAnswerError("timed out"), RefusedCallError("HTTP 403")])
def test_a_server_that_does_not_unload_is_started_again(server, clock, said, error) -> None:
    run = supervise(server, clock, said)
    server.unload_error = error
    server.processes[0].kill()
    run(2)
    assert (server.starts, server.loads) == (1, [])


def test_a_server_that_ends_or_is_not_ready_is_started_again(server, clock, said) -> None:
    run = supervise(server, clock, said)
    server.alive = False
    run(1)
    assert server.starts == 1
    server.ready = False
    run(119)
    assert server.starts == 1
    run(5)
    assert server.starts == 2


def test_who_is_told_how_many_repairs_are_enough_gives_up(server, clock, said) -> None:
    run = supervise(server, clock, said, most=3)
    server.alive, server.load_error = False, LoadError("no")
    assert run(60) == "3 repairs within 10 minutes were not enough"
    assert server.starts == 3


def test_repairs_that_are_long_ago_do_not_count(server, clock, said) -> None:
    run = supervise(server, clock, said, most=2)
    for _ in range(5):
        server.alive = False
        assert run(400) == ""
    assert server.starts == 5
