"""A trial of the embedded server: starts it with a model that adds one, and asks it.

What ``jitney doctor --start`` runs, because some faults (a stub that finds no packages, shared
memory that is too small, a policy that forbids listening) only show when everything runs.
"""

import http.client
import json
import tempfile
from pathlib import Path

from jitney.errors import JitneyError
from jitney.server.server import TritonServer

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
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() + 1)]
            )
            for r in requests
        ]
"""


def try_server(timeout_s: float = 60.0) -> None:
    """Start a server on free ports, send it three numbers, stop it.

    Raises JitneyError if it does not start, answers wrongly or does not stop cleanly.
    """
    with tempfile.TemporaryDirectory(prefix="jitney-trial-") as name:
        version = Path(name, "plus_one", "1")
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
        (version / "model.py").write_text(_MODEL, encoding="utf-8")
        server = TritonServer(Path(name))
        server.start(timeout_s)
        try:
            answer = ask(server.http_url)
        finally:
            clean = server.stop()
        if answer != [2, 3, 4]:
            raise JitneyError(f"the server answered {answer} where [2, 3, 4] is right")
        if not clean:
            raise JitneyError(f"the stop was not clean: {server.unclean}")


def ask(address: str) -> object:
    """What the model that adds one makes of 1, 2 and 3. Raises JitneyError if it makes nothing."""
    request = {"inputs": [{"name": "x", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}]}
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(
            "POST", "/v2/models/plus_one/infer", json.dumps(request), {"Connection": "close"}
        )
        response = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "outputs" not in response:
        raise JitneyError(f"the server answered: {response.get('error', response)}")
    return response["outputs"][0]["data"]
