"""What is generated for a body: requests to the model, and the answer that its steps make. Pure.

``language.py`` has it done by a server. Jobs have it done by an engine of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from jitney.sampling_params import Limits

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.answer_parser import make_parser
from jitney_gateway.answers import ModelAnswer
from jitney_gateway.chat_answer import chat_answer
from jitney_gateway.completion_answer import PromptEcho, completion_answer
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.messages_answer import MessageAnswer
from jitney_gateway.messages_request import NAMES_OF_MESSAGE, MessageRequest, chat_of_message
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.older_functions import set_tools_of_functions
from jitney_gateway.parsers import Parser
from jitney_gateway.reasoning_tokens import reasoning_counter
from jitney_gateway.responses_answer import ResponseAnswer
from jitney_gateway.responses_request import NAMES_OF_RESPONSE, ResponseRequest, chat_of_response
from jitney_gateway.server_request import ServerRequest, request_of_chat
from jitney_gateway.tool_choice import choose_allowed_tools
from jitney_gateway.wire import ChatRequest, CompletionRequest, WireRecord
from jitney_gateway.without_effect import NamesOfFields, leave_out_of_chat

_NO_LIMITS = Limits()


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


FIELDS_WITH_CHOICES = ("id", "object", "created", "model", "choices", "usage")
"""The fields of an answer in OpenAI's older APIs."""
CHAT_APIS = {
    "/v1/chat/completions": ChatApi(
        body=ChatRequest,
        chat_of_body=_chat_of_chat,
        names={},
        answer=chat_answer,
        fields=FIELDS_WITH_CHOICES,
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
"""By their paths."""


class GenerationPlan(NamedTuple):
    """What is generated for a body."""

    body: ChatRequest | CompletionRequest
    """The chat that the body stands for, or the body itself."""
    server_requests: list[ServerRequest]
    """One for each prompt."""
    answer: ModelAnswer
    """It is fed the steps of all requests."""


def plan_chat(
    api: ChatApi,
    body: Any,
    model: ModelDescription,
    *,
    request_id: str,
    ignored: IgnoredFields,
    limits: Limits = _NO_LIMITS,
) -> GenerationPlan:
    """For a chat, whose body is of that API. Raises FieldError."""
    chat = api.chat_of_body(body, model, ignored)
    leave_out_of_chat(chat, model, ignored, api.names)
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
    return GenerationPlan(chat, [server_request], answer)


def plan_completions(
    body: CompletionRequest,
    server_requests: list[ServerRequest],
    echoes: Sequence[PromptEcho],
    *,
    request_id: str,
) -> GenerationPlan:
    """For texts, whose requests are made. ``echoes``: one for each prompt, if the client wants
    them."""
    sequences = []
    for index in range(len(server_requests)):
        echo = echoes[index] if echoes else PromptEcho()
        for _ in range(body.n or 1):
            parser = Parser(None, None)
            sequences.append(SequenceContent(parser, echo=echo.text))
    answer = completion_answer(body, request_id, sequences, echoes)
    return GenerationPlan(body, server_requests, answer)
