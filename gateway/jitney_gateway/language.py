"""The endpoints of language models.

Each makes one or several requests to the model, and an answer from its steps: whole, or as a stream
of server-sent events.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from jitney.errors import CancelledError, JitneyError
from jitney.sampling_params import LIMITS_HEADER, parse_limits
from jitney.tracing import HEADERS
from starlette.types import Receive, Scope, Send

from jitney_gateway.answers import ChatAnswer, CompletionAnswer, ModelAnswer
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.document import Endpoint, Handler
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
from jitney_gateway.harmony import make_parser
from jitney_gateway.messages_answer import MessageAnswer
from jitney_gateway.messages_request import (
    CountTokensRequest,
    MessageRequest,
    chat_of_message,
    chat_of_prompt,
)
from jitney_gateway.parsers import Parser
from jitney_gateway.refusals import as_json, unforeseen_error
from jitney_gateway.responses_answer import ResponseAnswer
from jitney_gateway.responses_request import ResponseRequest, chat_of_response
from jitney_gateway.server_client import ServerClient, Step
from jitney_gateway.server_request import (
    InputValue,
    ModelDescription,
    ServerRequest,
    formats_of_answer,
    request_of_chat,
    request_of_token_ids,
    requests_of_completions,
)
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonObject,
    TokenizeRequest,
    WireRecord,
)

T = TypeVar("T")


class ChatApi(NamedTuple):
    """An API in which clients send chats: its body, what makes a chat of a body, and its answer."""

    body: type[WireRecord]
    chat_of_body: Callable[[Any, ModelDescription], ChatRequest]
    answer: Callable[[Any, str, Sequence[SequenceContent]], ModelAnswer]
    """Makes the answer from the body, the request's id and its sequences."""
    fields: tuple[str, ...]
    """The fields that every answer has."""


def _chat_of_chat(body: ChatRequest, model: ModelDescription) -> ChatRequest:
    return body


_FIELDS_WITH_CHOICES = ("id", "object", "created", "model", "choices", "usage")
_CHAT_APIS = {
    "/v1/chat/completions": ChatApi(
        body=ChatRequest,
        chat_of_body=_chat_of_chat,
        answer=ChatAnswer,
        fields=_FIELDS_WITH_CHOICES,
    ),
    "/v1/responses": ChatApi(
        body=ResponseRequest,
        chat_of_body=chat_of_response,
        answer=ResponseAnswer,
        fields=("id", "object", "created_at", "model", "status", "output", "usage"),
    ),
    "/v1/messages": ChatApi(
        body=MessageRequest,
        chat_of_body=chat_of_message,
        answer=MessageAnswer,
        fields=("id", "type", "role", "model", "content", "stop_reason", "usage"),
    ),
}


class LanguageEndpoints:
    """The endpoints of language models. ``metrics`` counts what they generate."""

    def __init__(self, server: ServerClient, metrics: GatewayMetrics) -> None:
        self._server = server
        self._metrics = metrics

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        endpoints = []
        for path, api in _CHAT_APIS.items():
            handler = partial(self.chat, api)
            endpoints.append(_endpoint(path, handler, api.body, api.fields, streams=True))
        completions = _endpoint(
            "/v1/completions",
            self.completions,
            CompletionRequest,
            _FIELDS_WITH_CHOICES,
            streams=True,
        )
        count_tokens = _endpoint(
            "/v1/messages/count_tokens", self.count_tokens, CountTokensRequest, ("input_tokens",)
        )
        tokenize = _endpoint(
            "/tokenize", self.tokenize, TokenizeRequest, ("count", "max_model_len", "tokens")
        )
        detokenize = _endpoint("/detokenize", self.detokenize, DetokenizeRequest, ("prompt",))
        return [*endpoints, completions, count_tokens, tokenize, detokenize]

    async def chat(self, api: ChatApi, request: Request, body: Any) -> Response:
        """Continue a chat."""
        request_id = request.state.id
        model = await self._find_model(request, body.model)
        chat = api.chat_of_body(body, model)
        limits = parse_limits(request.state.limits)
        server_request = request_of_chat(chat, model, request_id, limits)

        formats = formats_of_answer(chat, model)
        tools = msgspec.to_builtins(chat.tools or [])
        most_calls = 1 if chat.parallel_tool_calls is False else None
        sequences = []
        for _ in range(chat.n or 1):
            parser = make_parser(formats, tools)
            sequences.append(SequenceContent(parser, most_calls))
        answer = api.answer(body, request_id, sequences)
        for name in answer.extra_inputs:
            server_request.inputs[name] = True
        return await self._generate(request, chat, answer, [server_request])

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        request_id = request.state.id
        model = await self._find_model(request, body.model)
        limits = parse_limits(request.state.limits)
        server_requests = requests_of_completions(body, model, request_id, limits)
        sequences = []
        for server_request in server_requests:
            echo = await self._prompt_text(server_request) if body.echo else ""
            for _ in range(body.n or 1):
                parser = Parser(None, None)
                sequences.append(SequenceContent(parser, echo=echo))
        answer = CompletionAnswer(body, request_id, sequences)
        return await self._generate(request, body, answer, server_requests)

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        answer: ModelAnswer,
        server_requests: Sequence[ServerRequest],
    ) -> Response:
        """Generate the answer. Returns the response: the whole of it, or its stream."""
        state = request.state
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        if state.limits:
            headers[LIMITS_HEADER] = state.limits
        timer = AnswerTimer(self._metrics, body.model, state.owner, bool(body.stream))
        steps = self._server.generate(server_requests, headers)
        events = _events_of_steps(steps, answer, timer, state.id)
        if body.stream:
            # An error before the first step still becomes a response with a status.
            first = await _unless_gone(request.receive, anext(events))
            stream = _server_sent_events(first, events, answer)
            return _EventStream(stream, media_type="text/event-stream")
        await _unless_gone(request.receive, _exhaust(events))
        return as_json(answer.as_json())

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """The token ids of a text or of a chat."""
        model = await self._find_model(request, body.model)
        outputs = await self._server.infer_task(request_of_token_ids(body))
        ids = outputs["output_ids"].tolist()
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        return as_json(answer)

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> Response:
        """The number of tokens in a chat's prompt."""
        model = await self._find_model(request, body.model)
        # A request to generate is made, and not sent: so this refuses what `/v1/messages` refuses.
        unsent = request_of_chat(chat_of_prompt(body, model), model, request.state.id)
        messages = unsent.inputs["messages"]
        outputs = await self._infer_task(body.model, "tokenize", messages=messages)
        return as_json({"input_tokens": len(outputs["output_ids"])})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        await self._find_model(request, body.model)
        text = await self._text_of_ids(body.model, body.tokens)
        return as_json({"prompt": text})

    async def _prompt_text(self, server_request: ServerRequest) -> str:
        """The prompt of a request as text."""
        text = server_request.inputs.get("text_input")
        if isinstance(text, bytes):
            return text.decode()
        return await self._text_of_ids(server_request.model, server_request.inputs["input_ids"])

    async def _text_of_ids(self, model: str, ids: InputValue) -> str:
        outputs = await self._infer_task(model, "detokenize", input_ids=ids)
        text: bytes = outputs["text_output"][0]
        return text.decode()

    async def _infer_task(self, model: str, task: str, **inputs: InputValue) -> Mapping[str, Any]:
        inputs["task"] = task.encode()
        return await self._server.infer_task(ServerRequest(model=model, inputs=inputs))

    async def _find_model(self, request: Request, name: str) -> ModelDescription:
        """A language model; the request is counted for it. Raises UnknownModelError."""
        model = await self._server.language_model(name)
        request.state.model = name
        return model


def _endpoint(
    path: str,
    handler: Handler,
    body: type[WireRecord],
    fields: tuple[str, ...],
    *,
    streams: bool = False,
) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        answer=handler,
        text=body.__doc__,
        body=body,
        fields=fields,
        streams=streams,
    )


# ------------------------------------------------------------------------------- streams
#
# When a client leaves, the requests to the model must end at once. Each generator below closes the
# one that it reads: `_server_sent_events` closes `_events_of_steps`, which closes the steps of
# `ServerClient.generate`, and that cancels the requests. What closes the outermost one:
#
# - before the first step, and for an answer that is no stream: `_unless_gone`, by a cancellation;
# - during a stream and after it: `_EventStream`.


async def _events_of_steps(
    steps: AsyncGenerator[Step], answer: ModelAnswer, timer: AnswerTimer, request_id: str
) -> AsyncGenerator[list[JsonObject]]:
    """The events that the answer makes of each step."""
    try:
        async for step in steps:
            timer.add_step(step)
            yield list(answer.feed(step))
    except JitneyError:
        raise
    except Exception:
        raise unforeseen_error(request_id) from None
    finally:
        await steps.aclose()
        timer.end(answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def _exhaust(events: AsyncGenerator[list[JsonObject]]) -> None:
    async for _ in events:
        pass


async def _server_sent_events(
    first: list[JsonObject], more: AsyncGenerator[list[JsonObject]], answer: ModelAnswer
) -> AsyncGenerator[bytes]:
    """The bytes of a stream: the events of one step in one piece, and the end of the answer, which
    may be an error."""
    try:
        if first:
            yield _encoded(first)
        async for events in more:
            if events:
                yield _encoded(events)
        last = answer.closing_events()
    except JitneyError as error:
        last = answer.error_events(error)
    finally:
        await more.aclose()
    yield _encoded(last) + answer.end_of_stream


def _encoded(events: Sequence[JsonObject]) -> bytes:
    return b"".join(map(_encoded_event, events))


def _encoded_event(event: JsonObject) -> bytes:
    """A server-sent event. It has a name in the APIs whose events have a type."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return name.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"


class _EventStream(StreamingResponse):
    """A stream that ends the model's requests at once when its client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If the client leaves first, ``work`` is cancelled, and CancelledError
    is raised."""

    async def wait_for_disconnect() -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()

    disconnect = asyncio.create_task(wait_for_disconnect())
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((disconnect, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("the client has gone")
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()
        await asyncio.gather(disconnect, task, return_exceptions=True)
