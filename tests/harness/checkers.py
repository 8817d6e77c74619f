"""Programs that check the files in `contrib`: promtool of Prometheus, and systemd-analyze."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLES = {"promtool": "ONCEKEY_TEST_PROMTOOL", "systemd-analyze": "ONCEKEY_TEST_SYSTEMD_ANALYZE"}
"""The environment variables that name the programs, where they are not found by their own names."""
TARGETS = {"promtool": "promtool", "systemd-analyze": "systemd"}


class CheckerMissingError(Exception):
    """Tests need a program that is not on this machine: a failure, never a skip."""


@dataclass(frozen=True)
class Case:
    """Series of one job, minute by minute, and which alerts fire at the end of them."""

    name: str
    series: Mapping[str, str]
    """By name and labels without the job, in promtool's notation: `0+3x10` is 0, then ten times three more."""
    minutes: int
    firing: Sequence[str] = field(default=())
    """The labels of each alert, beside the job."""


def program(name: str) -> str:
    """The one that is named, the one of this environment, or one on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which(os.environ.get(VARIABLES[name]) or name, path=path)
    if found is None:
        raise CheckerMissingError(
            f"No {name} was found: `make {TARGETS[name]}` gets it on Debian and Ubuntu as root; elsewhere install it, "
            f"or set {VARIABLES[name]} to the program."
        )
    return found


def check(rules: Path) -> str:
    """What promtool says of a file of rules."""
    return _run("promtool", "check", "rules", str(rules))


def try_out(rules: Path, cases: Sequence[Case], folder: Path) -> str:
    """Run the rules against all cases at once, each as a job of its own; one without series has a world of its own."""
    busy, empty = ([case for case in cases if bool(case.series) is wanted] for wanted in (True, False))
    file = folder / "cases.json"  # JSON is YAML, and needs no package to be written
    tests = [_world(busy, jobs=True)] * bool(busy) + [_world([case], jobs=False) for case in empty]
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    return _run("promtool", "test", "rules", str(file))


def _world(cases: Sequence[Case], *, jobs: bool) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [
            {"series": name.replace("{", f'{{job="{case.name}",', 1), "values": values}
            for case in cases
            for name, values in case.series.items()
        ],
        "promql_expr_test": [_expected(case, f'job="{case.name}"' if jobs else 'alertname!=""') for case in cases],
    }


def _expected(case: Case, whose: str) -> dict[str, Any]:
    shown = [f'ALERTS{{alertstate="firing",{one}{f",{whose}" if case.series else ""}}}' for one in case.firing]
    return {
        "expr": f'ALERTS{{alertstate="firing",{whose}}}',
        "eval_time": f"{case.minutes}m",
        "exp_samples": [{"labels": labels, "value": 1} for labels in shown],
    }


def verify(units: Sequence[Path]) -> str:
    """What systemd says of units: nothing, if nothing is wrong. The exit code is 0 also for a key that it ignores."""
    return _run("systemd-analyze", "verify", *map(str, units))


def _run(name: str, *words: str) -> str:
    done = subprocess.run([program(name), *words], capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
