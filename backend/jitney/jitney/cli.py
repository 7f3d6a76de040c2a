"""The ``jitney`` command: ``serve``, ``gateway``, ``generate``, ``batch``, ``doctor``, ``bench``,
``tune`` and ``plan``.

Holds options and their help; what a command does is one function of another room, imported when
the command runs, so that ``--help`` is quick. Every error that Jitney raises on purpose becomes one
readable line and exit status 1; a traceback means a bug of ours.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from jitney_jobs.command import batch, generate_on_terminal
from jitney_measure import plan
from jitney_measure.bench import bench
from jitney_measure.tune import tune
from rich.console import Console
from rich.markup import escape

from jitney import __version__
from jitney.config import EngineConfig
from jitney.engine.quiet import quiet_imports
from jitney.errors import JitneyError
from jitney.messages import Footprint

app = typer.Typer(
    help="In-flight batching over a paged KV cache, as a backend of Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Entry point of the ``jitney`` script."""
    quiet_imports()
    try:
        app()
    except JitneyError as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"jitney {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
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
        Path | None, typer.Option(help="Of the gateway: lines NAME:KEY, one of which clients send.")
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
    given = {"--api-key-file": api_key_file, "--otlp-endpoint": otlp_endpoint}
    given["--batches"] = batches
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    status = serve_until_stopped(server, start_timeout, grace, openai_port, options)
    raise typer.Exit(status)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads standard input.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, or the id of a model in the local hub cache. Default in a "
            "source checkout: the demo model."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, relative to the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: the cores this process may use.")
    ] = None,
) -> None:
    """Continue a prompt on the terminal, token by token, without a server.

    It runs the same engine as the server, in this process.

    Examples:

        jitney generate "def fibonacci(n):"
        jitney generate "import os" --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 200
        jitney generate - --model path/to/checkpoint < prompt.txt
    """
    from jitney_server.installation import demo_checkpoint

    from jitney.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    options = {"dtype": dtype, "device": device, "threads": threads}
    generate_on_terminal(prompt, model or str(demo_checkpoint()), params, options)


@app.command()
def doctor(
    http_port: Annotated[int, typer.Option(help="Port you mean to serve HTTP on.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port you mean to serve gRPC on.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port you mean to serve metrics on.")] = 8002,
    start: Annotated[
        bool, typer.Option("--start", help="Also start a server with a trivial model and ask it.")
    ] = False,
) -> None:
    """Look over this installation: say what is wrong and how to repair it.

    Checks Python, packages and their versions, the server's binary, stub and libraries, ports,
    shared memory, memory, processor and GPU. Changes nothing. The exit status is 1 if serving is
    impossible as things stand.
    """
    from jitney_server.doctor import run_doctor

    if not run_doctor([http_port, grpc_port, metrics_port], start=start):
        raise typer.Exit(1)


@app.command()
def gateway(
    server: Annotated[str, typer.Option(help="The server's gRPC address.")] = "127.0.0.1:8001",
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 9000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Lines NAME:KEY: clients must send one of the keys. Default: none do."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="http://HOST:PORT of an OpenTelemetry collector, for traces (gRPC)."),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(help="The server's metrics, http://HOST:8002/metrics: to tell its load."),
    ] = None,
    batches: Annotated[
        Path | None, typer.Option(help="Folder of files and batches. Default: there are none.")
    ] = None,
    grace: Annotated[int, typer.Option(help="Seconds that streams get at the stop.", min=0)] = 10,
) -> None:
    """Serve the models of a running server to clients of OpenAI's API.

    A process of its own without state: several may stand before one server, behind one proxy. With
    --batches they share a folder.

    Examples:

        jitney gateway
        jitney gateway --server 10.0.0.5:8001 --port 9000 --api-key-file api_keys
    """
    from jitney_gateway.command import run_gateway

    run_gateway(server, host, port, api_key_file, otlp_endpoint, metrics_url, batches, grace)


def _weigh(config: EngineConfig) -> Footprint:
    from jitney.engine.assemble import weigh

    return weigh(config)


def _prompt_lengths(source: str, column: str, model: str) -> list[int]:
    from jitney_jobs.generate import prompt_lengths

    return prompt_lengths(source, column, model)


app.command()(bench)
app.command()(tune)
app.command("plan")(plan.command(_weigh, _prompt_lengths))
app.add_typer(batch, name="batch")


if __name__ == "__main__":
    main()
