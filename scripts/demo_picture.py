"""The demo's picture: one lane per request over time, and how many were running at once."""

from collections.abc import Sequence

from demo_requests import DemoRequest
from rich.text import Text

_HEIGHTS = " ▁▂▃▄▅▆▇█"


def running(requests: Sequence[DemoRequest], moment: float) -> int:
    """How many had got their first token, and not yet their last, at ``moment``."""
    return sum(
        request.started is not None
        and request.started <= moment
        and (request.ended is None or moment < request.ended)
        for request in requests
    )


def most_running(requests: Sequence[DemoRequest]) -> int:
    """The largest number at any moment: it only grows when one starts."""
    starts = [p.started for p in requests if p.started is not None]
    return max((running(requests, moment) for moment in starts), default=0)


def lane(request: DemoRequest, begin: float, now: float, width: int) -> str:
    """``width`` cells of time: ░ sent and waiting, █ in the batch, nothing otherwise."""
    cells = []
    step = max(now - begin, 1e-6) / width
    for cell in range(width):
        low = begin + cell * step
        high = begin + (cell + 1) * step
        sent = request.sent is not None and request.sent < high
        ended = request.ended is not None and request.ended <= low
        started = request.started is not None and request.started < high
        cells.append(" " if ended or not sent else "█" if started else "░")
    return "".join(cells)


def picture(
    requests: Sequence[DemoRequest], begin: float, now: float, *, width: int, tails: bool
) -> Text:
    """The whole plot. ``tails`` adds the end of each text, for a terminal that is updated."""
    tail_width = max(0, width - 74) if tails else 0
    lane_width = min(60, max(10, width - 34 - tail_width))
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{'':>2}  {'':4}  prompt  made  ", style="dim")
    text.append(f"0 s{f'{now - begin:.1f} s':>{lane_width - 3}}\n", style="dim")
    for request in requests:
        colour = "cyan" if request.via == "gRPC" else "magenta"
        text.append(f"{request.number:>2}  ")
        text.append(f"{request.via:4}", style=colour)
        prompt_tokens = request.prompt_tokens or ""
        text.append(f"  {prompt_tokens:>6}  {request.made or '':>4}  ", style="dim")
        text.append(lane(request, begin, now, lane_width), style=colour)
        if tail_width > 3:
            ending = " ".join(request.text.split())[-tail_width + 2 :]
            text.append(f"  {ending}", style="dim")
        text.append("\n")
    step = max(now - begin, 1e-6) / lane_width
    counts = [running(requests, begin + (cell + 0.5) * step) for cell in range(lane_width)]
    scale = (len(_HEIGHTS) - 1) / max(len(requests), 1)
    bars = "".join(_HEIGHTS[round(count * scale)] for count in counts)
    text.append(f"{'running at once':>20}  ", style="bold")
    text.append(bars, style="green")
    text.append(f"  {counts[-1]}" if any(p.ended is None for p in requests) else "")
    return text
