"""The demo's picture: one lane per request over time, and how many were aboard at once."""

from collections.abc import Sequence

from demo_passengers import Passenger
from rich.text import Text

_HEIGHTS = " ▁▂▃▄▅▆▇█"


def aboard(passengers: Sequence[Passenger], moment: float) -> int:
    """How many had got their first token, and not yet their last, at ``moment``."""
    return sum(
        passenger.boarded is not None
        and passenger.boarded <= moment
        and (passenger.left is None or moment < passenger.left)
        for passenger in passengers
    )


def most_aboard(passengers: Sequence[Passenger]) -> int:
    """The largest number at any moment: it only grows when one boards."""
    boardings = [p.boarded for p in passengers if p.boarded is not None]
    return max((aboard(passengers, moment) for moment in boardings), default=0)


def lane(passenger: Passenger, begin: float, now: float, width: int) -> str:
    """``width`` cells of time: ░ sent and waiting, █ aboard, nothing otherwise."""
    cells = []
    step = max(now - begin, 1e-6) / width
    for cell in range(width):
        low, high = begin + cell * step, begin + (cell + 1) * step
        sent = passenger.sent is not None and passenger.sent < high
        left = passenger.left is not None and passenger.left <= low
        boarded = passenger.boarded is not None and passenger.boarded < high
        cells.append(" " if left or not sent else "█" if boarded else "░")
    return "".join(cells)


def picture(
    passengers: Sequence[Passenger], begin: float, now: float, *, width: int, tails: bool
) -> Text:
    """The whole drawing. ``tails`` adds the end of each text, for a terminal that is redrawn."""
    tail_width = max(0, width - 74) if tails else 0
    lane_width = min(60, max(10, width - 34 - tail_width))
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{'':>2}  {'':4}  prompt  made  ", style="dim")
    text.append(f"0 s{f'{now - begin:.1f} s':>{lane_width - 3}}\n", style="dim")
    for passenger in passengers:
        colour = "cyan" if passenger.via == "gRPC" else "magenta"
        text.append(f"{passenger.number:>2}  ")
        text.append(f"{passenger.via:4}", style=colour)
        prompt_tokens = passenger.prompt_tokens or ""
        text.append(f"  {prompt_tokens:>6}  {passenger.made or '':>4}  ", style="dim")
        text.append(lane(passenger, begin, now, lane_width), style=colour)
        if tail_width > 3:
            ending = " ".join(passenger.text.split())[-tail_width + 2 :]
            text.append(f"  {ending}", style="dim")
        text.append("\n")
    step = max(now - begin, 1e-6) / lane_width
    counts = [aboard(passengers, begin + (cell + 0.5) * step) for cell in range(lane_width)]
    scale = (len(_HEIGHTS) - 1) / max(len(passengers), 1)
    bars = "".join(_HEIGHTS[round(count * scale)] for count in counts)
    text.append(f"{'aboard at once':>20}  ", style="bold")
    text.append(bars, style="green")
    text.append(f"  {counts[-1]}" if any(p.left is None for p in passengers) else "")
    return text
