"""The endpoints of language models.

Each makes one or several requests to the model, and an answer from its steps: whole, or as a stream
of server-sent events.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response
from jitney.sampling_params import LIMITS_HEADER, parse_limits
from jitney.tracing import HEADERS as TRACE_HEADERS

from jitney_gateway.completion_answer import PromptEcho
from jitney_gateway.document import Endpoint, Handler
from jitney_gateway.event_stream import (
    EventStream,
    events_of_steps,
    exhaust,
    server_sent_events,
    wait_for_first,
    while_connected,
)
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
from jitney_gateway.generation import (
    CHAT_APIS,
    FIELDS_WITH_CHOICES,
    ChatApi,
    GenerationPlan,
    plan_chat,
    plan_completions,
)
from jitney_gateway.http_answers import as_json
from jitney_gateway.messages_request import (
    NAMES_OF_MESSAGE,
    CountTokensRequest,
    chat_of_prompt,
)
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.server_client import ServerClient
from jitney_gateway.server_request import (
    InputValue,
    ServerRequest,
    request_of_chat,
    request_of_token_ids,
    requests_of_completions,
)
from jitney_gateway.wire import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    WireRecord,
)
from jitney_gateway.without_effect import known_kwargs, leave_out, leave_out_of_chat


class LanguageEndpoints:
    """The endpoints of language models. ``metrics`` counts what they generate."""

    def __init__(self, server: ServerClient, metrics: GatewayMetrics) -> None:
        self._server = server
        self._metrics = metrics

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        endpoints = []
        for path, api in CHAT_APIS.items():
            handler = partial(self.chat, api)
            endpoints.append(_endpoint(path, handler, api.body, api.fields, streams=True))
        completions = _endpoint(
            "/v1/completions",
            self.completions,
            CompletionRequest,
            FIELDS_WITH_CHOICES,
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
        limits = parse_limits(request.state.limits)
        plan = plan_chat(
            api, body, model, request_id=request_id, ignored=request.state.ignored, limits=limits
        )
        return await self._generate(request, plan)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue texts."""
        request_id = request.state.id
        model = await self._find_model(request, body.model)
        leave_out(body, model, request.state.ignored)
        limits = parse_limits(request.state.limits)
        server_requests = requests_of_completions(body, model, request_id, limits)
        echoes = []
        if body.echo:
            wants_logprobs = body.logprobs is not None
            for server_request in server_requests:
                echoes.append(await self._echo(server_request, with_first_token=wants_logprobs))
        plan = plan_completions(body, server_requests, echoes, request_id=request_id)
        return await self._generate(request, plan)

    async def _generate(self, request: Request, plan: GenerationPlan) -> Response:
        """Generate the answer. Returns the response: the whole of it, or its stream."""
        state = request.state
        body = plan.body
        answer = plan.answer
        headers = {}
        for name in TRACE_HEADERS:
            if name in request.headers:
                headers[name] = request.headers[name]
        if state.limits:
            headers[LIMITS_HEADER] = state.limits
        timer = AnswerTimer(self._metrics, body.model, state.owner, bool(body.stream))
        steps = self._server.generate(plan.server_requests, headers)
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
