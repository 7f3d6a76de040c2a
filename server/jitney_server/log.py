"""What the embedded server's log says about a start that failed, in a few readable lines.

Pure text; ``server`` calls it. The log itself is kept whole for whoever needs more.
"""

import re
import signal

# "E1120 18:30:01.123456 4711 model_lifecycle.cc:654] "failed to load 'pylm' version 1: …"
# and, of models that it does not even try: "failed to load model 'pylm': …", "Poll failed for model
# directory 'pylm': …".
_FAILED = re.compile(
    r"(?:failed to load(?: model)?|Poll failed for model directory) "
    r"'(?P<model>[^']+)'(?: version \d+)?: (?P<why>.*)"
)
# "Invalid argument: ensemble 'embed' depends on 'minilm' which …", "… ensemble embed contains
# models that are not available …".
_ENSEMBLE = re.compile(r"(?P<why>ensemble '?(?P<model>[^' ]+)'? (?:depends on|contains) .*)")
_ERROR = re.compile(r"^[EF]\d{4} [\d:.]+ \d+ \S+\] (?P<text>.*)|^error: (?P<plain>.*)")


def failed_models(text: str) -> dict[str, str]:
    """Model -> why it failed to load, without tracebacks, in the order of the log."""
    failures: dict[str, str] = {}
    for line in text.splitlines():
        match = _FAILED.search(line) or _ENSEMBLE.search(line)
        if match is not None and match["model"] not in failures:
            # One record is one line here: the newlines inside are escaped.
            reason = readable(match["why"].replace("\\n", "\n"))
            failures[match["model"]] = reason.replace("\n", "\n    ")
    return failures


def readable(reason: str) -> str:
    """The server's reason for a failed load without the Python frames that it appends, and without
    repetitions: a warm-up that fails gives the error of each of its requests, alike as a rule."""
    seen: list[str] = []
    for part in reason.split("\nAt:\n")[0].rstrip('"; \n').split("; "):
        # The first one stands behind the name of the warm-up.
        if not any(before == part or before.endswith(f": {part}") for before in seen):
            seen.append(part)
    return "; ".join(seen)


def explain_failure(text: str, status: int) -> str:
    """Why a server that exited with ``status`` did not come up: each model that failed, or else
    the server's own error lines, or else its last lines."""
    failures = failed_models(text)
    if failures:
        head = "one model" if len(failures) == 1 else f"{len(failures)} models"
        listed = "".join(f"\n  {model}: {why}" for model, why in failures.items())
        return f"the server stopped because {head} failed to load:{listed}"
    matches = [match for match in map(_ERROR.match, text.splitlines()) if match is not None]
    errors = [match["text"] or match["plain"] for match in matches]
    # Every start on a machine without a GPU prints these.
    errors = [line for line in errors if "CudaDriverHelper" not in line]
    shown = errors or text.splitlines()[-5:]
    listed = "".join(f"\n  {line}" for line in dict.fromkeys(shown[-5:])) or " it printed nothing"
    ending = f"exited with status {status}"
    if status < 0:
        ending = f"was ended by {signal.Signals(-status).name}"
    return f"the server {ending}:{listed}"
