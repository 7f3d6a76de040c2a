"""Stand-in for the native ONNX Runtime backend, for the embedded server.

The server loads this file for ``backend: "onnxruntime"`` and ``platform: "onnxruntime_onnx"``; in
NVIDIA's container the C++ backend of that name comes first. ``docs/standins.md`` says which keys of
the configuration are honoured.
"""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from jitney.errors import JitneyError
from jitney.server_log import log_to_server
from jitney.server_watch import end_with_server
from jitney_server.standins.batch import Batcher
from jitney_server.standins.exchange import answer, model_path, refusal
from jitney_server.standins.onnx_options import read_options
from jitney_server.standins.onnx_session import OnnxSession, read_signature
from jitney_server.standins.signature import check_config, complete_config

DEFAULT_MAX_BATCH_SIZE = 4
"""Of a model that can batch and does not say how far: the native backend's default."""


class TritonPythonModel:
    """One instance of one model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in what ``config.pbtxt`` leaves open, from the model file."""
        config = auto_complete_model_config.as_dict()
        try:
            path = model_path(
                Path(pb_utils.get_model_dir()), config["default_model_filename"] or "model.onnx"
            )
            operations = config.get("model_operations", {}).get("op_library_filename", [])
            signature = read_signature(path, operations)
            complete_config(config, signature, DEFAULT_MAX_BATCH_SIZE)
            check_config(config, signature)
        except JitneyError as error:
            raise refusal(pb_utils, error) from None
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model. Raises TritonModelException with the reason if that is impossible."""
        end_with_server()
        log_to_server(pb_utils.Logger)
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        on_gpu = args["model_instance_kind"] == "GPU"
        device_id = int(args["model_instance_device_id"]) if on_gpu else None
        try:
            options = read_options(config, device_id)
            path = model_path(folder, config["default_model_filename"] or "model.onnx")
            session = OnnxSession(path, options, device_id)
            check_config(config, session.signature)
        except JitneyError as error:
            raise refusal(pb_utils, error) from None
        for note in options.notes:
            pb_utils.Logger.log_info(f"{args['model_instance_name']}: {note}")
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: ONNX Runtime on {', '.join(session.providers)}"
        )
        batching = int(config["max_batch_size"]) > 0
        self._session = session
        self._batcher = Batcher(session.run, session.signature, batching)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the batch that the server put together."""
        return answer(pb_utils, requests, self._batcher.execute, self._session.adopt)

    def finalize(self) -> None:
        """Give the session back."""
        del self._batcher, self._session
