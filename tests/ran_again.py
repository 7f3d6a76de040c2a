"""Says which tests ran again. tests/conftest.py registers it for every run with `--last-failed`.

`.ci/run` runs once more what failed. A test that passes then is a defect too, of the test or of the
product, and nobody would see it in a summary that is green.
"""

import os

import pytest


class RanAgain:
    """Counts the tests of a second run and names them above its summary."""

    def __init__(self) -> None:
        self._failed: dict[str, bool] = {}
        """Test -> whether it has failed again."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test: its set-up, itself or its tear-down."""
        failed_before = self._failed.get(report.nodeid, False)
        self._failed[report.nodeid] = failed_before or report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """After the failures, before the line with the counts, which stays the last one."""
        count = len(self._failed)
        terminalreporter.section("1 test ran again" if count == 1 else f"{count} tests ran again")
        for name, failed in self._failed.items():
            outcome = "failed again" if failed else "passed now"
            terminalreporter.write_line(f"{outcome}: {name}")


def register(config: pytest.Config) -> None:
    """For a run of what failed last; in the process that prints, not in those that run tests."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("lf", False) and not is_worker:
        config.pluginmanager.register(RanAgain())
