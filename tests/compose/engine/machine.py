"""What the tests of docker-compose.yml need of the machine: Debian's packages, one container engine
of their own, and a base image. Nothing here outlives :class:`Engine`'s block.

The engine works without the kernel's packet filter: containers reach each other and the published
ports, but not the world. So images are built with the machine's own network.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("docker.io", "docker-compose", "debootstrap", "prometheus")
PROGRAMS = ("dockerd", "docker-compose", "debootstrap", "promtool")
BASE_IMAGE = "debian:bookworm-slim"
DOCKER = "/usr/bin/docker"  # Debian's, whatever else the path has


def install() -> None:
    """Install Debian's packages if a program is missing. They are not to be started."""
    if all(shutil.which(program) for program in PROGRAMS):
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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder / 'docker.sock'}",
            "DOCKER_BUILDKIT": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    "--iptables=false",
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
        assert self._process is not None
        if self._process.poll() is None:
            running = self.docker("ps", "-q", check=False).stdout.split()
            if running:
                self.docker("kill", *running, check=False)
            self._process.terminate()
        self._process.wait(60)

    def docker(
        self, *arguments: str, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """One docker command. Its output is in the error if it fails."""
        return self._run([DOCKER, *arguments], check=check, timeout_s=timeout_s)

    def build(self, dockerfile: str, target: str, tag: str, secrets: Sequence[str] = ()) -> None:
        """One target of a Dockerfile of the project, with the machine's network."""
        command = ["build", "--network=host", f"--file={dockerfile}", f"--target={target}"]
        self.docker(
            *command, f"--tag={tag}", "--progress=plain", *secrets, str(ROOT), timeout_s=1800
        )

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

    def compose(
        self, settings: Path, *arguments: str, file: Path | None = None, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """docker-compose over the project's file, or another, with settings from a file."""
        return self._run(
            [
                "docker-compose",
                f"--env-file={settings}",
                f"--project-directory={ROOT}",
                f"--file={file or ROOT / 'docker-compose.yml'}",
                *arguments,
            ],
            timeout_s=timeout_s,
        )

    def _run(
        self, command: Sequence[str], *, check: bool = True, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        environment: Mapping[str, str] = self.environment
        done = subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
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
