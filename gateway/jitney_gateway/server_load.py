"""How busy the models of a server are, for who chooses among servers: read from the server's
metrics when somebody asks, and told under the names that others read.

The response header is that of Triton's own HTTP endpoints, in the form of ORCA's load reports; the
metrics are vLLM's, which the Gateway API Inference Extension reads if nobody tells it otherwise.
"""

import asyncio
import re
import time
import urllib.request
from collections import defaultdict
from http.client import HTTPException

import msgspec
from jitney.errors import ConfigError

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"
FRESH_S = 0.25
"""Seconds for which what was read is told again."""
_TIMEOUT_S = 1.0
_FAMILIES = {
    "jitney_waiting_requests": "num_requests_waiting",
    "jitney_running_requests": "num_requests_running",
    "nv_trt_llm_kv_cache_block_metrics": "",
}
_METRICS = {
    "num_requests_waiting": "vllm:num_requests_waiting",
    "num_requests_running": "vllm:num_requests_running",
    "kv_cache_utilization": "vllm:kv_cache_usage_perc",
}
_LINE = re.compile(rf"^({'|'.join(_FAMILIES)}){{(.*)}} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Figures = dict[str, float]
"""By name: vLLM's for requests, kv_cache_utilization from 0 to 1, and max_token_capacity."""


class ServerLoad:
    """That of one server."""

    def __init__(self, url: str) -> None:
        """``url``: of its metrics. Raises ConfigError if it is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the address of the metrics is {url!r}, not http://HOST:PORT/metrics"
            )
        self._url = url
        # No proxy, whatever the environment says: the server is near.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._reading = asyncio.Lock()
        self._read_at = -FRESH_S
        self._models: dict[str, Figures] = {}

    async def header(self, form: str, model: str) -> dict[str, str]:
        """The response header for ``model`` in the form ``text`` or ``json``. Empty for any other
        form, and if the server does not tell."""
        figures = (await self._read()).get(model)
        if figures is None or form not in ("text", "json"):
            return {}
        told = "JSON " + msgspec.json.encode({"named_metrics": figures}).decode()
        if form == "text":
            told = "TEXT " + ", ".join(
                f"named_metrics.{name}={figures[name]:.15g}" for name in figures
            )
        return {RESPONSE_HEADER: told}

    async def page(self) -> bytes:
        """Of all models, in Prometheus' text format. Empty if the server does not tell."""
        models = await self._read()
        lines: list[str] = []
        for name, metric in _METRICS.items():
            lines.append(f"# TYPE {metric} gauge")
            for model, figures in models.items():
                lines.append(f'{metric}{{model_name="{model}"}} {figures[name]:.15g}')
        return "\n".join([*lines, ""]).encode() if models else b""

    async def _read(self) -> dict[str, Figures]:
        async with self._reading:
            if time.monotonic() - self._read_at >= FRESH_S:
                try:
                    self._models = parse(await asyncio.to_thread(self._fetch))
                except (OSError, HTTPException):
                    self._models = {}  # none are better than old ones
                self._read_at = time.monotonic()
        return self._models

    def _fetch(self) -> str:
        with self._opener.open(self._url, timeout=_TIMEOUT_S) as answer:
            page: bytes = answer.read()
        return page.decode(errors="replace")


def parse(page: str) -> dict[str, Figures]:
    """The figures of each language model, all its instances together."""
    models: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for family, text, value in _LINE.findall(page):
        labels = dict(_LABEL.findall(text))
        name = _FAMILIES[family] or labels["kv_cache_block_type"]
        models[labels["model"]].append((name, float(value)))
    return {model: _figures(lines) for model, lines in models.items()}


def _figures(lines: list[tuple[str, float]]) -> Figures:
    def total(name: str) -> float:
        return sum(value for known, value in lines if known == name)

    blocks = total("max")
    block_size = max((value for known, value in lines if known == "tokens_per"), default=0.0)
    return {
        "kv_cache_utilization": total("used") / blocks if blocks else 0.0,
        "max_token_capacity": blocks * block_size,
        "num_requests_waiting": total("num_requests_waiting"),
        "num_requests_running": total("num_requests_running"),
    }
