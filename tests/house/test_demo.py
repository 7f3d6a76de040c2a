"""`make demo` is a test too: it ends with status 0 only if everything it shows happened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.server
def test_demo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_models.py")],
        capture_output=True,
        check=False,
    )
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--log-file", str(log)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout
    assert "Triton Inference Server is up" in text
    assert len(re.findall(r"\d boards \(gRPC", text)) == 6
    assert len(re.findall(r"\d boards \(HTTP", text)) == 6
    assert len(re.findall(r"leaves after \d+ tokens", text)) == 12
    assert int(re.findall(r"aboard at once +up to (\d+)", text)[0]) >= 2
    mean = float(re.findall(r"with ([\d.]+) sequences each", text)[0])
    assert mean > 1.0, "by the server's own metrics too, steps were shared"
    assert "stopped cleanly" in text
    if built.returncode == 3:  # the libraries for an export are missing: it goes on without
        assert "Left out, the models beside the language model" in text
    else:
        assert built.returncode == 0, built.stderr.decode()
        assert "drawn: a 5" in text
        executions = re.findall(r"256 requests, run in (\d+) executions", text)
        assert len(executions) == 2
        assert all(int(count) < 256 for count in executions)
    assert "Traceback" not in log.read_text(encoding="utf-8")


@pytest.mark.usefixtures("scripts")
def test_lanes_and_counts() -> None:
    from demo_passengers import make_passengers
    from demo_picture import aboard, lane, most_aboard, picture

    first, second, third = make_passengers()[:3]
    first.sent, first.tokens, first.left = 0.0, [(2.0, 1), (5.0, 3)], 6.0
    second.sent, second.tokens, second.left = 4.0, [(5.0, 1)], 10.0
    everyone = [first, second, third]
    assert [aboard(everyone, moment) for moment in (0.0, 2.0, 5.5, 6.0, 10.0)] == [0, 1, 2, 1, 0]
    assert most_aboard(everyone) == 2
    assert first.made == 4
    assert lane(first, 0.0, 10.0, 10) == "░░████    "
    assert lane(second, 0.0, 10.0, 10) == "    ░█████"
    assert lane(third, 0.0, 10.0, 10) == " " * 10
    drawn = picture(everyone, 0.0, 10.0, width=80, tails=False).plain
    assert drawn.splitlines()[1].startswith(" 1  gRPC")
    assert len(drawn.splitlines()) == 5


@pytest.mark.usefixtures("scripts")
def test_what_makes_the_demo_fail() -> None:
    import demo
    from demo_passengers import make_passengers

    passengers = make_passengers()
    for passenger in passengers:
        passenger.sent, passenger.tokens, passenger.left = 0.0, [(1.0, 2)], 2.0
    demo.check(passengers)
    passengers[3].error = "gone"
    with pytest.raises(demo.DemoError, match="request 4: gone"):
        demo.check(passengers)
    passengers[3].error = ""
    passengers[4].tokens = []
    with pytest.raises(demo.DemoError, match="request 5 brought 0 tokens"):
        demo.check(passengers)
    for number, passenger in enumerate(passengers):
        passenger.tokens, passenger.left = [(float(number), 1)], number + 0.5
    with pytest.raises(demo.DemoError, match="no two requests"):
        demo.check(passengers)
