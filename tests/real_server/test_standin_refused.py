"""Models that the stand-ins must not load, in the real server: each says what is wrong with it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jitney_server.server import TritonServer

from tests.server.standins import onnx_models as models
from tests.server.standins.onnx_models import ONE, io, parameter

BAD: dict[str, tuple[Any, str, str]] = {
    # name -> model, config, what the server's reason must match
    "missing": (None, 'backend: "onnxruntime"\n', r"model file .*missing/1/model\.onnx is missing"),
    "corrupt": (b"nonsense" * 20, "", r"corrupt/1/model\.onnx cannot be loaded: .*[Pp]rotobuf"),
    "operator": (models.unknown_operator(), "", r"model\.onnx cannot be loaded: .*Teleport"),
    "dims": (
        models.identity(shape=("n", 3)),
        "max_batch_size: 4\n" + io("input", "x", "TYPE_FP32", "[5]"),
        r"tensor 'x': the configuration has dims \[5\], but the model has \[-1, 3\]",
    ),
    "threads": (
        models.identity(),
        parameter("intra_op_thread_count", "many"),
        r"intra_op_thread_count is 'many', but must be a whole number",
    ),
    "plan": (
        b"no engine",
        'platform: "tensorrt_plan"\n',
        r"TensorRT engine needs an NVIDIA GPU .*backend: onnxruntime.*NVIDIA's container",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (made, config, _) in BAD.items():
        filename = "model.plan" if name.endswith("plan") else "model.onnx"
        models.write_model(repository, name, made, config + ONE, filename)
    with TritonServer(repository, keep_going=True, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), started.last_stop.problem


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_says_what_is_wrong(server: TritonServer, name: str) -> None:
    state, reason = server.admin.model_states()[name]
    assert state == "UNAVAILABLE"
    assert re.search(BAD[name][2], reason), reason
    assert "Traceback" not in reason
