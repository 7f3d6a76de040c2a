"""The gateway's endpoints: bodies in, answers and streams out, errors as OpenAI's objects.

Stateless but for what it counts and, for half a minute, what it knows of a model (files and batches
are on the disk): several gateways may stand before one server, and one may be ended at any time.
"""

import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from jitney.errors import CancelledError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.tracing import Tracing
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jitney_gateway.answers import Body
from jitney_gateway.backend import Backend, Model, UnknownModelError
from jitney_gateway.batch_records import Folder
from jitney_gateway.batch_work import working
from jitney_gateway.batches import Batches, BatchRequest
from jitney_gateway.document import ERRORS, FORMS, operation
from jitney_gateway.figures import Figures
from jitney_gateway.keys import Keys
from jitney_gateway.language import Language
from jitney_gateway.load import REQUEST_HEADER, Load
from jitney_gateway.pooling import classify, embed, rerank
from jitney_gateway.refusals import (
    StatusError,
    as_asked,
    as_json,
    describe,
    describe_for_messages,
    fault,
    refusal,
)
from jitney_gateway.traced import Traced
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

_OPEN = ("/health", "/metrics")
"""Endpoints that need no key."""

Handler = Callable[..., Awaitable[Response]]


def make_app(
    backend: Backend,
    keys: Mapping[str, str] | Keys,
    tracing: Tracing | None = None,
    load: Load | None = None,
    folder: Folder | None = None,
    url: str = "",
) -> FastAPI:
    """``keys``: API key -> name of its owner; none: every client is welcome. ``folder``: of files
    and batches, whose lines go to this gateway's own ``url``."""
    gateway, batches = Gateway(backend, keys, load), Batches(folder, backend)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with working(folder, url):
            yield
        await backend.close()
        if tracing is not None:
            tracing.close()

    app = FastAPI(title="Jitney", lifespan=life, docs_url=None, redoc_url=None)

    def add(method: str, path: str, answer: Handler, text: str | None, extra: Body) -> None:
        app.add_api_route(
            path,
            partial(gateway.serve, path, answer),
            methods=[method],
            name=path,
            summary=path,
            description=text,
            response_class=Response,
            openapi_extra=extra,
        )

    bodies: dict[str, tuple[Handler, type[WireRecord]]] = {
        **gateway.language.routes(),
        "/v1/embeddings": (partial(gateway.pool, embed), EmbeddingRequest),
        "/v1/classify": (partial(gateway.pool, classify), ClassifyRequest),
        "/v1/rerank": (partial(gateway.pool, rerank), RerankRequest),
        "/v1/batches": (batches.create, BatchRequest),
    }
    schemas, components = body_schemas([type_ for _, type_ in bodies.values()])
    for (path, (answer, type_)), schema in zip(bodies.items(), schemas, strict=True):
        read = partial(_read, answer, type_)
        add("POST", path, read, type_.__doc__, operation("POST", path, schema))
    pages: dict[str, Handler] = {
        "/v1/models": gateway.models,
        "/v1/models/{name:path}": gateway.model,
        "/health": gateway.health,
        "/metrics": gateway.metrics,
    }
    for path, answer in pages.items():
        add("GET", path, answer, answer.__doc__, operation("GET", path))
    for method, path, answer, text in batches.routes():
        add(method, path, answer, text, operation(method, path, FORMS.get(path)))
    app.openapi()["components"] = {"schemas": components | ERRORS}
    app.add_exception_handler(HTTPException, _no_such_page)
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing, without=_OPEN)
    return app


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    response = refusal(StatusError(error.status_code, f"{path}: {error.detail}"), _form_of(path))
    response.headers.update(error.headers or {})
    return response


def _form_of(path: str) -> Callable[[JitneyError], tuple[int, Body]]:
    """Of a refusal."""
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
        raise as_asked(error, body) from None


def _entry(model: Model) -> dict[str, Any] | None:
    """Of the list of models. None: it serves none of the endpoints."""
    if model.description is None and not model.endpoint:
        return None
    entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "jitney"}
    if model.description is not None:
        entry["max_model_len"] = model.description.max_model_len
    if model.base is not None:
        entry["parent"] = model.base
    return entry


class Gateway:
    """What the endpoints share."""

    def __init__(self, backend: Backend, keys: Mapping[str, str] | Keys, load: Load | None) -> None:
        self._backend, self._keys, self._load = backend, keys, load
        self._figures = Figures()
        self.language = Language(backend, self._figures)

    async def serve(self, path: str, answer: Handler, request: Request) -> Response:
        """Check the key, answer, count; every error becomes an object."""
        tell = _form_of(path)
        state, given = request.state, request.headers.get("x-request-id", "")
        state.model, state.key, state.limits, state.id = "", "", "", secrets.token_hex(12)
        state.path = path
        if 0 < len(given) <= 40 and given.isascii() and given.isprintable():
            state.id = given
        try:
            if path not in _OPEN:
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
        if self._load is not None and (form := request.headers.get(REQUEST_HEADER)):
            response.headers.update(await self._load.header(form, state.model))
        self._figures.request(path, state.model, response.status_code)
        return response

    def _owner(self, headers: Mapping[str, str]) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        for known, name in self._keys.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                return name
        if self._keys:
            raise StatusError(401, "the header Authorization must be: Bearer, and a known API key")
        return ""

    async def pool(
        self, answer: Callable[..., Awaitable[Body]], request: Request, body: Any
    ) -> Response:
        """Embed, classify or rank."""
        model = await self._backend.look(body.model)
        await self._backend.check(request.url.path, body.model)
        request.state.model = body.model
        return as_json(await answer(self._backend, model, body))

    async def models(self, request: Request) -> Response:
        """All that serve one of the endpoints."""
        found: dict[str, Model] = {}
        for name in await self._backend.names():
            with contextlib.suppress(UnknownModelError):  # it has just been unloaded
                found[name] = await self._backend.look(name)
        for base in list(found.values()):
            for name in base.description.adapters if base.description else ():
                found.setdefault(name, base.adapter(name))
        entries = map(_entry, found.values())
        return as_json({"object": "list", "data": [each for each in entries if each]})

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
        load = b"" if self._load is None else await self._load.page()
        return Response(self._figures.page() + load, media_type="text/plain; version=0.0.4")
