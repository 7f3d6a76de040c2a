# The images on NVIDIA's: `triton`, the server with the native backends and ours, and `perf`, which
# measures it. The release is pinned here and nowhere else; 26.07 or later has no known holes.
# BuildKit is needed; build secrets as in deploy/Dockerfile.
ARG RELEASE=26.07

FROM nvcr.io/nvidia/tritonserver:${RELEASE}-py3 AS triton
USER root
# The kernels' launchers are compiled on first use: that takes a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        curl gcc libc6-dev python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin jitney \
    && python3 -m venv --system-site-packages --without-pip /opt/jitney
COPY pyproject.toml constraints.txt deploy/server/requirements.py /build/
ARG TORCH_INDEX=
# The image's own numpy is what its stub was tested with: it stays, so ours is no constraint.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle \
    cd /build \
    && sed -i '/^numpy==/d' constraints.txt \
    && pip="python3 -m pip --python /opt/jitney/bin/python" \
    && $pip install --constraint constraints.txt \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && /opt/jitney/bin/python requirements.py cpu gpu quantization gguf jobs otel >requirements.txt \
    && $pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE CHANGELOG.md /build/
COPY backend /build/backend
COPY server /build/server
COPY gateway /build/gateway
COPY jobs /build/jobs
COPY measure /build/measure
COPY benchmarks /build/benchmarks
# The backend's folder goes beside the image's own; onnxruntime and tensorrt are native here.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle \
    python3 -m pip --python /opt/jitney/bin/python install --no-deps /build \
    && install -D -m 644 /build/backend/jitney/model.py /opt/tritonserver/backends/jitney/model.py \
    && rm -rf /build \
    && install -d -o jitney -g jitney /var/cache/jitney /tmp/onnxruntime_tensorrt_cache
COPY deploy/server/entrypoint.py deploy/server/health.py /opt/jitney/serve/
ENV PATH=/opt/jitney/bin:$PATH \
    HOME=/var/cache/jitney \
    NUMBA_CACHE_DIR=/var/cache/jitney/numba \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1
USER 10001:10001
ENTRYPOINT ["/opt/jitney/bin/python", "/opt/jitney/serve/entrypoint.py", "--native", "/opt/tritonserver"]
CMD ["--models", "/models"]


FROM nvcr.io/nvidia/tritonserver:${RELEASE}-py3-sdk AS perf
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin jitney \
    && python3 -m venv --system-site-packages --without-pip /opt/jitney \
    && install -d -o jitney -g jitney /reports
COPY pyproject.toml constraints.txt deploy/server/requirements.py /sweep/
# The sweep reads and draws; it needs neither torch nor a model. The image's own numpy stays here,
# too.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle \
    cd /sweep \
    && sed -i '/^numpy==/d' constraints.txt \
    && /opt/jitney/bin/python requirements.py --without torch transformers tokenizers safetensors \
        -- bench >requirements.txt \
    && python3 -m pip --python /opt/jitney/bin/python install \
        --constraint constraints.txt --requirement requirements.txt
COPY benchmarks /sweep/benchmarks
COPY backend/jitney/jitney /sweep/jitney
COPY server/jitney_server /sweep/jitney_server
COPY measure/jitney_measure /sweep/jitney_measure
ENV PATH=/opt/jitney/bin:$PATH \
    HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /sweep
