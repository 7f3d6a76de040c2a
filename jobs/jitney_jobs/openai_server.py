"""Asks a server of OpenAI's API, such as ``jitney gateway``."""

import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec
from jitney.errors import InstallationError, InvalidArgumentError, install_extra, nearest

from jitney_jobs.asking import TIMEOUT_S, access_of
from jitney_jobs.failures import Meaning, RequestError, meaning_of_status, retry_after_s
from jitney_jobs.job import Job
from jitney_jobs.openai_form import OpenAiRequest

try:
    import httpx2
    import openai

    from jitney_jobs.kept_connections import KeptConnections
except ImportError:
    raise InstallationError(
        f"OpenAI's lines on a server need openai: {install_extra('jobs')}"
    ) from (None)

_CONNECT_S = 10.0
_KEPT_S = 30.0
"""Seconds for which a connection is kept that nobody uses."""
_SHOWN = 2000
"""Characters of an answer that is not JSON, in an error."""
_MOST_MODELS_NAMED = 10
_RESULTS = ("object", "choices", "data", "output")
"""An answer has one of these."""
_LIST_S = 10.0
"""Longest time to ask which models there are."""


class OpenAiServer:
    """A server of OpenAI's API. Its answers are taken as they are."""

    def __init__(self, job: Job) -> None:
        """Raises InvalidArgumentError for files that cannot be read."""
        self._url = str(job.server)
        self._host = urlsplit(self._url).netloc
        self._model = job.model
        self._access = access_of(job)
        self._client: openai.AsyncOpenAI | None = None
        # No key, organization or project of this process' environment goes to the server.
        self._headers: dict[str, Any] = {
            "authorization": openai.Omit(),
            "openai-organization": openai.Omit(),
            "openai-project": openai.Omit(),
            "idempotency-key": openai.Omit(),
            "accept-encoding": "gzip, deflate",
            **dict(self._access.headers),
        }

    async def open(self) -> bool:
        """Raises InvalidArgumentError if the server lists its models, and lacks the job's. Whatever
        else it says is left to the rows."""
        self._client = openai.AsyncOpenAI(
            api_key="",
            base_url=self._url,
            max_retries=0,  # what is tried again, and when, is for the executor to say
            http_client=httpx2.AsyncClient(
                transport=KeptConnections(self._access.context, _KEPT_S),
                trust_env=False,
                follow_redirects=False,  # the key is for this address
                timeout=httpx2.Timeout(TIMEOUT_S, connect=_CONNECT_S),
            ),
            _enforce_credentials=False,
        )
        if self._model is None:
            return False
        return await self._check_model(self._model)

    async def _check_model(self, model: str) -> bool:
        """Returns whether the server has answered."""
        assert self._client is not None
        try:
            response = await self._client.get(
                "/v1/models",
                cast_to=httpx2.Response,
                options={"headers": self._headers, "timeout": _LIST_S},
            )
            listed = msgspec.json.decode(response.content)
            names = [entry["id"] for entry in listed["data"]]
        except openai.APIConnectionError:
            return False
        except (openai.OpenAIError, msgspec.DecodeError, KeyError, TypeError):
            return True
        if names and model not in names:
            shown = ", ".join(names[:_MOST_MODELS_NAMED])
            if len(names) > _MOST_MODELS_NAMED:
                shown = f"{shown} and {len(names) - _MOST_MODELS_NAMED} more"
            bound = f"a model of {self._host}{nearest(model, names)}: it has {shown}"
            raise InvalidArgumentError.of("model", model, bound)
        return True

    async def close(self) -> None:
        """Close the connections. The server drops the requests of these connections."""
        if self._client is not None:
            await self._client.close()

    async def ask(self, request: OpenAiRequest) -> Any:
        """The object that the server answers. Raises RequestError."""
        assert self._client is not None, "it was opened"
        try:
            response = await self._client.post(
                request.path,
                cast_to=httpx2.Response,
                content=request.body,
                options={"headers": self._headers},
            )
        except openai.APIStatusError as error:
            raise self._answered(error.response) from None
        except openai.APITimeoutError as error:
            away = isinstance(error.__cause__, httpx2.ConnectTimeout)
            meaning = Meaning.AWAY if away else Meaning.PASSING
            raise self._unanswered(meaning, error) from None
        except openai.APIConnectionError as error:
            raise self._unanswered(_meaning_of_connection(error), error) from None
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise RequestError(f"url cannot be sent: {error}") from None
        return self._checked(response)

    def _checked(self, response: httpx2.Response) -> Any:
        """The answer of status 200. Raises RequestError if it is none."""
        try:
            answer = msgspec.json.decode(response.content)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            answer = None
        if not isinstance(answer, dict):
            error = self._answered(response, Meaning.FAULT)
            error.args = (f"the answer is no JSON object: {error}",)
            raise error
        is_error = answer.get("object") == "error"
        if answer.get("error") and not any(name in answer for name in _RESULTS):
            is_error = True
        if is_error:
            raise self._answered(response, _meaning_of_code(answer))
        return answer

    def _answered(self, response: httpx2.Response, meaning: Meaning | None = None) -> RequestError:
        """The failure of a request that was answered. ``meaning``: that of the status, if None."""
        text = self._access.hide(response.content.decode(errors="replace"))
        status = response.status_code
        if 300 <= status < 400:
            location = self._access.hide(response.headers.get("location", "nowhere"))
            text = f"the server redirects to {location[:_SHOWN]}: name that address as server"
        error = RequestError(f"{status} {text[:_SHOWN]}")
        error.meaning = meaning or meaning_of_status(status)
        error.status = status
        error.body = _error_body(text, status)
        error.retry_after_s = retry_after_s(response.headers)
        return error

    def _unanswered(self, meaning: Meaning, error: Exception) -> RequestError:
        cause = error.__cause__ or error
        why = self._access.hide(str(cause)) or type(cause).__name__
        return RequestError.of_meaning(meaning, f"{self._host} does not answer: {why}")


def _meaning_of_connection(error: BaseException) -> Meaning:
    """Of an error without an answer."""
    is_connecting = isinstance(error.__cause__, httpx2.ConnectError)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and is_connecting:
            return Meaning.JOB  # the certificate, or a server without TLS
        cause = cause.__cause__ or cause.__context__
    return Meaning.AWAY if is_connecting else Meaning.PASSING


def _meaning_of_code(answer: dict[str, Any]) -> Meaning:
    """Of an error in an answer whose status is 200. Some proxies have the status inside."""
    inner = answer.get("error")
    code = inner.get("code") if isinstance(inner, dict) else answer.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        return meaning_of_status(code)
    return Meaning.FAULT


def _error_body(text: str, status: int) -> dict[str, Any]:
    """The answer, in OpenAI's form of an error if it has no form."""
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    kind = "invalid_request_error" if status < 500 else "server_error"
    details = {"message": text[:_SHOWN], "type": kind, "param": None, "code": None}
    return {"error": details}
