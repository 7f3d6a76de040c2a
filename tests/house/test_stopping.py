"""What a stop reads from the metrics, and how it hangs up on clients of a child process."""

import socket
import subprocess
import sys

from jitney.stopping import hang_up, requests_in_flight

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
            assert hang_up(child.pid, [port + 1]) == 0
            assert hang_up(child.pid, [port]) == 1
            assert child.stdout.readline() == "b''\n"


def test_a_process_that_is_gone_has_no_connections() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert hang_up(child.pid, [1]) == 0
