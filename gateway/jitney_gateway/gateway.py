"""Answers every request of a gateway: keys, endpoints, error responses and metrics.

``app.py`` makes the application of it. ``language.py`` has the endpoints of language models.
``pooling.py`` makes the answers of models that embed, classify or rank.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request, Response
from jitney import __version__
from jitney.errors import CancelledError, InvalidArgumentError, JitneyError, UnavailableError
from starlette.requests import ClientDisconnect

from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.document import TEXT, Endpoint, Handler
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.gateway_metrics import GatewayMetrics
from jitney_gateway.http_answers import as_json, error_response
from jitney_gateway.keys import KeySource
from jitney_gateway.language import LanguageEndpoints
from jitney_gateway.pooling import (
    PoolingFunction,
    classify,
    embed,
    rerank,
    rerank_for_cohere,
    score,
)
from jitney_gateway.pooling_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from jitney_gateway.refusals import (
    DescribeError,
    StatusError,
    UnknownModelError,
    describe,
    describe_for_messages,
    unforeseen_error,
)
from jitney_gateway.request_body import (
    check_content_type,
    check_not_encoded,
    check_origin,
    read_body,
)
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.server_load import REQUEST_HEADER, ServerLoad
from jitney_gateway.wire import WireRecord, decode

_LOG = logging.getLogger(__name__)

IGNORED_HEADER = "jitney-ignored"
"""The header of a response that names the fields of the request that had no effect."""
OPERATIONAL_PATHS = ("/health", "/health/ready", "/ping", "/metrics")
"""Paths that those who run the gateway ask: they need no key and get no span."""
_MAX_ID_LENGTH = 40
"""Longest id that a client may give its request."""
_MOST_LOGGED = 1000
"""Most lines in the log about ignored fields. There is one for each path and set of fields."""


class PoolingEndpoint(NamedTuple):
    """An endpoint that embeds, classifies or ranks."""

    path: str
    served: str
    """The endpoint that a model must serve for this one."""
    function: PoolingFunction
    body: type[WireRecord]
    fields: tuple[str, ...]
    """The fields that every answer has."""


_LIST = ("object", "data", "model", "usage")
_RANKS = ("model", "results", "usage")
_COHERE = ("id", "results", "meta")
_POOLING_ENDPOINTS = (
    PoolingEndpoint("/v1/embeddings", "/v1/embeddings", embed, EmbeddingRequest, _LIST),
    PoolingEndpoint("/v1/classify", "/v1/classify", classify, ClassifyRequest, _LIST),
    PoolingEndpoint("/v1/rerank", "/v1/rerank", rerank, RerankRequest, _RANKS),
    PoolingEndpoint("/rerank", "/v1/rerank", rerank, RerankRequest, _RANKS),
    PoolingEndpoint("/v2/rerank", "/v1/rerank", rerank_for_cohere, RerankRequest, _COHERE),
    PoolingEndpoint("/score", "/v1/rerank", score, ScoreRequest, _LIST),
    PoolingEndpoint("/v1/score", "/v1/rerank", score, ScoreRequest, _LIST),
)


def describe_error_of(path: str) -> DescribeError:
    """The form of errors in the API that ``path`` belongs to."""
    return describe_for_messages if path.startswith("/v1/messages") else describe


class Gateway:
    """Answers every request, and has the endpoints that are not those of language models."""

    def __init__(
        self,
        server: ServerClient,
        keys: KeySource,
        load: ServerLoad | None,
        *,
        strict: bool = False,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._server = server
        self._keys = keys
        self._load = load
        self._strict = strict
        self._allowed_origins = allowed_origins
        self._started_at = int(time.time())
        self._logged: set[tuple[str, str]] = set()
        """Path and ignored fields of requests of which the log has told."""
        self._metrics = GatewayMetrics()
        self._language = LanguageEndpoints(server, self._metrics)

    def endpoints(self) -> list[Endpoint]:
        """All endpoints of the gateway itself, without those of mounted services."""
        return [
            *self._language.endpoints(),
            *self._pooling_endpoints(),
            Endpoint(
                method="GET",
                path="/v1/models",
                answer=self.models,
                text="The models that serve one of the endpoints.",
                fields=("object", "data"),
            ),
            Endpoint(
                method="GET",
                path="/v1/models/{name:path}",
                answer=self.model,
                text="One of the models.",
                fields=("id", "object", "created", "owned_by"),
            ),
            *self._health_endpoints(),
            Endpoint(
                method="GET",
                path="/version",
                answer=self.version,
                text="The version of the gateway.",
                fields=("version",),
            ),
            Endpoint(
                method="GET",
                path="/metrics",
                answer=self.metrics,
                text="What Prometheus reads.",
                content={"text/plain": {"schema": TEXT}},
            ),
        ]

    def _health_endpoints(self) -> list[Endpoint]:
        endpoints = []
        # The second is that of the server's own front end, the third that of SageMaker.
        for path in ("/health", "/health/ready", "/ping"):
            endpoint = Endpoint(
                method="GET",
                path=path,
                answer=self.health,
                text="Whether the server is ready.",
            )
            endpoints.append(endpoint)
        return endpoints

    def _pooling_endpoints(self) -> list[Endpoint]:
        endpoints = []
        for row in _POOLING_ENDPOINTS:
            endpoint = Endpoint(
                method="POST",
                path=row.path,
                answer=partial(self.pool, row.served, row.function),
                text=row.body.__doc__,
                body=row.body,
                fields=row.fields,
            )
            endpoints.append(endpoint)
        return endpoints

    async def serve(self, path: str, handler: Handler, request: Request) -> Response:
        """Answer a request with ``handler``, if it has a key. Every error becomes a response."""
        describe_error = describe_error_of(path)
        state = request.state
        self._set_state(request, path)
        try:
            if path not in OPERATIONAL_PATHS:
                state.owner = self._owner_of_key(request.headers)
                state.limits = self._keys.limits(state.owner)
            response = await handler(request)
        except ClientDisconnect:
            response = error_response(CancelledError("the client has gone"), describe_error)
        except asyncio.CancelledError:
            # The gateway stops, and the time is over that open requests had: uvicorn cancels them.
            response = error_response(UnavailableError("the gateway stops"), describe_error)
        except JitneyError as error:
            response = error_response(error, describe_error)
            if response.status_code >= 500:
                _LOG.warning("request %s: %s", state.id, error)
        except Exception:
            response = error_response(unforeseen_error(state.id), describe_error)
        response.headers["x-request-id"] = state.id
        ignored = state.ignored.header()
        if ignored:
            response.headers[IGNORED_HEADER] = ignored
            self._log_ignored(path, state.id, ignored)
        load_form = request.headers.get(REQUEST_HEADER)
        if load_form and self._load is not None:
            # An adapter has no load of its own. No model is named if the request was refused early.
            model = self._server.base_of(state.model)
            response.headers.update(await self._load.header(load_form, model))
        self._metrics.count_request(path, state.model, response.status_code)
        if request.method == "HEAD":
            response.body = b""  # the headers stay, with the length that it had
        return response

    def _set_state(self, request: Request, path: str) -> None:
        """Set what handlers, metrics and spans read in ``request.state``."""
        state = request.state
        state.path = path
        state.id = _id_of(request.headers)
        state.ignored = IgnoredFields(strict=self._strict)
        # The next three become known later, or never: a refusal is counted with what is known by
        # then.
        state.model = ""
        state.owner = ""  # the name of the key's owner
        state.limits = ""  # the limits of that owner, as text

    def _log_ignored(self, path: str, request_id: str, ignored: str) -> None:
        """Log what had no effect, once for all requests that are alike in that."""
        kind = (path, ignored)
        if kind in self._logged or len(self._logged) == _MOST_LOGGED:
            return
        self._logged.add(kind)
        _LOG.warning("request %s to %s: these fields were ignored: %s", request_id, path, ignored)

    def handler_of(self, endpoint: Endpoint) -> Handler:
        """What answers the requests to an endpoint, once their key is known."""
        if endpoint.body is None:
            return partial(self._answer_without_body, endpoint)
        return partial(self._answer_with_body, endpoint.answer, endpoint.body)

    async def _answer_with_body(
        self, answer: Handler, type_: type[WireRecord], request: Request
    ) -> Response:
        """Read the JSON body of a request and answer it. A refusal names the body's own field."""
        if self._allowed_origins:
            check_content_type(request.headers)
        body = decode(await read_body(request), type_, request.state.ignored)
        try:
            return await answer(request, body)
        except InvalidArgumentError as error:
            raise name_clients_field(error, body) from None

    async def _answer_without_body(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request that has no JSON: it has a form or nothing."""
        if endpoint.method != "GET":
            check_not_encoded(request.headers)
            check_origin(request.headers, self._allowed_origins)
        return await endpoint.answer(request)

    def _owner_of_key(self, headers: Mapping[str, str]) -> str:
        """The owner of the key that a request has; empty if no key is needed. Raises
        StatusError."""
        owners = self._keys.refreshed_owners()
        if not owners:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        given = key.strip().encode()
        for known, owner in owners.items():
            # The time that this takes does not tell how much of a wrong key is right.
            if hmac.compare_digest(known.encode(), given):
                return owner
        raise StatusError(401, "the header Authorization must be: Bearer, and a known API key")

    async def pool(
        self, served: str, function: PoolingFunction, request: Request, body: Any
    ) -> Response:
        """Embed, classify or rank with a model that serves the endpoint ``served``."""
        model = await self._server.find_model_for(served, body.model)
        request.state.model = body.model
        return as_json(await function(self._server, model, body))

    async def models(self, request: Request) -> Response:
        """The models and adapters that serve one of the endpoints, also those that are being loaded
        again. A model that does not answer, and has never answered, is left out."""
        models: dict[str, ServedModel] = {}
        for name in await self._server.listed_models():
            try:
                models[name] = await self._find_listed(name)
            except UnknownModelError:
                continue  # it has just been unloaded
            except JitneyError as error:
                _LOG.warning("model %r is not listed: %s", name, error)
        for base in list(models.values()):
            adapters = [] if base.description is None else base.description.adapters
            for name in adapters:
                if name not in models:
                    models[name] = base.adapter(name)
        for alias, name in self._server.aliases.items():
            if name in models:
                models[alias] = models[name].alias(alias)
        entries = [_entry(model, self._started_at) for model in models.values()]
        data = [entry for entry in entries if entry is not None]
        return as_json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of the models."""
        name = request.path_params["name"]
        if not name:
            return await self.models(request)
        model = await self._find_listed(name)
        entry = _entry(model.alias(name), self._started_at)
        if entry is None:
            raise UnknownModelError("this model serves none of the gateway's endpoints")
        return as_json(entry)

    async def _find_listed(self, name: str) -> ServedModel:
        """A model, as it was known last if it does not answer now. Raises as ``find_model``."""
        try:
            return await self._server.find_model(name)
        except UnknownModelError:
            raise
        except JitneyError:
            known = self._server.known_model(name)
            if known is None:
                raise
            return known

    async def health(self, request: Request) -> Response:
        """Whether the server is ready."""
        if not await self._server.is_ready():
            raise UnavailableError("the server is not ready")
        return Response()

    async def version(self, request: Request) -> Response:
        """The version of the gateway."""
        return as_json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus reads."""
        text = self._metrics.exposition()
        if self._load is not None:
            text += await self._load.exposition()
        return Response(text, media_type="text/plain; version=0.0.4")


def _id_of(headers: Mapping[str, str]) -> str:
    """The id of a request: the client's, or one of our own if that cannot be used."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)


def _entry(model: ServedModel, created: int) -> dict[str, Any] | None:
    """A model's entry in the list of models; None if it serves none of the endpoints.

    ``created``: when this gateway was started, in seconds since 1970. Triton does not tell when a
    model was made, and clients expect a time.
    """
    if model.description is None and not model.endpoint:
        return None
    entry: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "jitney",
    }
    if model.description is not None:
        entry["max_model_len"] = model.description.max_model_len
    if model.base is not None:
        entry["parent"] = model.base
    return entry
