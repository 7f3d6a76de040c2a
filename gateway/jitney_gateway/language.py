"""The endpoints of language models: what is asked of a model, and its answer, whole or as a stream
of server-sent events."""

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

from jitney_gateway.answers import Answer, JsonObject
from jitney_gateway.chat import Tensor
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.document import Endpoint, Handler
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
from jitney_gateway.messages_api import (
    MessageAnswer,
    MessageRequest,
    PromptRequest,
    chat_of_message,
    chat_of_prompt,
)
from jitney_gateway.parsers import Parser
from jitney_gateway.refusals import as_json, fault
from jitney_gateway.responses_api import ResponseAnswer, ResponseRequest, chat_of_response
from jitney_gateway.server_client import ServerClient, Step
from jitney_gateway.server_request import (
    ModelDescription,
    ServerRequest,
    formats,
    request_of_chat,
    request_of_token_ids,
    requests_of_completions,
)
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    WireRecord,
)

T = TypeVar("T")
Told = Answer | ResponseAnswer | MessageAnswer
ChatOf = Callable[[Any, ModelDescription], ChatRequest]
_GENERATED = ("id", "object", "created", "model", "choices", "usage")
"""Fields of OpenAI's older answers."""
_TOKENIZED = ("count", "max_model_len", "tokens")


class ChatForm(NamedTuple):
    """One of the forms in which clients send chats."""

    body: type[WireRecord]
    chat_of: ChatOf
    """The chat that such a body stands for."""
    answer: type[Told]
    fields: tuple[str, ...]
    """Of an answer, in any case."""


_CHATS = {
    "/v1/chat/completions": ChatForm(
        ChatRequest,
        lambda body, known: body,
        Answer,
        _GENERATED,
    ),
    "/v1/responses": ChatForm(
        ResponseRequest,
        chat_of_response,
        ResponseAnswer,
        ("id", "object", "created_at", "model", "status", "output", "usage"),
    ),
    "/v1/messages": ChatForm(
        MessageRequest,
        chat_of_message,
        MessageAnswer,
        ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    ),
}


class LanguageEndpoints:
    """The endpoints. ``figures`` count what is generated."""

    def __init__(self, backend: ServerClient, figures: GatewayMetrics) -> None:
        self._backend = backend
        self._figures = figures

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        made = []
        for path, form in _CHATS.items():
            answer = partial(self.chat, form)
            made.append(_endpoint(path, answer, form.body, form.fields, streams=True))
        made.append(
            _endpoint(
                "/v1/completions", self.completions, CompletionRequest, _GENERATED, streams=True
            )
        )
        counted = ("input_tokens",)
        made += [
            _endpoint("/v1/messages/count_tokens", self.count_tokens, PromptRequest, counted),
            _endpoint("/tokenize", self.tokenize, TokenizeRequest, _TOKENIZED),
            _endpoint("/detokenize", self.detokenize, DetokenizeRequest, ("prompt",)),
        ]
        return made

    async def chat(self, form: ChatForm, request: Request, body: Any) -> Response:
        """Continue a chat."""
        known = await self._model(request, body.model)
        chat = form.chat_of(body, known)
        ask = request_of_chat(chat, known, request.state.id, parse_limits(request.state.limits))
        tools = msgspec.to_builtins(chat.tools or [])
        most = 1 if chat.parallel_tool_calls is False else None
        used = formats(chat, known)
        sequences = []
        for _ in range(chat.n or 1):
            parser = Parser(used.tool, used.reasoning, tools)
            sequences.append(SequenceContent(parser, most))
        answer = form.answer(body, request.state.id, sequences)
        ask.inputs |= dict.fromkeys(answer.returns, True)
        return await self._generate(request, chat, answer, [ask])

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        known = await self._model(request, body.model)
        asks = requests_of_completions(
            body, known, request.state.id, parse_limits(request.state.limits)
        )
        sequences = []
        for ask in asks:
            echo = await self._text(ask) if body.echo else ""
            for _ in range(body.n or 1):
                sequences.append(SequenceContent(Parser(None, None), echo=echo))
        answer = Answer(body, request.state.id, sequences)
        return await self._generate(request, body, answer, asks)

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        answer: Told,
        asks: Sequence[ServerRequest],
    ) -> Response:
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        if request.state.limits:
            headers[LIMITS_HEADER] = request.state.limits
        watch = AnswerTimer(self._figures, body.model, request.state.key, bool(body.stream))
        chunks = _chunks(self._backend.generate(asks, headers), answer, watch, request.state.id)
        if body.stream:
            first = await _unless_gone(request.receive, anext(chunks))
            return _Events(_events(first, chunks, answer), media_type="text/event-stream")
        await _unless_gone(request.receive, _read_all(chunks))
        return as_json(answer.whole())

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """The ids of a text or a chat."""
        known = await self._model(request, body.model)
        ids = (await self._backend.perform(request_of_token_ids(body)))["output_ids"].tolist()
        answer = {"count": len(ids), "max_model_len": known.max_model_len, "tokens": ids}
        return as_json(answer)

    async def count_tokens(self, request: Request, body: PromptRequest) -> Response:
        """The tokens of a chat's prompt."""
        known = await self._model(request, body.model)
        messages = request_of_chat(chat_of_prompt(body, known), known, "").inputs["messages"]
        arrays = await self._perform(body.model, "tokenize", messages=messages)
        return as_json({"input_tokens": len(arrays["output_ids"])})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """The text of ids."""
        await self._model(request, body.model)
        return as_json({"prompt": await self._detokenized(body.model, body.tokens)})

    async def _text(self, ask: ServerRequest) -> str:
        """Of a prompt."""
        text = ask.inputs.get("text_input")
        if isinstance(text, bytes):
            return text.decode()
        return await self._detokenized(ask.model, ask.inputs["input_ids"])

    async def _detokenized(self, model: str, ids: Tensor) -> str:
        arrays = await self._perform(model, "detokenize", input_ids=ids)
        text: bytes = arrays["text_output"][0]
        return text.decode()

    async def _perform(self, model: str, task: str, **inputs: Tensor) -> Mapping[str, Any]:
        return await self._backend.perform(
            ServerRequest(model=model, inputs={**inputs, "task": task.encode()})
        )

    async def _model(self, request: Request, name: str) -> ModelDescription:
        known = await self._backend.language_model(name)
        request.state.model = name
        return known


def _endpoint(
    path: str,
    answer: Handler,
    body: type[WireRecord],
    fields: tuple[str, ...],
    *,
    streams: bool = False,
) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        answer=answer,
        text=body.__doc__,
        body=body,
        fields=fields,
        streams=streams,
    )


async def _chunks(
    steps: AsyncGenerator[Step], answer: Told, watch: AnswerTimer, id_: str
) -> AsyncGenerator[list[JsonObject]]:
    try:
        async for step in steps:
            watch.note(step)
            yield list(answer.feed(step))
    except JitneyError:
        raise
    except Exception:
        raise fault(id_) from None
    finally:
        await steps.aclose()
        watch.end(answer.usage.prompt, answer.usage.completion)


async def _read_all(chunks: AsyncGenerator[list[JsonObject]]) -> None:
    async for _ in chunks:
        pass


async def _events(
    chunks: list[JsonObject], more: AsyncGenerator[list[JsonObject]], answer: Told
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


def _event(body: JsonObject) -> bytes:
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

    gone = asyncio.create_task(leave())
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("the client has gone")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)
