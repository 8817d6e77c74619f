"""The record in two rows: existing ones stay readable, nothing is read torn, and no write gets past its proof."""

from __future__ import annotations

import threading
import uuid
from contextlib import closing

import psycopg
import pytest

from contract.older import OlderStore
from harness import flows
from harness.tables import await_waiters, make_tables
from oncekey import wire
from oncekey.core.flow import Mode, Statement, Transaction, adrive, drive
from oncekey.core.guards import Facts, Guard
from oncekey.core.migrations import MigrationPhase
from oncekey.core.model import Doubtful, Effects, EntryKind, MemoEntry, Proceed, RecordId, Recovery, State
from oncekey.core.policy import Policy
from oncekey.core.upkeep import Expired
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres import store as postgres
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import migrating
from oncekey.stores.rows import memo_text, snapshot_of, version_proof
from oncekey.stores.sql import SqlSchema
from oncekey.stores.statements import execute
from oncekey.testing.claims import LEASE, a_claim, again, answered
from oncekey_contract.world import (
    CALL,
    CHARGE,
    ORDER,
    OTHER_CHARGE,
    REPEATABLE,
    World,
    announced,
    begun,
    blocking,
)

# A row for every state, kind of effects, and thing that lay in the record itself before the split.
EVERYTHING = """
    INSERT INTO oncekey.record (
        scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed, state, outcome, entered,
        fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts, recovery_point, memo, intent,
        response_status, response_headers, response_body, response_schema, last_error, reconcile_after,
        reconcile_tries, created_at, last_run_at, finished_at, expires_at, request)
    SELECT 'shop|t1', state || '-' || effects || '-' || memo || calling || kept || due, gen_random_uuid(), 'pay',
        effects, 'resume', 'POST', '/', 'f', '\\x0073', state, CASE WHEN done THEN 'failure' END, true, 4, 9,
        CASE WHEN runs THEN 'somebody' END, CASE WHEN runs THEN 77 END, 1, 2, 3, 4, 'started',
        CASE WHEN memo THEN '[["order","phase","1"]]' END,
        CASE WHEN calling AND state <> 'completed' THEN '{"phase":"charge","downstream_key":"d","digest":"x","sends":1,'
            '"first_sent_at":1,"send_by":2,"repeatable_until":null}' END,
        CASE WHEN done THEN 402 END, CASE WHEN done THEN '[]' END, CASE WHEN done THEN '\\x00ff'::bytea END,
        CASE WHEN done THEN 1 END, CASE WHEN state = 'unknown' THEN 'timeout' END,
        CASE WHEN due THEN 5 END, CASE WHEN due THEN 3 ELSE 0 END, 5, 6, CASE WHEN done THEN 9 END, 7,
        CASE WHEN kept THEN '\\x00'::bytea END
    FROM (SELECT state, effects, memo, calling, kept, due, state IN ('completed', 'expired') AS done,
                 state = 'in_progress' AS runs
          FROM (VALUES ('pending'), ('in_progress'), ('completed'), ('failed_retryable'), ('unknown'), ('expired'))
               AS states (state)
          CROSS JOIN (VALUES ('local'), ('phased'), ('outbox'), ('inline')) AS kinds (effects)
          CROSS JOIN (VALUES (true), (false)) AS memos (memo)
          CROSS JOIN (VALUES (true), (false)) AS calls (calling)
          CROSS JOIN (VALUES (true), (false)) AS requests (kept)
          CROSS JOIN (VALUES (true), (false)) AS dues (due)) AS rows
"""
BESIDE = """
    INSERT INTO oncekey.outbox (id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation,
                                downstream_key, position, state, attempts, fence, due_at, created_at)
    SELECT gen_random_uuid(), 't', 'a', 't', '{}', 'defer', scope, key, incarnation, 'd', 0, 'ready', 0, 0, 1, 1
    FROM oncekey.record WHERE state = 'pending' AND effects = 'outbox';
    INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
    SELECT incarnation, 'charge', 'd', scope, key, operation, 1 FROM oncekey.record WHERE intent IS NOT NULL;
    INSERT INTO oncekey.evidence (at, source, event_id, downstream_key, said) VALUES (7, 'webhook', 'e1', 'd', '{}')
"""
OLD_SCHEMA = SqlSchema(
    "oncekey.databases.postgres", postgres.tables()._dialect, migrations=postgres.tables().migrations[:6]
)


@pytest.fixture
def driver(postgres_dsn):
    with closing(PsycopgDriver(postgres_dsn, pool_size=4)) as driver:
        yield driver


@pytest.fixture
def old(driver, postgres_dsn):
    """A database that the last version before the split filled: as it reads its records."""
    drive(migrating.up(OLD_SCHEMA), driver.run)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(EVERYTHING)
        for statement in BESIDE.split(";"):
            connection.execute(statement)
    return everything(OlderStore(), driver)


def everything(store, driver):
    def body():
        rows = yield Statement("keys", "SELECT scope, key FROM oncekey.record")
        return [RecordId(row["scope"], row["key"]) for row in rows]

    ids = drive(execute(Transaction("keys", Mode.READ, body)), driver.run)
    return {one: drive(store.find(one), driver.run).record for one in ids}


def test_existing_records_stay_readable_after_the_split(old, driver):  # R237
    assert len(old) == 6 * 4 * 16
    assert {record.state for record in old.values()} == set(State)

    drive(migrating.up(postgres.tables(), only=MigrationPhase.PRE), driver.run)
    assert everything(PostgresStore(), driver) == old
    assert everything(OlderStore(), driver) == old

    assert [one.phase for one in drive(migrating.up(postgres.tables()), driver.run)] == [MigrationPhase.POST] * 2
    assert everything(PostgresStore(), driver) == old


def test_split_does_not_rewrite_the_table(old, driver, postgres_dsn):
    """Only what has something to put aside is touched, and nobody waits for a large table."""
    node = "SELECT pg_relation_filenode('oncekey.record')"
    plain = "SELECT key, xmin, ctid FROM oncekey.record WHERE key LIKE '%-falsefalsefalsefalse' ORDER BY key"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        before = [connection.execute(sql).fetchall() for sql in (node, plain)]
        drive(migrating.up(postgres.tables()), driver.run)
        assert [connection.execute(sql).fetchall() for sql in (node, plain)] == before
    assert len(before[1]) == 24


@pytest.mark.parametrize("until", [MigrationPhase.PRE, None], ids=["after pre", "after post"])
def test_existing_records_keep_their_content_in_transitions(old, driver, until):
    """Sweeps, take-overs, doubts and busts by this version; each keeps what the record had."""
    drive(migrating.up(postgres.tables(), only=until), driver.run)
    store = PostgresStore(clock=lambda: 100)
    readers = (store, OlderStore(clock=lambda: 100)) if until is MigrationPhase.PRE else (store,)

    def swept(record):
        if not Guard.RUNS_AGAIN.holds(Facts(record, 100)):
            return doubted(record)
        assert drive(store.upkeep.sweep(record, State.FAILED_RETRYABLE, "swept"), driver.run)
        return (record.memo, record.intent, record.request, record.reconcile_after, record.reconcile_tries)

    def doubted(record):
        assert drive(store.mark_unknown(record, "why"), driver.run)
        return (record.memo, record.intent, record.request, 100, record.reconcile_tries)

    def taken(record):
        claim = a_claim(record.id.key, id=record.id, request=b"new")
        found = drive(store.take_over(claim, record), driver.run)
        if Guard.WORKER_BEGAN.holds(Facts(record, 100)):
            assert found is None
            return None
        begun_before = record.memo or record.intent
        kept = record.request if begun_before else record.request or b"new"
        assert found.record.request == kept
        return (record.memo, record.intent, kept, None, record.reconcile_tries)

    def superseded(record):
        claim = a_claim(record.id.key, id=record.id, request=b"new")
        assert drive(store.supersede(claim, record), driver.run)
        return ((), None, b"new", None, 0)

    for seen, move in {
        State.IN_PROGRESS: swept,
        State.FAILED_RETRYABLE: taken,
        State.COMPLETED: superseded,
        State.EXPIRED: superseded,
    }.items():
        for name, record in old.items():
            if record.state is not seen:
                continue
            expected = move(record)
            if expected is None:
                continue
            for reader in readers:
                now = drive(reader.find(name), driver.run).record
                assert (now.version, now.memo, now.intent, now.request, now.reconcile_after, now.reconcile_tries) == (
                    record.version + 1,
                    *expected,
                ), (name, reader)


def test_an_unfinished_record_is_put_aside_by_the_older_version_too(old, driver, postgres_dsn):
    """Whatever the older version moved between `pre` and `post` is there after `post`."""
    drive(migrating.up(postgres.tables(), only=MigrationPhase.PRE), driver.run)
    older = OlderStore(clock=lambda: 100)
    for record in old.values():
        if record.state is State.IN_PROGRESS:
            drive(older.upkeep.sweep(record, State.UNKNOWN, "swept"), driver.run)
        elif record.state is State.EXPIRED:
            drive(older.supersede(a_claim(id=record.id, request=b"new"), record), driver.run)
        elif record.state is State.FAILED_RETRYABLE:
            drive(older.take_over(a_claim(id=record.id, request=b"new"), record), driver.run)
    fresh = a_claim(request=b"kept")
    drive(older.claim(fresh), driver.run)
    drive(older.claim(again(fresh, request=b"refused")), driver.run)
    before = everything(older, driver)

    drive(migrating.up(postgres.tables()), driver.run)

    assert everything(PostgresStore(), driver) == before
    assert before[fresh.id].request == b"kept"
    with psycopg.connect(postgres_dsn) as connection:
        orphans = (
            "SELECT count(*) FROM oncekey.work w LEFT JOIN oncekey.record r USING (incarnation) WHERE r.key IS NULL"
        )
        assert connection.execute(orphans).fetchone() == (0,)


def test_the_older_applications_user_needs_no_rights_on_the_new_table(old, driver, postgres_dsn):
    user = f"shop_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {user} LOGIN".encode())
        try:
            connection.execute(f"GRANT USAGE ON SCHEMA oncekey TO {user}".encode())
            connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA oncekey TO {user}".encode())
            drive(migrating.up(postgres.tables(), only=MigrationPhase.PRE), driver.run)
            older = OlderStore(clock=lambda: 100)
            address = postgres_dsn.replace("postgres@", f"{user}@")
            with closing(PsycopgDriver(address, pool_size=1)) as shop:
                for record in old.values():
                    if record.state is State.IN_PROGRESS:
                        assert drive(older.upkeep.sweep(record, State.UNKNOWN, "swept"), shop.run)
                claim = a_claim(request=b"kept")
                drive(older.claim(claim), shop.run)
            assert everything(PostgresStore(), driver)[claim.id].request == b"kept"
        finally:
            connection.execute(f"DROP OWNED BY {user}".encode())
            connection.execute(f"DROP ROLE {user}".encode())


def test_migration_at_startup_keeps_old_processes_running(old, driver, postgres_dsn):  # R237
    with closing(wire.connect(postgres_dsn)) as engine:
        engine.migrate()
        engine.check()
        drive(migrating.check(OLD_SCHEMA), engine.driver.run)
        assert everything(OlderStore(), driver) == old


@pytest.fixture
def dsn(postgres_dsn):
    return make_tables(postgres_dsn)


@pytest.fixture
def world(dsn):
    with blocking(PostgresStore, PsycopgDriver(dsn, pool_size=8)) as world:
        yield world


class Stranger:
    """Somebody who has written, and has not committed yet."""

    def __init__(self, world: World, dsn: str, name: str, params: dict) -> None:
        self._connection = psycopg.connect(dsn)
        statement = world.store._statements.statement(name, params)
        assert self._connection.execute(pyformat(statement.command), statement.params).fetchall(), (
            "the stranger wrote nothing"
        )

    def commit(self) -> None:
        self._connection.commit()
        self._connection.close()


def waiting(dsn, action):
    """Start `action`, and return when it waits for a lock; calling the result waits for what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    await_waiters(dsn)

    def ended():
        thread.join()
        return results[0]

    return ended


def test_an_owner_that_waited_does_not_write_over_a_result(world, dsn):  # R53
    """The resolver's result has no new fence: only the memo tells, and that lies in the other row."""
    claim, lease = announced(world, REPEATABLE)
    world.settle(lease, Doubtful("swept"))
    seen = world.record(claim.id)
    given = {**version_proof(seen), "memo": memo_text((ORDER, OTHER_CHARGE), None, None), "recovery_point": "charge"}
    resolver = Stranger(world, dsn, "operator_result", given)
    late = waiting(dsn, lambda: world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)))
    resolver.commit()
    assert late() is None
    assert world.record(claim.id).memo == (ORDER, OTHER_CHARGE)


def test_waiting_owner_stores_its_result_after_a_sweep(world, dsn):  # row 6
    claim, lease = announced(world, REPEATABLE)
    world.advance(2 * LEASE)
    seen = world.record(claim.id)
    sweeper = Stranger(world, dsn, "mark_unknown", {**version_proof(seen), "last_error": "swept"})
    late = waiting(dsn, lambda: world.go(world.store.phases.result(lease, (ORDER,), (ORDER, CHARGE), LEASE)))
    sweeper.commit()
    assert late().record == world.record(claim.id)
    assert world.record(claim.id).memo == (ORDER, CHARGE)


def test_owner_without_work_row_settles_after_a_sweep(world, dsn):
    claim = a_claim(effects=Effects.INLINE, recovery=Recovery.UNKNOWN)
    lease = world.owned(claim)
    assert lease.alone
    world.advance(LEASE)
    sweeper = Stranger(world, dsn, "mark_unknown", {**version_proof(world.record(claim.id)), "last_error": "swept"})
    late = waiting(dsn, lambda: world.settle(lease, answered()))
    sweeper.commit()
    assert late().ours
    found = world.record(claim.id)
    assert (found.state, found.reconcile_after, found.response) == (State.COMPLETED, None, answered().response)


def stepped(world):
    """A phased record with one finished phase."""
    claim, lease = begun(world)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    return claim, lease


@pytest.mark.parametrize("verb", ["checkpoint", "announce", "settle_completed", "settle_handed_back"])
def test_a_statement_that_waited_for_a_step_is_refused(world, dsn, verb):
    """The owner lost the reply to its step, and the server still runs it when the next statement comes."""
    claim, lease = stepped(world)
    proof = {"scope": claim.id.scope, "key": claim.id.key, "incarnation": str(claim.incarnation), "fence": lease.fence}
    step = {"seen_memo": memo_text((ORDER,), None, None), "recovery_point": "other", "lease": LEASE}
    other = (ORDER, MemoEntry("other", EntryKind.PHASE, "1"))
    first = Stranger(world, dsn, "checkpoint", {**proof, **step, "memo": memo_text(other, None, None)})
    call = {
        "phase": "charge", "downstream_key": "d", "digest": "x", "sends": 1, "repeatable": None, "send_window": 1,
        "busy": 1,
    }  # fmt: skip
    answer = {"outcome": "success", "response_status": 200, "response_headers": "[]", "response_body": b"",
              "response_schema": 1}  # fmt: skip
    params = {
        "checkpoint": {**step, "memo": memo_text((ORDER, CHARGE), None, None)},
        "announce": {**step, **call, "memo": memo_text((ORDER,), None, None)},
        "settle_completed": answer,
        "settle_handed_back": {"last_error": "x", "resume_after": 0, "spared": 0},
        "discard": {},
    }[verb]

    def once():
        def body():
            return (yield world.store._statements.statement(verb, {**proof, **params}))

        return world.go(execute(Transaction(verb, Mode.SINGLE, body)))

    second = waiting(dsn, once)
    first.commit()
    assert list(second()) == []
    found = world.record(claim.id)
    assert (found.memo, found.state, found.recovery_point) == (other, State.IN_PROGRESS, "other")


def test_hold_locks_both_rows_of_a_record(world, dsn):
    claim, lease = stepped(world)
    proof = {"scope": claim.id.scope, "key": claim.id.key, "incarnation": str(claim.incarnation), "fence": lease.fence}
    memo = (ORDER, MemoEntry("other", EntryKind.PHASE, "1"))
    step = {
        "seen_memo": memo_text((ORDER,), None, None),
        "recovery_point": "other",
        "lease": LEASE,
        "memo": memo_text(memo, None, None),
    }
    owner = Stranger(world, dsn, "checkpoint", {**proof, **step})

    def hold():
        def body():
            rows = yield world.store._statements.statement(
                "hold_record", {"scope": claim.id.scope, "key": claim.id.key}
            )
            return snapshot_of(rows[0], None).record

        return world.go(execute(Transaction("hold", Mode.ATOMIC, body)))

    held = waiting(dsn, hold)
    owner.commit()
    assert held() == world.record(claim.id)
    assert world.record(claim.id).memo == memo


def test_readers_see_both_rows_consistently(world):
    """The owner names each step as the record's recovery point; the memo must end with the same."""
    claim, lease = stepped(world)
    over = threading.Event()
    torn = []

    def read() -> None:
        while not over.is_set():
            record = world.record(claim.id)
            if record.memo[-1].name != record.recovery_point:
                torn.append(record)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    memo = world.record(claim.id).memo
    try:
        for number in range(100):
            longer = (*memo, MemoEntry(f"step {number}", EntryKind.VALUE, "1"))
            assert world.checkpoint(lease, memo, longer, LEASE) is not None
            memo = longer
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert torn == []


def test_work_row_is_deleted_with_its_record(world, dsn):
    kept, lease = begun(world)
    world.settle(lease, answered())
    world.advance(10 * 24 * 3600 * 1_000_000)
    assert world.go(world.store.upkeep.purge(Expired(0, world.clock()), 10)).moved == 1
    plain = a_claim()
    world.settle(world.owned(plain), answered())
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM oncekey.work").fetchone() == (0,)
    assert world.find(kept.id).record is None


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_running_process_survives_the_post_migration(driver, postgres_dsn, scheme):  # R237
    """Its statements are prepared, and the columns go from under them."""
    drive(migrating.up(postgres.tables(), only=MigrationPhase.PRE), driver.run)
    store = PostgresStore()
    address = postgres_dsn.replace("postgresql", scheme, 1) + "?pool_size=1&pgbouncer=0"
    process = wire.aconnect(address)

    async def work():
        claim = a_claim(effects=Effects.PHASED, recovery=Recovery.RESUME, request=b"kept")
        verdict = await flows.abegin(process, claim, Policy())
        assert isinstance(verdict, Proceed)
        lease = verdict.lease
        assert await adrive(store.phases.announce(lease, (), (), CALL), process.driver.run) is not None
        assert await adrive(store.renew(lease, LEASE), process.driver.run) is not None
        assert await adrive(store.phases.result(lease, (), (CHARGE,), LEASE), process.driver.run) is not None
        assert (await flows.asettle(process, lease, answered())).ours
        return (await process.find(claim.id)).record

    try:
        before = [await work() for _ in range(8)][-1]
        drive(migrating.up(postgres.tables()), driver.run)
        after = await work()
        assert (await process.find(before.id)).record == before
        assert (after.state, after.memo, after.request) == (before.state, (CHARGE,), None)
    finally:
        await process.close()
