"""A server started on trial, with a trivial model: ``jitney doctor --start`` and tests use it."""

import tempfile
from pathlib import Path

from jitney.errors import JitneyError

from jitney_server.server import TritonServer

_CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [-1] }]
"""
_MODEL = """
import jitney.config  # the stub must see the environment that the launcher runs in
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]))
        return responses
"""


def write_trial(repository: Path) -> None:
    """Write the model ``plus_one``, which adds one, into a repository."""
    version = repository / "plus_one" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    (version / "model.py").write_text(_MODEL, encoding="utf-8")


def try_server() -> None:
    """Start a server on free ports, send its model three numbers, and stop it. Raises JitneyError
    or OSError for what goes wrong."""
    x = {"name": "x", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}
    with tempfile.TemporaryDirectory(prefix="jitney-trial-") as folder:
        repository = Path(folder)
        write_trial(repository)
        with TritonServer(repository) as server:
            (y,) = server.admin.infer("plus_one", [x])
        if server.last_stop.problem is not None:
            raise JitneyError(f"the stop was not clean: {server.last_stop.problem}")
        if y["data"] != [2, 3, 4]:
            raise JitneyError(f"the server answered {y['data']} where [2, 3, 4] is right")
