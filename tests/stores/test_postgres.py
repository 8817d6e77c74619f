"""What oncekey says to PostgreSQL, on a real server: how much it costs, what it writes, and what it survives."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from psycopg.rows import dict_row

from harness import flows
from harness.tables import await_waiters, database_with_tables
from oncekey import wire
from oncekey.core.flow import Mode, drive
from oncekey.core.model import (
    Code,
    Completed,
    Discarded,
    Doubtful,
    Effects,
    Outcome,
    Proceed,
    Recovery,
    Refuse,
    Replay,
    Retryable,
    State,
    StoredResponse,
)
from oncekey.core.policy import Policy
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres.generated.psycopg_transactions import execute
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.within import Within
from oncekey.engine import request
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.stores.keystore import STATEMENTS
from oncekey.stores.phases import STATEMENTS as PHASES
from oncekey.stores.rows import COLUMNS, WORK, claim_params, owner_proof, response_params, version_proof
from oncekey.testing.claims import LEASE, OTHER_FINGERPRINT, TTL, ManualClock, a_claim, again, answered

COMMANDS = PostgresStore()._statements._commands
ROW = "SELECT ctid, xmin, xmax, * FROM oncekey.record WHERE key = %s"


def within(connection):
    """Statements in the open transaction of a connection of the test's own."""
    return Within(partial(execute, connection, Mode.ATOMIC))


@pytest.fixture(scope="module")
def dsn(postgres_server):
    """One database for all tests that use keys of their own and change nothing else."""
    with database_with_tables(postgres_server, "statements") as dsn:
        yield dsn


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def engine(dsn, clock):
    with closing(wire.connect(dsn, clock=clock)) as engine:
        yield engine


@pytest.fixture
def raw(dsn):
    """Somebody who looks at the tables from outside."""
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def own_raw(tables_dsn):
    """The same for a database of one test."""
    with psycopg.connect(tables_dsn, autocommit=True, row_factory=dict_row) as connection:
        yield connection


def owned(engine: Engine, claim):
    verdict = flows.begin(engine, claim, Policy())
    assert isinstance(verdict, Proceed), verdict
    return verdict.lease


def completed(engine: Engine, claim=None):
    claim = claim or a_claim()
    assert flows.settle(engine, owned(engine, claim), answered()).ours
    return claim


class Statements:
    """What the server counted for one database, as seen from another one."""

    def __init__(self, server, dsn: str) -> None:
        self._connection = psycopg.connect(server.dsn(), autocommit=True)
        self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        self._database = dsn.rpartition("/")[2]

    def reset(self) -> None:
        self._connection.execute("SELECT pg_stat_statements_reset()")

    def seen(self) -> list[tuple]:
        """For each text: calls, rows, and what went to the write-ahead log."""
        return self._connection.execute(
            "SELECT calls, rows, wal_records, wal_bytes FROM pg_stat_statements"
            " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = %s)",
            [self._database],
        ).fetchall()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def statements(postgres_server, dsn):
    with closing(Statements(postgres_server, dsn)) as statements:
        yield statements


class TestCost:
    """R66: one statement for a first reservation, nothing written for anybody after it."""

    def test_a_first_reservation_is_one_statement(self, engine, statements):  # R66, R62
        statements.reset()
        owned(engine, a_claim())
        [(calls, rows, wal_records, _)] = statements.seen()
        assert (calls, rows) == (1, 1)
        assert wal_records > 0

    @pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
    async def test_first_claim_takes_one_statement_under_asyncio(self, dsn, statements, scheme):  # R66
        engine: AsyncEngine = wire.aconnect(dsn.replace("postgresql", scheme, 1))
        for is_new in (True, False):
            # A connection that was given back sends nothing more; asyncpg looks for a pooler once, on a new one.
            statements.reset()
            assert isinstance(await flows.abegin(engine, a_claim(), Policy()), Proceed)
            looks = [1] if is_new and scheme == "postgresql+asyncpg" else []
            assert [calls for calls, *_ in statements.seen()] == [1, *looks]
        await engine.close()

    def test_a_replay_is_one_statement_and_writes_nothing(self, engine, statements):  # R66, R96, E1, E3
        claim = completed(engine)
        statements.reset()
        for _ in range(3):
            assert isinstance(flows.begin(engine, again(claim), Policy()), Replay)
        assert statements.seen() == [(3, 3, 0, 0)]

    def test_a_duplicate_in_flight_writes_nothing(self, engine, statements):
        claim = a_claim()
        owned(engine, claim)
        statements.reset()
        assert isinstance(flows.begin(engine, again(claim), Policy()), Refuse)
        assert statements.seen() == [(1, 1, 0, 0)]

    def test_a_settlement_is_one_statement(self, engine, statements):
        lease = owned(engine, a_claim())
        statements.reset()
        assert flows.settle(engine, lease, answered()).ours
        assert [calls for calls, *_ in statements.seen()] == [1]

    def test_a_replay_takes_no_transaction_number(self, engine, dsn):  # E3
        claim = completed(engine)
        with psycopg.connect(dsn) as connection:
            flow = request.begin(PostgresStore(clock=ManualClock()), again(claim), Policy())
            assert isinstance(drive(flow, within(connection).run), Replay)
            assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)


class TestTraps:
    """E1 to E7, E9 and E10 of the usual SQL, as regressions (R266); E8 is in `upkeep`, and E11 in `outbox`."""

    def test_a_finished_key_replays_again_and_again(self, engine):  # E1, R96
        claim = completed(engine)
        for _ in range(5):
            verdict = flows.begin(engine, again(claim), Policy())
            assert isinstance(verdict, Replay)
            assert verdict.record.response == answered().response

    def test_a_stale_lock_is_not_resumed_by_another_body(self, engine, clock):  # E2, R38
        claim = a_claim(effects=Effects.PHASED, recovery=Recovery.RESUME)
        owned(engine, claim)
        clock.advance(2 * LEASE)
        before = flows.find(engine, claim.id).record
        verdict = flows.begin(engine, again(claim, fingerprint=OTHER_FINGERPRINT), Policy())
        assert verdict == Refuse(Code.KEY_REUSED)
        assert flows.find(engine, claim.id).record == before

    @pytest.mark.parametrize("finished", [True, False])
    def test_duplicates_do_not_modify_the_row(self, engine, raw, finished):  # E3
        claim = a_claim()
        lease = owned(engine, claim)
        if finished:
            flows.settle(engine, lease, answered())
        before = raw.execute(ROW, [claim.id.key]).fetchone()
        for _ in range(3):
            flows.begin(engine, again(claim), Policy())
            flows.begin(engine, again(claim, fingerprint=OTHER_FINGERPRINT), Policy())
        # Neither another version of the tuple nor a lock on it.
        assert raw.execute(ROW, [claim.id.key]).fetchone() == before

    def test_in_progress_can_be_seen(self, engine, dsn):  # E4
        # The reservation is committed before the business begins: nobody queues behind it.
        claim = a_claim()
        owned(engine, claim)
        verdict = flows.begin(engine, again(claim), Policy())
        assert isinstance(verdict, Refuse)
        assert verdict.code is Code.IN_PROGRESS

    @pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
    def test_a_row_that_is_committed_after_our_snapshot_is_found(self, dsn, isolation):  # E5, E6, R64, R65
        default = f"{dsn}?options=-c%20default_transaction_isolation%3D{isolation.replace(' ', '%5C%20')}"
        claim, clock = a_claim(), ManualClock()
        winner = claim_params(claim, None) | {"now": clock.now}
        with (
            closing(wire.connect(default, clock=clock)) as engine,
            psycopg.connect(dsn) as first,
            ThreadPoolExecutor(1) as thread,
        ):
            first.execute(pyformat(COMMANDS["claim"]), winner)
            second = thread.submit(flows.begin, engine, again(claim), Policy())
            await_waiters(dsn)
            first.commit()
            verdict = second.result()
        assert isinstance(verdict, Refuse)
        assert verdict.code is Code.IN_PROGRESS
        assert verdict.record.incarnation == claim.incarnation

    def test_single_claim_statement_misses_a_concurrent_commit(self, dsn):  # E6
        # Why the store looks again: without that second statement there would be no answer at all.
        claim, now = a_claim(), {"now": None}
        with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second, ThreadPoolExecutor(1) as thread:
            first.execute(pyformat(COMMANDS["claim"]), claim_params(claim, None) | now)
            late = claim_params(again(claim), None) | now
            waiting = thread.submit(lambda: second.execute(pyformat(COMMANDS["claim"]), late).fetchall())
            await_waiters(dsn)
            first.commit()
            assert waiting.result() == []

    @pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
    def test_stricter_default_isolation_level_causes_no_errors(self, tables_dsn, own_raw, isolation):  # E5, R64
        name = own_raw.info.dbname
        own_raw.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'".encode())
        claims = [a_claim() for _ in range(10)]
        with closing(wire.connect(tables_dsn)) as engine, ThreadPoolExecutor(8) as threads:
            for claim in claims:
                verdicts = list(threads.map(lambda _, c=claim: flows.begin(engine, again(c), Policy()), range(8)))
                winners = [verdict for verdict in verdicts if isinstance(verdict, Proceed)]
                assert len(winners) == 1
                others = [verdict.code for verdict in verdicts if isinstance(verdict, Refuse)]
                assert others == [Code.IN_PROGRESS] * 7
                settled = list(threads.map(lambda _, w=winners[0]: flows.settle(engine, w.lease, answered()), range(8)))
                assert all(one.ours for one in settled)

    def test_response_body_is_stored_as_bytes(self, engine, raw):  # E7
        body = b'{"b":1e2,"a":"\\u0000","b":"\xff","a":1.0}'
        claim = a_claim()
        flows.settle(engine, owned(engine, claim), Completed(StoredResponse(200, (), body), Outcome.SUCCESS))
        verdict = flows.begin(engine, again(claim), Policy())
        assert isinstance(verdict, Replay)
        assert verdict.record.response.body == body
        [kind] = raw.execute(
            "SELECT data_type FROM information_schema.columns"
            " WHERE table_name = 'record' AND column_name = 'response_body'"
        ).fetchall()
        assert kind == {"data_type": "bytea"}

    def test_a_lease_counts_from_the_claim_and_not_from_the_callers_begin(self, dsn):  # E9
        claim = a_claim()
        with psycopg.connect(dsn) as connection:
            began = connection.execute("SELECT (extract(epoch FROM now()) * 1000000)::bigint").fetchone()[0]
            verdict = drive(request.begin(PostgresStore(), claim, Policy()), within(connection).run)
            assert isinstance(verdict, Proceed)
            settled = drive(PostgresStore().settle(verdict.lease, answered()), within(connection).run)
        assert began < verdict.record.created_at < settled.snapshot.record.finished_at
        assert verdict.lease.lease_until == verdict.record.created_at + claim.lease

    @pytest.mark.parametrize("settlement", [answered(), Retryable("x"), Doubtful("x"), Discarded()])
    def test_owner_after_takeover_writes_nothing(self, engine, clock, raw, settlement):  # E10, R53, F11
        claim = a_claim()
        zombie = owned(engine, claim)
        clock.advance(LEASE)
        successor = owned(engine, again(claim))
        before = raw.execute(ROW, [claim.id.key]).fetchone()
        settled = flows.settle(engine, zombie, settlement)
        assert not settled.ours
        assert settled.snapshot.record.owner != claim.owner
        assert raw.execute(ROW, [claim.id.key]).fetchone() == before
        assert flows.settle(engine, successor, answered(b"the successor's")).ours


MANY_ROWS = """
    INSERT INTO oncekey.record (
        scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed, state, entered, fence,
        version, owner, lease_until, deadline, call_timeout, ttl, attempts, recovery_point,
        created_at, last_run_at, expires_at)
    SELECT 'shop|tenant-' || n % 10, 'key-' || n, gen_random_uuid(), 'o',
        (ARRAY['local', 'phased', 'outbox', 'inline'])[1 + n % 4], 'retry', 'POST', '/', 'f', '',
        'in_progress', true, 1, 1, 'somebody', n, 1, 1, 1, 1, 'started', 1, 1, 1
    FROM generate_series(1, 20000) AS n
"""


class TestTables:
    """The schema keeps what the statements promise."""

    def test_a_key_is_unique_within_its_scope_and_only_there(self, engine, raw):  # R23, R245
        indexes = raw.execute(
            """
            SELECT index.relname, indisunique, indisprimary, array_agg(attname ORDER BY ordinality) AS columns
            FROM pg_index
            JOIN pg_class AS index ON index.oid = indexrelid
            CROSS JOIN unnest(indkey) WITH ORDINALITY AS part (number, ordinality)
            JOIN pg_attribute ON attrelid = indrelid AND attnum = part.number
            WHERE indrelid = 'oncekey.record'::regclass
            GROUP BY 1, 2, 3
            """
        ).fetchall()
        # What a heartbeat or a phase writes is in none, so that both stay cheap.
        assert [index for index in indexes if index["indisunique"]] == [
            {"relname": "record_pkey", "indisunique": True, "indisprimary": True, "columns": ["scope", "key"]}
        ]
        assert {index["relname"]: index["columns"] for index in indexes if not index["indisunique"]} == {
            "record_resumable": ["created_at"],
            "record_running": ["created_at", "scope", "key"],
            "record_expiring": ["expires_at", "scope", "key"],
            "record_expired": ["expires_at", "scope", "key"],
            "record_key": ["key", "scope"],
            "record_waiting": ["state", "created_at", "scope", "key"],
        }
        claim = a_claim()
        owned(engine, claim)
        owned(engine, again(claim, id=replace(claim.id, scope="another tenant")))
        with pytest.raises(psycopg.errors.UniqueViolation):
            raw.execute("UPDATE oncekey.record SET scope = %s WHERE key = %s", [claim.id.scope, claim.id.key])

    def test_a_replay_with_begin_reads_the_key_and_no_index_of_states(self, tables_dsn, own_raw):
        # While no record is completed, their index is the smallest. The plan stays in the session when it has grown.
        with closing(wire.connect(tables_dsn)) as engine:
            claim = a_claim()
            owned(engine, claim)
        for key, state in ((claim.id.key, "in_progress"), ("another", "completed")):
            if key != claim.id.key:
                own_raw.execute(
                    "INSERT INTO oncekey.record SELECT (jsonb_populate_record(record, %s)).* FROM oncekey.record",
                    (json.dumps({"key": key, "state": state, "response_status": 201}),),
                )
            with own_raw.transaction():
                named = (claim.id.scope.encode(), key.encode())
                own_raw.execute("SELECT oncekey.enter_2(1, 2, 3, %s, %s, NULL, 1000, 1000)", named)
                scans = own_raw.execute(
                    "SELECT indexrelid::regclass::text AS name FROM pg_index "
                    "WHERE indrelid = 'oncekey.record'::regclass AND pg_stat_get_xact_numscans(indexrelid) > 0"
                ).fetchall()
            assert [row["name"] for row in scans] == ["oncekey.record_pkey"], state

    def test_heartbeats_touch_no_index(self, tables_dsn, own_raw):
        with closing(wire.connect(tables_dsn)) as engine:
            lease = owned(engine, a_claim())
            for _ in range(5):
                assert flows.renew(engine, lease, LEASE) is not None
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'record'"
        counted = own_raw.execute(query).fetchone()
        while counted["n_tup_upd"] < 5:  # a session reports when it ends
            counted = own_raw.execute(query).fetchone()
        assert counted == {"n_tup_upd": 5, "n_tup_hot_upd": 5}

    @pytest.fixture(scope="class")
    @classmethod
    def many_rows(cls, dsn):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(MANY_ROWS)
            connection.execute("ANALYZE oncekey.record")

    @pytest.mark.usefixtures("many_rows")
    @pytest.mark.parametrize(
        "name", [*STATEMENTS, "claim_kept", "settle_alone", *(name for name in PHASES if name != "resumable")]
    )
    def test_every_statement_finds_its_row_by_the_primary_key(self, engine, raw, name):  # R245
        claim = a_claim()
        verdict = flows.begin(engine, claim, Policy())
        values = {
            **claim_params(claim, None),
            **owner_proof(verdict.lease),
            **version_proof(verdict.record),
            **response_params(answered().response, None, None),
            "outcome": "success",
            "last_error": "x",
            "resume_after": 0,
            "spared": 0,
            "seen_memo": None,
            "memo": '[["a","phase","1"]]',
            "recovery_point": "a",
            "phase": "charge",
            "downstream_key": "key",
            "digest": "digest",
            "sends": 1,
            "repeatable": None,
            "send_window": 1,
            "busy": 1,
            "asked": json.dumps([{"scope": claim.id.scope, "key": claim.id.key}]),
            "now": None,
        }
        explained = raw.execute("EXPLAIN (FORMAT JSON) " + pyformat(COMMANDS[name]), values).fetchone()
        plan = json.dumps(explained["QUERY PLAN"])
        scans = re.findall(r'"Node Type": "([^"]*Scan[^"]*)", [^{]*?"Relation Name": "record"', plan)
        assert scans
        assert set(scans) <= {"Index Scan", "Index Only Scan"}
        assert set(re.findall(r'"Index Name": "(\w+)"', plan)) - {"work_pkey"} == {"record_pkey"}
        assert ('"Relation Name": "work"' in plan) == (
            name not in {"claim", "settle_alone", "renew", "recall", "recall_all"}
        )
        if name in {"claim", "claim_kept"}:
            assert '"Conflict Arbiter Indexes": ["record_pkey"]' in plan

    def test_required_record_columns_are_not_nullable(self, raw):
        rows = raw.execute(
            "SELECT column_name, is_nullable FROM information_schema.columns"
            " WHERE table_schema = 'oncekey' AND table_name = 'record'"
        ).fetchall()
        assert {row["column_name"] for row in rows} == {*COLUMNS, "memo_version"} - WORK
        assert {row["column_name"] for row in rows if row["is_nullable"] == "YES"} == {
            "outcome",
            "owner",
            "lease_until",
            "response_status",
            "response_headers",
            "response_body",
            "response_schema",
            "last_error",
            "finished_at",
        }


WITNESS = """
    CREATE TABLE witness (what text NOT NULL, setting text NOT NULL);
    CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO witness VALUES (tg_op || coalesce(' ' || new.state, ''), current_setting('synchronous_commit'));
            RETURN NULL;
        END $$;
    CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON oncekey.record
        FOR EACH ROW EXECUTE FUNCTION witness();
"""


class TestDurability:
    """An acknowledged reservation or answer survives the server, whatever its defaults are."""

    @pytest.fixture
    def careless(self, tables_dsn, own_raw):
        """A database whose sessions do not wait for the disk."""
        own_raw.execute(WITNESS)
        own_raw.execute(f"ALTER DATABASE {own_raw.info.dbname} SET synchronous_commit = off".encode())
        return tables_dsn

    def test_every_acknowledged_write_is_synchronous(self, careless, clock, own_raw):
        with closing(wire.connect(careless, clock=clock)) as engine:
            claim = a_claim()
            zombie = owned(engine, claim)
            clock.advance(LEASE)
            flows.settle(engine, owned(engine, again(claim)), Retryable("x"))
            assert not flows.settle(engine, zombie, answered()).ours
            flows.settle(engine, owned(engine, again(claim)), answered())
            clock.advance(TTL)
            flows.settle(engine, owned(engine, again(claim)), Doubtful("x"))
            inline = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
            owned(engine, inline)
            clock.advance(LEASE)
            assert isinstance(flows.begin(engine, again(inline), Policy()), Refuse)
            flows.settle(engine, owned(engine, a_claim()), Discarded())
            assert drive(engine.store.find(inline.id), engine.driver.run).record.state is State.UNKNOWN
        seen = own_raw.execute("SELECT what, setting FROM witness").fetchall()
        assert [row["what"] for row in seen] == [
            "INSERT in_progress",  # claim
            "UPDATE in_progress",  # take over
            "UPDATE failed_retryable",
            "UPDATE in_progress",
            "UPDATE completed",
            "UPDATE in_progress",  # supersede
            "UPDATE unknown",
            "INSERT in_progress",
            "UPDATE unknown",  # doubt
            "INSERT in_progress",
            "DELETE",  # discard
        ]
        assert {row["setting"] for row in seen} == {"on"}

    def test_business_transaction_commits_synchronously(self, careless):
        with closing(wire.connect(careless)) as engine:
            lease = owned(engine, a_claim())
            transaction = engine.open()
            flows.settle_within(engine, transaction, lease, answered())
            shown = transaction.connection.execute("SHOW synchronous_commit").fetchone()
            transaction.commit()
        assert shown == ("on",)
        with psycopg.connect(careless) as other:
            assert other.execute("SHOW synchronous_commit").fetchone() == ("off",)

    def test_heartbeat_does_not_wait_for_the_disk(self, careless, own_raw):
        with closing(wire.connect(careless)) as engine:
            lease = owned(engine, a_claim())
            own_raw.execute("TRUNCATE witness")
            assert flows.renew(engine, lease, LEASE) is not None
        assert own_raw.execute("SELECT setting FROM witness").fetchall() == [{"setting": "off"}]
