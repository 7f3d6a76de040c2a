"""The gateway as an ASGI application: its routes and its OpenAPI document.

In memory a gateway has only its counts, and what it knows of the server's models. Files and batches
are on the disk. So several gateways may stand before one server, and each may be ended at any time.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from jitney.tracing import Tracing
from starlette.exceptions import HTTPException

from jitney_gateway.document import ERRORS, Endpoint, Schema, body_schemas, operation
from jitney_gateway.gateway import IGNORED_HEADER, OPERATIONAL_PATHS, Gateway, describe_error_of
from jitney_gateway.http_answers import as_json, error_response
from jitney_gateway.keys import KeySource
from jitney_gateway.mounting import MountedService
from jitney_gateway.refusals import StatusError
from jitney_gateway.server_client import ServerClient
from jitney_gateway.server_load import RESPONSE_HEADER, ServerLoad
from jitney_gateway.tracing_middleware import TracingMiddleware

_EXPOSED_HEADERS = (IGNORED_HEADER, "x-request-id", "retry-after", RESPONSE_HEADER)
"""Headers of a response that a page of another origin may read."""


def make_app(
    server: ServerClient,
    keys: KeySource,
    *,
    tracing: Tracing | None = None,
    load: ServerLoad | None = None,
    services: Sequence[MountedService] = (),
    url: str = "",
    strict: bool = False,
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """The application.

    - ``url``: the gateway's own address, at which the mounted ``services`` send it requests.
    - ``strict``: fields that have no effect are refused, not ignored.
    - ``allowed_origins``: web origins whose pages may use the gateway; ``*`` for all.
    """
    gateway = Gateway(server, keys, load, strict=strict, allowed_origins=allowed_origins)
    endpoints = gateway.endpoints()
    for service in services:
        endpoints += service.endpoints(server)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(server.watching())
            for service in services:
                await stack.enter_async_context(service.working(url))
            yield  # while the gateway serves
        await server.close()
        if tracing is not None:
            tracing.close()

    # FastAPI's own route for the document would need no key.
    app = FastAPI(title="Jitney", lifespan=lifespan, openapi_url=None)
    endpoints.append(_document_endpoint(app))
    _add_routes(app, gateway, endpoints)
    app.add_exception_handler(HTTPException, _answer_unknown_route)
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing, without=OPERATIONAL_PATHS)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
    return app


def _document_endpoint(app: FastAPI) -> Endpoint:
    async def document(request: Request) -> Response:
        return as_json(app.openapi())

    return Endpoint(
        method="GET",
        path="/openapi.json",
        answer=document,
        text="This document.",
        fields=("openapi", "info", "paths"),
    )


def _add_routes(app: FastAPI, gateway: Gateway, endpoints: Sequence[Endpoint]) -> None:
    """Make a route of each endpoint, and complete the OpenAPI document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    schemas = body_schemas(bodies)
    for endpoint in endpoints:
        body_schema = None
        if endpoint.body is not None:
            body_schema = schemas.of_type[endpoint.body]
        _add_route(app, gateway, endpoint, body_schema)
    # FastAPI makes the document once and keeps it, so what is added here stays.
    document = app.openapi()
    document["components"] = {"schemas": schemas.components | ERRORS}


def _add_route(
    app: FastAPI, gateway: Gateway, endpoint: Endpoint, body_schema: Schema | None
) -> None:
    answer = partial(gateway.serve, endpoint.path, gateway.handler_of(endpoint))
    app.add_api_route(
        endpoint.path,
        answer,
        methods=[endpoint.method],
        name=endpoint.path,
        summary=endpoint.path,
        description=endpoint.text,
        response_class=Response,
        openapi_extra=operation(endpoint, body_schema),
    )
    if endpoint.method == "GET":
        app.add_api_route(endpoint.path, answer, methods=["HEAD"], include_in_schema=False)


async def _answer_unknown_route(request: Request, error: Exception) -> Response:
    """The response if no endpoint has the request's path, or its method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    refusal = StatusError(error.status_code, f"{path}: {error.detail}")
    response = error_response(refusal, describe_error_of(path))
    response.headers.update(error.headers or {})
    return response
