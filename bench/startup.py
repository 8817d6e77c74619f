"""`python -m bench.startup`: the duration of `import oncekey` and `oncekey --help`, and of what they are compared with.

Each round starts every candidate once in a separate interpreter, one after the other, so that all run under the same
load; figures are the medians of all rounds, minus the time of an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

HELP = "import sys; sys.argv = ['oncekey', '--help']; from oncekey.cli import main; main()"
CANDIDATES = {
    "python": "pass",
    "import typer, rich": "import typer, rich",
    "oncekey --help": HELP,
    "import fastapi": "import fastapi",
    "import oncekey": "import oncekey",
    "from oncekey import Once": "from oncekey import Once",
}
COMPARED = (
    ("oncekey --help", "import typer, rich", 2.0),
    ("import oncekey", "import fastapi", 1 / 3),
    ("from oncekey import Once", "import fastapi", None),
)


def seconds(script: str) -> float:
    """The time of an interpreter that runs a script, from start to exit."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measured(rounds: int) -> dict[str, float]:
    """The median of each candidate, without the time of the interpreter itself."""
    for script in CANDIDATES.values():
        seconds(script)  # compiles modules for the first time
    took: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(rounds):
        for name, script in CANDIDATES.items():
            took[name].append(seconds(script))
    bare = statistics.median(took.pop("python"))
    return {name: max(0.0, statistics.median(times) - bare) for name, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    took = measured(chosen.rounds)
    ratios = {ours: took[ours] / took[theirs] for ours, theirs, _ in COMPARED}
    if chosen.json:
        print(json.dumps({"seconds": took, "ratios": ratios}, indent=2))
        return
    for name, median in took.items():
        print(f"{name:26} {median * 1000:7.1f} ms")
    for ours, theirs, limit in COMPARED:
        wanted = "" if limit is None else f"   (goal: at most {limit:.2f})"
        print(f"{ours} / {theirs}: {ratios[ours]:.2f}{wanted}")


if __name__ == "__main__":
    main()
