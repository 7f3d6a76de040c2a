"""What a stop reads from the metrics, and how it hangs up on clients of a child process."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import psutil
import pytest
from jitney_server import connections, stopping
from jitney_server.admin import Admin, ModelState, RefusedCallError
from jitney_server.connections import HangUp, hang_up
from jitney_server.ports import ServerPorts
from jitney_server.stopping import StopOutcome, requests_in_flight, stop, unload_all

METRICS = """
# HELP jitney_running_requests Requests accepted and not waiting
jitney_running_requests{model="chat",model_instance="chat_0_0",version="1"} 2
jitney_running_requests{model="chat",model_instance="chat_0_1",version="1"} 1
jitney_waiting_requests{model="chat",model_instance="chat_0_0",version="1"} 4
jitney_running_requests{model="idle",model_instance="idle_0_0",version="1"} 0
jitney_running_sequences{model="other",model_instance="other_0_0",version="1"} 9
nv_inference_pending_request_count{model="foreign"} 1
"""


def test_requests_are_summed_over_instances() -> None:
    assert requests_in_flight(METRICS) == {"chat": 7.0, "idle": 0.0}
    assert requests_in_flight("") == {}


LISTENER = """
import socket
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    print("accepted", flush=True)
    print(connection.recv(1), flush=True)
"""


def test_a_child_takes_it_for_the_clients_going() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)):
            assert child.stdout.readline() == "accepted\n"
            assert hang_up(child.pid, [port + 1]) == HangUp(closed=0, was_allowed=True)
            assert hang_up(child.pid, [port]) == HangUp(closed=1, was_allowed=True)
            assert child.stdout.readline() == "b''\n"


def test_a_client_reads_the_end_though_the_server_never_does() -> None:
    """As this server treats a connection whose request has had no response. And an answer that is
    under way can have no proper end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=30) as client:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(b"half")
                assert hang_up(os.getpid(), [address[1]]) == HangUp(closed=1, was_allowed=True)
                with pytest.raises(OSError, match="Broken pipe"):
                    accepted.sendall(b"end")
                assert client.recv(100) == b"half"
                assert client.recv(100) == b""


def test_a_connection_that_only_its_client_has_closed_ends() -> None:
    def statuses() -> list[str]:
        connections = psutil.Process().net_connections(kind="tcp")
        return [each.status for each in connections if each.laddr.port == address[1]]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address)
        accepted, _ = listener.accept()
        with accepted:
            client.close()
            assert sorted(statuses()) == [psutil.CONN_CLOSE_WAIT, psutil.CONN_LISTEN]
            assert hang_up(os.getpid(), [address[1]]) == HangUp(closed=1, was_allowed=True)
            ends = time.monotonic() + 30
            while psutil.CONN_CLOSE_WAIT in statuses():
                assert time.monotonic() < ends
                time.sleep(0.01)


def closing_two(monkeypatch: pytest.MonkeyPatch, first_error: int) -> HangUp:
    """What becomes of two connections to this process if the system refuses the first one."""
    refused: list[int] = []
    really_copied = connections._copied_socket

    def copied(pidfd: int, descriptor: int) -> socket.socket:
        if not refused:
            refused.append(descriptor)
            raise OSError(first_error, os.strerror(first_error))
        return really_copied(pidfd, descriptor)

    monkeypatch.setattr(connections, "_copied_socket", copied)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), socket.create_connection(address):
            accepted = [listener.accept()[0], listener.accept()[0]]
            outcome = hang_up(os.getpid(), [address[1]])
            for connection in accepted:
                connection.close()
    assert refused
    return outcome


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOTCONN])
def test_a_connection_that_its_client_has_closed_does_not_save_the_others(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert closing_two(monkeypatch, number) == HangUp(closed=1, was_allowed=True)


def test_a_system_that_does_not_allow_it_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert closing_two(monkeypatch, errno.EPERM) == HangUp(closed=0, was_allowed=False)


class FakeAdmin:
    """A server of two models: ``chat``, whose first unloads are refused, and ``never``, which
    nobody asked for. ``stuck`` keeps chat UNLOADING for good."""

    ports = ServerPorts(http=0, grpc=1, metrics=2)

    def __init__(self, refusals: int = 0, *, stuck: bool = False, requests: int = 0) -> None:
        self.refusals, self.stuck, self.requests = refusals, stuck, requests
        self.state = "READY"
        self.asked = 0
        self.told_to_end = 0

    def model_states(self) -> dict[str, ModelState]:
        return {"chat": ModelState(self.state, ""), "never": ModelState("", "")}

    def unload(self, name: str) -> None:
        assert name == "chat"
        self.asked += 1
        if self.asked <= self.refusals:
            raise RefusedCallError("busy with something else")
        self.state = "UNLOADING" if self.stuck else "UNAVAILABLE"

    def metrics(self) -> str:
        return f'jitney_running_requests{{model="chat"}} {self.requests}\n'


def outcome_of(
    server: FakeAdmin,
    monkeypatch: pytest.MonkeyPatch,
    grace_s: float = 0.2,
    *,
    unload_s: float = 0.4,
    cut_s: float = 0.4,
) -> StopOutcome:
    """How the server is unloaded, without the seconds in the texts."""
    monkeypatch.setattr(stopping, "_ASK_AGAIN_S", 0.02)
    monkeypatch.setattr(stopping, "_UNLOAD_S", unload_s)
    monkeypatch.setattr(stopping, "_CUT_S", cut_s)
    monkeypatch.setattr(stopping, "_LAG_S", 0.0)
    monkeypatch.setattr(stopping, "_STUCK_S", 0.1)
    monkeypatch.setattr(stopping, "_STUCK_AFTER_GRACE_S", 0.1)

    def tell_to_end() -> None:
        server.told_to_end += 1

    outcome = unload_all(cast("Admin", server), os.getpid(), grace_s, tell_to_end)
    if outcome.problem is None:
        return outcome
    return outcome._replace(problem=re.sub(r"^after \S+ s ", "", outcome.problem))


def test_nobody_is_told_of_the_stop_of_a_server_that_has_ended(tmp_path: Path) -> None:
    """Its id may be another process's by now."""
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    note = tmp_path / "note"
    outcome = stop(cast("Admin", FakeAdmin()), process, grace_s=60, note=note)
    problem = "the server had ended before, with status 3"
    assert outcome == StopOutcome(problem, cut_requests=True)
    assert not note.exists()


def test_a_model_that_refused_to_unload_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeAdmin(refusals=2)
    assert outcome_of(server, monkeypatch, grace_s=60) == StopOutcome()
    assert server.asked == 3


def test_a_model_that_is_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "chat is READY with 0 requests in flight (busy with something else)"
    assert outcome_of(FakeAdmin(refusals=10**6), monkeypatch) == StopOutcome(text)


def test_what_is_open_after_the_grace_is_cut_off_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before. The model is told, and has a moment to send its clients an error."""

    class Server(FakeAdmin):
        def model_states(self) -> dict[str, ModelState]:
            if self.told_to_end:
                self.requests = 0
                self.state = "UNAVAILABLE"
            return super().model_states()

    server = Server(stuck=True, requests=3)
    began = time.monotonic()
    outcome = outcome_of(server, monkeypatch, grace_s=0.5, cut_s=3600)
    assert time.monotonic() - began > 0.5
    assert server.told_to_end == 1
    text = "3 requests were cut off: chat is UNLOADING with 3 requests in flight"
    assert outcome == StopOutcome(text, cut_requests=True)
    assert server.asked == 1, "a model that is unloading need not be asked again"


def test_a_model_that_does_not_end_what_is_open_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = outcome_of(FakeAdmin(stuck=True, requests=1), monkeypatch, unload_s=3600)
    text = "1 request was cut off: chat is UNLOADING with 1 requests in flight"
    assert outcome == StopOutcome(text, cut_requests=True)


@pytest.mark.parametrize("grace_s", [0.2, 3600])
def test_a_model_that_the_server_does_not_end_holds_up_no_stop_and_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """The server's race: UNLOADING, no request in flight, and the model was never told to end: its
    metrics are still there. No request is lost with it."""
    server = FakeAdmin(stuck=True)
    outcome = outcome_of(server, monkeypatch, grace_s, unload_s=3600)
    assert outcome == StopOutcome(stuck="chat is UNLOADING with 0 requests in flight")
    assert server.told_to_end == 0


def test_a_stop_with_a_stuck_model_tells_what_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(FakeAdmin):
        def metrics(self) -> str:
            if self.told_to_end:
                self.requests = 0
            return super().metrics()

    outcome = outcome_of(Server(stuck=True, requests=2), monkeypatch, unload_s=3600, cut_s=3600)
    assert outcome.cut_requests
    assert outcome.problem == (
        "2 requests were cut off: chat is UNLOADING with 2 requests in flight"
    )
    assert outcome.stuck == "chat is UNLOADING with 0 requests in flight"


def test_models_without_requests_may_take_longer_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeAdmin(stuck=True)
    ends = time.monotonic() + 0.3  # beyond the grace of 0.2 s; its metrics have gone before

    def states() -> dict[str, ModelState]:
        over = time.monotonic() > ends
        return {"chat": ModelState("UNAVAILABLE" if over else server.state, "")}

    monkeypatch.setattr(server, "model_states", states)
    metrics = iter([server.metrics()])
    monkeypatch.setattr(server, "metrics", lambda: next(metrics, ""))
    assert outcome_of(server, monkeypatch, unload_s=60) == StopOutcome()
    silent = FakeAdmin(stuck=True)
    monkeypatch.setattr(silent, "metrics", lambda: "")
    text = "requests may have been cut off: chat is UNLOADING"
    assert outcome_of(silent, monkeypatch) == StopOutcome(text, cut_requests=True), "who knows"
