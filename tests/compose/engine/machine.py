"""What the tests of docker-compose.yml need of the machine: Debian's packages, one container engine
of their own, and a base image. Nothing here outlives :class:`Engine`'s block.

The machine's packet filter and its forwarding are left alone: containers reach each other and the
published ports all the same. Images are built with the machine's own network.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("docker.io", "docker-compose", "debootstrap", "prometheus", "prometheus-pushgateway"),
    *("nginx-light", "libnginx-mod-stream", "libnginx-mod-http-lua"),  # tests/compose/test_proxy.py
)
CHECKER = "kubernetes-validate>=1.31"
PROGRAMS = (
    *("dockerd", "docker-compose", "debootstrap", "promtool", "nginx"),
    "prometheus-pushgateway",
)
NGINX_MODULES = ("ngx_stream_module.so", "ngx_http_lua_module.so")
BASE_IMAGE = "debian:bookworm-slim"
DOCKER = "/usr/bin/docker"  # Debian's, whatever else the path has

# docker-compose calls the `docker` of its path to build. This one adds what a build needs on this
# machine: its network, and its package index as secrets, unless the command brings its own. Debian
# has compose as a program, not as a plugin of `docker`.
_BUILDER = """#!/bin/sh
if [ "$1" = compose ]; then
    shift
    exec docker-compose "$@"
fi
if [ "$1" = build ]; then
    shift
    case " $* " in
        *" --secret "*) exec {docker} build --network=host "$@" ;;
        *) exec {docker} build --network=host {secrets} "$@" ;;
    esac
fi
exec {docker} "$@"
"""


def install() -> None:
    """Install Debian's packages if a program is missing. They are not to be started."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    has_modules = all(Path("/usr/lib/nginx/modules", name).exists() for name in NGINX_MODULES)
    if has_modules and all(shutil.which(program, path=path) for program in PROGRAMS):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    subprocess.run([*apt, "update"], env=environment, check=True)
    subprocess.run(
        [*apt, "install", "--no-install-recommends", "-y", *PACKAGES],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )


class Engine:
    """A container engine with its own folder and socket; ended with all its containers."""

    def __init__(self, folder: Path, secrets: Sequence[str]) -> None:
        """``secrets`` are arguments that every build gets."""
        self.folder = folder
        self.secrets = tuple(secrets)
        programs = folder / "programs"
        programs.mkdir(parents=True, exist_ok=True)
        builder = programs / "docker"
        builder.write_text(_BUILDER.format(docker=DOCKER, secrets=shlex.join(secrets)))
        builder.chmod(0o755)
        self.environment: dict[str, str] = {
            **os.environ,
            "PATH": f"{programs}:/usr/sbin:/usr/bin:{os.environ['PATH']}",
            "DOCKER_HOST": f"unix://{folder / 'docker.sock'}",
            "DOCKER_BUILDKIT": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._interfaces: set[str] = set()

    def __enter__(self) -> "Engine":
        self._interfaces = interfaces()
        with (self.folder / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    "--iptables=false",
                    "--ip-forward=false",
                    "--bridge=none",
                    f"--data-root={self.folder / 'data'}",
                    f"--exec-root={self.folder / 'exec'}",
                    f"--pidfile={self.folder / 'dockerd.pid'}",
                    f"--host={self.environment['DOCKER_HOST']}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 60
        while self.docker("version", check=False).returncode != 0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                tail = (self.folder / "dockerd.log").read_text(errors="replace")[-3000:]
                self.__exit__(None, None, None)
                raise RuntimeError(f"the container engine did not start:\n{tail}")
            time.sleep(0.5)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends everything. Raises RuntimeError if something is left, unless an error passes."""
        assert self._process is not None
        if self._process.poll() is None:
            containers = self.docker("ps", "-aq", check=False).stdout.split()
            if containers:
                self.docker("rm", "--force", *containers, check=False)
            self.docker("network", "prune", "--force", check=False)
            self._process.terminate()
        self._process.wait(60)
        # The machine's own network, by which images were built, stays mounted.
        for mount in reversed(self._mounts()):
            subprocess.run(["umount", mount], check=False)
        left = self.leftovers()
        if left and error is None:
            raise RuntimeError(f"the container engine left behind: {', '.join(left)}")

    @property
    def process(self) -> psutil.Process:
        """The running engine."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def leftovers(self) -> list[str]:
        """What the engine has outside of its folder: processes, mounts, interfaces."""
        folder = str(self.folder)
        left = [
            f"process {process.pid} ({' '.join(process.info['cmdline'])[:80]})"
            for process in psutil.process_iter(["cmdline"])
            if any(folder in word for word in process.info["cmdline"] or ())
            and process.pid != os.getpid()
            and process.info["cmdline"][0].rpartition("/")[2] in _ENGINE_PROGRAMS
        ]
        left += [f"mount {mount}" for mount in self._mounts()]
        left += [f"interface {name}" for name in sorted(interfaces() - self._interfaces)]
        return left

    def _mounts(self) -> list[str]:
        """What is mounted below the engine's folder, in order."""
        table = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        mounts = [line.split()[1] for line in table]
        return [mount for mount in mounts if mount.startswith(f"{self.folder}/")]

    def docker(
        self, *arguments: str, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """One docker command. Its output is in the error if it fails."""
        return self.run(["docker", *arguments], check=check, timeout_s=timeout_s)

    def build(self, folder: Path, tag: str, dockerfile: str) -> None:
        """An image of the tests' own, from the text of a Dockerfile and a folder of its files."""
        file = folder / "Dockerfile"
        file.write_text(dockerfile, encoding="utf-8")
        self.docker("build", f"--file={file}", f"--tag={tag}", str(folder), timeout_s=1800)

    def import_base(self) -> None:
        """Make the base image of Debian's packages, under the name that the Dockerfile has."""
        if self.docker("images", "-q", BASE_IMAGE).stdout.strip():
            return
        tree = self.folder / "base"
        subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", str(tree)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        with subprocess.Popen(
            ["tar", "--directory", str(tree), "--exclude=./var/cache/apt/archives", "-c", "."],
            stdout=subprocess.PIPE,
        ) as tar:
            subprocess.run(
                [DOCKER, "import", "-", BASE_IMAGE],
                stdin=tar.stdout,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                check=True,
            )
        shutil.rmtree(tree)

    def run(
        self,
        command: Sequence[str],
        *,
        folder: Path = ROOT,
        settings: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """A command of a user of this engine. Raises RuntimeError with its output if it fails."""
        done = subprocess.run(
            command,
            env={**self.environment, **(settings or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return done


_ENGINE_PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "docker-proxy", "runc")


def interfaces() -> set[str]:
    """The machine's network interfaces."""
    return set(psutil.net_if_addrs())


if __name__ == "__main__":
    install()
    if find_spec("kubernetes_validate") is None:  # tests/compose/test_job_files.py
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", CHECKER], check=True)
