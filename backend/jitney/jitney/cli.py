"""The ``jitney`` command: ``serve``, ``generate``, ``doctor``, ``bench`` and ``tune``.

Owns what is printed on the terminal. Every error that Jitney raises on purpose becomes one readable
line and exit status 1; a traceback means a bug of ours. Heavy modules are imported by the command
that needs them, so that ``--help`` is quick.
"""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney import __version__
from jitney.errors import InvalidArgumentError, JitneyError
from jitney.quiet import quiet_imports
from jitney.sweep.command import bench
from jitney.tune.command import tune

if TYPE_CHECKING:
    from jitney.server import TritonServer

app = typer.Typer(
    help="In-flight batching over a paged KV cache, as a backend of Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main() -> None:
    """Entry point of the ``jitney`` script."""
    try:
        app()
    except JitneyError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
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


# --------------------------------------------------------------------------- serve


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
    from jitney.server import TritonServer

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
    stop = threading.Event()
    with _stopping(stop):
        try:
            with err.status(f"Loading {', '.join(model) if model else f'all of {repository}'} …"):
                server.start(start_timeout)
            _print_welcome(server)
            while server.is_alive() and not stop.wait(0.5):
                pass
        except _Interrupted:
            pass
        if not stop.is_set():
            tail = server.log_tail(15)
            server.stop()
            raise JitneyError(f"the server ended by itself; its last lines are:\n{tail}")
        _stop(server, grace)


def _stop(server: "TritonServer", grace: int) -> None:
    err.print(f"Stopping: running requests get up to {grace} s; Ctrl-C again to end them now.")
    try:
        clean = server.stop()
    except _Interrupted:
        clean = server.stop(0)
    if not clean:
        raise JitneyError(
            f"the stop was not clean: {server.unclean}"
            f"{f'; its log is {server.log_file}' if server.log_file else ''}"
        )
    err.print("Stopped.")


class _Interrupted(Exception):
    """A signal asked to stop; raised in the main thread, wherever it is."""


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and the closing of the terminal set ``stop`` and raise _Interrupted, until
    the block ends. What the caller has switched off (``nohup``) stays off."""

    def interrupt(number: int, frame: object) -> None:
        stop.set()
        raise _Interrupted

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _states(server: "TritonServer") -> dict[str, tuple[str, str]]:
    """Model -> (state, reason) of every model that was asked for or that was loaded for another.

    What the server did not even try to load (an ensemble without its parts, a configuration that
    cannot be read) has no state in its index, or is not there; its log has the reason.
    """
    from jitney.server_log import failed_models, read_tail, said_once

    states = server.model_states()
    wanted = server.models or [
        folder.name
        for folder in server.model_repository.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    ]
    failures = failed_models(read_tail(server.log_file, 5000)) if server.log_file else {}
    shown = {name for name, (state, _) in states.items() if state}
    made = {}
    for name in shown.union(wanted):
        state, reason = states.get(name, ("", ""))
        made[name] = (state, said_once(reason) or failures.get(name, "the log says why"))
    return made


def _print_welcome(server: "TritonServer") -> None:
    """Models, addresses, and one line to try."""
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    speaking = []
    for name, (state, reason) in sorted(_states(server).items()):
        if state == "READY":
            table.add_row(name, "[green]ready[/]")
            if any(tensor["name"] == "text_input" for tensor in server.model_inputs(name)):
                speaking.append(name)
        elif state in ("LOADING", "UNLOADING"):
            table.add_row(name, state.lower())
        else:
            table.add_row(name, f"[red]failed[/]: {escape(reason)}")
    out.print(table)
    out.print(f"\nHTTP     http://{server.http_url}\ngRPC     {server.grpc_url}")
    out.print(f"metrics  {server.metrics_url}\nlog      {server.log_file}", soft_wrap=True)
    if speaking:
        body = json.dumps({"text_input": "def add(a, b):", "stream": True, "max_tokens": 32})
        out.print("\nTry it:", style="bold")
        out.print(
            f"curl -N http://{server.http_url}/v2/models/{speaking[0]}/generate_stream -d '{body}'",
            soft_wrap=True,
            markup=False,
        )
    out.print("\nCtrl-C stops the server.", style="dim")


# --------------------------------------------------------------------------- generate


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
    path = model or str(_demo_checkpoint())
    text = sys.stdin.read() if prompt == "-" else prompt
    quiet_imports()
    from transformers.utils import logging as transformers_logging

    from jitney.llm import LLM
    from jitney.sampling_params import SamplingParams

    transformers_logging.disable_progress_bar()  # the terminal is ours
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
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if threads is not None:
        options["threads"] = threads
    with err.status(f"Loading {path} (the first time, kernels are compiled) …"):
        llm = LLM(path, **options)
    try:
        _stream(llm, text, params)
    finally:
        llm.close()


def _stream(llm: Any, prompt: str, params: Any) -> None:
    """Print the prompt and, as they come, its tokens' text."""
    out.print(escape(prompt), style="dim", end="", soft_wrap=True)
    for piece in llm.stream(prompt, params):
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    print()


def _demo_checkpoint() -> Path:
    """The demo model of a source checkout. Raises InvalidArgumentError outside of one."""
    from jitney.installation import backend_directories

    folder = backend_directories()[0].parent / "model_repository" / "pylm" / "1" / "checkpoint"
    if not folder.is_dir():
        raise InvalidArgumentError(
            "no model was named, and the demo model is only in a source checkout: "
            "give --model a checkpoint folder"
        )
    return folder


# --------------------------------------------------------------------------- doctor


@app.command()
def doctor(
    http_port: Annotated[int, typer.Option(help="Port you mean to serve HTTP on.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port you mean to serve gRPC on.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port you mean to serve metrics on.")] = 8002,
    start: Annotated[
        bool, typer.Option("--start", help="Also start a server with a trivial model and ask it.")
    ] = False,
) -> None:
    """Look over this installation: say what is wrong and how to mend it.

    Checks Python, packages and their versions, the server's binary, stub and libraries, ports,
    shared memory, memory, processor and GPU. Changes nothing. The exit status is 1 if serving is
    impossible as things stand.
    """
    from jitney.doctor import Finding, can_serve, examine

    findings = examine([http_port, grpc_port, metrics_port])
    if start and can_serve(findings):
        from jitney.trial import try_server

        try:
            with err.status("Starting a server …"):
                try_server()
            findings.append(Finding("trial", "ok", "a server started, answered and stopped"))
        except JitneyError as error:
            findings.append(Finding("trial", "fails", str(error), "see docs/troubleshooting.md"))
    marks = {"ok": "[green]ok   [/]", "warns": "[yellow]warns[/]", "fails": "[red]FAILS[/]"}
    for finding in findings:
        out.print(
            f"{marks[finding.state]} {finding.name:<14}{escape(finding.text)}", soft_wrap=True
        )
        if finding.mend:
            out.print(f"      {'':<14}[bold]mend:[/] {escape(finding.mend)}", soft_wrap=True)
    if not can_serve(findings):
        out.print("\n[bold red]Serving is impossible as things stand.[/]")
        raise typer.Exit(1)
    out.print("\n[bold green]Ready to serve.[/]")


# --------------------------------------------------------------------------- bench, tune

app.command()(bench)
app.command()(tune)


if __name__ == "__main__":
    main()
