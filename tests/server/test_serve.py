"""`jitney serve` and `jitney doctor`: one-line errors, and a server run from start to Ctrl-C."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError, JitneyError
from jitney_server import gateway_process, serving
from jitney_server.admin import Admin
from jitney_server.doctor import Finding
from jitney_server.gateway_process import GatewayProcess
from jitney_server.interruptible import interruptible
from jitney_server.ports import ServerPorts, choose_ports
from jitney_server.server import TritonServer
from typer.testing import CliRunner, Result

from tests.real_server.client import wait_until
from tests.signals import heed_signals

JITNEY = Path(sys.executable).parent / "jitney"
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [JITNEY, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **options,
    )


def invoke(words: list[str], **options: Any) -> Result:
    return CliRunner().invoke(cli.make_app(), words, **options)


def test_an_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    result = run("serve", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == f"error: the model repository {tmp_path}/nowhere is not a folder\n"


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    result = run("serve", str(tmp_path), "--model", "[bold]not[/]")
    assert result.returncode == 1
    assert "'[bold]not[/]' is not in" in result.stderr, "text from outside is never markup"


@pytest.mark.parametrize("option", ["--api-key-file", "--otlp-endpoint", "--batches"])
def test_an_option_of_the_gateway_needs_a_gateway(tmp_path: Path, option: str) -> None:
    result = invoke(["serve", str(tmp_path / "nowhere"), option, "x"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert str(result.exception) == (f"{option} belongs to the gateway: give --openai-port too")
    result = invoke(["serve", str(tmp_path / "nowhere"), option, "x", "--openai-port", "0"])
    assert "is not a folder" in str(result.exception)


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warns", 0), ("fails", 1)])
def test_doctor_prints_findings_and_sets_the_status(
    monkeypatch: pytest.MonkeyPatch, state: str, status: int
) -> None:
    findings = {"thing": Finding(state, "is [so:b:2]", "do that")}  # type: ignore[arg-type]
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(
        "jitney_server.doctor.examine", lambda ports: asked.append(ports) or findings
    )
    kinds = {"model m": Finding("ok", "cache paged")}
    looked: list[Path] = []
    monkeypatch.setattr(
        "jitney_server.doctor.examine_models", lambda folder: looked.append(folder) or kinds
    )
    result = invoke(["doctor", "--http-port", "1234"])
    assert result.exit_code == status
    assert looked == ([] if state == "fails" else [Path("model_repository")])
    assert ("model m" in result.output) == bool(looked)
    assert asked == [{"http": 1234, "grpc": 8001, "metrics": 8002}]
    assert "is [so:b:2]" in result.output
    assert "do that" in result.output


@pytest.mark.slow
@pytest.mark.server
def test_doctor_start() -> None:
    result = run("doctor", "--start")
    assert result.returncode == 0, result.stdout
    assert "a server started, answered and stopped" in result.stdout


ENSEMBLE = """platform: "ensemble"
input [{ name: "x" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [-1] }]
ensemble_scheduling { step [{
  model_name: "broken" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
}] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    from jitney_server.trial import write_trial

    write_trial(tmp_path / "repository")
    return tmp_path / "repository"


def ask(address: str) -> object:
    """What the model that adds one makes of 1, 2 and 3."""
    host, port = address.removeprefix("http://").split(":")
    x = {"name": "x", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}
    (y,) = Admin(host, ServerPorts(int(port), 0, 0), {}).infer("plus_one", [x])
    return y["data"]


READY = "/v2/models/plus_one/ready"


def status(url: str) -> int:
    """The status of the answer."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def wait_for(pattern: str, file: Path, process: subprocess.Popen[bytes]) -> str:
    """The first group of ``pattern`` once it stands in ``file``."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        match = re.search(pattern, file.read_text(encoding="utf-8"))
        if match:
            return match[1]
        assert process.poll() is None, file.read_text(encoding="utf-8")
        time.sleep(0.1)
    raise AssertionError(file.read_text(encoding="utf-8"))


def start(repository: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    environment = {**os.environ, "COLUMNS": "200"}
    with output.open("wb") as file:
        return subprocess.Popen(
            [JITNEY, "serve", str(repository), *ports, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=heed_signals,
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_run(number: signal.Signals) -> None:
    """As Ctrl-C does; what nohup ignores stays ignored."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, signal.SIG_IGN)
        with interruptible():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.slow
@pytest.mark.server
def test_every_model_that_is_not_served_is_listed(repository: Path, tmp_path: Path) -> None:
    """Also what the server did not try to load: an ensemble without its part, a folder without a
    version."""
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.py").write_text("raise ValueError('no')", "utf-8")
    config = (repository / "plus_one" / "config.pbtxt").read_text(encoding="utf-8")
    for name, text in (("broken", config), ("empty", config), ("lost", ENSEMBLE)):
        (repository / name).mkdir(exist_ok=True)
        (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    (repository / "lost" / "1").mkdir()
    output = tmp_path / "output"
    process = start(repository, output, "--keep-going")
    try:
        wait_for(r"(Ctrl-C stops the server)", output, process)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
    text = output.read_text(encoding="utf-8")
    states = dict(re.findall(r"^(\w+) +((?:ready|failed).*)", text, re.MULTILINE))
    assert states.keys() == {"plus_one", "broken", "empty", "lost"}, text
    assert states["plus_one"].strip() == "ready"
    assert "ValueError: no" in states["broken"]
    assert "ensemble 'lost' depends on 'broken'" in states["lost"]
    assert "at least one version must be available" in states["empty"]


def test_a_repository_without_models_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "config.pbtxt").write_text("")  # a file beside the models is no model
    server = TritonServer(tmp_path)
    monkeypatch.setattr(Admin, "model_states", lambda self: {})
    monkeypatch.setattr(server, "start", lambda timeout_s: None)
    asked_to_stop = threading.Event()
    asked_to_stop.set()
    serving._run(server, None, asked_to_stop, 1.0)
    assert f"warning: {tmp_path} holds no models" in capsys.readouterr().err


@pytest.mark.server
def test_what_dies_comes_back_until_a_signal(repository: Path, tmp_path: Path) -> None:
    """The process of a model is killed, then the server; then the stop is clean. The key of the
    restricted endpoints stands on no command line, which every local user can read."""
    import psutil

    output = tmp_path / "output"
    process = start(repository, output, f"--log-file={tmp_path / 'log'}")
    try:
        address = wait_for(r"HTTP +(http://\S+)", output, process)
        wait_for(r"(Ctrl-C stops the server)", output, process)
        with urllib.request.urlopen(f"{address}/v2/health/ready", timeout=60) as response:
            assert response.status == 200
        text = output.read_text(encoding="utf-8")
        assert re.search(r"plus_one +ready", text)
        assert "CUDA" not in text, "warnings of a machine without a GPU stay in the log"
        (server,) = psutil.Process(process.pid).children()
        shown = server.cmdline()
        assert "jitney-key" not in " ".join(shown)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}/v2/repository/index", b"", timeout=60)
        (stub,) = server.children()
        (name,) = re.findall(r"shm-region-prefix-name=(\S+)", " ".join(shown))
        stub.kill()
        wait_for(r"(process of model plus_one has ended)", output, process)
        seen = set()
        while "model plus_one is loaded again" not in output.read_text(encoding="utf-8"):
            assert process.poll() is None
            seen.add((status(f"{address}/v2/health/ready"), status(f"{address}{READY}")))
        assert {of_server for of_server, _ in seen} == {200}, "others go on being served"
        assert 400 in {of_model for _, of_model in seen}
        assert ask(address) == [2, 3, 4]
        server.kill()
        wait_for(r"(the server ended by itself)", output, process)
        wait_for(r"(the server is ready again)", output, process)
        assert ask(address) == [2, 3, 4]
        assert not list(Path("/dev/shm").glob(f"{name}*"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, output.read_text(encoding="utf-8")
        assert "Stopped." in output.read_text(encoding="utf-8")
        assert "loading: plus_one" in (tmp_path / "log").read_text(encoding="utf-8")
    finally:
        process.kill()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/v2/health/ready", timeout=60)


@pytest.mark.server
def test_a_signal_during_the_start_stops_it(repository: Path, tmp_path: Path) -> None:
    model = repository / "plus_one" / "1" / "model.py"
    model.write_text("import time\ntime.sleep(300)\n", encoding="utf-8")
    output, log = tmp_path / "output", tmp_path / "log"
    process = start(repository, output, f"--log-file={log}")
    try:
        wait_until(lambda: log.exists() and "loading" in log.read_text(encoding="utf-8"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.server
def test_a_gateway_beside_comes_back_and_stops_too(repository: Path, tmp_path: Path) -> None:
    import psutil

    output = tmp_path / "output"
    process = start(repository, output, "--openai-port=0")
    try:
        address = wait_for(r"OpenAI +(http://\S+)/v1", output, process)

        def is_healthy() -> bool:
            try:
                return urllib.request.urlopen(f"{address}/health", timeout=60).status == 200
            except OSError:
                return False

        def gateway() -> psutil.Process | None:
            children = psutil.Process(process.pid).children()
            found = [each for each in children if "gateway" in each.cmdline()]
            return found[0] if found else None

        wait_until(is_healthy)
        first = gateway()
        assert first is not None
        first.kill()
        wait_for(r"(the gateway ended by itself)", output, process)
        wait_until(is_healthy)
        second = gateway()
        assert second is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, output.read_text(encoding="utf-8")
        assert not second.is_running()
    finally:
        process.kill()


GATEWAY = """
import sys, time, types
from jitney_server.gateway_process import GatewayProcess
server = types.SimpleNamespace(
    grpc_url="127.0.0.1:1", host="127.0.0.1", metrics_url="http://127.0.0.1:2/metrics"
)
def show(address):
    print(address, flush=True)
gateway = GatewayProcess(server, int(sys.argv[1]), (), say=print, print_address=show)
while True:
    gateway.turn()
    time.sleep(0.1)
"""


def test_a_gateway_ends_when_who_started_it_is_killed() -> None:
    (port,) = choose_ports("127.0.0.1", {"gateway": 0})

    def is_free() -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    command = [sys.executable, "-c", GATEWAY, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "OpenAI" in process.stdout.readline()
        assert not is_free()
        process.kill()
    wait_until(is_free)


class Gateway:
    """A gateway whose processes run some code, and what is told of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.addresses: list[str] = []
        server = types.SimpleNamespace(
            grpc_url="", host="127.0.0.1", metrics_url="", requested_ports=ServerPorts(8000, 0, 0)
        )
        self.process = GatewayProcess(
            server,  # type: ignore[arg-type]
            0,
            (),
            say=self.said.append,
            print_address=self.addresses.append,
        )

    def turn_until(self, condition: Callable[[], bool]) -> None:
        def is_met() -> bool:
            self.process.turn()
            return condition()

        wait_until(is_met)


Gateways = Callable[[str], Gateway]


@pytest.fixture
def gateway_that_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateways]:
    made: list[Gateway] = []

    def make(code: str) -> Gateway:
        monkeypatch.setattr(gateway_process, "_RUN_GATEWAY", code)
        made.append(Gateway())
        return made[-1]

    yield make
    for each in made:
        each.process.kill()


LISTENS = "import time; print('address', flush=True); time.sleep(3600)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "the gateway cannot be started: it ended with status 3"),
        (
            "import sys; sys.exit('error: the key file is empty')",
            "the gateway cannot be started: the key file is empty",
        ),
        ("import time; time.sleep(3600)", "the gateway does not check its options within 0 s"),
    ],
)
def test_a_gateway_that_could_not_start_is_found_before_the_models_load(
    gateway_that_runs: Gateways, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    if "sleep" in code:
        monkeypatch.setattr(gateway_process, "_START_S", 0.1)
    gateway = gateway_that_runs(code)
    with pytest.raises(JitneyError, match=reason):
        gateway.process.check()


def test_what_a_gateway_needs_is_checked_by_the_gateway_itself(tmp_path: Path) -> None:
    """Before the models load: the port, the key file, the port's difference from the server's."""
    (port,) = choose_ports("127.0.0.1", {"gateway": 0})
    server = types.SimpleNamespace(
        grpc_url="127.0.0.1:0",
        host="127.0.0.1",
        metrics_url="http://127.0.0.1:0/metrics",
        requested_ports=ServerPorts(8000, 0, 0),
    )

    def check(port: int, *options: str) -> None:
        GatewayProcess(
            server,  # type: ignore[arg-type]
            port,
            options,
            say=print,
            print_address=print,
        ).check()

    check(port)
    check(0)
    with pytest.raises(JitneyError, match="8000 is requested for both http and gateway"):
        check(8000)
    with pytest.raises(JitneyError, match=r"nowhere cannot be read"):
        check(port, f"--api-key-file={tmp_path / 'nowhere'}")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(JitneyError, match="in use"):
        check(port)


def test_nothing_is_loaded_for_a_gateway_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_process, "_RUN_GATEWAY", "raise SystemExit(3)")
    calls: list[str] = []
    server = types.SimpleNamespace(
        grpc_url="",
        host="127.0.0.1",
        metrics_url="",
        requested_ports=ServerPorts(0, 0, 0),
        models=["m"],
        model_repository=Path("models"),
        start=lambda timeout_s: calls.append("start"),
        stop=lambda: calls.append("stop"),
    )
    with pytest.raises(JitneyError, match="the gateway cannot be started"):
        serving.serve_until_stopped(
            server,  # type: ignore[arg-type]
            start_timeout_s=1,
            grace_s=1,
            openai_port=0,
        )
    assert "start" not in calls


def test_a_gateway_that_ends_is_started_again_after_growing_pauses(
    gateway_that_runs: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not stop the server, and no turn waits for it."""
    gateway = gateway_that_runs("print('address', flush=True)")
    gateway.turn_until(lambda: len(gateway.said) == 1)
    monkeypatch.setattr(gateway_process, "_RUN_GATEWAY", "raise SystemExit(3)")
    # There is no first pause: another gateway runs already, with the code of before.
    gateway.turn_until(lambda: len(gateway.said) == 2)
    assert gateway.said == ["the gateway ended by itself, with status 0"] * 2
    began = time.monotonic()
    gateway.turn_until(lambda: len(gateway.said) == 3)
    assert gateway.said[-1] == "the gateway ended by itself, with status 3"
    assert time.monotonic() - began > 0.9, "the next start waits for a second"


def test_a_gateway_whose_start_fails_once_is_started_again(
    gateway_that_runs: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has no process for it, or its port is taken: that passes."""
    gateway = gateway_that_runs(LISTENS)
    real = subprocess.Popen
    errors: list[Exception] = [BlockingIOError("no process"), JitneyError("the port is taken")]

    def start(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return real(*arguments, **options)

    monkeypatch.setattr(gateway_process.subprocess, "Popen", start)
    gateway.turn_until(lambda: gateway.addresses == ["address"])
    assert gateway.said == [
        "the gateway could not be started: no process",
        "the gateway could not be started: the port is taken",
    ]


def test_a_gateway_that_prints_does_not_hang(gateway_that_runs: Gateways) -> None:
    """Neither itself, when its pipe is full, nor who waits for the end of a line."""
    gateway = gateway_that_runs(
        "import time; print('address', flush=True)\n"
        "for number in range(5000): print('x' * 100, flush=True)\n"
        "print('half a line', end='', flush=True); time.sleep(3600)"
    )
    gateway.turn_until(lambda: len(gateway.said) == 5000)
    assert gateway.addresses == ["address"]
    assert set(gateway.said) == {"the gateway: " + 100 * "x"}
    gateway.process.turn()


def test_a_gateway_that_does_not_listen_is_started_again(
    gateway_that_runs: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_process, "_START_S", 0.2)
    gateway = gateway_that_runs("import time; time.sleep(3600)")
    gateway.turn_until(lambda: gateway.said != [])
    # From here on the next one that is started listens.
    monkeypatch.setattr(gateway_process, "_START_S", 60.0)
    monkeypatch.setattr(gateway_process, "_RUN_GATEWAY", LISTENS)
    gateway.turn_until(lambda: gateway.addresses == ["address"])
    assert gateway.said == [
        "the gateway does not listen after 0 s, and is killed",
        "the gateway has ended",
    ]
