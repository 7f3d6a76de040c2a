"""A service with the real engine over an arithmetic runner, and what tests ask of its requests."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from jitney.config import EngineConfig
from jitney.engine.engine import Engine
from jitney.engine.handle import LocalEngine
from jitney.frontend.service import Service
from jitney.messages import Submit
from jitney.sampling_params import SamplingParams
from jitney.text.tokenizer import Tokenizer

from tests.fake_runner import FakeRunner
from tests.solo_stream import solo_stream

VOCAB = 320
LABELS = {"model": "m", "version": "1", "model_instance": "m_0_0"}


class House:
    """A service, its engine and runner."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        step_seconds: float = 0.0,
        info_device: str = "cpu",
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        config = EngineConfig(
            model="unused", block_size=4, cancel_sweep_s=0.01, metrics_flush_s=0.02, **options
        )
        self.runner = FakeRunner(
            vocab_size=VOCAB, num_blocks=512, max_model_len=2000, step_seconds=step_seconds
        )
        self.runner.info = msgspec.structs.replace(self.runner.info, device=info_device)
        self.engine = Engine(config, self.runner)
        self.handle = LocalEngine(self.engine)
        self.service = Service(self.handle, tokenizer, LABELS)

    def solo(self, prompt: str, **sampling: Any) -> list[int]:
        """The ids that the request must get."""
        params = SamplingParams(ignore_eos=True, **sampling)
        ids = self.tokenizer.encode(prompt)
        return solo_stream(Submit(key=0, prompt=ids, params=params, arrival=0.0), vocab_size=VOCAB)

    def idle(self) -> bool:
        kv = self.engine.scheduler.kv
        return kv.num_used == 0 and not self.engine.has_work


def sampling(**params: Any) -> str:
    return json.dumps({"seed": 1, "ignore_eos": True, **params})


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def ended(*requests: Any) -> bool:
    return all(request.sender.final for request in requests)


def ids_of(request: Any) -> list[int]:
    return [i for response in request.sender.sent for i in response.tensors["output_ids"].tolist()]


def text_of(request: Any) -> str:
    pieces = [response.tensors["text_output"][0] for response in request.sender.sent]
    return b"".join(pieces).decode()


def error_of(request: Any) -> str:
    (response,) = (one for one in request.sender.sent if one.error is not None)
    assert request.sender.sent[-1] is response
    assert request.sender.final == 1
    return response.error.text


def count_of(outcome: str) -> float:
    """Requests that ended so, as the server's metrics have it."""
    family: Any = sys.modules["triton_python_backend_utils"].MetricFamily
    labels = frozenset({**LABELS, "outcome": outcome}.items())
    return family.values["jitney_requests_total", labels]
