"""The command ``jitney plan``: what a model and its requests need of a device's memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from jitney.errors import InvalidArgumentError
from jitney.read_config import from_text, make_config

from jitney_measure.options import make_folder

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.ASCII)
_UNITS = {
    "": 1.0,
    "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def command(prompt_lengths: Callable[[str, str, str], list[int]]) -> Callable[..., None]:
    """The command. ``prompt_lengths(files, column, model)`` gives the tokens of each prompt in a
    job's files: the package of jobs hands it over, since it stands above this one."""

    def plan(
        model: Annotated[str, typer.Argument(help="Checkpoint: a folder, or an id in the hub.")],
        memory: Annotated[str, typer.Option(help="Memory of the device: 80GiB, 24GB.")],
        prompt: Annotated[
            str,
            typer.Option(
                help="Tokens of a prompt, MEAN or MEAN:DEVIATION: 900:400; several: 200,3000:9."
            ),
        ] = "",
        output: Annotated[str, typer.Option(help="Tokens of an answer: 250:150.")] = "",
        streams: Annotated[
            int | None,
            typer.Option(
                help="Requests sent at a time. Default: a queue without end.", min=1, max=65536
            ),
        ] = None,
        source: Annotated[
            Path | None,
            typer.Option(
                "--from",
                help="Lengths: result.json of a sweep; Prometheus' JSON answer to a "
                "range query; or a file of prompts.",
            ),
        ] = None,
        column: Annotated[
            str, typer.Option(help="Column of --from FILE that holds the prompts.")
        ] = "text",
        option: Annotated[
            list[str] | None, typer.Option(help="NAME=VALUE as in model.json; several times.")
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("plan"),
    ) -> None:
        """Say how many sequences fit, and what to set, before anything is loaded.

        Reads the checkpoint's headers, not its weights. What is expected by arithmetic stands
        beside a simulation of the real scheduler. The device is a GPU, which need not be here; with
        --option device=cpu it is this machine's processor.

        Examples:

            jitney plan MODEL --memory 80GiB --prompt 900:400 --output 250:150 --streams 64
            jitney plan MODEL --memory 24GB --from prompts.jsonl --output 250 --option dtype=float16
            jitney plan MODEL --memory 24GB --from bench/result.json
        """
        from jitney.engine.assemble import weigh  # imports torch

        from jitney_measure import lengths, plan_tables, planning

        texts = dict(_pair(each) for each in option or ())
        given = {name: from_text(name, text) for name, text in texts.items()}
        config = make_config({"device": "auto", **given, "model": model})
        size = read_bytes(memory)
        prompts: Any = lengths.parse("prompt", prompt) if prompt else None
        outputs = lengths.parse("output", output) if output else None
        if source is not None and _is_record(source, column):
            recorded = lengths.read(source)
            prompts = prompts or recorded.prompt
            outputs = outputs or recorded.output
            streams = streams or recorded.streams
        elif source is not None:
            if prompts is not None:
                expected = f"left out: the prompts are those of {source}"
                raise InvalidArgumentError.of("prompt", prompt, expected)
            prompts = lengths.counted(prompt_lengths(str(source), column, model))
        if prompts is None or outputs is None:
            missing = "output" if prompts is not None else "prompt"
            raise InvalidArgumentError(f"--{missing} is missing: MEAN or MEAN:DEVIATION of tokens")
        make_folder(out)
        requests = planning.sample(prompts, outputs)
        footprint = weigh(config)
        sizes = planning.choose_sizes(
            config, set(given), footprint=footprint, requests=requests, memory=size, streams=streams
        )
        plan_tables.show(footprint, sizes, out)

    return plan


def _is_record(source: Path, column: str) -> bool:
    """Whether a file has lengths of the past, rather than prompts."""
    from jitney_measure import lengths

    return source.suffix == ".json" and not lengths.holds_prompts(source, column)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgumentError.of("option", text, "NAME=VALUE")
    return name, value


def read_bytes(text: str) -> int:
    """``80GiB``, ``24GB`` or a number. Raises InvalidArgumentError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise InvalidArgumentError.of("memory", text, "a size above 0 like 80GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
