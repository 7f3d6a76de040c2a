"""The server under test: its addresses, and what it says of a model. HTTP by the standard library.

A closed server (``jitney serve``, the proxy of docker-compose) does not list its repository; its
statistics, which are open, name every model that is loaded.
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jitney.errors import InvalidArgumentError, UnavailableError, nearest

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Tensor:
    """An input as the configuration has it: ``shape`` without the batch, -1 for a free size."""

    name: str
    datatype: str
    """``FP32``, ``BYTES``, …"""
    shape: tuple[int, ...]
    optional: bool


@dataclass(frozen=True)
class Model:
    """What a sweep needs to know of a model."""

    name: str
    inputs: tuple[Tensor, ...]
    max_batch: int
    """0: the model takes no batches."""
    decoupled: bool
    parts: tuple[str, ...]
    """The models of an ensemble, in their order."""
    outputs: tuple[str, ...]

    @property
    def language(self) -> bool:
        """Whether it speaks the protocol of Triton's language models: text in, a stream out."""
        return self.decoupled and self.has("text_input")

    def has(self, name: str) -> bool:
        """Whether it has an input of the name."""
        return any(tensor.name == name for tensor in self.inputs)


@dataclass(frozen=True)
class Target:
    """Addresses of one server: ``host:port``, and the metrics' whole URL."""

    grpc: str
    http: str
    metrics: str

    @classmethod
    def of(cls, grpc: str, http_address: str | None, metrics: str | None) -> "Target":
        """What is not given is on the same host at Triton's usual port."""
        host, found, port = grpc.rpartition(":")
        if not found or not host or not port.isdigit():
            raise InvalidArgumentError.of("url", grpc, "HOST:PORT of the server's gRPC")
        return cls(grpc, http_address or f"{host}:8000", metrics or f"http://{host}:8002/metrics")

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON at a path of the HTTP address; with ``body``, the answer to it.

        Raises UnavailableError if nobody answers, InvalidArgumentError if the server refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.http}{path}", data)
        return json.loads(_fetch(request, "the server's HTTP", "--http-url"))

    def server(self) -> str:
        """Name and version."""
        said = self.get("/v2")
        return f"{said.get('name', 'unknown')} {said.get('version', '')}".strip()

    def loaded(self) -> list[str]:
        """Names of the models that are loaded."""
        return sorted({model["name"] for model in self.get("/v2/models/stats")["model_stats"]})

    def model(self, name: str | None) -> Model:
        """A model by its name; None takes the only language model there is.

        Raises InvalidArgumentError with the names that there are.
        """
        names = self.loaded()
        if name is not None:
            if name not in names:
                raise InvalidArgumentError(
                    f"the server has no model {name!r}{nearest(name, names)}; "
                    f"it has {', '.join(names) or 'none'}"
                )
            return self._described(name)
        speaking = [model for model in map(self._described, names) if model.language]
        if len(speaking) != 1:
            raise InvalidArgumentError(
                f"say which model: the server has {', '.join(names) or 'none'}, "
                f"{len(speaking)} of them language models"
            )
        return speaking[0]

    def _described(self, name: str) -> Model:
        config = self.get(f"/v2/models/{quote(name)}/config")
        steps = config.get("ensemble_scheduling", {}).get("step", [])
        return Model(
            name=name,
            inputs=tuple(_tensor(tensor) for tensor in config["input"]),
            max_batch=int(config.get("max_batch_size", 0)),
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            parts=tuple(dict.fromkeys(step["model_name"] for step in steps)),
            outputs=tuple(tensor["name"] for tensor in config["output"]),
        )

    def statistics(self, name: str) -> dict[str, Any]:
        """Triton's own counts of a model, all of its versions added up by the caller."""
        said: dict[str, Any] = self.get(f"/v2/models/{quote(name)}/stats")
        return said

    def metrics_text(self) -> str:
        """The Prometheus endpoint. Raises UnavailableError if nobody answers."""
        return _fetch(urllib.request.Request(self.metrics), "the metrics", "--metrics-url")


def _tensor(said: dict[str, Any]) -> Tensor:
    kind = said["data_type"].removeprefix("TYPE_")
    return Tensor(
        name=said["name"],
        datatype="BYTES" if kind == "STRING" else kind,
        shape=tuple(int(size) for size in said["dims"]),
        optional=bool(said.get("optional", False)),
    )


def _fetch(request: urllib.request.Request, what: str, option: str) -> str:
    # Straight to the server: a proxy that the environment names does not reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return str(reply.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace").strip()
        raise InvalidArgumentError(
            f"{request.full_url} answers {error.code}: {text or error.reason}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(
            f"{what} cannot be reached at {request.full_url} ({reason}); {option} says where it is"
        ) from None
