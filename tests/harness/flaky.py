"""Runs a failed test once more, alone: on a busy machine a sound test can wait too briefly.

A test that passes alone is reported as flaky, with its first failure. It does not fail the run unless there are more
than `MOST` of them. Tests of the promises (`NEVER`) get no second chance: a rare failure there is a race of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

MOST: Final = 3
"""So many flaky tests are reported; one more fails the run."""
ATTEMPTS: Final = 20
"""With more failures than this, something is broken, and nothing is run again."""
NEVER: Final = ("tests/contract/", "tests/proof/", "tests/race/", "tests/local/")
ALONE: Final = "ONCEKEY_TEST_ALONE"
"""Set for the second run, so that it has no third one."""


@dataclass(slots=True, eq=False)
class Flaky:
    """The plugin: it acts in the process that counts the results, after the last test."""

    seen: list[pytest.TestReport] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run the failed tests again, and take those that pass off the list of failures."""
        config = session.config
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or hasattr(config, "workerinput") or os.environ.get(ALONE):
            return
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return  # interrupted, or nothing failed
        failures: dict[str, list[pytest.TestReport]] = {}
        for outcome in ("failed", "error"):
            for report in reporter.stats.get(outcome, ()):
                failures.setdefault(report.nodeid, []).append(report)
        if len(failures) > ATTEMPTS:
            return
        for test in sorted(failures):
            if not test.startswith(NEVER) and _passes_alone(test, config):
                self.seen += failures.pop(test)
        for outcome in ("failed", "error"):
            left = [report for report in reporter.stats.pop(outcome, ()) if report.nodeid in failures]
            reporter.stats.update({outcome: left} if left else {})
        if self.seen:
            reporter.stats["flaky"] = self.seen
        if not failures and len({report.nodeid for report in self.seen}) <= MOST:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the first failure of each flaky test."""
        if not self.seen:
            return
        tests = {report.nodeid for report in self.seen}
        verdict = f"more than {MOST} fail the run" if len(tests) > MOST else "they passed when run again, alone"
        terminalreporter.section(f"{len(tests)} flaky tests: {verdict}", yellow=True)
        for report in self.seen:
            terminalreporter.write_sep("_", report.nodeid, yellow=True)
            terminalreporter.line(report.longreprtext)


def _passes_alone(test: str, config: pytest.Config) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, cwd=config.invocation_params.dir, env={**os.environ, ALONE: "1"}, check=False, capture_output=True
    )
    return done.returncode == pytest.ExitCode.OK
