"""The endpoints of language models.

Each makes one or several requests to the model, and an answer from its steps: whole, or as a stream
of server-sent events.
"""

import asyncio
import time
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

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.answers import ModelAnswer
from jitney_gateway.chat_answer import ChatAnswer
from jitney_gateway.completion_answer import CompletionAnswer, PromptEcho
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.document import Endpoint, Handler
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
from jitney_gateway.harmony import make_parser
from jitney_gateway.messages_answer import MessageAnswer
from jitney_gateway.messages_request import (
    NAMES_OF_MESSAGE,
    CountTokensRequest,
    MessageRequest,
    chat_of_message,
    chat_of_prompt,
)
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.older_functions import set_tools_of_functions
from jitney_gateway.parsers import Parser
from jitney_gateway.reasoning_tokens import reasoning_counter
from jitney_gateway.refusals import as_json, unforeseen_error
from jitney_gateway.responses_answer import ResponseAnswer
from jitney_gateway.responses_request import (
    NAMES_OF_RESPONSE,
    ResponseRequest,
    chat_of_response,
)
from jitney_gateway.server_client import ServerClient, Step
from jitney_gateway.server_request import (
    InputValue,
    ServerRequest,
    request_of_chat,
    request_of_token_ids,
    requests_of_completions,
)
from jitney_gateway.tool_choice import choose_allowed_tools
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonObject,
    TokenizeRequest,
    WireRecord,
)
from jitney_gateway.without_effect import (
    NamesOfFields,
    known_kwargs,
    leave_out,
    leave_out_of_chat,
)

T = TypeVar("T")
HEADERS_S = 1.0
"""Seconds after which a stream begins, even if the model has said nothing yet: until then, an error
has a status of its own."""
SILENCE_S = 5.0
"""Seconds without a byte after which a stream sends a sign of life."""
_NextEvents = asyncio.Future[list[JsonObject] | None]
"""The events of a step to come; None if there is none any more."""


class ChatApi(NamedTuple):
    """An API in which clients send chats: its body, what makes a chat of a body, and its answer."""

    body: type[WireRecord]
    chat_of_body: Callable[[Any, ModelDescription, IgnoredFields], ChatRequest]
    """Adds what has no effect to the ignored fields."""
    names: NamesOfFields
    answer: Callable[[Any, str, Sequence[SequenceContent]], ModelAnswer]
    """Makes the answer from the body, the request's id and its sequences."""
    fields: tuple[str, ...]
    """The fields that every answer has."""


def _chat_of_chat(
    body: ChatRequest, model: ModelDescription, ignored: IgnoredFields
) -> ChatRequest:
    set_tools_of_functions(body)
    choose_allowed_tools(body)
    return body


def _chat_of_response(
    body: ResponseRequest, model: ModelDescription, ignored: IgnoredFields
) -> ChatRequest:
    return chat_of_response(body, model)


_FIELDS_WITH_CHOICES = ("id", "object", "created", "model", "choices", "usage")
_CHAT_APIS = {
    "/v1/chat/completions": ChatApi(
        body=ChatRequest,
        chat_of_body=_chat_of_chat,
        names={},
        answer=ChatAnswer,
        fields=_FIELDS_WITH_CHOICES,
    ),
    "/v1/responses": ChatApi(
        body=ResponseRequest,
        chat_of_body=_chat_of_response,
        names=NAMES_OF_RESPONSE,
        answer=ResponseAnswer,
        fields=("id", "object", "created_at", "model", "status", "output", "usage"),
    ),
    "/v1/messages": ChatApi(
        body=MessageRequest,
        chat_of_body=chat_of_message,
        names=NAMES_OF_MESSAGE,
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
        ignored = request.state.ignored
        chat = api.chat_of_body(body, model, ignored)
        leave_out_of_chat(chat, model, ignored, api.names)
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
        if len(sequences) == 1:
            answer.usage.reasoning = reasoning_counter(formats.reasoning, model.added_tokens)
        extra_inputs = list(answer.extra_inputs)
        if answer.usage.reasoning is not None:
            extra_inputs.append("return_output_ids")  # which a model has for one sequence only
        for name in extra_inputs:
            server_request.inputs[name] = True
        return await self._generate(request, chat, answer, [server_request])

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        request_id = request.state.id
        model = await self._find_model(request, body.model)
        leave_out(body, model, request.state.ignored)
        limits = parse_limits(request.state.limits)
        server_requests = requests_of_completions(body, model, request_id, limits)
        sequences = []
        echoes = []
        for server_request in server_requests:
            echo = PromptEcho()
            if body.echo:
                wants_logprobs = body.logprobs is not None
                echo = await self._echo(server_request, with_first_token=wants_logprobs)
                echoes.append(echo)
            for _ in range(body.n or 1):
                parser = Parser(None, None)
                sequences.append(SequenceContent(parser, echo=echo.text))
        answer = CompletionAnswer(body, request_id, sequences, echoes)
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
            first = await _first_or_late(request.receive, events)
            stream = _server_sent_events(first, events, answer)
            return _EventStream(stream, first, events)
        await _unless_gone(request.receive, _exhaust(events))
        return as_json(answer.as_json())

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """The token ids of a text or of a chat."""
        model = await self._find_model(request, body.model)
        ignored = request.state.ignored
        body.chat_template_kwargs = known_kwargs(body.chat_template_kwargs, model, ignored)
        outputs = await self._server.infer_task(request_of_token_ids(body))
        ids = outputs["output_ids"].tolist()
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        return as_json(answer)

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> Response:
        """The number of tokens in a chat's prompt."""
        model = await self._find_model(request, body.model)
        # A request to generate is made, and not sent: so this refuses what `/v1/messages` refuses.
        ignored = request.state.ignored
        chat = chat_of_prompt(body, model, ignored)
        leave_out_of_chat(chat, model, ignored, NAMES_OF_MESSAGE)
        unsent = request_of_chat(chat, model, request.state.id)
        messages = unsent.inputs["messages"]
        outputs = await self._infer_task(body.model, "tokenize", messages=messages)
        return as_json({"input_tokens": len(outputs["output_ids"])})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        await self._find_model(request, body.model)
        text = await self._text_of_ids(body.model, body.tokens)
        return as_json({"prompt": text})

    async def _echo(self, server_request: ServerRequest, *, with_first_token: bool) -> PromptEcho:
        """The prompt of a request as text."""
        model = server_request.model
        inputs = server_request.inputs
        first_token = ""
        if "input_ids" in inputs:
            ids = inputs["input_ids"]
            text = await self._text_of_ids(model, ids)
        else:
            given = inputs["text_input"]
            assert isinstance(given, bytes)
            text = given.decode()
            ids = []
            if with_first_token:
                outputs = await self._infer_task(model, "tokenize", text_input=given)
                ids = outputs["output_ids"].tolist()
        assert isinstance(ids, list)
        if with_first_token:
            first_token = await self._text_of_ids(model, ids[:1])
        return PromptEcho(text, first_token)

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
# - before the headers: `_first_or_late`;
# - for an answer that is no stream: `_unless_gone`, by a cancellation;
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


async def _first_or_late(receive: Receive, events: AsyncGenerator[list[JsonObject]]) -> _NextEvents:
    """The first events of a stream, for which its headers wait ``HEADERS_S`` at most.

    An error that comes before still becomes a response with a status, and is raised here. Raises
    CancelledError if the client leaves first.
    """
    first: _NextEvents = asyncio.ensure_future(anext(events, None))
    try:
        await _unless_gone(receive, _done_or_late(first))
        if first.done():
            first.result()
    except BaseException:
        await _abandon(first, events)
        raise
    return first


async def _done_or_late(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task}, timeout=HEADERS_S)


async def _abandon(pending: _NextEvents, events: AsyncGenerator[list[JsonObject]]) -> None:
    """Close ``events``, whose next ones may be awaited at this moment."""
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await events.aclose()


async def _server_sent_events(
    first: _NextEvents, more: AsyncGenerator[list[JsonObject]], answer: ModelAnswer
) -> AsyncGenerator[bytes]:
    """The bytes of a stream: the events of one step in one piece, and the end of the answer, which
    may be an error. After each ``SILENCE_S`` without any bytes there is a sign of life, so that
    proxies and clients do not take the stream for dead."""
    pending = first
    sent_at = time.monotonic()
    try:
        while True:
            remaining = sent_at + SILENCE_S - time.monotonic()
            await asyncio.wait({pending}, timeout=max(remaining, 0.0))
            if not pending.done():
                yield answer.sign_of_life
                sent_at = time.monotonic()
                continue
            events = pending.result()
            if events is None:
                break
            if events:
                yield _encoded(events)
                sent_at = time.monotonic()
            pending = asyncio.ensure_future(anext(more, None))
        last = answer.closing_events()
    except JitneyError as error:
        last = answer.error_events(error)
    finally:
        await _abandon(pending, more)
    yield _encoded(last) + answer.end_of_stream


def _encoded(events: Sequence[JsonObject]) -> bytes:
    return b"".join(map(_encoded_event, events))


def _encoded_event(event: JsonObject) -> bytes:
    """A server-sent event. It has a name in the APIs whose events have a type."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return name.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"


class _EventStream(StreamingResponse):
    """A stream that ends the model's requests at once when its client has gone."""

    def __init__(
        self,
        stream: AsyncGenerator[bytes],
        first: _NextEvents,
        events: AsyncGenerator[list[JsonObject]],
    ) -> None:
        """``stream`` is made of ``first`` and ``events``."""
        super().__init__(stream, media_type="text/event-stream")
        self._stream = stream
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()
            # A generator that has not begun closes nothing: the client left with the headers.
            await _abandon(self._first, self._events)


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
