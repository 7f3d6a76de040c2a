"""The class that the server's stub looks for. Thin: loading is here, serving is in ``service``.

The server calls ``auto_complete_config`` in a short-lived process of its own (so nothing heavy is
imported at the top), then ``initialize`` once, ``execute`` for each request and ``finalize`` once,
after every response has been sent.
"""

import gc
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import triton_python_backend_utils as pb_utils

from jitney.config import EngineConfig
from jitney.engine.quiet import quiet_imports
from jitney.errors import JitneyError
from jitney.frontend.contract import complete_config
from jitney.frontend.termination import drain_at_signals
from jitney.read_config import check_models_exist, load_config
from jitney.server_log import log_to_server
from jitney.server_watch import end_with_server

if TYPE_CHECKING:
    from jitney.frontend.service import Service

_LOG = logging.getLogger(__name__)


class TritonPythonModel:
    """One instance of one model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declare the tensors of the contract, so that ``config.pbtxt`` need not."""
        return complete_config(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and start its threads.

        Raises TritonModelException with the reason if it cannot be served; the server then reports
        the model as unavailable and goes on with the others.
        """
        # First: if the server dies during the load, which can last for minutes, this process ends
        # with it.
        end_with_server()
        log_to_server(pb_utils.Logger)
        quiet_imports()
        version_folder = Path(args["model_repository"]) / args["model_version"]
        try:
            options = load_config(version_folder / "model.json", options_of(args))
            check_models_exist(options)
            config = assign_device(options, args)
            service = _start(config, args)
            self._service = service
            drain_at_signals(service, config.drain_s)
        except JitneyError as error:
            raise pb_utils.TritonModelException(error.client_message) from None
        except MemoryError:
            raise pb_utils.TritonModelException("the model does not fit into memory") from None

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests on. Never blocks on the engine and never raises."""
        for request in requests:
            self._service.accept(request)

    def is_ready(self) -> bool:
        """Whether requests are served now. Servers newer than 2.51 call this."""
        return self._service.is_ready

    def finalize(self) -> None:
        """Stop the threads and give the memory back."""
        self._service.close()
        gc.collect()


def options_of(args: dict[str, str]) -> dict[str, str]:
    """Options that ``config.pbtxt`` gives as ``parameters``. They replace those in model.json.

    Parameters with a name in capitals (``EXECUTION_ENV_PATH``, …) are the server's own.
    """
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items() if not name.isupper()}


def assign_device(config: EngineConfig, args: dict[str, str]) -> EngineConfig:
    """Fill in what the server decides: this instance's device and how many instances share it."""
    groups = json.loads(args["model_config"]).get("instance_group", [])
    on_gpu = args["model_instance_kind"] == "GPU"
    gpu = int(args["model_instance_device_id"]) if on_gpu else None
    device = config.device
    if on_gpu and device == "auto":
        device = f"cuda:{gpu}"
    # ``count`` of a group is the number of its instances on each of its devices.
    counts = [int(group.get("count", 1)) for group in groups if _is_on_device(group, gpu)]
    # Option ``instances`` may be larger: other models may share the device. And without any group
    # in config.pbtxt there is still this instance.
    num_instances = max(config.instances, sum(counts), 1)
    return msgspec.structs.replace(config, instances=num_instances, device=device)


def _is_on_device(group: dict[str, Any], gpu: int | None) -> bool:
    """Whether a group's instances run on GPU number ``gpu``, or, if that is None, on the CPU."""
    if gpu is None:
        return group.get("kind") != "KIND_GPU"
    return group.get("kind") == "KIND_GPU" and gpu in group.get("gpus", [])


def _start(config: EngineConfig, args: dict[str, str]) -> "Service":
    from jitney.engine.supervisor import SupervisedEngine
    from jitney.frontend.service import Service
    from jitney.text.tokenizer import Tokenizer, TokenizerData
    from jitney.tracing import Tracing

    tracing = Tracing(config.trace_endpoint, "jitney") if config.trace_endpoint else None
    engine = SupervisedEngine(config)
    labels = {
        "model": args["model_name"],
        "version": args["model_version"],
        "model_instance": args["model_instance_name"],
    }
    tokenizer_data = engine.start()
    try:
        tokenizer = Tokenizer(msgspec.msgpack.decode(tokenizer_data, type=TokenizerData))
        return Service(engine, tokenizer, labels, tracing)
    except BaseException:
        engine.kill()
        raise
