"""Why a start of the embedded server failed, in a few readable lines, from the text of its log.

Pure. ``server`` and ``serving`` call it.
"""

import re
import signal

# E1120 18:30:01.123456 4711 model_lifecycle.cc:654] "failed to load 'pylm' version 1: …"
# The other forms are of models that the server does not even try to load:
# "failed to load model 'pylm': …", "Poll failed for model directory 'pylm': …"
_FAILED_MODEL = re.compile(
    r"(?:failed to load(?: model)?|Poll failed for model directory) "
    r"'(?P<model>[^']+)'(?: version \d+)?: (?P<why>.*)"
)
# "Invalid argument: ensemble 'embed' depends on 'minilm' which …"
# "… ensemble embed contains models that are not available …"
_FAILED_ENSEMBLE = re.compile(r"(?P<why>ensemble '?(?P<model>[^' ]+)'? (?:depends on|contains) .*)")
# [libprotobuf ERROR …/text_format.cc:337] Error parsing text-format inference.ModelConfig: 3:14: …
_PARSE_ERROR = re.compile(
    r"Error parsing text-format \S+: (?P<line>\d+):(?P<column>\d+): (?P<why>.*)"
)
_UNREADABLE_CONFIG = "failed to read text proto from"
_USAGE = "Usage: tritonserver [options]"
"""What the server prints after its reason, and before all its options, if one is wrong."""
# What an error looks like: a log record of the level error or fatal, or a line that the server
# prints without its logger.
_ERROR = re.compile(r"^[EF]\d{4} [\d:.]+ \d+ \S+\] (?P<text>.*)|^error: (?P<plain>.*)")
_PORT_TAKEN = re.compile(r"Socket '[^']*' already in use")
_MOST_LINES = 5


def failed_models(text: str) -> dict[str, str]:
    """Model -> why it failed to load, without tracebacks, in the order of the log."""
    failures: dict[str, str] = {}
    # If a configuration cannot be read, the server first prints the errors in it, and then a line
    # that names its model. So the first error is kept until that line comes.
    parse_error: str | None = None
    for line in text.splitlines():
        parsed = _PARSE_ERROR.search(line)
        if parsed is not None and parse_error is None:
            parse_error = f"line {parsed['line']}, column {parsed['column']}: {parsed['why']}"
        match = _FAILED_MODEL.search(line) or _FAILED_ENSEMBLE.search(line)
        if match is None:
            continue
        # A record of the log is one line: the newlines inside are escaped.
        reason = without_frames_and_repetitions(match["why"].replace("\\n", "\n"))
        if parse_error is not None and _UNREADABLE_CONFIG in reason:
            reason += f": {parse_error}"
            parse_error = None
        # The server may name a model several times. The first reason is the cause.
        failures.setdefault(match["model"], reason.replace("\n", "\n    "))
    return failures


def without_frames_and_repetitions(reason: str) -> str:
    """The server's reason for a failed load, without the Python frames that it appends and without
    repetitions.

    A warm-up that fails gives the error of each of its requests, and these are mostly the same. The
    first one has the name of the warm-up before it.
    """
    without_frames = reason.split("\nAt:\n")[0].rstrip('"; \n')
    errors: list[str] = []
    for error in without_frames.split("; "):
        is_repeated = error in errors or any(known.endswith(f": {error}") for known in errors)
        if not is_repeated:
            errors.append(error)
    return "; ".join(errors)


def is_port_taken(text: str) -> bool:
    """Whether the server says that another process listens on one of its ports."""
    return _PORT_TAKEN.search(text) is not None


def explain_failure(text: str, status: int) -> str:
    """Why a server that exited with ``status`` did not come up, from the text of its log.

    Each model that failed is named with its reason. If none is known, the server's own error lines
    are shown, or else the last lines of the log.
    """
    failures = failed_models(text)
    if failures:
        head = "one model" if len(failures) == 1 else f"{len(failures)} models"
        listed = "".join(f"\n  {model}: {why}" for model, why in failures.items())
        return f"the server stopped because {head} failed to load:{listed}"
    lines = _lines_before_usage(text)
    if not lines:
        lines = _error_lines(text)
    if not lines:
        lines = text.splitlines()
    without_repetitions = dict.fromkeys(lines[-_MOST_LINES:])
    listed = "".join(f"\n  {line}" for line in without_repetitions) or " it printed nothing"
    ending = f"exited with status {status}"
    if status < 0:
        ending = f"was ended by {signal.Signals(-status).name}"
    return f"the server {ending}:{listed}"


def _lines_before_usage(text: str) -> list[str]:
    """What the server says before it prints its usage: the option that it refuses, and why. Empty
    if it has not printed its usage."""
    before, usage, _ = text.partition(_USAGE)
    if not usage:
        return []
    return [line for line in before.splitlines() if line.strip()]


def _error_lines(text: str) -> list[str]:
    errors = []
    for line in text.splitlines():
        match = _ERROR.match(line)
        # Every start on a machine without a GPU prints errors of the CUDA driver.
        if match is not None and "CudaDriverHelper" not in line:
            errors.append(match["text"] or match["plain"])
    return errors
