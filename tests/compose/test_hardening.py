"""The defaults of what is shipped: nothing runs code that came as data, nothing listens to
strangers, nobody changes the server from outside, and a proxy with TLS and keys is in front.

Here is what the files and the code show by themselves. The running deployment is asked in
`engine/test_cpu_access.py` and `engine/test_cpu_isolation.py`; that a load refuses pickles and a
checkpoint's own code is in `tests/execution`.
"""

import ast
import importlib.util
import inspect
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from jitney_server import commands
from jitney_server.leftovers import RunFolder
from jitney_server.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROXY = (DEPLOY / "proxy" / "nginx.conf.in").read_text(encoding="utf-8")
# Every Python file that the server and its models run from: not jobs, which talk to processes
# of their own.
SERVED = [
    file
    for folder in (ROOT / "backend", DEPLOY, ROOT / "model_repository")
    for file in sorted(folder.rglob("*.py"))
    if file != ROOT / "jobs/jitney_jobs/prepare_workers.py"
]
# Modules whose formats run code when they are read, or send objects in such a format.
CODE_AS_DATA = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imported(tree: ast.Module) -> Iterator[str]:
    """The first part of the name of every module that is imported, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


# --------------------------------------------------------------------------- no code that is data


@pytest.mark.parametrize("file", SERVED, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_that_is_read_can_be_code(file: Path) -> None:
    tree = tree_of(file)
    assert not set(imported(tree)) & CODE_AS_DATA
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("torch.load", "eval", "exec"), f"line {node.lineno}"
        for word in node.keywords:
            if word.arg in ("trust_remote_code", "allow_pickle"):
                assert ast.unparse(word.value) == "False", f"line {node.lineno}"


# --------------------------------------------------------------------------- who may connect


@pytest.fixture
def entrypoint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """deploy/server/entrypoint.py as a module."""
    monkeypatch.syspath_prepend(DEPLOY / "server")
    spec = importlib.util.spec_from_file_location("entrypoint", DEPLOY / "server" / "entrypoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_listeners_are_on_the_loopback_address_unless_told_otherwise(
    entrypoint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect.signature(TritonServer).parameters["host"].default == "127.0.0.1"
    assert inspect.signature(commands.serve).parameters["host"].default == "127.0.0.1"
    server = entrypoint.Server(entrypoint.parse(["--embedded"]))
    folder = Path("/somewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server.runtime = RunFolder()
    given = dict(word.split("=", 1) for word in server.command(folder, folder, folder)[1:])
    assert {name: given[name] for name in given if name.endswith("-address")} == {
        "--http-address": "127.0.0.1",
        "--grpc-address": "127.0.0.1",
        "--metrics-address": "127.0.0.1",
    }


def test_the_server_is_not_told_to_open_anything_again() -> None:
    """Arguments after ours would win, and those that compose gives are none of these."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in ("triton", "triton-cpu"):
        assert services[name]["command"] == (
            "--models /models --host 0.0.0.0 --drain-s ${DRAIN_SECONDS:-30} --exit-timeout-s 15 "
            "-- ${SERVER_ARGS:-}"
        )
        assert "ports" not in services[name]  # of 0.0.0.0, only the inner network sees anything


# --------------------------------------------------------------------------- the proxy in front


def locations() -> dict[str, str]:
    """Head of each location of the proxy -> its body."""
    return dict(
        re.findall(r"\n        location ([^{\n]*?) \{\n(.*?)\n        \}", PROXY, re.S)
    ) | dict(re.findall(r'\n        location (~ "[^"]+") \{\n(.*?)\n        \}', PROXY, re.S))


def test_every_port_of_the_proxy_speaks_tls() -> None:
    listens = re.findall(r"^\s*listen (.*);", PROXY, re.M)
    assert listens == [
        "8443",  # these two pass on what they get, unread, to these
        "3000",
        "unix:/run/jitney/models.sock ssl http2 proxy_protocol",
        "unix:/run/jitney/grafana.sock ssl http2 proxy_protocol",
    ]
    assert re.findall(r"ssl_protocols (.*);", PROXY) == ["TLSv1.2 TLSv1.3"]


def test_every_way_to_the_server_but_health_takes_a_key_and_has_limits() -> None:
    ways = {
        head: body
        for head, body in locations().items()
        if "proxy_pass" in body or "grpc_pass" in body
    }
    open_ways = {
        head for head, body in ways.items() if 'if ($key_name = "") { return 401; }' not in body
    }
    health = {"= /healthz", "= /v2/health/ready", "= /v2/health/live", "= /health"}
    assert open_ways == health | {"/"}
    assert "$grafana" in ways["/"]
    assert len(ways) == 11
    asked = r"proxy_pass http://\$(triton:8000/v2/health/(live|ready)|gateway:9000/health);"
    for head in health:
        assert "health.conf" in ways[head]
        assert re.search(asked, ways[head])
    for head in set(ways) - open_ways:
        assert "limit_req zone=rate" in ways[head]
        assert "limit_conn open" in ways[head]


@pytest.mark.parametrize(
    ("sent", "is_refused"),
    [
        ("/v2/systemsharedmemory/region/..%2f..%2fmodels/register", True),
        ("/v2/repository/..%2Fmodels/index", True),
        ("/v2/models/pylm#/trace/setting", True),
        ("/v2/models/%2e%2e/models/pylm", True),
        ("/v2/logging/../models/pylm", True),
        ("/v2/models/pylm/.?x", True),
        ("/v2", False),
        ("/v2/models/all-MiniLM-L6-v2.1/versions/1/infer", False),
        ("/v2/models/pylm/generate?x=../y%2f#", False),
    ],
)
def test_a_path_that_the_server_would_read_otherwise_is_refused(
    sent: str, is_refused: bool
) -> None:
    """The locations match what nginx made of a path; servers get it as it was sent."""
    bodies = [
        body for body in locations().values() if re.search(r"\$(triton:8000|gateway:9000);", body)
    ]
    assert len(bodies) == 4
    for body in bodies:
        (pattern,) = re.findall(r'if \(\$request_uri ~\* "(.*)"\) \{ return 404; \}', body)
        assert (re.search(pattern, sent, re.I) is not None) == is_refused


def test_nobody_without_a_key_has_a_body_stored() -> None:
    health = (DEPLOY / "proxy" / "health.conf").read_text(encoding="utf-8")
    assert "client_max_body_size 1k;" in health
    for body in locations().values():
        if "$grafana" in body:
            assert "proxy_request_buffering off;" in body


def test_the_key_ends_at_the_proxy_or_the_gateway() -> None:
    for name, kind in (("http.conf", "proxy"), ("grpc.conf", "grpc")):
        text = (DEPLOY / "proxy" / name).read_text(encoding="utf-8")
        assert f'{kind}_set_header Authorization "";' in text
        assert f'{kind}_set_header X-Api-Key "";' in text
    for body in locations().values():
        if "$gateway:9000;" in body:
            assert "include /etc/jitney/gateway.conf;" in body
