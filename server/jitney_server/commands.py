"""The commands ``jitney serve`` and ``jitney doctor``, which ``jitney.cli`` finds by entry points.

The modules that do the work are imported when a command runs: `jitney --help` imports this one, and
must be fast.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from jitney.errors import InvalidArgumentError


def serve(
    repository: Annotated[
        Path,
        typer.Argument(help="Folder of models, each with a config.pbtxt and numbered versions."),
    ] = Path("model_repository"),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Serve only this model; may be given several times. Default: all."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 opens the server to the network.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 8002,
    openai_port: Annotated[
        int | None,
        typer.Option(help="Also run `jitney gateway` there. 0 picks a free one.", min=0, max=65535),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Of the gateway: lines NAME:KEY; clients must send one of the keys."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="Of the gateway: http://HOST:PORT of an OpenTelemetry collector."),
    ] = None,
    batches: Annotated[
        Path | None, typer.Option(help="Of the gateway: the folder of files and batches.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Serve what loads, even if a model fails.")
    ] = False,
    open_endpoints: Annotated[
        bool,
        typer.Option(
            "--open-endpoints",
            help="Let every client load and unload models, register shared memory and change "
            "trace and log settings. Closed by default.",
        ),
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option(help="Where the server and the models log. Default: a temporary file."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds to wait until every model is ready.", min=1)
    ] = 600.0,
    grace: Annotated[
        int, typer.Option(help="Seconds that running requests get when the server stops.", min=0)
    ] = 10,
    server_arg: Annotated[
        list[str] | None,
        typer.Option(help="Handed to tritonserver as it is, e.g. --server-arg=--log-verbose=1."),
    ] = None,
    gateway_arg: Annotated[
        list[str] | None,
        typer.Option(help="Handed to the gateway as it is, e.g. --gateway-arg=--strict."),
    ] = None,
) -> None:
    """Start Triton Inference Server over a model repository and run until Ctrl-C.

    The server is the real one, from the nvidia-pytriton package: no container is needed. It listens
    on this machine only, unless --host says otherwise.

    Examples:

        jitney serve
        jitney serve my_models --model chat --http-port 0 --grpc-port 0 --metrics-port 0
    """
    from jitney_server.server import TritonServer
    from jitney_server.serving import serve_until_stopped

    for_gateway = {
        "--api-key-file": api_key_file,
        "--otlp-endpoint": otlp_endpoint,
        "--batches": batches,
    }
    gateway_options = _gateway_options(
        for_gateway, gateway_arg or [], has_gateway=openai_port is not None
    )
    server = TritonServer(
        repository,
        models=model or None,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        keep_going=keep_going,
        open_endpoints=open_endpoints,
        log_file=log_file,
        extra_args=server_arg or (),
        exit_timeout_s=grace,
    )
    status = serve_until_stopped(
        server,
        start_timeout_s=start_timeout,
        grace_s=grace,
        openai_port=openai_port,
        gateway_options=gateway_options,
    )
    raise typer.Exit(status)


def _gateway_options(
    named: Mapping[str, object], others: Sequence[str], *, has_gateway: bool
) -> list[str]:
    """The options of the gateway: those of ``named`` that have a value, and ``others``. Raises
    InvalidArgumentError if there are any although there is no gateway."""
    given = {name: value for name, value in named.items() if value is not None}
    names = [*given]
    if others:
        names.append("--gateway-arg")
    if names and not has_gateway:
        raise InvalidArgumentError(f"{names[0]} belongs to the gateway: give --openai-port too")
    options = [f"{name}={value}" for name, value in given.items()]
    return [*options, *others]


def doctor(
    repository: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of models: say of each language model how it keeps its past. "
            "Default: model_repository, if there is one."
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(help="Port you mean to serve HTTP on.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port you mean to serve gRPC on.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port you mean to serve metrics on.")] = 8002,
    start: Annotated[
        bool, typer.Option("--start", help="Also start a server with a trivial model and ask it.")
    ] = False,
) -> None:
    """Look over this installation: say what is wrong and how to repair it.

    Checks Python, packages and their versions, the server's binary, stub and libraries, ports,
    shared memory, memory, processor and GPU, and which kind of cache each language model has, or
    why it would not load. Changes nothing. The exit status is 1 if serving is impossible as things
    stand.
    """
    from jitney_server.doctor import run_doctor
    from jitney_server.repository import check_repository

    usual = Path("model_repository")
    if repository is None and usual.is_dir():
        repository = usual
    if repository is not None:
        check_repository(repository, None, keep_going=True)
    ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    if not run_doctor(ports, start=start, repository=repository):
        raise typer.Exit(1)
