"""The server under test: its addresses, and what it says of a model. HTTP by the standard library.

A closed server (``jitney serve``, the proxy of docker-compose) does not list its repository; its
statistics, which are open, name every model that is loaded. A proxy that keeps those back too is
asked for the model by its name.
"""

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from jitney.errors import InvalidArgumentError, UnavailableError, nearest
from jitney.sweep.access import Access
from jitney.sweep.record import printable

_TIMEOUT_S = 30.0
_LATER = (429, 503)
"""A proxy counts our questions among the load's requests."""
_ATTEMPTS = 4
_LONGEST_WAIT_S = 5.0


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")
"""Host and port."""


class RefusedError(InvalidArgumentError):
    """The server or a proxy before it answered, but not with what it was asked for."""


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
    """Addresses of one server: ``host:port``, and the metrics' whole URL, None if there are none to
    be reached."""

    grpc: str
    http: str
    metrics: str | None
    access: Access = field(default_factory=Access)

    @classmethod
    def of(
        cls,
        grpc: str,
        http_address: str | None,
        metrics: str | None,
        access: Access | None = None,
    ) -> "Target":
        """What is not given is on the same host at Triton's usual port; with TLS, where a proxy
        stands before the server, HTTP is at gRPC's port and the metrics are nowhere."""
        host = _host("url", grpc, "gRPC")
        if http_address is not None:
            _host("http_url", http_address, "HTTP")
        if metrics is not None:
            _check_metrics(metrics)
        access = access or Access()
        if access.tls:
            return cls(grpc, http_address or grpc, metrics, access)
        usual = f"http://{host}:8002/metrics"
        return cls(grpc, http_address or f"{host}:8000", metrics or usual, access)

    def address(self, protocol: str) -> str:
        """As perf_analyzer takes it."""
        if protocol == "grpc":
            return self.grpc
        return f"https://{self.http}" if self.access.tls else self.http

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON at a path of the HTTP address; with ``body``, the answer to it.

        Raises UnavailableError if nobody answers, RefusedError if the server refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.access.scheme}://{self.http}{path}", data)
        self._let_in(request)
        text = self._fetch(request, "the server's HTTP", "--http-url")
        try:
            return json.loads(text)
        except ValueError:
            raise RefusedError(f"{request.full_url} does not answer with JSON") from None

    def server(self) -> str:
        """Name and version."""
        said = self._object("/v2")
        return f"{said.get('name', 'unknown')} {said.get('version', '')}".strip()

    def loaded(self) -> list[str]:
        """Names of the models that are loaded."""
        with _triton():
            stats = self._object("/v2/models/stats")["model_stats"]
            return sorted({str(model["name"]) for model in stats})

    def model(self, name: str | None) -> Model:
        """A model by its name; None takes the only language model there is.

        Raises InvalidArgumentError with the names that there are.
        """
        try:
            names = self.loaded()
        except RefusedError as error:
            if name is None:
                raise InvalidArgumentError(
                    f"say which model: which ones there are cannot be asked ({error})"
                ) from None
            return self._described(name)
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
        with _triton():
            config = self._object(f"/v2/models/{quote(name, safe='')}/config")
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
        return self._object(f"/v2/models/{quote(name, safe='')}/stats")

    def _object(self, path: str) -> dict[str, Any]:
        said = self.get(path)
        if not isinstance(said, dict):
            raise RefusedError(f"{self.http}{path} does not answer as Triton does")
        return said

    def metrics_text(self) -> str:
        """The Prometheus endpoint. Raises UnavailableError if nobody answers, RefusedError."""
        if self.metrics is None:
            raise UnavailableError("the metrics are not published here; --metrics-url says where")
        request = urllib.request.Request(self.metrics)
        own, there = urlsplit(f"{self.access.scheme}://{self.http}"), urlsplit(self.metrics)
        if (own.scheme, own.hostname) == (there.scheme, there.hostname):
            self._let_in(request)  # a key goes to no other host, and not in clear beside TLS
        return self._fetch(request, "the metrics", "--metrics-url")

    def _let_in(self, request: urllib.request.Request) -> None:
        for name, value in self.access.headers:
            request.add_unredirected_header(name, value)

    def _fetch(self, request: urllib.request.Request, what: str, option: str) -> str:
        # Straight to the server: a proxy that the environment names does not reach it.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=self.access.context),
        )
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with opener.open(request, timeout=_TIMEOUT_S) as reply:
                    return str(reply.read().decode("utf-8", "replace"))
            except urllib.error.HTTPError as error:
                if error.code not in _LATER or attempt == _ATTEMPTS:
                    raise self._refused(request, error) from None
                time.sleep(min(_wait_s(error), _LONGEST_WAIT_S))
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                reason = printable(self.access.hide(str(reason)))  # maybe what was answered
                raise UnavailableError(
                    f"{what} cannot be reached at {request.full_url} ({reason}); "
                    f"{option} says where it is"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def _refused(
        self, request: urllib.request.Request, error: urllib.error.HTTPError
    ) -> RefusedError:
        said = error.read().decode("utf-8", "replace").strip() or str(error.reason)
        text = f"{request.full_url} answers {error.code}: {printable(self.access.hide(said))[:300]}"
        if error.code in (401, 403):
            text += "; --api-key-file or --header gives a key"
        return RefusedError(text)


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """Around the reading of an answer, which may be another server's."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"the server does not answer as Triton does ({error!r})") from None


def _host(option: str, address: str, what: str) -> str:
    """The host of ``HOST:PORT``, one of IPv6 with its brackets."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        bound = f"HOST:PORT of the server's {what}, without http://, and [ADDRESS]:PORT for IPv6"
        # What stands before an @ is a name and a password, as a rule.
        raise InvalidArgumentError.of(option, address.rpartition("@")[2], bound)
    return match[1]


def _check_metrics(url: str) -> None:
    """Raises InvalidArgumentError, which does not show a password."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole or "@" in parts.netloc:
        shown = url.rpartition("@")[2]
        raise InvalidArgumentError.of(
            "metrics_url", shown, "http://HOST:PORT/metrics or https://, without a password"
        )


def _wait_s(error: urllib.error.HTTPError) -> float:
    """What the answer asks for; one second if it says nothing."""
    said = error.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 1.0


def _tensor(said: dict[str, Any]) -> Tensor:
    kind = said["data_type"].removeprefix("TYPE_")
    return Tensor(
        name=said["name"],
        datatype="BYTES" if kind == "STRING" else kind,
        shape=tuple(int(size) for size in said["dims"]),
        optional=bool(said.get("optional", False)),
    )
