"""The command ``jitney gateway``, which ``jitney.cli`` finds by its entry point.

The gateway itself is imported when the command runs: the packages that it needs are an extra.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from jitney.errors import InvalidArgumentError


def gateway(
    server: Annotated[str, typer.Option(help="The server's gRPC address.")] = "127.0.0.1:8001",
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 9000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Lines NAME:KEY: clients must send one of the keys. Default: no key is needed."
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="http://HOST:PORT of an OpenTelemetry collector, for traces (gRPC)."),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="The server's metrics, http://HOST:8002/metrics: its load is read there."
        ),
    ] = None,
    batches: Annotated[
        Path | None, typer.Option(help="Folder of files and batches. Default: there are none.")
    ] = None,
    grace: Annotated[int, typer.Option(help="Seconds that streams get at the stop.", min=0)] = 10,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse fields that have no effect, by name.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may use the gateway (CORS); * for all."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="NAME=MODEL: another name of a model or adapter. May be given again."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only say what is wrong with these options."),
    ] = False,
) -> None:
    """Serve the models of a running server to clients of OpenAI's API.

    A process of its own without state: several may stand before one server, behind one proxy. With
    --batches they share a folder.

    Examples:

        jitney gateway
        jitney gateway --server 10.0.0.5:8001 --port 9000 --api-key-file api_keys
    """
    from jitney_gateway.run_gateway import run_gateway

    run_gateway(
        server,
        host,
        port,
        api_key_file=api_key_file,
        otlp_endpoint=otlp_endpoint,
        metrics_url=metrics_url,
        batches=batches,
        grace_s=grace,
        strict=strict,
        allowed_origins=allow_origin or (),
        aliases=read_aliases(alias or ()),
        only_check=check,
    )


def read_aliases(given: Sequence[str]) -> dict[str, str]:
    """Alias -> the model's own name, from ``NAME=MODEL``. Raises InvalidArgumentError."""
    aliases = {}
    for text in given:
        name, sign, model = text.partition("=")
        if not name or not sign or not model:
            raise InvalidArgumentError(f"--alias is {text!r}, but must be NAME=MODEL")
        aliases[name] = model
    return aliases
