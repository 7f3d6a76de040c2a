"""Whoever follows a request reads few files: those that a plain streamed one enters are counted."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jitney
import pytest
from jitney.engine.supervisor import SupervisedEngine
from jitney.read_config import make_config
from jitney.text.tokenizer import Tokenizer

from tests.frontend.house import LABELS, ended, sampling, text_of, wait_until
from tests.frontend.plain_runner import LOADER

PACKAGE = Path(jitney.__file__).parent
MOST_FILES = 18
BESIDE = {"jitney-sweeper", "jitney-metrics"}
"""Threads that no request waits for: they go round whatever is open."""


class Trail:
    """The files of the package of which a function is called, in any thread of the front, while
    ``recording``."""

    def __init__(self) -> None:
        self.recording = False
        self.files: dict[str, None] = {}  # in order

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.recording or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and threading.current_thread().name not in BESIDE:
            self.files[str(path.relative_to(PACKAGE))] = None


@pytest.fixture
def trail() -> Iterator[Trail]:
    made = Trail()
    threading.setprofile(made.note)
    sys.setprofile(made.note)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)


def test_a_plain_streamed_request_enters_few_files(
    pb: Any, tokenizer: Tokenizer, trail: Trail
) -> None:
    """From the server's call to the socket write, and from the socket back to the client."""
    from jitney.frontend.model import TritonPythonModel
    from jitney.frontend.service import Service

    engine = SupervisedEngine(make_config({"model": "m", "block_size": 4}), LOADER)
    engine.start()
    model = TritonPythonModel()
    model._service = Service(engine, tokenizer, LABELS)
    try:
        for trail.recording in (False, True):  # the second time all is imported and known
            request = pb.Request(
                text_input="the bus", stream=True, sampling_parameters=sampling(max_tokens=50)
            )
            model.execute([request])
            wait_until(lambda request=request: ended(request))
        trail.recording = False
    finally:
        model.finalize()
    assert len(request.sender.sent) > 1
    assert text_of(request)
    assert {"frontend/model.py", "engine/wire.py", "frontend/channel.py"} <= trail.files.keys()
    print(*trail.files, sep="\n")
    assert len(trail.files) <= MOST_FILES, "a request enters one file more"
