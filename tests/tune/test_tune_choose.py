"""The best setting, what came nearest, and what is said beside it."""

import io
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError
from jitney.tune import choose, record
from jitney.tune.budget import Budget
from jitney.tune.record import Trial, Tuning
from jitney.tune.report import write_report
from jitney.tune.terminal import conclusion, instruction, print_end, shown_results, trial_line
from msgspec.structs import replace
from rich.console import Console

from tests.tune.trials import BOUNDS, SLO, failed, point, trial, unmeasured

NOW, OTHER, THIRD = {"batch_size": 64}, {"batch_size": 8}, {"batch_size": 1}


def tuning(*trials: Trial, ending: record.Ending = "complete") -> Tuning:
    choice = choose.choose(trials, BOUNDS)
    near = None if choice else choose.nearest(trials, BOUNDS)
    return Tuning(
        "m", False, SLO, "2026", 9.0, 60.0, "axes", {"batch_size": (1, 8, 64)}, {}, tuple(trials),
        ending, choice, near,
    )  # fmt: skip


def test_the_greatest_throughput_within_the_bounds() -> None:
    trials = (
        trial(NOW, "current", point(1, 100, 0.005), point(4, 300, 0.015), point(16, 900, 0.05)),
        trial(OTHER, "search", point(4, 400, 0.01)),
        trial(THIRD, "search", point(4, 800, 0.03)),
    )
    choice = choose.choose(trials, BOUNDS)
    assert choice is not None
    assert (choice.values, choice.throughput, str(choice.load)) == (OTHER, 400, "4 at once")
    assert (choice.before, choice.is_current) == (300, False)
    assert any("measured once" in text for text in choice.cautions)
    assert "batch 8: 400.0 rows/s at 4 at once; the current setting 300.0 (+33%)" in conclusion(
        tuning(*trials)
    )


def test_what_was_measured_again_counts() -> None:
    """The first figure of the best one of many is too great by chance."""
    first = (
        trial(NOW, "current", point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 330, 0.01)),
    )
    again = (
        trial(OTHER, "final", point(4, 305, 0.01)),
        trial(NOW, "final", point(4, 310, 0.01)),
    )
    choice = choose.choose(first + again, BOUNDS)
    assert choice is not None
    assert choice.is_current
    assert choice.throughput == 310
    assert "Nothing better than the current setting" in conclusion(tuning(*first, *again))
    kept = choose.choose((*first, again[0]), BOUNDS)
    assert kept is not None
    assert (kept.values, kept.throughput, kept.before) == (OTHER, 305, 300)
    assert any("no time to measure the current setting again" in text for text in kept.cautions)
    assert any("gave 330.0 at first and 305.0 when measured again" in t for t in kept.cautions)


def test_the_current_setting_stays_where_the_best_one_falls_below_it() -> None:
    """Also if there was no time to measure it again: the best one's first figure was chance."""
    choice = choose.choose(
        (
            trial(NOW, "current", point(4, 300, 0.01)),
            trial(OTHER, "search", point(4, 330, 0.01)),
            trial(OTHER, "final", point(4, 290, 0.01)),
        ),
        BOUNDS,
    )
    assert choice is not None
    assert (choice.is_current, choice.throughput) == (True, 300)


def test_a_last_measurement_that_was_cut_short_does_not_count() -> None:
    """It climbs from the lowest load: what it has is no figure of the setting."""
    first = (
        trial(NOW, "current", point(1, 80, 0.01), point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 400, 0.01), point(8, 500, 0.01)),
    )
    cut = trial(OTHER, "final", point(1, 90, 0.01), point(2, 170, 0.01), cut=True)
    choice = choose.choose((*first, cut), BOUNDS)
    assert choice is not None
    assert (choice.values, choice.throughput) == (OTHER, 500)
    assert any("measured once" in text for text in choice.cautions)
    assert shown_results(tuning(*first, cut))["best"].best == first[1].result.best
    # So of the current one; but what went as far as the best load of before does count.
    again = trial(OTHER, "final", point(4, 390, 0.01), point(8, 480, 0.01), cut=True)
    choice = choose.choose(
        (*first, again, trial(NOW, "final", point(1, 81, 0.01), cut=True)), BOUNDS
    )
    assert choice is not None
    assert (choice.values, choice.throughput, choice.before) == (OTHER, 480, 300)
    assert any("no time to measure the current setting again" in text for text in choice.cautions)


def test_why_the_current_setting_may_be_better_than_its_figure() -> None:
    """A gain over a figure that is too low is no gain."""
    other = trial(OTHER, "search", point(4, 900, 0.01))
    shaky = trial(NOW, "current", point(1, 100, 0.01), point(4, 890, 0.01, "unstable"))
    choice = choose.choose((shaky, other), BOUNDS)
    assert choice is not None
    assert "of the current setting, 4 at once gave more (890.0/s), but not steadily" in (
        choice.cautions
    )
    choice = choose.choose((trial(NOW, "current", point(1, 100, 0.01), cut=True), other), BOUNDS)
    assert choice is not None
    assert "the current setting was not put under all loads, for lack of time" in choice.cautions


def test_a_gain_within_the_noise_is_doubted() -> None:
    steady = (
        trial(NOW, "current", point(4, 300, 0.01)),
        trial(OTHER, "search", point(4, 900, 0.01)),
        trial(OTHER, "final", point(4, 890, 0.01)),
        trial(NOW, "final", point(4, 301, 0.01)),
    )
    choice = choose.choose(steady, BOUNDS)
    assert choice is not None
    assert choice.cautions == ()
    small = (*steady[:1], trial(OTHER, "search", point(4, 309, 0.01)))
    choice = choose.choose(small, BOUNDS)
    assert choice is not None
    assert any("may differ by 5%" in text for text in choice.cautions)


def test_no_setting_meets_the_bounds() -> None:
    trials = (
        trial(NOW, "current", point(1, 100, 0.1), point(4, 300, 0.3)),
        trial(OTHER, "search", point(1, 90, 0.03), point(4, 90, 0.001, "behind")),
        failed(THIRD),
    )
    assert choose.choose(trials, BOUNDS) is None
    near = choose.nearest(trials, BOUNDS)
    assert near is not None
    assert (near.values, str(near.load), near.figure) == (
        OTHER,
        "1 at once",
        "latency-p95 is 30 ms",
    )
    assert near.excess == pytest.approx(1.5)
    said = conclusion(tuning(*trials))
    assert "No setting meets latency-p95=20ms. Nearest: batch 8 at 1 at once" in said
    assert "1.5 times its bound" in said
    shown = shown_results(tuning(*trials))
    assert {name: result.points[0].measured.throughput for name, result in shown.items()} == {
        "current": 100, "nearest": 90,
    }  # fmt: skip


def test_nothing_could_be_measured() -> None:
    made = tuning(failed(NOW), failed(OTHER))
    assert conclusion(made) == "No setting could be measured."
    assert shown_results(made) == {}


def test_why_there_is_no_figure_is_said() -> None:
    """Bounds that are broken are one thing, loads without figures, or with a queue that grows,
    others."""
    late, lost = trial(NOW, "current", point(1, 9, 0.1)), trial(OTHER, "search", unmeasured(1, "x"))
    behind = trial(THIRD, "search", point(1, 9, 0.001, "behind"), unmeasured(4, "x"))
    assert "meets the bounds at no load" in trial_line(late, "rows/s")
    assert "could be measured at no load" in trial_line(lost, "rows/s")
    assert "failed or fell behind at every load" in trial_line(behind, "rows/s")
    assert "more were sent than any setting keeps up with" in conclusion(tuning(behind, lost))
    good = trial(THIRD, "search", point(4, 400, 0.01))
    for current, said in (
        (late, "the current setting meets the bounds at no load"),
        (
            trial(NOW, "current", unmeasured(1, "x")),
            "the current setting could be measured at no load",
        ),
        (Trial(NOW, "current", failure="no such file"), "the current setting did not load"),
    ):
        assert said in conclusion(tuning(current, good))


def test_what_the_lines_take_the_place_of() -> None:
    made = tuning(trial(NOW, "current", point(4, 300, 0.01)))
    lines = "instance_group {\n}\ndynamic_batching {\n}"
    for change, said in (
        ({"lines": lines}, "its instance_group and dynamic_batching, which are to be deleted:"),
        ({"lines": "dynamic_batching {\n}"}, "of its dynamic_batching, which"),
        ({"language": True, "lines": "parameters {\n}"}, "of its parameters of these names"),
    ):
        assert said in instruction(replace(made, **change), "config.pbtxt")


def test_reasons_stand_in_the_report_as_they_are(tmp_path: Path) -> None:
    """What the terminal would take for its markup, and the browser for its own."""
    reason = "no [kernel] for <this>"
    made = tuning(trial(NOW, "current", point(4, 300, 0.01)), failed(OTHER, reason))
    page = write_report(made, tmp_path).read_text(encoding="utf-8")
    assert "did not load: no [kernel] for &lt;this&gt;" in page
    terminal = Console(file=io.StringIO(), width=200)
    print_end(made, terminal, "config.pbtxt")
    assert f"did not load: {reason}" in terminal.file.getvalue()


def test_the_order_of_scores() -> None:
    """Met by throughput, above missed by nearness, above what did not load."""
    ascending = [
        failed(NOW),
        trial(NOW, "search", point(1, 900, 0.2)),
        trial(NOW, "search", point(1, 10, 0.021)),
        trial(NOW, "search", point(1, 10, 0.001)),
        trial(NOW, "search", point(1, 20, 0.001)),
    ]
    scores = [choose.score(each, BOUNDS) for each in ascending]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_doubts_are_said() -> None:
    """A load that is not steady, and one below the best that breaks the bounds."""
    shaky = trial(
        OTHER, "search", point(1, 50, 0.04), point(4, 400, 0.01), point(8, 900, 0.01, "unstable")
    )
    choice = choose.choose((trial(NOW, "current", point(4, 100, 0.01)), shaky), BOUNDS)
    assert choice is not None
    assert choice.throughput == 400, "steady loads come first"
    said = " / ".join(choice.cautions)
    assert "8 at once gave more (900.0/s), but not steadily" in said
    assert "1 at once breaks the bounds (latency-p95 is 40 ms)" in said
    assert [str(each.load) for _, each in choose.unstable([shaky])] == ["8 at once"]


def test_the_current_setting_did_not_load() -> None:
    trials = (
        Trial(NOW, "current", failure="no such file"),
        trial(OTHER, "search", point(4, 400, 0.01)),
    )
    choice = choose.choose(trials, BOUNDS)
    assert choice is not None
    assert choice.before is None
    assert list(shown_results(tuning(*trials))) == ["best"]


def test_the_record_comes_back(tmp_path: Path) -> None:
    made = tuning(trial(NOW, "current", point(4, 300, 0.01)), failed(OTHER), ending="interrupted")
    record.write(made, tmp_path / "a/tune.json")
    assert record.read(tmp_path / "a/tune.json") == made
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a/tune.json"]
    for content, said in (("{}", "is not the record"), (None, "cannot read")):
        path = tmp_path / "other.json"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        else:
            path.unlink()
        with pytest.raises(InvalidArgumentError, match=said):
            record.read(path)


def test_the_grid_only_where_it_fits() -> None:
    """By a guess before anything was measured, then by what was."""
    budget = Budget(limit_s=600, load_seconds=3, ladder=7, language=False)
    assert budget.strategy(0, 5) == "grid"
    assert budget.strategy(0, 50) == "axes"
    for _ in range(4):
        budget.took(1.0)
        budget.loaded(1.0)
    assert (budget.load_s, budget.loading_s) == (1, 1)
    assert budget.strategy(0, 50) == "grid"
    assert budget.finals_s == 2 * 8
    assert budget.may_try(600 - 16 - 2)
    assert not budget.may_try(600 - 16 - 1.9)
    assert budget.may_measure(600 - 16 - 1)
    assert not budget.may_measure(590)
