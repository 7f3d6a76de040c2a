"""The endpoints of language models.

Each makes one or several requests to the model, and an answer from its steps: whole, or as a stream
of server-sent events.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import Request, Response
from jitney.sampling_params import LIMITS_HEADER, parse_limits
from jitney.tracing import HEADERS as TRACE_HEADERS

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.answer_parser import make_parser
from jitney_gateway.answers import ModelAnswer
from jitney_gateway.chat_answer import chat_answer
from jitney_gateway.completion_answer import PromptEcho, completion_answer
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.document import Endpoint, Handler
from jitney_gateway.event_stream import (
    EventStream,
    events_of_steps,
    exhaust,
    server_sent_events,
    wait_for_first,
    while_connected,
)
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
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
from jitney_gateway.refusals import as_json
from jitney_gateway.responses_answer import ResponseAnswer
from jitney_gateway.responses_request import (
    NAMES_OF_RESPONSE,
    ResponseRequest,
    chat_of_response,
)
from jitney_gateway.server_client import ServerClient
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
    TokenizeRequest,
    WireRecord,
)
from jitney_gateway.without_effect import (
    NamesOfFields,
    known_kwargs,
    leave_out,
    leave_out_of_chat,
)


class ChatApi(NamedTuple):
    """An API in which clients send chats: its body, what makes a chat of a body, and its answer."""

    body: type[WireRecord]
    chat_of_body: Callable[[Any, ModelDescription, IgnoredFields], ChatRequest]
    """Makes the chat that a body stands for. It notes the fields that have no effect."""
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
        answer=chat_answer,
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
        if len(sequences) == 1:  # a model tells token ids of one sequence only
            answer.usage.reasoning = reasoning_counter(formats.reasoning, model.added_tokens)
        extra_inputs = list(answer.extra_inputs)
        if answer.usage.reasoning is not None:
            extra_inputs.append("return_output_ids")
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
        answer = completion_answer(body, request_id, sequences, echoes)
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
        headers = {}
        for name in TRACE_HEADERS:
            if name in request.headers:
                headers[name] = request.headers[name]
        if state.limits:
            headers[LIMITS_HEADER] = state.limits
        timer = AnswerTimer(self._metrics, body.model, state.owner, bool(body.stream))
        steps = self._server.generate(server_requests, headers)
        events = events_of_steps(steps, answer, timer, state.id)
        if body.stream:
            first = await wait_for_first(request.receive, events)
            stream = server_sent_events(first, events, answer)
            return EventStream(stream, first, events)
        await while_connected(request.receive, exhaust(events))
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
        # The request of a whole answer is made, so that the same is refused as for `/v1/messages`.
        # It is not sent.
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
        text = await self._text_of_prompt(server_request)
        if not with_first_token:
            return PromptEcho(text)
        ids = await self._ids_of_prompt(server_request)
        first_token = await self._text_of_ids(model, ids[:1])
        return PromptEcho(text, first_token)

    async def _text_of_prompt(self, server_request: ServerRequest) -> str:
        inputs = server_request.inputs
        if "input_ids" in inputs:
            return await self._text_of_ids(server_request.model, inputs["input_ids"])
        text = inputs["text_input"]
        assert isinstance(text, bytes)
        return text.decode()

    async def _ids_of_prompt(self, server_request: ServerRequest) -> list[int]:
        inputs = server_request.inputs
        if "input_ids" in inputs:
            ids = inputs["input_ids"]
            assert isinstance(ids, list)
            return ids
        text = inputs["text_input"]
        outputs = await self._infer_task(server_request.model, "tokenize", text_input=text)
        new_ids: list[int] = outputs["output_ids"].tolist()
        return new_ids

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
