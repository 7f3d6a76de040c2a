"""The threads of the service: none ends by an exception, and none takes too much of the time."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from jitney.frontend import service, sweeper
from jitney.frontend import worker as worker_module
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import ModelMetrics, OpenCounts
from jitney.frontend.responder import Responder
from jitney.frontend.worker import Worker

from tests.frontend.house import LABELS, House, ended, sampling, wait_until


@pytest.mark.parametrize("worker", ["responder", "sweeper", "metrics"])
def test_an_exception_in_a_thread_is_counted_and_the_thread_goes_on(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    house = make_house(step_seconds=0.002)
    owner, name = {
        "responder": (house.service._metrics, "add_step"),
        "sweeper": (Channel, "is_cancelled"),
        "metrics": (house.service._metrics, "flush"),
    }[worker]
    faults: list[int] = []

    def fail(*_: Any) -> None:
        faults.append(1)
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fail)
        request = pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=20))
        house.service.accept(request)
        wait_until(lambda: ended(request))
        assert request.sender.sent[0].error is None
        wait_until(lambda: faults)
    errors = ("jitney_thread_errors_total", frozenset(LABELS.items()))
    wait_until(lambda: pb.MetricFamily.values[errors] > 0)
    late = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1900))
    house.service.accept(late)
    wait_until(lambda: late.sender.sent)
    late.sender.cancelled = True
    wait_until(lambda: ended(late))
    assert all(each.is_alive for each in house.service._workers.values())


def stop_worker(house: House, name: str) -> None:
    house.service._workers[name].stop()
    house.service._workers[name].join(10)


@pytest.mark.parametrize(
    ("seconds", "period"),
    [(0.0001, 0.01), (0.01, 0.2), (0.1, 1.0), (1.0, 4.0)],
    ids=["few requests", "a twentieth of the time", "once a second", "very many requests"],
)
def test_sweeps_are_fewer_the_longer_they_take(
    pb: Any,
    make_house: Callable[..., House],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    period: float,
) -> None:
    house = make_house(step_seconds=0.002)
    stop_worker(house, "sweeper")
    request = pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=1900))
    house.service.accept(request)
    now = 0.0

    def ask(_: Channel) -> bool:
        nonlocal now
        now += seconds
        return False

    with monkeypatch.context() as slow:
        slow.setattr(sweeper, "time", SimpleNamespace(monotonic=lambda: now))
        slow.setattr(Channel, "is_cancelled", ask)
        pause = house.service._sweeper.turn()
    assert now == seconds
    assert seconds + pause == pytest.approx(period)


def test_counters_are_sent_less_often_than_gauges_if_that_takes_long(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house()
    stop_worker(house, "metrics")
    now = 100.0
    house.service._all_metrics_due = now
    counts = OpenCounts(encoding=0, submitted=1, reports=0)
    flushes: list[bool] = []

    def flush(_: ModelMetrics, *, only_gauges: bool = False) -> None:
        nonlocal now
        flushes.append(only_gauges)
        now += 0.05

    with monkeypatch.context() as slow:
        slow.setattr(service, "time", SimpleNamespace(monotonic=lambda: now))
        slow.setattr(ModelMetrics, "flush", flush)
        slow.setattr(Responder, "counts", property(lambda _: counts))
        for _ in range(3):
            assert house.service._flush_metrics() == 0.02
        now = 105.0  # a hundred times as long as the first one took
        for _ in range(2):
            house.service._flush_metrics()
        counts = OpenCounts(encoding=0, submitted=0, reports=0)  # then all are up to date
        house.service._flush_metrics()
    assert flushes == [False, True, True, False, True, False]


def test_sending_has_its_share_on_a_cpu_and_no_bound_on_a_gpu(
    make_house: Callable[..., House],
) -> None:
    assert make_house().service._responder._send_queue.share == 0.2
    assert make_house(send_share=0.5).service._responder._send_queue.share == 0.5
    assert make_house(info_device="cuda:0").service._responder._send_queue.share == 1.0


def test_metrics_wait_until_the_shared_memory_has_room(
    pb: Any, make_house: Callable[..., House], shared_memory: Any
) -> None:
    house = make_house()
    stop_worker(house, "metrics")
    shared_memory.set_room(False)
    house.service.count_error()
    calls = pb.MetricFamily.calls
    assert house.service._flush_metrics() == 0.02
    assert pb.MetricFamily.calls == calls
    shared_memory.set_room(True)
    house.service._flush_metrics()
    assert pb.MetricFamily.values["jitney_thread_errors_total", frozenset(LABELS.items())] == 1


def test_the_same_exception_in_every_turn_fills_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "ERROR_PAUSE_S", 0.0)
    errors = iter([ValueError("a")] * 20 + [ValueError("b")] * 20)

    def turn() -> float | None:
        error = next(errors, None)
        if error is not None:
            raise error
        return None

    counted: list[int] = []
    with caplog.at_level(logging.ERROR):
        worker = Worker("test", turn, lambda: counted.append(1))
        worker.join(60)
    assert len(counted) == 40
    assert len(caplog.records) == 2
