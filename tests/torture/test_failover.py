"""`oncekey torture` on a primary with a synchronous standby: the primary is killed under load, the other promoted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psycopg

from harness.pair import PostgresPair
from harness.patience import wait_until
from harness.postgres import installations
from torture.test_torture import COMMAND, PATIENCE, surroundings

COMPLETED = "SELECT count(*) FROM oncekey.record WHERE state = 'completed'"
SETTINGS = ("--seconds", "5", "--seed", "11", "--servers", "2", "--workers", "1", "--clients", "4", "--keep", "--json")


def completed(dsn: str) -> int:
    try:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(COMPLETED).fetchone()
    except psycopg.errors.UndefinedTable:
        return 0
    return 0 if row is None else int(row[0])


def test_failover_loses_no_response_and_repeats_no_effect(tmp_path: Path) -> None:
    with PostgresPair(installations()[-1]) as pair:
        dsn = pair.primary.create_database("torture")
        pair.await_applied()
        process = subprocess.Popen(
            [*COMMAND, "--store", pair.dsn("torture"), *SETTINGS],
            cwd=tmp_path,
            env=surroundings(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: completed(dsn) >= 5 or process.poll() is not None, "nothing was completed", every=0.05)
            assert process.poll() is None, process.communicate()
            before = completed(dsn)
            pair.fail_over()
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, out + err
        told = json.loads(out)
        assert (told["duplicates"], told["lost"], told["violations"]) == (0, 0, [])
        assert completed(pair.standby.dsn("torture")) >= before  # and every client was answered by it at the end
