"""The files of the deployment against each other and against the code: what needs no engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jitney.cli import make_app
from jitney.engine.fork_server import CAUSES
from jitney.errors import ConfigError
from jitney.frontend.families import OUTCOMES
from jitney_gateway.keys import read_keys
from typer.main import get_command

from tests.compose.engine.tight_models import CROWD_PROMPT, CROWD_TOKENS, TIGHT_OPTIONS
from tests.compose.monitoring import alerts, dashboard_queries, value_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
DOCUMENT = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_shut_in(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
    assert "mem_limit" in service
    assert "privileged" not in service
    assert service.get("network_mode") is None
    assert "inner" in service["networks"]
    if name != "proxy":
        assert "ports" not in service
        assert "edge" not in service["networks"]
    assert not [each for each in service.get("environment", {}) if each.endswith("PASSWORD")]


def test_what_ends_is_not_started_again_for_ever() -> None:
    restart = {name: service["restart"] for name, service in SERVICES.items()}
    assert restart.pop("perf") == "no"
    assert restart.pop("job") == "on-failure:3"
    assert set(restart.values()) == {"unless-stopped"}


def test_nothing_is_published_but_on_an_address_that_the_settings_name() -> None:
    for port in SERVICES["proxy"]["ports"]:
        assert re.match(r"\$\{\w+_ADDRESS:-127\.0\.0\.1\}:", port)


def test_every_setting_is_in_the_example_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    assert len(re.findall(r"\$\{", COMPOSE)) == len(re.findall(r"\$\{\w+:-", COMPOSE))
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.M))
    of_compose = {"COMPOSE_PROFILES": "gpu", "COMPOSE_PROJECT_NAME": "jitney"}
    assert shown == used | of_compose


def test_the_gateway_asks_the_server_that_there_is_and_checks_the_proxys_keys() -> None:
    gateway = SERVICES["gateway"]
    words = gateway["command"].split()
    options = dict(zip(words[::2], words[1::2], strict=False))
    assert options["--server"] == "triton:8001"
    assert options["--metrics-url"] == "http://triton:8002/metrics"
    assert options["--api-key-file"] == "/run/secrets/api_keys"
    assert "api_keys" in gateway["secrets"]
    assert gateway["volumes"] == [f"batches:{options['--batches']}"]
    assert set(words[:12:2]) <= {
        each
        for parameter in get_command(make_app()).commands["gateway"].params
        for each in parameter.opts
    }
    proxy = (DEPLOY / "proxy" / "nginx.conf.in").read_text(encoding="utf-8")
    assert f"http://$gateway:{options['--port']};" in proxy
    assert f":{options['--port']}/metrics" in gateway["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    (job,) = (each for each in scraped["scrape_configs"] if each["job_name"] == "gateway")
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["gateway"], int(options["--port"]))


def test_images_with_a_model_or_the_gateway_can_send_traces() -> None:
    """Option trace_endpoint and --otlp-endpoint."""
    for file, count in (("Dockerfile", 2), ("triton.Dockerfile", 1)):
        text = (DEPLOY / file).read_text(encoding="utf-8")
        assert len(re.findall(r"\botel >requirements\.txt", text)) == count


def test_the_release_is_pinned_in_one_place() -> None:
    files = [ROOT / "docker-compose.yml", ROOT / ".env.example", *DEPLOY.rglob("*")]
    pinned = [
        line
        for file in files
        if file.is_file() and file.parent.name != "secrets"
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"=2\d\.\d\d\b|tritonserver:2\d\.", line)
    ]
    assert len(pinned) == 1
    assert pinned[0].startswith("ARG RELEASE=")
    assert float(pinned[0].removeprefix("ARG RELEASE=")) >= 26.07


def test_the_containers_user_is_the_same_everywhere() -> None:
    for file in (DEPLOY / "Dockerfile", DEPLOY / "triton.Dockerfile"):
        text = file.read_text(encoding="utf-8")
        targets = re.findall(r"^FROM .* AS (\w[\w-]*)$", text, re.M)
        assert text.count("USER 10001:10001") == len([each for each in targets if each != "base"])


def test_no_secret_gets_into_an_image_or_into_git() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert "deploy/secrets" in ignored
    assert "!model_repository" not in ignored
    assert (DEPLOY / "secrets" / ".gitignore").read_text(encoding="utf-8").splitlines()[1] == "*"


# --------------------------------------------------------------------------- monitoring


def test_queries_name_metrics_that_there_are() -> None:
    """Ours as docs/metrics.md lists them, which the code writes; the server's as it has them."""
    listed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    ours = set(re.findall(r"^\| `(jitney_\w+)`", listed, re.M))
    known = ours | {f"{name}_{part}" for name in ours for part in ("bucket", "sum", "count")}
    expressions = [each for _, each in dashboard_queries("1m", ".*")] + list(alerts().values())
    for expression in expressions:
        for name in re.findall(r"\bjitney_\w+", expression):
            assert name in known, expression


@pytest.mark.parametrize(("label", "written"), [("outcome", OUTCOMES), ("cause", CAUSES)])
def test_queries_select_by_values_that_there_are(label: str, written: tuple[str, ...]) -> None:
    expressions = [each for _, each in dashboard_queries("1m", ".*")] + list(alerts().values())
    selected = re.findall(rf'\b{label}="(\w+)"', "\n".join(expressions))
    assert selected
    assert set(selected) <= set(written)


def test_every_volume_is_watched() -> None:
    mounted = {volume.split(":")[0]: volume for volume in SERVICES["disks"]["volumes"]}
    assert set(mounted) == set(yaml.safe_load(COMPOSE)["volumes"])
    for name, volume in mounted.items():
        assert volume == f"{name}:/volumes/{name}:ro"
    assert "/volumes/" in alerts()["VolumeFull"]


def test_prometheus_asks_services_and_the_prober_has_its_probes() -> None:
    folder = DEPLOY / "prometheus"
    asked = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    probes = yaml.safe_load((folder / "prober.yml").read_text(encoding="utf-8"))["modules"]
    jobs = {job["job_name"]: job for job in asked["scrape_configs"]}
    for job in jobs.values():
        for target in (
            each for found in job.get("static_configs", ()) for each in found["targets"]
        ):
            host = re.sub(r"^https?://|:\d+.*$", "", target)
            assert host in {*SERVICES, "localhost"}, target
        assert set(job.get("params", {}).get("module", ())) <= set(probes)
    for name, condition in alerts().items():
        for job_name in re.findall(r'job="(\w+)"', condition):
            assert job_name in jobs, name


def test_alerts_are_explained_in_the_document() -> None:
    for name, condition in alerts().items():
        assert f"\n### {name}\n" in DOCUMENT
        assert value_of(condition)
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["annotations"]["runbook"] == f"docs/deploying.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_grafana_is_told_of_the_dashboard_and_its_source() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    (source,) = source["datasources"]
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "jitney.json").read_text())
    named = {
        target["datasource"]["uid"]
        for panel in board["panels"]
        for target in (*panel.get("targets", ()), panel)
        if "datasource" in target
    }
    assert named == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "jitney.yml").read_text())[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_the_tight_model_is_tight_on_every_processor() -> None:
    """It takes a request of the crowd that is to overload it, and not two beside each other. It
    once refused all of them on processors without bfloat16, so that no alert of load fired."""
    file = ROOT / "model_repository" / "pylm" / "1" / "checkpoint" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    width = {"float32": 4, "bfloat16": 2}[str(TIGHT_OPTIONS["kv_cache_dtype"])]
    per_token = 2 * width * config["num_hidden_layers"] * config["num_key_value_heads"]
    tokens = int(TIGHT_OPTIONS["kv_cache_bytes"]) // (per_token * config["head_dim"]) // 16 * 16
    most = len(CROWD_PROMPT) + CROWD_TOKENS
    assert most <= tokens < 2 * CROWD_TOKENS
    assert most <= int(TIGHT_OPTIONS["max_model_len"])


# --------------------------------------------------------------------------- scripts


def make_secrets(folder: Path, *hosts: str) -> str:
    done = subprocess.run(
        [DEPLOY / "secrets.sh", *hosts],
        env={**os.environ, "SECRETS": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_secrets_are_made_once_and_kept_from_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert make_secrets(folder, "models.example", "10.0.0.7").count("made ") == 3
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"tls_certificate", "tls_key", "api_keys", "grafana_password"}
    assert folder.stat().st_mode & 0o777 == 0o700
    text = subprocess.run(
        ["openssl", "x509", "-in", folder / "tls_certificate", "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DNS:models.example" in text
    assert "IP Address:10.0.0.7" in text
    assert make_secrets(folder) == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def names_of(certificate: Path) -> str:
    """Whom a certificate is for."""
    command = ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_name_that_comes_later_gets_into_the_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder, "first.example")
    certificate = folder / "tls_certificate"
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert "certificate" in make_secrets(folder, "second.example", "10.0.0.7", "first.example")
    after = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    for name in ("DNS:localhost", "DNS:first.example", "DNS:second.example", "Address:10.0.0.7"):
        assert names_of(certificate).count(name) == 1
    for name in ("api_keys", "grafana_password"):
        assert after[name] == before[name]
    # The containers have the very files, not their names.
    assert {name: node for name, (node, _) in after.items()} == {
        name: node for name, (node, _) in before.items()
    }
    assert make_secrets(folder, "second.example", "127.0.0.1") == ""


def test_a_certificate_of_ones_own_is_not_replaced(tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9"
    own = ["-subj", "/CN=own", "-addext", "subjectAltName=DNS:*.own.example"]
    files = ["-keyout", tmp_path / "tls_key", "-out", tmp_path / "tls_certificate"]
    subprocess.run([*command.split(), *own, *files], check=True, capture_output=True)
    before = (tmp_path / "tls_certificate").read_bytes()
    make_secrets(tmp_path, "models.own.example")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make_secrets(tmp_path, "other.example")
    assert "other.example" in refused.value.stderr
    assert (tmp_path / "tls_certificate").read_bytes() == before


@pytest.mark.parametrize("present", ["tls_certificate", "tls_key"])
def test_half_a_pair_is_refused_and_kept(tmp_path: Path, present: str) -> None:
    """The script cannot make the other half, and must not overwrite this one."""
    (tmp_path / present).write_text("own", encoding="utf-8")
    for hosts in ([], ["models.example"]):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            make_secrets(tmp_path, *hosts)
        assert "only one of tls_certificate and tls_key" in refused.value.stderr
    assert [path.name for path in tmp_path.iterdir()] == [present]
    assert (tmp_path / present).read_text(encoding="utf-8") == "own"


def test_grafana_takes_a_new_password_when_it_starts_again(tmp_path: Path) -> None:
    """With programs of the test's own in the place of Grafana's."""
    script = (DEPLOY / "grafana" / "start").read_text(encoding="utf-8")
    (tmp_path / "password").write_text("new", encoding="utf-8")
    for name, text in (
        ("grafana", f'#!/bin/sh\n(echo "$@"; cat) >{tmp_path}/told\n'),
        ("run.sh", f"#!/bin/sh\ntouch {tmp_path}/grafana.db\n"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    for told in ("", "cli --homepath /home admin reset-admin-password --password-from-stdin\nnew"):
        subprocess.run(
            ["sh", "-s"],
            input=script.replace("/run.sh", f"{tmp_path}/run.sh"),
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "GF_PATHS_DATA": str(tmp_path),
                "GF_PATHS_HOME": "/home",
                "GF_SECURITY_ADMIN_PASSWORD__FILE": str(tmp_path / "password"),
            },
            text=True,
            check=True,
        )
        file = tmp_path / "told"
        assert (file.read_text(encoding="utf-8") if file.exists() else "") == told
    grafana = SERVICES["grafana"]
    assert grafana["environment"]["GF_METRICS_ENABLED"] == "false"
    mounted = [volume.split(":")[:2] for volume in grafana["volumes"]]
    assert ["./deploy/grafana/start", grafana["entrypoint"][-1]] in mounted


def test_keys_and_bodies_have_file_systems_of_their_own() -> None:
    """Keys are revoked although bodies fill theirs."""
    sizes = {
        place.split(":")[0]: re.findall(r"size=(\d+)m", place)
        for place in SERVICES["proxy"]["tmpfs"]
    }
    assert sizes == {"/tmp": ["320"], "/run/jitney": ["4"]}
    for name in ("start", "reload-keys"):
        text = (DEPLOY / "proxy" / name).read_text(encoding="utf-8")
        written = re.findall(r"(?:>|mv \S+ )(/\S+)", text)
        assert {each for each in written if not each.startswith(("/dev/", "/run/jitney/"))} == set()
        assert len(written) >= 1


def test_keys_become_a_map_of_the_proxy(tmp_path: Path) -> None:
    """As `reload-keys --check-only` writes it."""
    key = "Ab9._~+/=-" * 3
    written = render_keys(tmp_path, f"# a comment\n\nfirst:{key}\n")
    assert written.returncode == 0
    made = (tmp_path / "keys.map").read_text(encoding="utf-8")
    pattern = re.escape("Ab9._~+/=-").replace(r"\~", "~").replace(r"\-", "-") * 3
    assert made == f'"~^Bearer {pattern}$" "first";\n'
    assert (tmp_path / "keys.limits").read_text(encoding="utf-8") == ""


def test_limits_of_keys_become_a_map_of_the_proxy(tmp_path: Path) -> None:
    a, b, c = (letter * 24 for letter in "abc")
    text = f"a.b:{a} tiers=slow,bulk   min_priority=-5\nfree:{b}\na.b:{c} tiers=slow,bulk"
    assert render_keys(tmp_path, f"{text}  min_priority=-5\n").returncode == 0
    made = (tmp_path / "keys.limits").read_text(encoding="utf-8")
    assert made == '"~^a\\.b$" "tiers=slow,bulk min_priority=-5";\n'
    done = render_keys(tmp_path, text)
    assert (done.returncode, "line 3: a key of that name has other" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "line",
    [
        "short:abc",
        "no key at all",
        ":" + "k" * 30,
        "name:" + "k" * 30 + '"',
        "a b:" + "k" * 30,
        "",
        "name:" + "k" * 30 + " tier=bulk",
        "name:" + "k" * 30 + ' tiers="',
        "name:" + "k" * 30 + " tiers=a,,b",
        "name:" + "k" * 30 + " min_priority=5",
        "name:" + "k" * 30 + " tiers=,a",
        "name:" + "k" * 30 + " tiers=a,night/day",
        "name:" + "k" * 30 + " tiers=nächtlich",
        "nächtlich:" + "k" * 30,
        "name:" + "k" * 30 + " tiers=a tiers=b",
        "name:" + "k" * 30 + " min_priority=0 tiers=a min_priority=0",
    ],
)
def test_a_bad_line_of_keys_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    done = render_keys(tmp_path, f"# keys\n{line}\n")
    assert done.returncode != 0
    assert "line 2" in done.stderr or "no key" in done.stderr
    if line:
        assert line.partition(":")[2] not in done.stderr or not line.partition(":")[2]
    assert not (tmp_path / "keys.map").exists()
    with pytest.raises(ConfigError, match=r"line 2|no key"):  # by the gateway's rule too
        read_keys(tmp_path / "api_keys")


def render_keys(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """Run the script with its fixed places moved into ``folder``."""
    script = (DEPLOY / "proxy" / "reload-keys").read_text(encoding="utf-8")
    (folder / "api_keys").write_text(text, encoding="utf-8")
    return subprocess.run(
        ["sh", "-s", "--", "--check-only"],
        input=script.replace("/run/jitney/keys", f"{folder}/keys"),
        env={**os.environ, "API_KEYS_FILE": str(folder / "api_keys")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_requirements_are_those_of_the_project() -> None:
    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, DEPLOY / "server" / "requirements.py", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    every = lines("server", "cpu")
    assert any(line.startswith("torch>=") for line in every)
    assert any(line.startswith("numba>=") for line in every)
    assert any(line.startswith("nvidia-pytriton==") for line in every)
    fewer = lines("--without", "torch", "transformers", "--", "bench")
    assert any(line.startswith("matplotlib") for line in fewer)
    assert not any(re.match(r"torch\b|transformers", line) for line in fewer)
