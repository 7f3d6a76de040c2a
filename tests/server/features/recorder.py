"""The model of these tests: it does nothing and writes down when it did it.

Copied into the repository as ``1/model.py`` of a Python-based model by ``repository.py``. Every
execution, with all the requests that the server gave it at once, appends two lines of JSON to the
model's log: one when it starts and one when it ends. In between it waits for the gates that its
rows name: gate n is the file ``gate-n`` beside the log, 0 is none. So a test decides how long an
execution takes, and no clock does.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

GATE_TIMEOUT_S = 120.0


class TritonPythonModel:
    """Answers each row with its own value, the rows of the execution and the model's version."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameter ``folder``, where its log and its gates are."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.folder = Path(parameters["folder"]["string_value"])
        self.version = int(args["model_version"])
        self.instance = args["model_instance_name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One execution, as the module describes it."""
        inputs = [
            {name: _tensor(request, name) for name in ("VALUE", "GATE")} for request in requests
        ]
        values = [value for tensors in inputs for value in tensors["VALUE"].ravel().tolist()]
        self._log("start", values)
        for tensors in inputs:
            for gate in tensors["GATE"].ravel().tolist():
                if gate:
                    _wait_for(self.folder / f"gate-{gate}")
        self._log("end", values)
        return [self._response(tensors["VALUE"], len(values)) for tensors in inputs]

    def _log(self, event: str, values: list[int]) -> None:
        line = {
            "event": event,
            "values": values,
            "at": time.monotonic(),
            "instance": self.instance,
        }
        # One write of one short line: instances are processes and share the file.
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, (json.dumps(line) + "\n").encode())
        os.close(log)

    def _response(self, value: np.ndarray, rows: int) -> Any:
        outputs = {
            "VALUE_OUT": value,
            "ROWS": np.full_like(value, rows),
            "VERSION": np.full_like(value, self.version),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in outputs.items()])


def _tensor(request: Any, name: str) -> np.ndarray:
    array: np.ndarray = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array


def _wait_for(gate: Path) -> None:
    deadline = time.monotonic() + GATE_TIMEOUT_S
    while not gate.exists():
        if time.monotonic() > deadline:
            raise pb_utils.TritonModelException(f"{gate.name} was not opened")
        time.sleep(0.002)
