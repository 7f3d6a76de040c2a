"""Stand-ins for the images that cannot be had here, under their names: Grafana's and NVIDIA's.

They have the originals' user, layout and place, so that what the project puts around and on top of
them is tried. What is in the originals is not.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.compose.engine.machine import ROOT, Engine

# Grafana's user and places. It serves the folder of the dashboards, for want of Grafana; its
# database is an empty file, and its tool notes the password that it is told to set.
_GRAFANA = r"""
FROM jitney/triton-cpu:local
USER root
RUN install -d -o 472 -g 0 /var/lib/grafana \
    && printf '#!/bin/sh\ncat >/var/lib/grafana/password\n' >/usr/local/bin/grafana \
    && printf '#!/bin/sh\ntouch /var/lib/grafana/grafana.db\nexec %s\n' \
        'python3 -m http.server 3000 --directory /etc/jitney/dashboards' >/run.sh \
    && chmod 755 /usr/local/bin/grafana /run.sh
ENV GF_PATHS_DATA=/var/lib/grafana GF_PATHS_HOME=/usr/share/grafana
USER 472
STOPSIGNAL SIGINT
ENTRYPOINT ["/run.sh"]
"""

# NVIDIA's layout out of the embedded server's parts: the server in /opt/tritonserver, the system's
# Python with a numpy that is to stay, and its own backends, among them an ONNX Runtime.
_SERVER = """
FROM jitney/triton-cpu:local AS parts
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 libpython3.11
COPY --from=parts /opt/jitney/lib/python3.11/site-packages /parts
RUN cp -r /parts/pytriton/tritonserver /opt/tritonserver \\
    && cp /opt/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub \\
        /opt/tritonserver/backends/python/ \\
    && chmod 755 /opt/tritonserver/backends/python/triton_python_backend_stub \\
    && cp -r /parts/nvidia_pytriton.libs /opt/tritonserver/lib \\
    && cp -r /parts/jitney_backends/onnxruntime /opt/tritonserver/backends/ \\
    && cp -r /parts/numpy* /parts/onnxruntime* /usr/local/lib/python3.11/dist-packages/ \\
    && rm -r /parts
ENV LD_LIBRARY_PATH=/opt/tritonserver/lib
"""

# perf_analyzer itself is real. Like NVIDIA's, the image greets before it does what it is told.
_SDK = """
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3-minimal
COPY perf_analyzer /opt/perf_analyzer
RUN printf '#!/bin/sh\\nexport LD_LIBRARY_PATH=/opt/perf_analyzer\\nexec %s "$@"\\n' \\
        /opt/perf_analyzer/perf_analyzer >/usr/local/bin/perf_analyzer \\
    && chmod 755 /usr/local/bin/perf_analyzer
ENTRYPOINT ["sh", "-c", "echo Welcome; exec \\"$@\\"", "welcome"]
"""


def release() -> str:
    """The release of NVIDIA's images, as deploy/triton.Dockerfile pins it."""
    text = (ROOT / "deploy" / "triton.Dockerfile").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("ARG RELEASE="))
    return line.removeprefix("ARG RELEASE=")


def make_grafana(engine: Engine, folder: Path, tag: str) -> None:
    """Needs the image of the embedded server."""
    engine.build(folder, tag, _GRAFANA)


def make_server(engine: Engine, folder: Path) -> None:
    """Needs the image of the embedded server."""
    engine.build(folder, f"nvcr.io/nvidia/tritonserver:{release()}-py3", _SERVER)


def make_sdk(engine: Engine, folder: Path) -> None:
    """Needs `perf_analyzer`, which it fetches into the environment if it is not there."""
    subprocess.run([sys.executable, ROOT / "scripts" / "fetch_perf_analyzer.py"], check=True)
    shutil.copytree(Path(sys.prefix) / "perf_analyzer", folder / "perf_analyzer")
    engine.build(folder, f"nvcr.io/nvidia/tritonserver:{release()}-py3-sdk", _SDK)
