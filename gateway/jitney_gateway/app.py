"""The gateway's endpoints: bodies in, answers and streams out, errors as OpenAI's objects.

Stateless but for what it counts and, for half a minute, what it knows of a model (files and batches
are on the disk): several gateways may stand before one server, and one may be ended at any time.
"""

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
from jitney_gateway.keys import Keys
from jitney_gateway.language import LanguageEndpoints
from jitney_gateway.mounting import MountedService
from jitney_gateway.pooling import Pool, classify, embed, rerank
from jitney_gateway.refusals import (
    Describe,
    StatusError,
    as_json,
    describe,
    describe_for_messages,
    fault,
    name_clients_field,
    refusal,
)
from jitney_gateway.server_client import ServedModel, ServerClient, UnknownModelError
from jitney_gateway.server_load import REQUEST_HEADER, ServerLoad
from jitney_gateway.tracing_middleware import TracingMiddleware
from jitney_gateway.wire import (
    MAX_BODY_BYTES,
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    body_schemas,
    decode,
)

_LOG = logging.getLogger(__name__)

_WITHOUT_KEY = ("/health", "/metrics")
"""Paths that need no key, and get no span."""
_MAX_ID_LENGTH = 40
"""Of a request's id that the client chooses."""


def make_app(
    backend: ServerClient,
    keys: Mapping[str, str] | Keys,
    *,
    tracing: Tracing | None = None,
    load: ServerLoad | None = None,
    services: Sequence[MountedService] = (),
    url: str = "",
) -> FastAPI:
    """The application. ``keys``: API key -> name of its owner; none: every client is welcome.
    ``services``: what else is mounted; it asks this gateway at its own ``url``."""
    gateway = Gateway(backend, keys, load)
    endpoints = gateway.endpoints()
    for service in services:
        endpoints += service.endpoints(backend)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service.working(url))
            yield
        await backend.close()
        if tracing is not None:
            tracing.close()

    app = FastAPI(title="Jitney", lifespan=life, docs_url=None, redoc_url=None)
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    schemas, components = body_schemas(bodies)
    schema_of = dict(zip(bodies, schemas, strict=True))
    for endpoint in endpoints:
        schema = None if endpoint.body is None else schema_of[endpoint.body]
        _add(app, gateway, endpoint, schema)
    app.openapi()["components"] = {"schemas": components | ERRORS}
    app.add_exception_handler(HTTPException, _no_such_page)
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing, without=_WITHOUT_KEY)
    return app


def _add(app: FastAPI, gateway: "Gateway", endpoint: Endpoint, schema: Schema | None) -> None:
    """Make the route of an endpoint, whose body has this schema."""
    answer = endpoint.answer
    if endpoint.body is not None:
        answer = partial(_read, answer, endpoint.body)
    app.add_api_route(
        endpoint.path,
        partial(gateway.serve, endpoint.path, answer),
        methods=[endpoint.method],
        name=endpoint.path,
        summary=endpoint.path,
        description=endpoint.text,
        response_class=Response,
        openapi_extra=operation(endpoint, schema),
    )


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    said = StatusError(error.status_code, f"{path}: {error.detail}")
    response = refusal(said, _form_of(path))
    response.headers.update(error.headers or {})
    return response


def _form_of(path: str) -> Describe:
    """How a refusal is told there."""
    return describe_for_messages if path.startswith("/v1/messages") else describe


async def _read(answer: Handler, type_: type[Any], request: Request) -> Response:
    """Decode the body of a request, and answer it."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise StatusError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
    body = decode(bytes(data), type_)
    try:
        return await answer(request, body)
    except InvalidArgumentError as error:
        raise name_clients_field(error, body) from None


class Gateway:
    """What the endpoints share, and the endpoints that are nobody else's."""

    def __init__(
        self, backend: ServerClient, keys: Mapping[str, str] | Keys, load: ServerLoad | None
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._load = load
        self._figures = GatewayMetrics()
        self._language = LanguageEndpoints(backend, self._figures)

    def endpoints(self) -> list[Endpoint]:
        """All of the gateway's own."""
        pooled = ("object", "data", "model", "usage")
        page = partial(Endpoint, method="GET")
        return [
            *self._language.endpoints(),
            self._pooling("/v1/embeddings", embed, EmbeddingRequest, pooled),
            self._pooling("/v1/classify", classify, ClassifyRequest, pooled),
            self._pooling("/v1/rerank", rerank, RerankRequest, ("model", "results", "usage")),
            page(
                path="/v1/models",
                answer=self.models,
                text="The models that serve one of the endpoints.",
                fields=("object", "data"),
            ),
            page(
                path="/v1/models/{name:path}",
                answer=self.model,
                text="One of the models.",
                fields=("id", "object", "created", "owned_by"),
            ),
            page(path="/health", answer=self.health, text="Whether the server is ready."),
            page(
                path="/metrics",
                answer=self.metrics,
                text="What Prometheus reads.",
                content={"text/plain": {"schema": TEXT}},
            ),
        ]

    def _pooling(
        self, path: str, answer: Pool, body: type[Any], fields: tuple[str, ...]
    ) -> Endpoint:
        """An endpoint that embeds, classifies or ranks."""
        return Endpoint(
            method="POST",
            path=path,
            answer=partial(self.pool, answer),
            text=body.__doc__,
            body=body,
            fields=fields,
        )

    async def serve(self, path: str, answer: Handler, request: Request) -> Response:
        """Check the key, answer, count; every error becomes an object."""
        tell = _form_of(path)
        state = request.state
        state.path = path
        state.id = _id_of(request.headers)
        # Known later, or never: a refusal is counted with what was known by then.
        state.model = ""
        state.key = ""
        state.limits = ""
        try:
            if path not in _WITHOUT_KEY:
                state.key = self._owner(request.headers)
                if isinstance(self._keys, Keys):
                    state.limits = self._keys.limits(state.key)
            response = await answer(request)
        except ClientDisconnect:
            response = refusal(CancelledError("the client has gone"), tell)
        except JitneyError as error:
            response = refusal(error, tell)
            if response.status_code >= 500:
                _LOG.warning("request %s: %s", state.id, error)
        except Exception:
            response = refusal(fault(state.id), tell)
        response.headers["x-request-id"] = state.id
        form = request.headers.get(REQUEST_HEADER)
        if form and self._load is not None:
            response.headers.update(await self._load.header(form, state.model))
        self._figures.request(path, state.model, response.status_code)
        return response

    def _owner(self, headers: Mapping[str, str]) -> str:
        """Of the key that a request came with. Raises StatusError."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        key = key.strip()
        for known, name in self._keys.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                return name
        if self._keys:
            raise StatusError(401, "the header Authorization must be: Bearer, and a known API key")
        return ""

    async def pool(self, answer: Pool, request: Request, body: Any) -> Response:
        """Embed, classify or rank."""
        model = await self._backend.look(body.model)
        await self._backend.check(request.url.path, body.model)
        request.state.model = body.model
        return as_json(await answer(self._backend, model, body))

    async def models(self, request: Request) -> Response:
        """All that serve one of the endpoints."""
        found: dict[str, ServedModel] = {}
        for name in await self._backend.names():
            with contextlib.suppress(UnknownModelError):  # it has just been unloaded
                found[name] = await self._backend.look(name)
        for base in list(found.values()):
            if base.description is None:
                continue
            for name in base.description.adapters:
                found.setdefault(name, base.adapter(name))
        entries = [_entry(model) for model in found.values()]
        data = [entry for entry in entries if entry is not None]
        return as_json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of them."""
        entry = _entry(await self._backend.look(request.path_params["name"]))
        if entry is None:
            raise UnknownModelError("this model serves none of the gateway's endpoints")
        return as_json(entry)

    async def health(self, request: Request) -> Response:
        """Whether the server is ready."""
        if not await self._backend.is_ready():
            raise UnavailableError("the server is not ready")
        return Response()

    async def metrics(self, request: Request) -> Response:
        """What Prometheus reads."""
        page = self._figures.page()
        if self._load is not None:
            page += await self._load.page()
        return Response(page, media_type="text/plain; version=0.0.4")


def _id_of(headers: Mapping[str, str]) -> str:
    """The id of a request: the client's, or one of our own if that cannot be used."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)


def _entry(model: ServedModel) -> dict[str, Any] | None:
    """What the list of models says of one. None: it serves none of the endpoints."""
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
