"""The command line: what is refused before anything is measured, and the comparison."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from jitney import cli
from jitney.errors import InstallationError, InvalidArgumentError
from jitney_measure import options, record
from jitney_measure.exchanges import measure
from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
from jitney_measure.record import Load, LoadPoint, Result
from jitney_measure.target import Model, Target
from typer.testing import CliRunner

from tests.measure.exports import MODEL, calls, point

ROOT = Path(__file__).resolve().parents[2]


def error_of(*words: str) -> BaseException | None:
    return CliRunner().invoke(cli.make_app(), ["bench", *words]).exception


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--concurrency", "some"), "whole numbers from 1"),
        (("--sampling", "[]"), "a JSON object"),
        (("--input-tokens", "9:1"), "LOW:HIGH"),
        (("--compare", "/nowhere", "/nowhere"), "cannot read /nowhere"),
        (("--ca-file", "/nowhere"), "cannot read ca_file /nowhere"),
        (("--api-key-file", "/nowhere"), "cannot read api_key_file /nowhere"),
        (("--header", "a-key"), "header 1 must be NAME:VALUE"),
    ],
)
def test_mistakes_are_named_first(words: tuple[str, ...], said: str) -> None:
    error = error_of(*words)
    assert isinstance(error, InvalidArgumentError)
    assert said in str(error)


def test_each_command_has_the_shared_options_with_defaults_of_its_own() -> None:
    commands = typer.main.get_command(cli.make_app()).commands
    for name, seconds, out in (("bench", 10.0, "bench"), ("tune", 3.0, "tune")):
        options = {option.name: option for option in commands[name].params}
        assert (options["seconds"].default, options["out"].default) == (seconds, Path(out))
        assert {"--rows", "--batch-size"} <= set(options["rows"].opts)
        model = ["m"] * (name == "tune")
        for wrong in ("--data=/nowhere", "--arrivals=even", "--protocol=tcp", "--rows=0"):
            done = CliRunner().invoke(cli.make_app(), [name, *model, wrong])
            assert done.exit_code == 2
            assert f"Invalid value for '{wrong.partition('=')[0]}" in done.output


def test_a_key_in_clear_is_a_caution(tmp_path: Path) -> None:
    words = ["bench", "--perf-analyzer", str(tmp_path / "none"), "--header", "x-key: 0123456789"]
    output = CliRunner().invoke(cli.make_app(), words).output
    assert "in clear text" in output
    assert "0123456789" not in output


def test_without_matplotlib_it_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pages.plots", "plots", "report"):
        monkeypatch.delitem(sys.modules, f"jitney_measure.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = error_of("--concurrency", "nonsense")
    assert isinstance(error, InstallationError)
    assert ".[bench]" in str(error)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """Of either command; neither a server nor perf_analyzer is needed."""
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"^out .*can be written to: File exists"):
        options.make_folder(tmp_path / "out")


def test_two_files_side_by_side(tmp_path: Path) -> None:
    for name, pace in (("a", 0.01), ("b", 0.005)):
        found = measure(calls(60, pace, pace), language=False)
        points = (LoadPoint(Load("concurrency", 1), "steady", (), found),)
        result = Result(
            name, "m", False, "here:1", "triton", "2", "2026", {"seconds": f"{pace}"}, points
        )
        record.write(result, tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    done = CliRunner().invoke(
        cli.make_app(), ["bench", "--compare", *files, "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "<td>2.00</td>" in page, "the ratio of the throughputs"
    assert "Measured with different options" in page


def test_a_comparison_in_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    record.write(Result("a", "m", False, "here:1", "triton", "2", "2026", {}, ()), file)
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    error = error_of("--compare", str(file), str(file), "--out", str(tmp_path / "out"))
    assert isinstance(error, InvalidArgumentError)
    assert "a folder that can be written to: File exists" in str(error)


def test_the_module_for_images_without_the_command() -> None:
    """One line and status 1, without torch or a client library."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'tritonclient']));"
        "from benchmarks import sweep; sys.argv[1:] = ['--rate', 'x']; sweep.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: rate is 'x'")


@pytest.mark.parametrize(("at", "status", "written"), [(0, 130, 0), (2, 130, 2), (9, 0, 3)])
def test_an_interrupted_sweep_keeps_its_loads(
    at: int, status: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = tuple(Load("concurrency", number) for number in (1, 2, 4))

    def run(self: Driver, target: Target, model: Model, load: Load) -> LoadPoint:
        if load in loads[at:]:
            raise KeyboardInterrupt
        return point(load, measure(calls(100, 0.01, 0.01), language=False))

    monkeypatch.setattr(Driver, "run", run)
    monkeypatch.setattr(Target, "server", lambda self: "triton")
    monkeypatch.setattr(Target, "model", lambda self, name: MODEL)
    monkeypatch.setattr(PerfAnalyzer, "find", lambda named: PerfAnalyzer(Path("none"), "0"))
    words = ["bench", "--concurrency", "1,2,4", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli.make_app(), words)
    assert done.exit_code == status, done.output
    result = tmp_path / "out" / "result.json"
    assert len(record.read(result).points if result.exists() else ()) == written
    assert (tmp_path / "out" / "report.html").exists() == bool(written)
