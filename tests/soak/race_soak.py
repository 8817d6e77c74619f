"""The race for long: many processes ask for one key at once, round after round, on a private server of every store.

    python tests/soak/race_soak.py --rounds 2000 --processes 8

Half of the rounds are raced by claims, over keys that are new, failed and retryable, stale, or expired; the other half
through `@once.function`: LOCAL, with the key and the business row in one commit, or INLINE where the store shares no
transaction. Executions are counted outside of oncekey: by rows and items of the application, or by the lines of a file.
When a course is over each of its keys is asked for once more, and has to be answered by who executed it. Emulators of
DynamoDB are slow, so they have a tenth of the rounds. `tests/race` does the same in seconds.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.dynamo import CREDENTIALS
from oncekey.databases.dynamodb.items import table_of
from race.grounds import (
    OnDynamo,
    OnMariadb,
    OnPostgres,
    OnSqlite,
    Tally,
    WithLedger,
    WriteTarget,
    courses_of,
    prepare,
    run,
    tally,
)
from race.racing import PhasedRun
from soak.places import NAME, Opened, choosing, chosen

KINDS = 4
"""How many courses `courses_of` makes."""
SLOWER = 10
"""How many times fewer rounds an emulator of DynamoDB has."""


def ground_of(name: str, server: Any, url: str, folder: Path) -> WriteTarget:
    """What is raced on, and where its executions are counted."""
    match name.partition("-"):
        case "sqlite", _, _:
            return OnSqlite(Path(url.removeprefix("sqlite:///")))
        case "postgresql", _, _:
            return OnPostgres(url)
        case (("mariadb" | "mysql"), _, _):
            return OnMariadb(server, url)
        case "dynamodb", _, "moto":
            return OnDynamo(server)
        case "dynamodb", _, _:  # it knows no transactions
            server.client().create_table(**table_of(NAME))
    return WithLedger(url, folder / "executed")


def hold(name: str, opened: Opened, rounds: int, processes: int, seed: int) -> Tally:
    """One store's race."""
    part = max(rounds // (SLOWER if name.startswith("dynamodb") else 1) // (2 * KINDS), 1)
    courses = [*courses_of(part), PhasedRun("called", KINDS * part, by_function=True)]
    if name.startswith(("sqlite", "postgresql")):  # an OUTBOX function through SQLAlchemy, which claims first
        courses.append(PhasedRun("deferred", part, by_function=True, deferred=True))
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as (server, url):
        ground = ground_of(name, server, url, Path(folder))
        prepare(ground, courses)
        seen = run(ground, courses, processes, seed=seed, tells=name)
        return tally([key for phased_run in courses for key in phased_run.keys], ground.executed(), seen)


def main() -> None:
    """Race on all of them, also after one that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=8)
    choosing(parser)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    results: dict[str, Tally] = {}
    for name, opened in chosen(options).items():
        began = time.monotonic()
        results[name] = found = hold(name, opened, options.rounds, options.processes, options.seed)
        print(f"{name}: over after {time.monotonic() - began:.0f} s", file=sys.stderr)
        for word in found.wrong:
            print(f"{name}: {word}", file=sys.stderr)
    print(f"{options.processes} processes, seed {options.seed}")
    print(f"{'store':<20}{'rounds':>8}{'winners':>9}{'duplicates':>12}{'lost':>6}{'wrong':>7}")
    for name, one in results.items():
        row = f"{one.rounds:>8}{one.winners:>9}{one.duplicates:>12}{one.lost:>6}{len(one.wrong):>7}"
        print(f"{name:<20}{row}")
    raise SystemExit(0 if all(one.clean for one in results.values()) else 1)


if __name__ == "__main__":
    main()
