"""`python -m bench.partitions`: would it be better to partition responses by the day on which they expire?

PostgreSQL only, with separate tables. A key has to stay unique whatever day it expires, so the row of a key cannot be
partitioned by time: the other layout has a slim row for each key, which is deleted as today, and its response in a
partition, which is dropped. Both have the columns, the indexes and the settings of `oncekey.record`.

    whole   one row for each key, as shipped
    split   the row without the response, and the response in the partition of its day of expiry

For several sizes of responses: the cost of a new key and of a replay in turn, then the time to reap all expired keys,
the WAL that this writes, the work of VACUUM afterwards, and the duration of concurrent requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from bench.figures import BenchError
from bench.places import places
from bench.reap import waits, wal

ROWS: Final = 40_000
ROUNDS: Final = 8
OPS: Final = 150
BATCH: Final = 2_000
ALONE: Final = 150
"""Requests of the load before the reaper starts."""
SIZES: Final = (200, 4_000)
DAY: Final = 86_400_000_000
PAST: Final = "yesterday"
"""The partition of expired responses; `tomorrow` has the valid ones."""

ANSWER: Final = ("response_status", "response_headers", "response_body", "response_schema")
NOW: Final = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

TABLES: Final = """
    DROP SCHEMA IF EXISTS trial CASCADE;
    CREATE SCHEMA trial;
    CREATE TABLE trial.whole (LIKE oncekey.record INCLUDING ALL)
        WITH (fillfactor = 70, autovacuum_enabled = off);
    CREATE TABLE trial.split (LIKE oncekey.record INCLUDING ALL)
        WITH (fillfactor = 70, autovacuum_enabled = off);
    ALTER TABLE trial.split DROP COLUMN response_status, DROP COLUMN response_headers, DROP COLUMN response_body,
        DROP COLUMN response_schema;
    CREATE TABLE trial.answer (
        incarnation uuid NOT NULL, expires_at bigint NOT NULL, response_status integer, response_headers text,
        response_body bytea, response_schema integer, PRIMARY KEY (incarnation, expires_at)
    ) PARTITION BY RANGE (expires_at);
"""
REAP: Final = """
    WITH due AS MATERIALIZED (
        SELECT record.ctid FROM trial.{table} AS record
        WHERE record.state IN ('completed', 'failed_retryable', 'pending') AND record.expires_at < {now}
        ORDER BY record.expires_at, record.scope, record.key LIMIT {batch} FOR UPDATE SKIP LOCKED)
    DELETE FROM trial.{table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM due))
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The statements that write a new key and read a finished one."""

    name: str
    new: str
    replay: str


def layouts(columns: list[str]) -> tuple[Layout, Layout]:
    """Both layouts, with the current columns of the record."""
    values = {"key": "%(key)s", "incarnation": "gen_random_uuid()", "expires_at": f"{NOW} + {DAY}"}

    def chosen(names: list[str]) -> str:
        return ", ".join(values.get(name, f"model.{name}") for name in names)

    slim = [name for name in columns if name not in ANSWER]
    answer = ", ".join(ANSWER)
    whole = Layout(
        "whole",
        f"INSERT INTO trial.whole ({', '.join(columns)}) SELECT {chosen(columns)} FROM trial.model AS model",
        f"SELECT incarnation, {answer} FROM trial.whole WHERE scope = %(scope)s AND key = %(key)s",
    )
    split = Layout(
        "split",
        f"WITH made AS (INSERT INTO trial.split ({', '.join(slim)}) SELECT {chosen(slim)} FROM trial.model AS model"
        f" RETURNING incarnation, expires_at) INSERT INTO trial.answer (incarnation, expires_at, {answer})"
        f" SELECT made.incarnation, made.expires_at, {', '.join(f'model.{name}' for name in ANSWER)}"
        " FROM made, trial.model AS model",
        f"SELECT record.incarnation, {answer} FROM trial.split AS record JOIN trial.answer AS answer"
        " ON answer.incarnation = record.incarnation AND answer.expires_at = record.expires_at"
        " WHERE record.scope = %(scope)s AND record.key = %(key)s",
    )
    return whole, split


class Trial:
    """One size of responses on one database."""

    def __init__(self, connection: Any, dsn: str, size: int, rows: int) -> None:
        self._connection, self._dsn, self._size, self._rows = connection, dsn, size, rows
        connection.execute(TABLES)
        connection.execute("CREATE TABLE trial.model AS SELECT * FROM oncekey.record LIMIT 1")
        body = "(SELECT string_agg(sha256(n::text::bytea), '') FROM generate_series(1, {}) AS n)"
        connection.execute(f"UPDATE trial.model SET response_body = {body.format(size // 32)}")
        found = connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE (table_schema, table_name) = ('trial', 'model')"
            " ORDER BY ordinal_position"
        )
        self.layouts = layouts([name for (name,) in found.fetchall()])
        [[now]] = connection.execute(f"SELECT {NOW}").fetchall()
        for name, low, high in ((PAST, 0, now), ("tomorrow", now, now + 30 * DAY)):
            bounds = f"FOR VALUES FROM ({low}) TO ({high})"
            connection.execute(f"CREATE TABLE trial.{name} PARTITION OF trial.answer {bounds}")

    def measured(self) -> dict[str, Any]:
        """All figures of both layouts."""
        found: dict[str, Any] = {"answer_bytes": self._size, "rows": self._rows}
        costs: dict[str, dict[str, list[float]]] = {one.name: {"new": [], "replay": []} for one in self.layouts}
        logged = dict.fromkeys(costs, 0)
        for _ in range(ROUNDS):
            for layout in self.layouts:
                before = wal(self._connection)
                keys = [uuid.uuid4().hex for _ in range(OPS)]
                costs[layout.name]["new"].append(self._each(layout.new, keys))
                logged[layout.name] += wal(self._connection) - before
                costs[layout.name]["replay"].append(self._each(layout.replay, keys))
        for layout in self.layouts:
            self._fill(layout)
            mine = {name: round(min(took) * 1e6) for name, took in costs[layout.name].items()}
            found[layout.name] = {**mine, "new_wal": logged[layout.name] // (ROUNDS * OPS), **self._reaped(layout)}
        return found

    def _each(self, text: str, keys: list[str]) -> float:
        """Seconds per statement."""
        [[scope]] = self._connection.execute("SELECT scope FROM trial.model").fetchall()
        began = time.perf_counter()
        for key in keys:
            self._connection.execute(text, {"key": key, "scope": scope}, prepare=True)
        return (time.perf_counter() - began) / len(keys)

    def _fill(self, layout: Layout) -> None:
        """Write the expired rows to reap."""
        text = layout.new.replace(f"{NOW} + {DAY}", f"{NOW} - {DAY}").replace("%(key)s", "md5(random()::text || n)")
        many = f"FROM trial.model AS model, generate_series(1, {self._rows}) AS n"
        text = text.replace("FROM trial.model AS model", many, 1)
        self._connection.execute(text)
        self._connection.execute("VACUUM ANALYZE trial.whole, trial.split")
        self._connection.execute("CHECKPOINT")

    def _reaped(self, layout: Layout) -> dict[str, Any]:
        with _Load(self._dsn, layout) as load:
            alone = load.ended_since(0.0, at_least=ALONE)
            began, before = time.perf_counter(), wal(self._connection)
            text = REAP.format(table=layout.name, now=NOW, batch=BATCH)
            while self._connection.execute(text).rowcount:
                pass
            if layout.name == "split":
                self._connection.execute(f"ALTER TABLE trial.answer DETACH PARTITION trial.{PAST} CONCURRENTLY")
                self._connection.execute(f"DROP TABLE trial.{PAST}")
            took = time.perf_counter() - began
            beside = load.ended_since(began, at_least=1)
        logged = wal(self._connection) - before
        began = time.perf_counter()
        self._connection.execute(f"VACUUM trial.{layout.name}")
        vacuum = time.perf_counter() - began
        tables = ["trial.whole"] if layout.name == "whole" else ["trial.split", "trial.tomorrow"]
        sizes = [self._connection.execute(f"SELECT pg_total_relation_size('{one}')").fetchone()[0] for one in tables]
        return {
            "reap_s": round(took, 2),
            "reap_wal_mb": round(logged / 1e6, 1),
            "vacuum_s": round(vacuum, 2),
            "left_mb": round(sum(sizes) / 1e6, 1),
            "p99_alone_ms": waits(alone)["p99"],
            "p99_beside_ms": waits(beside)["p99"],
        }


class _Load:
    """New keys, one after the other, in a separate thread."""

    def __init__(self, dsn: str, layout: Layout) -> None:
        self._dsn, self._layout = dsn, layout
        self._took: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def ended_since(self, when: float, at_least: int) -> list[float]:
        """The seconds of each request that ended since then; waits for `at_least` of them."""
        while len(found := [took for ended, took in tuple(self._took) if ended >= when]) < at_least:
            if not self._thread.is_alive():
                raise BenchError("the load stopped")
            time.sleep(0.01)
        return found

    def _run(self) -> None:
        import psycopg  # noqa: PLC0415

        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._over.wait(0.004):
                began = time.perf_counter()
                connection.execute(self._layout.new, {"key": uuid.uuid4().hex}, prepare=True)
                ended = time.perf_counter()
                self._took.append((ended, ended - began))


def measured(rows: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """All measurements, on a separate server."""
    import psycopg  # noqa: PLC0415

    with places(("psycopg",)) as stores:
        dsn = stores["psycopg"]().replace("postgresql+psycopg:", "postgresql:", 1)
        from harness.filling import fill_postgres  # noqa: PLC0415  (in tests/, importable once `places` was entered)
        from harness.tables import make_tables  # noqa: PLC0415

        make_tables(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            fill_postgres(connection, 1, 1, age=0, finished=True)
            connection.execute("SET synchronous_commit = off")  # both commit once; the disk is not measured
            return [Trial(connection, dsn, size, rows).measured() for size in sizes]


def told(found: list[dict[str, Any]]) -> str:
    """The results as text for the terminal."""
    lines = []
    for one in found:
        lines.append(f"answers of {one['answer_bytes']} bytes, {one['rows']} rows to reap:")
        for name in ("whole", "split"):
            figures = ", ".join(f"{what} {value}" for what, value in one[name].items())
            lines.append(f"  {name}: {figures}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.partitions", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"number of expired rows ({ROWS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    said = parser.parse_args(words)
    found = measured(said.rows, SIZES)
    print(told(found))
    if said.json:
        said.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
