"""The gateway as an ASGI application: its routes, keys, error responses and metrics.

A gateway keeps what it counts, and for half a minute what it knows of a model; files and batches
are on the disk. So several gateways may stand before one server, and one may be ended at any time.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from jitney.errors import CancelledError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.tracing import Tracing
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jitney_gateway.document import ERRORS, TEXT, Endpoint, Handler, Schema, operation
from jitney_gateway.gateway_metrics import GatewayMetrics
from jitney_gateway.keys import KeySource
from jitney_gateway.language import LanguageEndpoints
from jitney_gateway.mounting import MountedService
from jitney_gateway.pooling import PoolingFunction, classify, embed, rerank
from jitney_gateway.refusals import (
    DescribeError,
    StatusError,
    UnknownModelError,
    as_json,
    describe,
    describe_for_messages,
    error_response,
    name_clients_field,
    unforeseen_error,
)
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.server_load import REQUEST_HEADER, ServerLoad
from jitney_gateway.tracing_middleware import TracingMiddleware
from jitney_gateway.wire import (
    MAX_BODY_BYTES,
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    WireRecord,
    body_schemas,
    decode,
)

_LOG = logging.getLogger(__name__)

_OPERATIONAL_PATHS = ("/health", "/metrics")
"""Paths that those who run the gateway ask: they need no key and get no span."""
_BODY_S = 120.0
"""Seconds that a client may take to send a body. Files have no such bound."""
_MAX_ID_LENGTH = 40
"""Of the id that a client gives its request."""


# ------------------------------------------------------------------------------- the application


def make_app(
    server: ServerClient,
    keys: KeySource,
    *,
    tracing: Tracing | None = None,
    load: ServerLoad | None = None,
    services: Sequence[MountedService] = (),
    url: str = "",
) -> FastAPI:
    """The application. ``url`` is the gateway's own address, at which the mounted ``services`` send
    it requests."""
    gateway = Gateway(server, keys, load)
    endpoints = gateway.endpoints()
    for service in services:
        endpoints += service.endpoints(server)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service.working(url))
            yield  # while the gateway serves
        await server.close()
        if tracing is not None:
            tracing.close()

    app = FastAPI(title="Jitney", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_routes(app, gateway, endpoints)
    app.add_exception_handler(HTTPException, _answer_unknown_route)
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing, without=_OPERATIONAL_PATHS)
    return app


def _add_routes(app: FastAPI, gateway: "Gateway", endpoints: Sequence[Endpoint]) -> None:
    """Make a route of each endpoint, and complete the OpenAPI document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    schemas = body_schemas(bodies)
    for endpoint in endpoints:
        if endpoint.body is None:
            _add_route(app, gateway, endpoint, endpoint.answer, None)
        else:
            handler = partial(_answer_with_body, endpoint.answer, endpoint.body)
            _add_route(app, gateway, endpoint, handler, schemas.of_type[endpoint.body])
    # FastAPI makes the document once and keeps it, so what is added here stays.
    document = app.openapi()
    document["components"] = {"schemas": schemas.components | ERRORS}


def _add_route(
    app: FastAPI,
    gateway: "Gateway",
    endpoint: Endpoint,
    handler: Handler,
    body_schema: Schema | None,
) -> None:
    app.add_api_route(
        endpoint.path,
        partial(gateway.serve, endpoint.path, handler),
        methods=[endpoint.method],
        name=endpoint.path,
        summary=endpoint.path,
        description=endpoint.text,
        response_class=Response,
        openapi_extra=operation(endpoint, body_schema),
    )


async def _answer_unknown_route(request: Request, error: Exception) -> Response:
    """The response if no endpoint has the request's path, or its method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    refusal = StatusError(error.status_code, f"{path}: {error.detail}")
    response = error_response(refusal, _describe_error_of(path))
    response.headers.update(error.headers or {})
    return response


def _describe_error_of(path: str) -> DescribeError:
    """The form of errors in the API that ``path`` belongs to."""
    return describe_for_messages if path.startswith("/v1/messages") else describe


async def _answer_with_body(answer: Handler, type_: type[WireRecord], request: Request) -> Response:
    """Read the body of a request and answer it. A refusal names the body's own field."""
    body = decode(await _read_body(request), type_)
    try:
        return await answer(request, body)
    except InvalidArgumentError as error:
        raise name_clients_field(error, body) from None


async def _read_body(request: Request) -> bytes:
    """Raises StatusError for a body that is too large or too slow, as soon as that is seen."""
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise StatusError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
    except TimeoutError:
        raise StatusError(408, f"the body did not come within {_BODY_S:.0f} s") from None
    return bytes(data)


# ------------------------------------------------------------------------------- the gateway


class Gateway:
    """Answers every request, and has the endpoints that are not those of language models."""

    def __init__(self, server: ServerClient, keys: KeySource, load: ServerLoad | None) -> None:
        self._server = server
        self._keys = keys
        self._load = load
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
            Endpoint(
                method="GET",
                path="/health",
                answer=self.health,
                text="Whether the server is ready.",
            ),
            Endpoint(
                method="GET",
                path="/metrics",
                answer=self.metrics,
                text="What Prometheus reads.",
                content={"text/plain": {"schema": TEXT}},
            ),
        ]

    def _pooling_endpoints(self) -> list[Endpoint]:
        list_fields = ("object", "data", "model", "usage")
        rank_fields = ("model", "results", "usage")
        return [
            self._pooling_endpoint("/v1/embeddings", embed, EmbeddingRequest, list_fields),
            self._pooling_endpoint("/v1/classify", classify, ClassifyRequest, list_fields),
            self._pooling_endpoint("/v1/rerank", rerank, RerankRequest, rank_fields),
        ]

    def _pooling_endpoint(
        self,
        path: str,
        function: PoolingFunction,
        body: type[WireRecord],
        fields: tuple[str, ...],
    ) -> Endpoint:
        return Endpoint(
            method="POST",
            path=path,
            answer=partial(self.pool, function),
            text=body.__doc__,
            body=body,
            fields=fields,
        )

    async def serve(self, path: str, handler: Handler, request: Request) -> Response:
        """Answer a request with ``handler``, if it has a key. Every error becomes a response."""
        describe_error = _describe_error_of(path)
        state = request.state
        _set_state(request, path)
        try:
            if path not in _OPERATIONAL_PATHS:
                state.owner = self._owner_of_key(request.headers)
                state.limits = self._keys.limits(state.owner)
            response = await handler(request)
        except ClientDisconnect:
            response = error_response(CancelledError("the client has gone"), describe_error)
        except JitneyError as error:
            response = error_response(error, describe_error)
            if response.status_code >= 500:
                _LOG.warning("request %s: %s", state.id, error)
        except Exception:
            response = error_response(unforeseen_error(state.id), describe_error)
        response.headers["x-request-id"] = state.id
        load_form = request.headers.get(REQUEST_HEADER)
        if load_form and self._load is not None:
            # An adapter has no load of its own. No model is named if the request was refused early.
            model = self._server.base_of(state.model)
            response.headers.update(await self._load.header(load_form, model))
        self._metrics.count_request(path, state.model, response.status_code)
        return response

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
            # In a time that does not tell how much of a wrong key is right.
            if hmac.compare_digest(known.encode(), given):
                return owner
        raise StatusError(401, "the header Authorization must be: Bearer, and a known API key")

    async def pool(self, function: PoolingFunction, request: Request, body: Any) -> Response:
        """Embed, classify or rank."""
        model = await self._server.find_model_for(request.url.path, body.model)
        request.state.model = body.model
        return as_json(await function(self._server, model, body))

    async def models(self, request: Request) -> Response:
        """The models and adapters that serve one of the endpoints. A model that does not answer is
        left out."""
        models: dict[str, ServedModel] = {}
        for name in await self._server.ready_models():
            try:
                models[name] = await self._server.find_model(name)
            except UnknownModelError:
                continue  # it has just been unloaded
            except JitneyError as error:
                _LOG.warning("model %r is not listed: %s", name, error)
        for base in list(models.values()):
            adapters = [] if base.description is None else base.description.adapters
            for name in adapters:
                if name not in models:
                    models[name] = base.adapter(name)
        entries = [_entry(model) for model in models.values()]
        data = [entry for entry in entries if entry is not None]
        return as_json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of the models."""
        entry = _entry(await self._server.find_model(request.path_params["name"]))
        if entry is None:
            raise UnknownModelError("this model serves none of the gateway's endpoints")
        return as_json(entry)

    async def health(self, request: Request) -> Response:
        """Whether the server is ready."""
        if not await self._server.is_ready():
            raise UnavailableError("the server is not ready")
        return Response()

    async def metrics(self, request: Request) -> Response:
        """What Prometheus reads."""
        text = self._metrics.exposition()
        if self._load is not None:
            text += await self._load.exposition()
        return Response(text, media_type="text/plain; version=0.0.4")


def _set_state(request: Request, path: str) -> None:
    """Set what handlers, metrics and spans read in ``request.state``."""
    state = request.state
    state.path = path
    state.id = _id_of(request.headers)
    # The next three become known later, or never: a refusal is counted with what is known by then.
    state.model = ""
    state.owner = ""  # the name of the key's owner
    state.limits = ""  # the limits of that owner, as text


def _id_of(headers: Mapping[str, str]) -> str:
    """The id of a request: the client's, or one of our own if that cannot be used."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)


def _entry(model: ServedModel) -> dict[str, Any] | None:
    """A model's entry in the list of models. None: it serves none of the endpoints."""
    if model.description is None and not model.endpoint:
        return None
    entry: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "jitney",
    }
    if model.description is not None:
        entry["max_model_len"] = model.description.max_model_len
    if model.base is not None:
        entry["parent"] = model.base
    return entry
