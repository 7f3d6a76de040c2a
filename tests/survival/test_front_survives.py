"""The front under a thousand sequences, and with threads that fail, in the real server.

Behind it is the real engine with a runner that computes nothing, so that steps are short and the
server is up in seconds: :mod:`tests.survival.arithmetic_model`.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import Stream, generate, metric, settled, stream, wait_until
from tests.survival.arithmetic_runner import CONTEXT, GATE, HOLD, MADE
from tests.tiny_models import write_tokenizer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
MODEL = "sums"
MAX_NUM_SEQS = 1024
MAX_REPORTS = 64
"""Of the front's backlog."""
DRAIN_S = 2.0
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model: what lies there makes its front fail or wait."""
    folder = tmp_path_factory.mktemp("survival") / "repository" / MODEL
    version = folder / "1"
    version.mkdir(parents=True)
    write_tokenizer(folder)
    (folder / "config.pbtxt").write_text(
        'backend: "python"\ninstance_group [{ kind: KIND_CPU }]\n', encoding="utf-8"
    )
    options = {"model": str(folder), "max_num_seqs": MAX_NUM_SEQS, "drain_s": DRAIN_S}
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    (version / "model.py").write_text(
        f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n\n"
        "from tests.survival.arithmetic_model import TritonPythonModel\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    """The last test stops it."""
    started = TritonServer(folder.parent, exit_timeout_s=60)
    started.start(PATIENCE_S)
    try:
        yield started
    finally:
        (folder / GATE).unlink(missing_ok=True)
        started.stop()


def value(server: TritonServer, name: str, **labels: str) -> float:
    return metric(server.metrics_url, name, model=MODEL, **labels)


def sampling(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **more}


def start(server: TritonServer, max_tokens: int, **more: Any) -> Stream:
    tensors = {
        "input_ids": [5, 6, 7],
        "stream": True,
        "return_num_output_tokens": True,
        "sampling_parameters": sampling(max_tokens, **more),
    }
    return Stream(server.grpc_url, MODEL, tensors)


def read(one: Stream) -> tuple[float, float]:
    """To the end: when the first of its responses was read, and the last."""
    assert one.step(PATIENCE_S)
    first = time.monotonic()
    while one.step(PATIENCE_S):
        pass
    last = time.monotonic()
    one.close()
    return first, last


def test_hundreds_of_requests_with_n_of_128(server: TritonServer, folder: Path) -> None:
    """Sequences never exceed ``max_num_seqs``, and a long prompt goes on between them: its
    first token comes before they have ended. The engine is held until it has all requests."""
    requests = 200
    left_at_first_token: list[int] = []

    def steps(at_most: str) -> float:
        return value(server, "jitney_batch_sequences_bucket", le=at_most)

    def ask(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return generate(server.http_url, MODEL, **body)

    long = {"input_ids": [5] * (CONTEXT - 8), **sampling(1)}
    many = {"input_ids": [5, 6, 7], "exclude_input_in_output": True, **sampling(3, n=128)}
    (folder / HOLD).touch()
    with ThreadPoolExecutor(requests + 1) as pool:
        slow = pool.submit(ask, long)
        futures = [pool.submit(ask, many) for _ in range(requests)]
        slow.add_done_callback(
            lambda _: left_at_first_token.append(sum(not one.done() for one in futures))
        )
        queued = "jitney_running_requests", "jitney_waiting_requests"
        wait_until(lambda: sum(value(server, name) for name in queued) == requests + 1)
        (folder / HOLD).unlink()
    assert slow.result()[0] == 200
    for status, body in (one.result() for one in futures):
        assert status == 200
        assert [len(text) for text in body["text_output"]] == [3] * 128
    few, most, all_steps = settled(
        lambda: [steps(at_most) for at_most in ("512", "1024", "+Inf")],
        lambda counted: counted[1] > counted[0],
    )
    assert few < most == all_steps
    assert left_at_first_token[0] > 0


def test_responses_leave_while_reports_keep_coming(server: TritonServer, folder: Path) -> None:
    """1,024 sequences, steps of no length. Whoever waits is served all the time, and the
    backlog of reports is bounded. The engine is held until it has all requests, or the first
    could end before the last has begun."""
    (folder / HOLD).touch()
    streams = [start(server, 150, n=128) for _ in range(MAX_NUM_SEQS // 128)]
    queued = "jitney_running_requests", "jitney_waiting_requests"
    wait_until(lambda: sum(value(server, name) for name in queued) == len(streams))
    (folder / HOLD).unlink()
    backlogs: list[float] = []
    with ThreadPoolExecutor(len(streams)) as pool:
        futures = [pool.submit(read, one) for one in streams]
        while not all(one.done() for one in futures):
            backlogs.append(value(server, "jitney_waiting_reports"))
    firsts, lasts = zip(*(one.result() for one in futures), strict=True)
    for reply in (one.reply for one in streams):
        assert reply.errors == []
        assert sum(reply.all("num_output_tokens")) == 128 * 150
        assert len(reply.responses) >= 5
    assert max(firsts) < min(lasts)
    assert max(backlogs) <= 2 * MAX_REPORTS


def test_an_answer_without_bound_is_refused(server: TritonServer) -> None:
    """Refused with the numbers; it takes no place in any queue. Streamed it is served."""
    huge = sampling(2000, n=128, logprobs=20)
    reply = stream(
        server.grpc_url, MODEL, input_ids=[5], stream=False, return_logprobs=True,
        sampling_parameters=huge,
    )  # fmt: skip
    assert reply.responses == []
    assert reply.error.startswith(
        "INVALID_ARGUMENT: n 128 × max_tokens 2,000 × (logprobs 20 + 1) is 5,376,000, but"
    )
    assert "at most 2,000,000 entries" in reply.error
    streamed = start(server, **huge)
    assert streamed.step()
    streamed.cancel()
    wait_until(lambda: value(server, "jitney_kv_used_blocks") == 0)


@pytest.mark.parametrize("thread", ["encode", "metrics", "responder", "sweeper"])
def test_an_exception_in_a_thread_of_the_front(
    server: TritonServer, folder: Path, thread: str
) -> None:
    """It is counted and logged, the thread goes on, and so does a stream."""
    errors = value(server, "jitney_thread_errors_total")
    running = start(server, CONTEXT - 3)
    assert running.step()
    (folder / thread).touch()
    if thread == "encode":
        reply = stream(server.grpc_url, MODEL, input_ids=[5], sampling_parameters=sampling(1))
        assert reply.responses == []
        assert reply.error == "INTERNAL: the request could not be taken in"

    def has_raised() -> bool:
        # If the stream has ended by now, the responder has nothing to do without this.
        reply = stream(server.grpc_url, MODEL, input_ids=[5], sampling_parameters=sampling(1))
        assert len(reply.text) == 1
        return not (folder / thread).exists()

    wait_until(has_raised)
    wait_until(lambda: value(server, "jitney_thread_errors_total") == errors + 1)
    assert server.log_file is not None
    assert "as the test wants it" in server.log_file.read_text(encoding="utf-8")
    reply = stream(server.grpc_url, MODEL, input_ids=[5], sampling_parameters=sampling(20))
    assert len(reply.text) == 20
    gone = start(server, CONTEXT - 3)
    assert gone.step()
    gone.cancel()
    assert sum(running.read(PATIENCE_S).all("num_output_tokens")) == CONTEXT - 3
    wait_until(lambda: value(server, "jitney_kv_used_blocks") == 0)


def test_a_stop_while_finished_results_wait_to_be_sent(server: TritonServer, folder: Path) -> None:
    """They are sent, and what has not ended by then gets UNAVAILABLE. The engine is held
    until it has all requests; from then on the first response holds up all others."""
    made = folder / MADE
    before = made.stat().st_size
    hold, gate = folder / HOLD, folder / GATE
    hold.touch()
    tensors = {
        "input_ids": [5],
        "sampling_parameters": sampling(1),
        "exclude_input_in_output": True,
    }
    finished = [Stream(server.grpc_url, MODEL, tensors) for _ in range(20)]
    endless = start(server, CONTEXT - 3)
    wait_until(lambda: value(server, "jitney_running_requests") == 21)
    gate.touch()
    hold.unlink()
    wait_until(lambda: made.stat().st_size > before + 20)
    clean: list[bool] = []
    stopping = threading.Thread(target=lambda: clean.append(server.stop(DRAIN_S)))
    stopping.start()
    wait_until(lambda: server.admin.model_states()[MODEL][0] != "READY")
    time.sleep(DRAIN_S + 1)
    gate.unlink()
    replies = [one.read(PATIENCE_S) for one in finished]
    assert [reply.errors for reply in replies] == [[]] * 20
    assert [len(reply.text) for reply in replies] == [1] * 20
    assert endless.read(PATIENCE_S).error.startswith("UNAVAILABLE: the server is shutting down")
    stopping.join(PATIENCE_S)
    assert clean == [False]
    # All whose results waited when the grace was over count, though they were sent after it.
    assert "21 requests were cut off" in (server.last_stop.problem or "")
