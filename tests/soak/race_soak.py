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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.dynamo import CREDENTIALS, Dynalite, Moto
from harness.mariadb import MariadbInstallation, MariadbServer, MysqlInstallation
from harness.postgres import PostgresServer
from harness.postgres_binaries import Installation, installations
from harness.valkeys import Cluster, StoringValkey
from oncekey.drivers.dynamodb_items import table_of
from race.grounds import (
    Ground,
    OnDynamo,
    OnMariadb,
    OnPostgres,
    OnSqlite,
    Tally,
    WithLedger,
    courses_of,
    prepare,
    run,
    tally,
)
from race.racing import Course

KINDS = 4
"""How many courses `courses_of` makes."""


@dataclass(frozen=True)
class Contest:
    """A store to race on."""

    name: str
    opened: Callable[[Path], AbstractContextManager[Ground]]
    share: int = 1
    """One of how many rounds is raced there."""


@contextmanager
def on_sqlite(folder: Path) -> Iterator[Ground]:
    """A file."""
    yield OnSqlite(folder / "race.db")


def on_postgres(installation: Installation) -> Callable[[Path], AbstractContextManager[Ground]]:
    """A server of one version."""

    @contextmanager
    def opened(_: Path) -> Iterator[Ground]:
        with PostgresServer(installation) as server:
            yield OnPostgres(server.create_database("race"))

    return opened


def on_mariadb(kind: type[MariadbInstallation]) -> Callable[[Path], AbstractContextManager[Ground]]:
    """A server of MariaDB, or of MySQL."""

    @contextmanager
    def opened(_: Path) -> Iterator[Ground]:
        with MariadbServer(kind=kind) as server:
            yield OnMariadb(server, server.create_database("race"))

    return opened


@contextmanager
def on_valkey(folder: Path) -> Iterator[Ground]:
    """One server that nothing happens to: what a fail-over may lose is another matter, and has tests of its own."""
    with StoringValkey() as server:
        yield WithLedger(server.url, folder / "executed")


@contextmanager
def on_cluster(folder: Path) -> Iterator[Ground]:
    """Three primaries, a replica of each."""
    with Cluster() as cluster:
        yield WithLedger(cluster.url, folder / "executed")


@contextmanager
def on_moto(_: Path) -> Iterator[Ground]:
    """It knows transactions, and does one request after the other, as the service does for one item."""
    with Moto() as server:
        yield OnDynamo(server)


@contextmanager
def on_dynalite(folder: Path) -> Iterator[Ground]:
    """It knows no transactions."""
    with Dynalite() as server:
        server.client().create_table(**table_of("race"))
        yield WithLedger(server.url("race"), folder / "executed")


def contests() -> list[Contest]:
    """All of them; of PostgreSQL every version that is here."""
    return [
        Contest("sqlite", on_sqlite),
        *(Contest(f"postgresql-{one.major}", on_postgres(one)) for one in installations()),
        *(Contest(kind.name, on_mariadb(kind)) for kind in (MariadbInstallation, MysqlInstallation)),
        Contest("redis", on_valkey),
        Contest("redis-cluster", on_cluster),
        Contest("dynamodb-moto", on_moto, 10),
        Contest("dynamodb-dynalite", on_dynalite, 10),
    ]


def hold(contest: Contest, rounds: int, processes: int, seed: int) -> Tally:
    """One store's race."""
    part = max(rounds // contest.share // (2 * KINDS), 1)
    courses = [*courses_of(part), Course("called", KINDS * part, by_function=True)]
    with tempfile.TemporaryDirectory() as folder, contest.opened(Path(folder)) as ground:
        prepare(ground, courses)
        seen = run(ground, courses, processes, seed=seed, tells=contest.name)
        return tally([key for course in courses for key in course.keys], ground.executed(), seen)


def main() -> None:
    """Race on all of them, also after one that failed."""
    known = contests()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--store", action="append", choices=[one.name for one in known], help="may be repeated")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    results: dict[str, Tally] = {}
    for contest in known:
        if options.store and contest.name not in options.store:
            continue
        began = time.monotonic()
        results[contest.name] = found = hold(contest, options.rounds, options.processes, options.seed)
        print(f"{contest.name}: over after {time.monotonic() - began:.0f} s", file=sys.stderr)
        for word in found.wrong:
            print(f"{contest.name}: {word}", file=sys.stderr)
    print(f"{options.processes} processes, seed {options.seed}")
    print(f"{'store':<20}{'rounds':>8}{'winners':>9}{'duplicates':>12}{'lost':>6}{'wrong':>7}")
    for name, one in results.items():
        row = f"{one.rounds:>8}{one.winners:>9}{one.duplicates:>12}{one.lost:>6}{len(one.wrong):>7}"
        print(f"{name:<20}{row}")
    raise SystemExit(0 if all(one.clean for one in results.values()) else 1)


if __name__ == "__main__":
    main()
