"""The server under test: its addresses, the way to it, and its models.

Loaded models are found through the server's statistics, since ``jitney serve`` and the proxy of
docker-compose refuse the repository index. Where the statistics are refused too, the user must name
the model.
"""

import http.client
import re
import string
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
from jitney.access import Access
from jitney.errors import InvalidArgumentError, UnavailableError, nearest

from jitney_measure.pages.text import printable

_HOST = r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/@\[\]]+)"
_PORT = r"(:(?P<port>[1-9][0-9]{0,4}))"
_ADDRESS = _HOST + _PORT
_METRICS = rf"https?://{_HOST}{_PORT}?(/[^\s@]*)?"
_MAX_PORT = 65535
_SENT_AS_THEY_ARE = "".join(set(string.punctuation) - set("/?#"))
"""In the name of a model. A server (2.51) does not decode a path, and knows no quoted names."""


class RefusedError(InvalidArgumentError):
    """The server or a proxy before it answered, but not with what it was asked for."""


class Tensor(msgspec.Struct, frozen=True):
    """An input as the configuration has it: ``dims`` without the batch, -1 for a free size."""

    name: str
    data_type: str  # ``TYPE_FP32``, ``TYPE_STRING``, …
    dims: tuple[int, ...] = ()
    optional: bool = False


class Model(msgspec.Struct, frozen=True):
    """What a sweep needs of a model's configuration, in the server's JSON form."""

    input: tuple[Tensor, ...]
    name: str = ""
    max_batch_size: int = 0  # 0: the model takes no batches
    model_transaction_policy: dict[str, Any] = {}
    ensemble_scheduling: dict[str, Any] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The models that work: of an ensemble its parts, else the model itself."""
        steps = self.ensemble_scheduling.get("step", ())
        return tuple(dict.fromkeys(step["model_name"] for step in steps)) or (self.name,)

    @property
    def language(self) -> bool:
        """Whether it has the protocol of Triton's language models: text in, a stream out."""
        return self.model_transaction_policy.get("decoupled", False) and self.has("text_input")

    def has(self, name: str) -> bool:
        """Whether it has an input of the name."""
        return any(tensor.name == name for tensor in self.input)


class _Loaded(msgspec.Struct):
    model_stats: list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """Addresses of one server: ``host:port``, and the URL of its metrics, None if there is none."""

    grpc: str
    http: str
    metrics: str | None
    access: Access = field(default_factory=Access)
    timeout_s: float = 30.0

    @classmethod
    def of(
        cls, grpc: str, http_address: str | None, metrics: str | None, access: Access | None = None
    ) -> "Target":
        """The default addresses are Triton's usual ports on the same host. TLS means that the
        server is behind a proxy: then the default for HTTP is gRPC's address, and there is none for
        the metrics. Raises InvalidArgumentError."""
        address = "HOST:PORT without http://, and [ADDRESS]:PORT for IPv6"
        url = "http://HOST:PORT/metrics, without a password"
        _check_address("url", grpc, _ADDRESS, address)
        if http_address is not None:
            _check_address("http_url", http_address, _ADDRESS, address)
        if metrics is not None:
            _check_address("metrics_url", metrics, _METRICS, url)
        access = access or Access()
        if access.tls:
            return cls(grpc, http_address or grpc, metrics, access)
        host = grpc.rpartition(":")[0]
        return cls(
            grpc,
            http_address or f"{host}:8000",
            metrics or f"http://{host}:8002/metrics",
            access,
        )

    def address(self, protocol: str) -> str:
        """As perf_analyzer takes it."""
        if protocol == "grpc":
            return self.grpc
        return f"https://{self.http}" if self.access.tls else self.http

    def get(self, path: str, body: Any = None, kind: Any = Any) -> Any:
        """The JSON at a path of the HTTP address; with ``body``, the answer to it. ``kind``: the
        type that it is read as.

        Raises UnavailableError if nobody answers, RefusedError if the server refuses.
        """
        url = f"{self.access.scheme}://{self.http}{path}"
        text = self._fetch(url, "--http-url", None if body is None else msgspec.json.encode(body))
        try:
            return msgspec.json.decode(text or "null", type=kind, strict=False)
        except msgspec.MsgspecError as error:
            raise RefusedError(f"{url} does not answer as Triton does: {error}") from None

    def server(self) -> str:
        """Name and version."""
        answer = self.get("/v2", kind=dict[str, Any])
        return f"{answer.get('name', 'unknown')} {answer.get('version', '')}".strip()

    def model(self, name: str | None) -> Model:
        """A model by its name; None takes the only language model.

        Raises InvalidArgumentError with the names of the loaded models.
        """
        try:
            loaded = self.get("/v2/models/stats", kind=_Loaded)
        except RefusedError as error:
            if name is None:
                raise InvalidArgumentError(
                    f"say which model: the server refuses to list its models ({error})"
                ) from None
            return self._described(name)  # an unknown name is refused by the server
        names = sorted({str(stats.get("name", "")) for stats in loaded.model_stats})
        listed = ", ".join(names) or "none"
        if name is None:
            return self._only_language_model(names, listed)
        if name not in names:
            raise InvalidArgumentError(
                f"the server has no model {name!r}{nearest(name, names)}; it has {listed}"
            )
        return self._described(name)

    def _only_language_model(self, names: list[str], listed: str) -> Model:
        found = []
        for name in names:
            model = self._described(name)
            if model.language:
                found.append(model)
        if len(found) != 1:
            raise InvalidArgumentError(
                f"say which model: the server has {listed}, {len(found)} of them language models"
            )
        return found[0]

    def _described(self, name: str) -> Model:
        found = self.get(model_path(name, "config"), kind=Model)
        return msgspec.structs.replace(found, name=name)

    def metrics_text(self) -> str:
        """The Prometheus endpoint. Raises UnavailableError if nobody answers, RefusedError."""
        if self.metrics is None:
            raise UnavailableError("the metrics are not published here; --metrics-url says where")
        return self._fetch(self.metrics, "--metrics-url")

    def _fetch(self, url: str, option: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(url, body)
        own = urlsplit(f"{self.access.scheme}://{self.http}")
        asked = urlsplit(url)
        if (own.scheme, own.hostname) == (asked.scheme, asked.hostname):
            # No key goes to another host, nor in clear text if the server has TLS.
            for name, value in self.access.headers:
                request.add_unredirected_header(name, value)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # the environment's proxy does not reach the server
            urllib.request.HTTPSHandler(context=self.access.context),
        )
        try:
            with opener.open(request, timeout=self.timeout_s) as reply:
                return str(reply.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            text = printable(self.access.hide(error.read().decode("utf-8", "replace")))
            hint = "; --api-key-file or --header gives a key" if error.code in (401, 403) else ""
            raise RefusedError(f"{url} answers {error.code}: {text[:900]}{hint}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = printable(self.access.hide(str(error)))
            raise UnavailableError(
                f"nothing answers at {url} ({reason}); {option} says where it is"
            ) from None


def _check_address(option: str, text: str, pattern: str, expected: str) -> None:
    """Raises InvalidArgumentError for what does not have the pattern, or has too great a port."""
    match = re.fullmatch(pattern, text)
    if match is not None:
        port = match["port"]  # None in a URL without one
        if port is None or int(port) <= _MAX_PORT:
            return
    # What is before an @ is usually a name and a password: it is not shown.
    raise InvalidArgumentError.of(option, text.rpartition("@")[2], expected)


def model_path(name: str, leaf: str) -> str:
    """The path of ``config``, ``stats``, ``generate`` … of a model."""
    return f"/v2/models/{quote(name, safe=_SENT_AS_THEY_ARE)}/{leaf}"
