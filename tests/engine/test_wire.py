"""The socket between a front and its engine: its messages, and that it ends the engine too."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from jitney.engine.wire import Frames, ToEngine
from jitney.messages import Cancel, FrontMessage, Submit
from jitney.sampling_params import SamplingParams

from tests.real_server.client import wait_until

FRONT = """
import sys, time
from jitney.read_config import make_config
from jitney.engine.supervisor import SupervisedEngine
from jitney.messages import Submit
from jitney.sampling_params import SamplingParams

engine = SupervisedEngine(make_config({"model": "fine"}), "tests.engine.deadly_runner:loader")
engine.start()
params = SamplingParams(max_tokens=900, seed=1)
engine.send(Submit(key=0, prompt=[1], params=params, arrival=time.monotonic()))
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_the_engine_ends_with_its_front() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", FRONT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as front:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        front.kill()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_every_message_comes_back_as_it_went() -> None:
    """Frames carry all kinds of messages, whatever is set in them."""
    left, right = socket.socketpair()
    params = SamplingParams(
        n=2, stop=("a", "b"), logit_bias={3: 1.5}, allowed_token_ids=(1, 2), seed=-5, logprobs=3
    )
    submit = Submit(
        key=1, prompt=[1, 2], params=params, arrival=1.5, stop_ids=frozenset({4, 5}),
        bad_words_ids=[[1], [2, 3]], deadline=None,
    )  # fmt: skip
    messages: list[FrontMessage] = [submit, Cancel(1)]
    sender: Frames[ToEngine] = Frames(left, ToEngine)
    receiver: Frames[ToEngine] = Frames(right, ToEngine)
    for message in messages:
        sender.send(message)
    assert [receiver.receive(), receiver.receive()] == messages
    assert receiver.receive(0.0) is None
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()
