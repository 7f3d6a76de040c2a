"""How busy the models of a server are, for a proxy that chooses among servers.

The gateway reads the server's metrics when a proxy asks, and tells the load in two ways: as a
response header, and among its own metrics. The header is that of Triton's own HTTP endpoints, in
the form of ORCA's load reports. The metrics have vLLM's names, which the Gateway API Inference
Extension reads by default.
"""

import asyncio
import math
import re
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from http.client import HTTPException

import msgspec
from jitney.errors import ConfigError

REQUEST_HEADER = "endpoint-load-metrics-format"
"""A client asks for the load with it. Its value is ``text`` or ``json``."""
RESPONSE_HEADER = "endpoint-load-metrics"
FRESH_S = 0.25
"""Seconds for which the gateway tells the same load again, without reading it anew."""
_TIMEOUT_S = 1.0

_WAITING = "jitney_waiting_requests"
_RUNNING = "jitney_running_requests"
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
"""Blocks of the KV cache; the label ``kv_cache_block_type`` tells which."""
_SAMPLE = re.compile(rf"^({_WAITING}|{_RUNNING}|{_BLOCKS}){{(.*)}} (\S+)$", re.M)
"""A line of the server's metrics: name, labels, value."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ModelLoad(msgspec.Struct, frozen=True):
    """How busy a model is, all its instances together. The response header has the names of these
    fields."""

    kv_cache_utilization: float
    """From 0 to 1."""
    max_token_capacity: float
    """Tokens that the KV cache holds."""
    num_requests_waiting: float
    num_requests_running: float


class ServerLoad:
    """The load of the models of one server."""

    def __init__(self, url: str) -> None:
        """``url`` is that of the server's metrics. Raises ConfigError if it is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the address of the metrics is {url!r}, not http://HOST:PORT/metrics"
            )
        self._url = url
        # No proxy, whatever the environment says: the server is near.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._lock = asyncio.Lock()
        self._read_at = -math.inf
        """When the load was last read; monotonic seconds."""
        self._models: dict[str, ModelLoad] = {}

    async def header(self, form: str, model: str) -> dict[str, str]:
        """The response header with the load of ``model``.

        ``form`` is the value of the request's header. Empty for another form than ``text`` and
        ``json``, and if the server does not tell the load.
        """
        load = (await self._read()).get(model)
        if load is None:
            return {}
        metrics = msgspec.structs.asdict(load)
        if form == "json":
            report = msgspec.json.encode({"named_metrics": metrics}).decode()
            return {RESPONSE_HEADER: f"JSON {report}"}
        if form == "text":
            parts = [f"named_metrics.{name}={value:.15g}" for name, value in metrics.items()]
            return {RESPONSE_HEADER: f"TEXT {', '.join(parts)}"}
        return {}

    async def exposition(self) -> bytes:
        """The load of all models, in Prometheus' text format. Empty if the server does not tell."""
        models = await self._read()
        if not models:
            return b""
        waiting = {name: load.num_requests_waiting for name, load in models.items()}
        running = {name: load.num_requests_running for name, load in models.items()}
        used = {name: load.kv_cache_utilization for name, load in models.items()}
        lines = [
            *_gauge("vllm:num_requests_waiting", waiting),
            *_gauge("vllm:num_requests_running", running),
            *_gauge("vllm:kv_cache_usage_perc", used),
        ]
        return "".join(f"{line}\n" for line in lines).encode()

    async def _read(self) -> dict[str, ModelLoad]:
        """Model -> its load, read from the server if what is known is too old."""
        async with self._lock:
            if time.monotonic() - self._read_at >= FRESH_S:
                try:
                    self._models = parse(await asyncio.to_thread(self._fetch))
                except (OSError, HTTPException):
                    self._models = {}  # to know no load is better than to tell an old one
                self._read_at = time.monotonic()
        return self._models

    def _fetch(self) -> str:
        with self._opener.open(self._url, timeout=_TIMEOUT_S) as response:
            text: bytes = response.read()
        return text.decode(errors="replace")


def _gauge(metric: str, values: dict[str, float]) -> list[str]:
    """The lines of a metric. ``values`` has that of each model."""
    lines = [f"# TYPE {metric} gauge"]
    for model, value in values.items():
        lines.append(f'{metric}{{model_name="{model}"}} {value:.15g}')
    return lines


@dataclass
class _Samples:
    """What the server's metrics say of one model, summed over its instances."""

    waiting: float = 0.0
    running: float = 0.0
    used_blocks: float = 0.0
    all_blocks: float = 0.0
    tokens_per_block: float = 0.0

    def add(self, metric: str, block_type: str | None, value: float) -> None:
        """Add a sample of one instance. ``block_type`` belongs to the metric of blocks."""
        if metric == _WAITING:
            self.waiting += value
        elif metric == _RUNNING:
            self.running += value
        elif block_type == "used":
            self.used_blocks += value
        elif block_type == "max":
            self.all_blocks += value
        elif block_type == "tokens_per":
            self.tokens_per_block = max(self.tokens_per_block, value)

    def load(self) -> ModelLoad:
        """The load that they make."""
        utilization = 0.0
        if self.all_blocks > 0:
            utilization = self.used_blocks / self.all_blocks
        return ModelLoad(
            kv_cache_utilization=utilization,
            max_token_capacity=self.all_blocks * self.tokens_per_block,
            num_requests_waiting=self.waiting,
            num_requests_running=self.running,
        )


def parse(text: str) -> dict[str, ModelLoad]:
    """The load of each language model, from the text of the server's metrics."""
    samples: defaultdict[str, _Samples] = defaultdict(_Samples)
    for metric, label_text, value in _SAMPLE.findall(text):
        labels = dict(_LABEL.findall(label_text))
        block_type = labels.get("kv_cache_block_type")
        samples[labels["model"]].add(metric, block_type, float(value))
    return {model: of_model.load() for model, of_model in samples.items()}
