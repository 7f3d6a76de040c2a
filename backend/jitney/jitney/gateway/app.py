"""The gateway's endpoints: bodies in, answers and streams out, errors as OpenAI's objects.

Stateless but for what it counts and, for half a minute, what it knows of a model (files and batches
are on the disk): several gateways may stand before one server, and one may be ended at any time.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from jitney.errors import CancelledError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.gateway.answers import Answer, Body, Choice
from jitney.gateway.ask import (
    Ask,
    Description,
    ask_chat,
    ask_completions,
    ask_tokens,
    formats,
)
from jitney.gateway.backend import Backend, Step, UnknownModelError
from jitney.gateway.batch_records import Folder
from jitney.gateway.batch_work import working
from jitney.gateway.batches import Batches, BatchRequest
from jitney.gateway.blocks import Blocks
from jitney.gateway.document import ERRORS, FORMS, operation
from jitney.gateway.figures import Figures, Watch
from jitney.gateway.keys import Keys
from jitney.gateway.load import REQUEST_HEADER, Load
from jitney.gateway.messages_api import (
    MessageAnswer,
    MessageRequest,
    PromptRequest,
    chat_of_message,
    chat_of_prompt,
)
from jitney.gateway.parsers import Parser
from jitney.gateway.pooling import classify, embed, rerank
from jitney.gateway.refusals import StatusError, as_asked, describe, describe_for_messages
from jitney.gateway.responses_api import ResponseAnswer, ResponseRequest, chat_of_response
from jitney.gateway.traced import Traced
from jitney.gateway.wire import (
    MAX_BODY_BYTES,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    TokenizeRequest,
    WireRecord,
    body_schemas,
    decode,
)
from jitney.tracing import HEADERS, Tracing

_LOG = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_OPEN = ("/health", "/metrics")
"""Endpoints that need no key."""

T = TypeVar("T")
Told = Answer | ResponseAnswer | MessageAnswer
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
        "/v1/chat/completions": (gateway.chat, ChatRequest),
        "/v1/completions": (gateway.completions, CompletionRequest),
        "/v1/responses": (
            partial(gateway.translated, chat_of_response, ResponseAnswer),
            ResponseRequest,
        ),
        "/v1/messages": (
            partial(gateway.translated, chat_of_message, MessageAnswer),
            MessageRequest,
        ),
        "/v1/messages/count_tokens": (gateway.count_tokens, PromptRequest),
        "/v1/embeddings": (partial(gateway.pool, embed), EmbeddingRequest),
        "/v1/classify": (partial(gateway.pool, classify), ClassifyRequest),
        "/v1/rerank": (partial(gateway.pool, rerank), RerankRequest),
        "/v1/batches": (batches.create, BatchRequest),
        "/tokenize": (gateway.tokenize, TokenizeRequest),
        "/detokenize": (gateway.detokenize, DetokenizeRequest),
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
    return refusal(StatusError(error.status_code, f"{request.url.path}: {error.detail}"), describe)


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


class Gateway:
    """What the endpoints share."""

    def __init__(self, backend: Backend, keys: Mapping[str, str] | Keys, load: Load | None) -> None:
        self._backend, self._keys, self._load = backend, keys, load
        self._figures = Figures()

    async def serve(self, path: str, answer: Handler, request: Request) -> Response:
        """Check the key, answer, count; every error becomes an object."""
        tell = describe_for_messages if path.startswith("/v1/messages") else describe
        state, given = request.state, request.headers.get("x-request-id", "")
        state.model, state.key, state.id = "", "", secrets.token_hex(12)
        state.path = path
        if 0 < len(given) <= 40 and given.isascii() and given.isprintable():
            state.id = given
        try:
            if path not in _OPEN:
                state.key = self._owner(request.headers)
            response = await answer(request)
        except JitneyError as error:
            response = refusal(error, tell)
            if response.status_code >= 500:
                _LOG.warning("request %s: %s", state.id, error)
        except Exception:
            _LOG.exception("request %s could not be answered", state.id)
            response = refusal(JitneyError(f"request {state.id} could not be answered"), tell)
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

    # ------------------------------------------------------------------ language models

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Continue a chat."""
        known = await self._model(request, body.model)
        ask = ask_chat(body, known, request.state.id)
        most = 1 if body.parallel_tool_calls is False else None
        parser = partial(Parser, *formats(body, known), msgspec.to_builtins(body.tools or []))
        choices = [Choice(parser(), most) for _ in range(body.n or 1)]
        answer = Answer(body, f"chatcmpl-{request.state.id}", choices)
        return await self._generate(request, body, answer, [ask])

    async def translated(
        self,
        chat_of: Callable[[Any, Description], ChatRequest],
        answer_of: type[ResponseAnswer | MessageAnswer],
        request: Request,
        body: Any,
    ) -> Response:
        """Continue a chat that has another form."""
        known = await self._model(request, body.model)
        chat = chat_of(body, known)
        ask = ask_chat(chat, known, request.state.id)
        most = 1 if chat.parallel_tool_calls is False else None
        parser = Parser(*formats(chat, known), msgspec.to_builtins(chat.tools or []))
        answer = answer_of(body, request.state.id, Blocks(parser, most))
        ask.inputs |= dict.fromkeys(answer.returns, True)
        return await self._generate(request, chat, answer, [ask])

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        known = await self._model(request, body.model)
        asks = ask_completions(body, known, request.state.id)
        echoes = [await self._text(ask) if body.echo else "" for ask in asks]
        n = range(body.n or 1)
        choices = [Choice(Parser(None, None), echo=echo) for echo in echoes for _ in n]
        answer = Answer(body, f"cmpl-{request.state.id}", choices)
        return await self._generate(request, body, answer, asks)

    async def _text(self, ask: Ask) -> str:
        text = ask.inputs.get("text_input")
        if isinstance(text, bytes):
            return text.decode()
        inputs = {"input_ids": ask.inputs["input_ids"], "task": b"detokenize"}
        arrays = await self._backend.perform(Ask(model=ask.model, inputs=inputs))
        return arrays["text_output"][0].decode()

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        answer: Told,
        asks: Sequence[Ask],
    ) -> Response:
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        watch = Watch(self._figures, body.model, request.state.key, bool(body.stream))
        steps = self._backend.generate(asks, headers)
        chunks = _chunks(steps, answer, watch)
        if body.stream:
            first = await _unless_gone(request.receive, anext(chunks))
            return _Events(_events(first, chunks, answer), media_type="text/event-stream")
        await _unless_gone(request.receive, _read_all(chunks))
        return _json(answer.whole())

    async def _model(self, request: Request, name: str) -> Description:
        known = await self._backend.language_model(name)
        request.state.model = name
        return known

    async def pool(
        self, answer: Callable[..., Awaitable[Body]], request: Request, body: Any
    ) -> Response:
        """Embed, classify or rank."""
        model = await self._backend.look(body.model)
        await self._backend.check(request.url.path, body.model)
        request.state.model = body.model
        return _json(await answer(self._backend, model, body))

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """The ids of a text or a chat."""
        known = await self._model(request, body.model)
        ids = (await self._backend.perform(ask_tokens(body)))["output_ids"].tolist()
        count, most = len(ids), known.max_model_len
        return _json({"count": count, "max_model_len": most, "tokens": ids})

    async def count_tokens(self, request: Request, body: PromptRequest) -> Response:
        """The tokens of a chat's prompt."""
        known = await self._model(request, body.model)
        asked = ask_chat(chat_of_prompt(body, known), known, "").inputs["messages"]
        inputs: dict[str, Any] = {"messages": asked, "task": b"tokenize"}
        arrays = await self._backend.perform(Ask(model=body.model, inputs=inputs))
        return _json({"input_tokens": len(arrays["output_ids"])})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """The text of ids."""
        await self._model(request, body.model)
        inputs: dict[str, Any] = {"input_ids": body.tokens, "task": b"detokenize"}
        return _json({"prompt": await self._text(Ask(model=body.model, inputs=inputs))})

    # ------------------------------------------------------------------ the gateway itself

    async def models(self, request: Request) -> Response:
        """All that serve one of the endpoints."""
        found: list[dict[str, Any] | None] = []
        for name in await self._backend.names():
            with contextlib.suppress(UnknownModelError):  # it has just been unloaded
                found.append(await self._entry(name))
        return _json({"object": "list", "data": [each for each in found if each]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        entry = await self._entry(request.path_params["name"])
        if entry is None:
            raise UnknownModelError("this model serves none of the gateway's endpoints")
        return _json(entry)

    async def _entry(self, name: str) -> dict[str, Any] | None:
        model = await self._backend.look(name)
        if model.description is None and not model.endpoint:
            return None
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "jitney"}
        if model.description is not None:
            entry["max_model_len"] = model.description.max_model_len
        return entry

    async def health(self, request: Request) -> Response:
        """Whether the server is ready."""
        if not await self._backend.is_ready():
            raise UnavailableError("the server is not ready")
        return Response()

    async def metrics(self, request: Request) -> Response:
        """What Prometheus reads."""
        load = b"" if self._load is None else await self._load.page()
        return Response(self._figures.page() + load, media_type="text/plain; version=0.0.4")


async def _chunks(
    steps: AsyncGenerator[Step], answer: Told, watch: Watch
) -> AsyncGenerator[list[Body]]:
    """What each step adds to the answer; counted."""
    try:
        async for step in steps:
            watch.note(step)
            yield list(answer.feed(step))
    finally:
        await steps.aclose()
        watch.end(answer.usage.prompt, answer.usage.completion)


async def _read_all(chunks: AsyncGenerator[list[Body]]) -> None:
    async for _ in chunks:
        pass


async def _events(
    chunks: list[Body], more: AsyncGenerator[list[Body]], answer: Told
) -> AsyncGenerator[bytes]:
    """Server-sent events, those of one step in one piece."""
    try:
        while True:
            if chunks:
                yield b"".join(map(_event, chunks))
            chunks = await anext(more)
    except StopAsyncIteration:
        last = answer.last()
    except JitneyError as error:
        last = answer.failed(error)
    finally:
        await more.aclose()
    yield b"".join(map(_event, last)) + answer.end


def _event(body: Body) -> bytes:
    named = f"event: {body['type']}\n" if "type" in body else ""
    return named.encode() + b"data: " + msgspec.json.encode(body) + b"\n\n"


class _Events(StreamingResponse):
    """Leaves the model's stream at once when its client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; CancelledError if the client leaves first, and ``work`` is ended."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone, task = asyncio.create_task(leave()), asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("the client has gone")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


def refusal(error: JitneyError, tell: Callable[[JitneyError], tuple[int, Body]]) -> Response:
    """An error's response."""
    status, body = tell(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return _json(body, status, headers)


def _json(body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
