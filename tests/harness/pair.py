"""A primary and its synchronous standby, both private: what is acknowledged is on both, until one of them is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Self

import psycopg

from harness.patience import wait_until
from harness.postgres import PostgresServer, ServerFailedError, run_as_account
from harness.postgres_binaries import Installation, preferred_installation
from harness.processes import children

STANDBY = "standby"
_STATE = f"SELECT sync_state FROM pg_stat_replication WHERE application_name = '{STANDBY}'"
_IN_RECOVERY = "SELECT pg_is_in_recovery()"
_PROMOTE = "SELECT pg_promote(wait => true)"


class Standby(PostgresServer):
    """A copy of a running primary that follows it."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(primary.installation)
        self._primary = primary

    def promote(self) -> None:
        """Make it the primary; it answers writes when this returns."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(_PROMOTE)
            wait_until(lambda: connection.execute(_IN_RECOVERY).fetchone() == (False,), "it still only reads")

    def freeze(self) -> None:
        """Let it do nothing any more, with every connection open: it confirms nothing, and nobody knows why."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _end(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ServerFailedError):
            self.thaw()
        super()._end(sign)

    def _signal(self, sign: signal.Signals) -> None:
        for pid in (self.pid, *children(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)

    def _fill(self, data: Path) -> None:
        source = f"host=127.0.0.1 port={self._primary.port} user=postgres application_name={STANDBY}"
        words = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        run_as_account([self.installation.program("pg_basebackup"), "--pgdata", data, "--dbname", source, *words])


class PostgresPair:
    """Two servers; the first one waits with every commit for the second. Use it as a context manager."""

    def __init__(self, installation: Installation | None = None) -> None:
        settings = {"synchronous_standby_names": STANDBY}
        self.primary = PostgresServer(installation or preferred_installation(), settings)
        self.standby = Standby(self.primary)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.primary)
            stack.enter_context(self.standby)
            self._await_sync()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dsn(self, database: str = "postgres") -> str:
        """The address of a database with both hosts in it, the primary last: who takes the first one is wrong."""
        return re.sub(
            r"@[^/]*", f"@127.0.0.1:{self.standby.port},127.0.0.1:{self.primary.port}", self.primary.dsn(database)
        )

    def await_applied(self) -> None:
        """Return when the standby shows what the primary has; that it has it is not enough for that."""
        with psycopg.connect(self.primary.dsn()) as primary, psycopg.connect(self.standby.dsn()) as standby:
            [place] = primary.execute("SELECT pg_current_wal_lsn()").fetchone() or [None]
            applied = "SELECT pg_last_wal_replay_lsn() >= %s"
            wait_until(lambda: standby.execute(applied, [place]).fetchone() == (True,), self.standby.log_tail)

    def fail_over(self) -> None:
        """Kill the primary, as a crash of its host does, and promote the other one."""
        self.primary.kill()
        self.standby.promote()

    def _await_sync(self) -> None:
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            wait_until(lambda: connection.execute(_STATE).fetchone() == ("sync",), self.standby.log_tail)
