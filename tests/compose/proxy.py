"""The proxy of the deployment without a container: deploy/proxy as it is, with its fixed folders
and ports moved, run by this machine's nginx in front of a server of the tests' own.
"""

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.compose.engine.clients import Client
from tests.compose.engine.deployment import wait_for
from tests.compose.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# Folder of the container -> folder of a test.
_PLACES = {"/etc/jitney": "etc", "/run/secrets": "secrets", "/run/jitney": "run", "/tmp": "tmp"}


def why_not() -> str:
    """Why the proxy cannot be run here; empty if it can."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        return "nginx is not installed"
    text = (DEPLOY / "proxy" / "nginx.conf.in").read_text(encoding="utf-8")
    modules = re.findall(r"^load_module .*;", text, re.M)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("\n".join([*modules, "events {}", "http {}"]))
        file.flush()
        done = subprocess.run(
            [nginx, "-t", "-q", "-c", file.name, "-g", "pid /dev/null; error_log stderr;"],
            capture_output=True,
            text=True,
            check=False,
        )
    return "" if done.returncode == 0 else f"nginx lacks a module: {done.stderr.strip()}"


# --------------------------------------------------------------------------- the server behind it


LARGE_BYTES = 32 << 20
"""Of a large answer: more than the buffers of all sockets on its way."""
HEALTH = ("/v2/health/ready", "/v2/health/live", "/health", "/api/health")
"""What the proxy asks a server, a gateway and Grafana for their health."""


@dataclass
class Server:
    """Stands in for Triton and for a gateway: answers everything, and notes what has reached it."""

    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    """Method, target, headers (lower case) and body of each request over HTTP."""
    called: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Method and metadata of each call over gRPC."""
    enough: threading.Event = field(default_factory=threading.Event)
    """Set: streams end, with a line more that says so."""
    begun: threading.Event = field(default_factory=threading.Event)
    """Set: a file is about to come."""
    large_path: str = ""
    """Answered with LARGE_BYTES zeros."""
    http_port: int = 0
    grpc_port: int = 0
    gateway_port: int = 0
    """Of a real gateway, if there is one."""

    def targets(self) -> list[str]:
        """Of the requests over HTTP."""
        return [target for _, target, _, _ in self.seen]

    def asked(self) -> list[tuple[str, str, dict[str, str], bytes]]:
        """What it has seen, but for questions for health. The proxy puts these by itself, for
        tests too that ended before their answer was there."""
        return [request for request in self.seen if request[1] not in HEALTH]


@contextmanager
def serve(host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    """A server on free ports, or one for HTTP. A generate_stream sends a line ten times a second,
    as many as `max_tokens` says, a chat two events until it is enough; /v1/drop is not answered; a
    stream over gRPC answers each message with itself."""
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if self.path == "/v1/files":
                state.begun.set()
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            state.seen.append((self.command, self.path, headers, body))
            if self.path == "/v1/drop":
                self.close_connection = True
                return
            self.send_response(200)
            if self.path == "/v1/chat/completions":
                self.send_header("Connection", "close")
                self.end_headers()
                for seconds in (0.1, 60):  # not in one packet
                    self.wfile.write(b"data: event\n\n")
                    state.enough.wait(seconds)
                self.wfile.write(b"data: [DONE]\n\n")
                return
            if self.path == state.large_path:
                self.send_header("Content-Length", str(LARGE_BYTES))
                self.end_headers()
                self.wfile.write(bytes(LARGE_BYTES))
                return
            if not self.path.endswith("generate_stream"):
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")
                return
            self.send_header("Connection", "close")
            self.end_headers()
            for number in range(json.loads(body)["max_tokens"]):
                self.wfile.write(b'data: {"text_output": "%d"}\n\n' % number)
                if state.enough.wait(0.1):
                    break
            self.wfile.write(b'data: {"text_output": "end"}\n\n')

        do_GET = do_DELETE = do_POST

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the client has left, which some tests are about
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Calls(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            state.called.append((call.method, dict(call.invocation_metadata)))
            if call.method.endswith("ModelStreamInfer"):
                return grpc.stream_stream_rpc_method_handler(lambda messages, context: messages)
            return grpc.unary_unary_rpc_method_handler(lambda message, context: message)

    web = http.server.ThreadingHTTPServer((host, port), Handler)
    web.daemon_threads = True
    threading.Thread(target=web.serve_forever, daemon=True).start()
    pool = ThreadPoolExecutor(8)
    calls = grpc.server(pool, handlers=[Calls()])
    state.http_port = web.server_port
    state.grpc_port = calls.add_insecure_port("127.0.0.1:0")
    calls.start()
    try:
        yield state
    finally:
        web.shutdown()
        web.server_close()
        calls.stop(0).wait()
        pool.shutdown()


@contextmanager
def names(addresses: list[str]) -> Iterator[int]:
    """The port of a name server that gives ``addresses``, as they are then, for every name."""

    def answer(query: bytes) -> bytes:
        question = query[12 : query.index(b"\0", 12) + 5]
        head = query[:2] + struct.pack(">5H", 0x8180, 1, len(addresses), 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4)
        return head + question + b"".join(record + socket.inet_aton(each) for each in addresses)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                query, client = listener.recvfrom(512)
                if not query:
                    return
                listener.sendto(answer(query), client)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.sendto(b"", listener.getsockname())
            thread.join()


# --------------------------------------------------------------------------- the proxy


class Proxy:
    """deploy/proxy, run in a folder of its own. ``settings`` are environment variables;
    ``kept_back`` is left out of the paths that it lets through, such as ``stat``; ``names`` is the
    port of its name server."""

    def __init__(
        self, server: Server, kept_back: str = "", names: int | None = None, **settings: str
    ) -> None:
        if reason := why_not():
            raise RuntimeError(f"{reason}: make test-compose installs it")
        self._kept_back = kept_back
        # Not pytest's folder: the path of a socket is at most 107 bytes long.
        self.folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self.port, self.grafana_port = free_port(), free_port()
        self._ports = {
            "$triton:8000": f"$triton:{server.http_port}",
            "$triton:8001": f"$triton:{server.grpc_port}",
            "$gateway:9000": f"$gateway:{server.gateway_port or server.http_port}",
            "$grafana:3000": f"$grafana:{server.http_port}",
            "listen 8443": f"listen 127.0.0.1:{self.port}",
            "listen 3000": f"listen 127.0.0.1:{self.grafana_port}",
        }
        if names is not None:
            self._ports["\n    @RESOLVER@"] = f"\nresolver 127.0.0.1:{names} valid=1s ipv6=off;"
        for name in ("etc", "run", "tmp", "bin"):
            (self.folder / name).mkdir()
        for source in (DEPLOY / "proxy").iterdir():
            self._copy(source)
        self.secrets = self.folder / "secrets"
        subprocess.run(
            [DEPLOY / "secrets.sh"],
            env={**os.environ, "SECRETS": str(self.secrets)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        self.environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}:/usr/sbin",
            "API_KEYS_FILE": str(self.secrets / "api_keys"),
            "TRITON_HOST": "127.0.0.1",
            "GATEWAY_HOST": "127.0.0.1",
            "GRAFANA_HOST": "127.0.0.1",
            **settings,
        }
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                # In the background a shell ignores signals, which children inherit. Not by
                # `preexec_fn`: gRPC does not take a fork well.
                ["env", "--default-signal", self.folder / "bin" / "start"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ended as a group: workers that outlive their master too
            )

    def __enter__(self) -> "Proxy":
        wait_for(self._answers, "the proxy to answer", 60, self.output)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.client("").request("GET", "/alive")[0] == 200
        return False

    def _copy(self, source: Path) -> None:
        """One of its files, with the folders and ports of this run."""
        places = "|".join(_PLACES)
        text = re.sub(
            rf"({places})(?![\w-])",
            lambda found: f"{self.folder}/{_PLACES[found[1]]}",
            source.read_text(encoding="utf-8"),
        )
        for name, value in self._ports.items():
            text = text.replace(name, value)
        if self._kept_back:
            text = text.replace("/models/[^/]+", f"/models/(?!{self._kept_back})[^/]+")
            text = re.sub(rf"\|{self._kept_back}\w*(?=\||\))", "", text, flags=re.IGNORECASE)
        if source.name == "nginx.conf.in" and os.geteuid() == 0:
            text = f"user root;\n{text}"  # its folder is closed to others
        target = self.folder / ("etc" if source.suffix else "bin") / source.name
        target.write_text(text, encoding="utf-8")
        target.chmod(0o755)

    def output(self) -> str:
        """All that it has printed, its log among it."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def log(self, uri: str) -> list[dict[str, Any]]:
        """The lines of its log about a path."""
        lines = [line for line in self.output().splitlines() if line.startswith("{")]
        return [line for line in map(json.loads, lines) if line["uri"] == uri]

    def workers(self) -> list[psutil.Process]:
        """nginx's processes, its master among them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def memory(self) -> int:
        """Bytes that nginx's processes hold, each for itself."""
        return sum(each.memory_full_info().uss for each in self.workers())

    def temporary_bytes(self) -> int:
        """Bytes of nginx's temporary files. It removes their names as soon as they are open."""
        folder = str(self.folder / "tmp")
        total = 0
        for worker in self.workers():
            for descriptor in Path(f"/proc/{worker.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(folder):
                        total += descriptor.stat().st_size
        return total

    def client(self, key: str | None = None) -> Client:
        """A client over HTTP, with the first key or another; an empty one is none."""
        if key is None:
            (key,) = re.findall("^first:(.*)$", self.keys(), re.M)
        return Client(self.port, self.secrets / "tls_certificate", key)

    def keys(self) -> str:
        """The text of its API keys."""
        return (self.secrets / "api_keys").read_text(encoding="utf-8")

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A client over gRPC."""
        trusted = (self.secrets / "tls_certificate").read_bytes()
        with grpc.secure_channel(
            f"localhost:{self.port}", grpc.ssl_channel_credentials(trusted)
        ) as channel:
            yield channel

    def reload(self) -> "subprocess.CompletedProcess[str]":
        """What `reload-keys` does and says."""
        return subprocess.run(
            ["reload-keys"],
            executable=self.folder / "bin" / "reload-keys",
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


def send(
    proxy: Proxy, path: str, body: bytes, *headers: tuple[str, str], key: bool = True
) -> tuple[int, bytes]:
    """Status and body of a POST with these headers, which may be given twice."""
    client = proxy.client(None if key else "")
    connection = client.connect()
    try:
        connection.putrequest("POST", path)
        for name, value in (*client.headers.items(), *headers):
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
