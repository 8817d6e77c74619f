"""The lock in the message of BEGIN, the record in the message of COMMIT: what they do, and what their failures mean."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import replace
from http import HTTPStatus

import psycopg
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from drivers.postgres.conftest import ORDERS
from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, PSYCOPG, TransactionInThreads, ask, opened, raw_of
from harness.asgi import until
from harness.cutting import CuttingProxy
from harness.dsn import through
from harness.postgres import PostgresServer, installations
from harness.tables import make_tables
from local.databases import lock_for
from oncekey.core.errors import (
    CommitAmbiguousError,
    RolledBackError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Statement, adrive
from oncekey.core.model import HOUR, SECOND, Deferred, Outcome, RecordId, Replay
from oncekey.core.onecommit import Stored, WriteKind, WriteTarget
from oncekey.core.policy import Policy
from oncekey.databases.postgres import asyncpg_transactions, psycopg_async_transactions
from oncekey.databases.postgres.generated import psycopg_transactions
from oncekey.databases.postgres.server import as_text
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import local
from oncekey.stores.locks import finished_row
from oncekey.stores.phases import row_text
from oncekey.stores.rows import LONGEST_FOLDED, headers_text
from oncekey.testing.claims import OTHER_FINGERPRINT, START, TTL, ManualClock, a_claim, again, answered

NEW = WriteTarget(WriteKind.NEW)
CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
OPEN = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"  # noqa: E501
KILLED = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"  # noqa: E501
SEAL = """
    SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
    WHERE n.nspname = 'oncekey' AND p.proname = 'seal'
"""


def literal(value: object) -> str:
    """A value as it is written into a message."""
    return as_text(Statement("one", "", {"value": value}, folds=True, text=":value"))


def order() -> str:
    return uuid.uuid4().hex


def insert(item: str) -> str:
    return f"INSERT INTO orders (item) VALUES ('{item}')"


async def entered(driver, claim, store=None):
    """Open the transaction of a request that is the first one."""
    locks = (store or PostgresStore()).locks
    tx, look = await driver.begin_with(locks.locking(lock_for(claim), claim))
    assert look.got
    return tx, look


async def sealed(tx, look, claim, settlement=None, store=None):
    fold = (store or PostgresStore()).locks.completing_at_commit(claim, NEW, settlement or answered(), look.begun)
    rows = await tx.commit_with(fold.statement)
    return None if rows is None else fold.read(rows)


async def performed(driver, claim, item):
    """One request, from its lock to its commit."""
    tx, look = await entered(driver, claim)
    await ask(tx, insert(item))
    return await sealed(tx, look, claim)


def there(raw, claim, item=None) -> tuple[int, int]:
    """How many records and rows there are."""
    records = raw.execute("SELECT count(*) FROM oncekey.record WHERE key = %s", [claim.id.key]).fetchone()[0]
    return records, raw.execute("SELECT count(*) FROM orders WHERE item = %s", [item]).fetchone()[0]


def left(tx) -> None:
    """Roll back without waiting for the reply."""
    (tx.transaction if isinstance(tx, TransactionInThreads) else tx).leave()


def columns(raw, claim) -> dict:
    cursor = raw.cursor(row_factory=psycopg.rows.dict_row)
    return cursor.execute("SELECT * FROM oncekey.record WHERE key = %s", [claim.id.key]).fetchone()


class TestMessages:
    async def test_new_key_takes_three_messages(self, kind, dsn):
        with CuttingProxy.before(dsn) as proxy:
            async with opened(kind, through(dsn, proxy.port), pool_size=1) as driver:
                for _ in range(2):
                    await (await driver.begin()).rollback()
                    proxy.count()
                    claim = a_claim()
                    tx, look = await entered(driver, claim)
                    await ask(tx, "INSERT INTO orders (item) SELECT gen_random_uuid()::text")
                    assert await sealed(tx, look, claim)
                    said = [
                        one for one, _ in proxy.messages
                    ]  # of the second time: asyncpg has prepared the INSERT then
        assert len(said) == 3, said
        assert b"BEGIN" in said[0]
        assert b"oncekey" in said[0]
        assert b"oncekey.seal" in said[2]
        assert b"COMMIT" in said[2]

    async def test_role_reset_adds_no_message(self, kind, dsn):
        with CuttingProxy.before(dsn) as proxy:
            async with opened(kind, through(dsn, proxy.port), pool_size=1) as driver:
                for _ in range(2):
                    await (await driver.begin()).rollback()
                    proxy.count()
                    claim = a_claim()
                    tx, look = await entered(driver, claim)
                    await ask(tx, "SET LOCAL ROLE pg_monitor")
                    assert await sealed(tx, look, claim)
                    said = [one for one, _ in proxy.messages]
        assert len(said) == 3, said
        assert b"SET LOCAL role TO DEFAULT" in said[2]
        assert b"oncekey.seal" in said[2]
        assert b"COMMIT" in said[2]

    async def test_in_progress_refusal_takes_two_messages(self, kind, dsn):
        with CuttingProxy.before(dsn) as proxy:
            async with opened(kind, dsn) as near, opened(kind, through(dsn, proxy.port), pool_size=1) as far:
                claim = a_claim()
                tx, _ = await entered(near, claim)
                await (await far.begin()).rollback()
                proxy.count()
                locks = PostgresStore().locks
                for other, fingerprint in ((False, claim.fingerprint), (True, OTHER_FINGERPRINT)):
                    late = again(claim, fingerprint=fingerprint)
                    refused, look = await far.begin_with(locks.locking(lock_for(late), late))
                    assert (look.got, look.other, look.snapshot.record) == (False, other, None)
                    await refused.rollback()
                assert len(proxy.messages) == 4
                await tx.rollback()

    async def test_replay_takes_one_message_and_a_rollback(self, kind, dsn):
        with CuttingProxy.before(dsn) as proxy:
            async with opened(kind, dsn) as near, opened(kind, through(dsn, proxy.port), pool_size=1) as far:
                claim = a_claim()
                await performed(near, claim, order())
                await (await far.begin()).rollback()
                proxy.count()
                late = again(claim)
                tx, look = await far.begin_with(PostgresStore().locks.locking(lock_for(late), late))
                assert look.snapshot.record.response == answered().response
                assert look.snapshot.record == (await adrive(PostgresStore().find(claim.id), near.run)).record
                assert [b"BEGIN" in one for one, _ in proxy.messages] == [True]
                await tx.rollback()

    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_notice_arrives_before_the_task_resumes(self, dsn, loop):
        async def several():
            async with opened(ASYNCPG, dsn) as driver:
                assert all(await asyncio.gather(*(performed(driver, a_claim(), order()) for _ in range(30))))

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(several())


class TestRecords:
    async def test_folded_record_equals_the_separately_written_one(self, kind, dsn, raw):
        store = PostgresStore(clock=ManualClock(START))
        async with opened(kind, dsn) as driver:
            folded, plain = a_claim(), a_claim()
            tx, look = await entered(driver, folded, store)
            assert await sealed(tx, look, folded, store=store) == Stored(START + TTL)
            tx, look = await entered(driver, plain, store)
            await tx.run(store.locks.completing(plain, NEW, answered(), look.begun))
            await tx.commit()
        ours, theirs = columns(raw, folded), columns(raw, plain)
        for own in ("key", "incarnation"):
            assert ours.pop(own) != theirs.pop(own)
        assert ours == theirs

    async def test_timestamps_are_the_server_time_at_commit(self, kind, dsn, raw):
        # P6: neither this machine's clock, nor that of BEGIN
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            tx, look = await entered(driver, claim)
            await ask(tx, "SELECT pg_sleep(0.01)")
            before = raw.execute(CLOCK).fetchone()[0]
            told = await sealed(tx, look, claim)
            after = raw.execute(CLOCK).fetchone()[0]
        record = columns(raw, claim)
        assert before < record["created_at"] < after
        assert record["created_at"] == record["finished_at"] == record["last_run_at"]
        assert told.expires_at == record["expires_at"] == record["created_at"] + TTL

    async def test_wrong_expiry_guess_is_corrected_by_the_server(self, kind, dsn, raw):
        store = PostgresStore()
        async with opened(kind, dsn) as driver:
            for wrong_by in (None, 0, HOUR, -HOUR):
                claim = a_claim()
                tx, look = await entered(driver, claim, store)
                if wrong_by:
                    store.locks._guess._ahead += wrong_by
                told = await sealed(tx, look, claim, store=store)
                assert told.expires_at // SECOND == columns(raw, claim)["expires_at"] // SECOND

    async def test_correct_expiry_guess_sends_no_notice(self, kind, dsn):
        store = PostgresStore(clock=ManualClock(START))
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            tx, look = await entered(driver, claim, store)
            connection = raw_of(tx)
            assert await sealed(tx, look, claim, store=store) == Stored(START + TTL)
            assert connection.notice is None

    @pytest.mark.parametrize("while_it_runs", [-HOUR, 0, 2 * TTL])
    @pytest.mark.parametrize("afterwards", [-HOUR, 0, TTL - 1])
    async def test_changed_clock_sets_timestamps_at_commit(self, kind, dsn, raw, while_it_runs, afterwards):
        # P6: what counts is the clock's time at the commit; a record that is from the future is an answer, too
        clock = ManualClock(START)
        store = PostgresStore(clock=clock)
        async with opened(kind, dsn) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim, store)
            await ask(tx, insert(item))
            clock.advance(while_it_runs)
            committed = clock()
            told = await sealed(tx, look, claim, store=store)
            assert told == Stored(committed + TTL)
            record = columns(raw, claim)
            assert {record[name] for name in ("created_at", "last_run_at", "finished_at")} == {committed}
            clock.advance(afterwards)
            late = again(claim)
            tx, look = await entered(driver, late, store)
            assert isinstance(local.enter(look, late, Policy()), Replay)
            await tx.rollback()
            clock.now = committed + TTL
            tx, look = await entered(driver, late, store)
            assert isinstance(local.enter(look, late, Policy()), local.LockHeld)  # and it expires once, by that clock
            await tx.rollback()

    async def test_stored_response_is_found_at_begin(self, kind, dsn):
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            await performed(driver, claim, order())
            tx, look = await entered(driver, again(claim))
            assert look.snapshot.record.response == answered().response
            await tx.rollback()

    async def test_hostile_values_stay_values(self, kind, dsn, raw):  # R196
        hostile = "'; DROP TABLE orders; -- \\ \" é \u2028 𝄞 %s :key $1 \\x41 $$"
        claim = replace(a_claim(), id=RecordId(hostile, hostile + order()), path=hostile, operation=hostile)
        body = bytes(range(256)) * 4
        async with opened(kind, dsn) as driver:
            tx, look = await entered(driver, claim)
            await ask(tx, "SET LOCAL standard_conforming_strings = off")
            await ask(tx, "SET LOCAL backslash_quote = on")
            await ask(tx, "SET LOCAL client_encoding = 'SJIS'")
            assert await sealed(tx, look, claim, answered(body)) is not None
        record = columns(raw, claim)
        assert (record["scope"], record["path"], record["operation"]) == (hostile, hostile, hostile)
        assert record["response_body"] == body

    def test_row_text_round_trips_every_value(self, raw):  # R196
        raw.execute("CREATE TYPE given_row AS (one text, two text, bytes bytea, yes boolean, number bigint)")
        texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))

        class Text(str):
            """A framework may have texts of its own kind."""

            __slots__ = ()

        number = st.integers(-(2**63), 2**63 - 1)

        @given(st.tuples(texts, texts | st.text("\\\"(),' "), st.binary(), st.booleans(), number))
        def reads(values):
            row = row_text(Text(values[0]), *values[1:])
            assert raw.execute("SELECT (convert_from(%s, 'UTF8')::given_row).*", [row.encode()]).fetchone() == values

        reads()

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\\"(),' "), min_size=6, max_size=6))
    def test_finished_row_matches_the_generic_row_text(self, texts):  # R196
        scope, key, operation, method, path, mark = texts
        plain = a_claim()
        claim = replace(plain, id=RecordId(scope, key), operation=operation, method=method, path=path, fingerprint=mark)
        said = replace(answered().response, status=HTTPStatus.CREATED, headers=((b"a", b'"\\'), (b"b", b"")))
        values = (scope, key, plain.incarnation.hex, operation, plain.effects.value, plain.recovery.value, method, path)
        spans = (plain.entered, plain.deadline, plain.call_timeout, plain.ttl)
        end = (201, headers_text(said.headers), said.schema_version)
        row = row_text(*values, mark, plain.seed, Outcome.SUCCESS.value, *spans, *end)
        assert finished_row(claim, Outcome.SUCCESS, said).decode() == row

    def test_unsuitable_settlements_are_not_folded(self):
        locks, claim = PostgresStore().locks, a_claim()
        assert locks.completing_at_commit(claim, NEW, answered(b"x" * LONGEST_FOLDED), 1) is not None
        assert locks.completing_at_commit(claim, NEW, answered(None), 1) is not None
        assert locks.completing_at_commit(claim, NEW, answered(b"x" * (LONGEST_FOLDED + 1)), 1) is None
        assert locks.completing_at_commit(claim, WriteTarget(WriteKind.REPLACE_EXPIRED), answered(), 1) is None
        assert locks.completing_at_commit(claim, WriteTarget(WriteKind.RETRYABLE), answered(), 1) is None
        assert locks.completing_at_commit(claim, NEW, Deferred(parcel=None), 1) is None

    def test_half_a_surrogate_pair_is_refused_as_any_value_that_cannot_be_stored(self):
        claim = replace(a_claim(), path="/\ud800")
        with pytest.raises(StoreError, match="surrogate"):
            PostgresStore().locks.completing_at_commit(claim, NEW, answered(), 1)


class TestPlans:
    async def test_the_look_reads_by_the_key_and_not_the_whole_table(self, kind, dsn):
        async with opened(kind, dsn, pool_size=1) as driver:
            for _ in range(8):  # also by the plan that a session keeps
                tx, _ = await entered(driver, a_claim())
                assert await ask(tx, "SELECT pg_stat_get_xact_numscans('oncekey.record'::regclass)") == [(0,)]
                await tx.rollback()


class TestTaken:
    """L3: somebody else's record is there, so nothing of ours may be."""

    async def test_the_business_is_rolled_back(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=1) as driver:
            await self.taken(driver, raw)

    async def test_a_seal_that_does_not_fail_is_noticed(self, kind, postgres_dsn):
        # The mutant: where the key is taken nothing is written, and the COMMIT after it happens.
        with psycopg.connect(make_tables(postgres_dsn), autocommit=True) as raw:
            raw.execute(ORDERS)
            text = raw.execute(SEAL).fetchone()[0]
            mutant = re.sub(r"(instant \+ it\.ttl\));", r"\1 ON CONFLICT DO NOTHING;", text, count=1)
            assert mutant != text
            raw.execute(mutant)
            async with opened(kind, postgres_dsn) as driver:
                with pytest.raises(AssertionError, match="somebody else's record"):
                    await self.taken(driver, raw)

    async def taken(self, driver, raw):
        claim, item = a_claim(), order()
        tx, look = await entered(driver, claim)
        await ask(tx, insert(item))
        # Another version of the application, which knows nothing of the lock.
        assert await performed_without_lock(raw, claim)
        assert await sealed(tx, look, claim) is None, "committed beside somebody else's record"
        assert there(raw, claim, item) == (1, 0)
        await until(lambda: raw.execute(OPEN).fetchone() == (0,))
        assert await performed(driver, a_claim(), item) is not None


async def performed_without_lock(raw, claim) -> bool:
    fold = PostgresStore().locks.completing_at_commit(claim, NEW, answered(b"theirs"), 0)
    with raw.transaction():
        raw.execute("SET LOCAL oncekey.begun = '0'")
        raw.execute(as_text(fold.statement).encode())
    return there(raw, claim)[0] == 1


@pytest.mark.parametrize("kind", [PSYCOPG, ASYNC_PSYCOPG])
class TestLeaving:
    """A roll-back whose reply the next borrower of the connection reads."""

    async def test_abandoned_transaction_does_not_reach_the_next_borrower(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=1) as driver:
            claim = a_claim()
            tx, _ = await entered(driver, claim)
            left(tx)
            late, look = await entered(driver, again(claim))
            assert look.snapshot.record is None
            await late.rollback()
            assert await performed(driver, claim, order())
            left(tx)  # it is over, and the connection is another's

    async def test_connection_lost_while_abandoned_is_not_reused(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=1) as driver:
            tx, _ = await entered(driver, a_claim())
            raw.execute(KILLED)
            left(tx)
            assert await performed(driver, a_claim(), order())


class TestRefusals:
    async def test_a_deferred_constraint_refuses_the_commit(self, kind, dsn, raw):
        # F20: the server's own no is a roll-back, although the record was written before
        async with opened(kind, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            assert await performed(driver, a_claim(), item)
            tx, look = await entered(driver, claim)
            await ask(tx, "SET CONSTRAINTS ALL DEFERRED")
            await ask(tx, insert(item))
            with pytest.raises(RolledBackError, match="refused the commit"):
                await sealed(tx, look, claim)
            assert there(raw, claim, item) == (0, 1)
            assert await performed(driver, claim, order())

    async def test_swallowed_sql_error_rolls_back_the_commit(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            await ask(tx, insert(item))
            with pytest.raises(Exception, match="division"):
                await ask(tx, "SELECT 1 / 0")
            with pytest.raises(RolledBackError):
                await sealed(tx, look, claim)
            assert there(raw, claim, item) == (0, 0)
            assert await performed(driver, claim, item)

    async def test_transaction_replaced_by_the_handler_is_rolled_back(self, kind, dsn, raw):  # L5, F16
        async with opened(kind, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            behind = raw_of(tx)
            for word in ("COMMIT", "BEGIN"):
                await (asyncio.to_thread(behind.execute, word) if kind == PSYCOPG else behind.execute(word))
            await ask(tx, insert(item))
            with pytest.raises(RolledBackError, match="the next one was rolled back"):
                await sealed(tx, look, claim)
            assert there(raw, claim, item) == (0, 0)
            assert await performed(driver, claim, item)

    async def test_read_only_server_is_unavailable_at_begin(self, kind, dsn, raw):
        mark = "&" if "?" in dsn else "?"
        async with opened(kind, f"{dsn}{mark}options=-c%20default_transaction_read_only%3Don") as driver:
            with pytest.raises(StoreUnavailableError, match="25006"):
                await entered(driver, a_claim())
            await until(lambda: raw.execute(OPEN).fetchone() == (0,))

    async def test_database_without_functions_raises_schema_error(self, kind, postgres_dsn):
        async with opened(kind, postgres_dsn, pool_size=1) as driver:
            for _ in range(2):
                with pytest.raises(SchemaError, match="migrate up"):
                    await entered(driver, a_claim())

    async def test_background_task_on_the_connection_prevents_commit(self, dsn, raw):
        async with opened(ASYNCPG, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            await ask(tx, insert(item))
            behind = asyncio.create_task(ask(tx, "SELECT pg_sleep(60)"))
            await asyncio.sleep(0)
            with pytest.raises(TransactionControlError, match="left behind"):
                await sealed(tx, look, claim)
            with pytest.raises(Exception, match=r"clos|cancel"):
                await behind
            assert there(raw, claim, item) == (0, 0)
            assert await performed(driver, a_claim(), order())

    async def test_commit_without_notice_is_not_treated_as_rollback(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            await ask(tx, insert(item))
            (raw_of(tx)._log_listeners if kind == ASYNCPG else raw_of(tx)._notice_handlers).clear()
            assert await sealed(tx, look, claim) == Stored(None)
            assert there(raw, claim, item) == (1, 1)

    async def test_finished_transaction_rejects_another_commit(self, kind, dsn):
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            tx, look = await entered(driver, claim)
            assert await sealed(tx, look, claim)
            with pytest.raises(TransactionControlError, match="over"):
                await sealed(tx, look, claim)
            await tx.rollback()

    async def test_a_first_step_that_fails_leaves_nothing_open(self, kind, dsn, raw):
        def first():
            yield Statement("fine", "SELECT 1 AS one")
            yield Statement("wrong", "SELECT 1 / 0")

        def unreadable():
            yield Statement("fine", "SELECT 1 AS one")
            raise LookupError("a record that cannot be read")

        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreError):
                await driver.begin_with(first())
            with pytest.raises(LookupError):
                await driver.begin_with(unreadable())
            await until(lambda: raw.execute(OPEN).fetchone() == (0,))
            assert await performed(driver, a_claim(), order())

    async def test_steps_that_do_not_fold_run_separately(self, kind, dsn):
        def first():
            one = yield Statement("one", "SELECT 1 AS one")
            two = yield Statement("two", "SELECT 2 AS two")
            return one[0]["one"], two[0]["two"]

        async with opened(kind, dsn) as driver:
            tx, found = await driver.begin_with(first())
            assert found == (1, 2)
            await tx.rollback()


class TestCleaning:
    """The session is cleaned up in the message of the COMMIT, behind it."""

    async def test_session_state_of_a_handler_is_reset(self, kind, dsn):
        async with opened(kind, dsn, pool_size=1) as driver:
            claim = a_claim()
            tx, look = await entered(driver, claim)
            await ask(tx, "SELECT set_config('app.tenant', 'acme', false), pg_advisory_lock(4711)")
            assert await sealed(tx, look, claim)
            tx = await driver.begin()
            found = await ask(tx, "SELECT COALESCE(current_setting('app.tenant', true), '')")
            assert found == [("",)]
            assert await ask(tx, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711") == [(0,)]
            await tx.rollback()

    async def test_failed_session_reset_is_not_a_failed_commit(self, kind, dsn, raw, monkeypatch):
        async with opened(kind, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            session = await ask(tx, "SELECT pg_backend_pid()")
            await ask(tx, insert(item))
            for module in (asyncpg_transactions, psycopg_transactions, psycopg_async_transactions):
                monkeypatch.setattr(module, "RESET", "SELECT 1 / 0")
            assert await sealed(tx, look, claim)
            assert there(raw, claim, item) == (1, 1)
            # A session that may not be clean is nobody's any more.
            tx = await driver.begin()
            assert await ask(tx, "SELECT pg_backend_pid()") != session
            await tx.rollback()

    async def test_undetermined_commit_failure_is_ambiguous(self, dsn, raw, monkeypatch):
        async with opened(ASYNCPG, dsn, pool_size=1) as driver:
            claim, item = a_claim(), order()
            tx, look = await entered(driver, claim)
            await ask(tx, insert(item))
            monkeypatch.setattr(asyncpg_transactions, "RESET", "SELECT 1 / 0")
            fold = PostgresStore().locks.completing_at_commit(claim, NEW, answered(), look.begun)
            with pytest.raises(CommitAmbiguousError):
                await tx.commit_with(replace(fold.statement, proof="SELECT 1 / 0 AS committed"))
            monkeypatch.undo()
            assert await performed(driver, a_claim(), order())


@pytest.mark.parametrize("installation", installations(), ids=str)
async def test_the_time_outs_go_along_with_begin(installation, kind):
    # L4: a host that vanished does not hold a key for hours; PostgreSQL 17 can end a transaction as a whole
    with PostgresServer(installation) as server:
        dsn = make_tables(server.create_database("limits"))
        async with opened(kind, dsn) as driver:
            tx, _ = await entered(driver, a_claim())
            shown = {}
            for name in ("idle_in_transaction_session_timeout", "statement_timeout", "transaction_timeout"):
                [(value,)] = await ask(tx, f"SELECT current_setting('{name}', true)")
                shown[name] = value
            assert shown == {
                "idle_in_transaction_session_timeout": "5min",
                "statement_timeout": "5min",
                "transaction_timeout": "1h" if installation.major >= 17 else None,
            }
            await tx.rollback()


class TestLiterals:
    """What is written into a message of several statements: digits, and nothing else of a value's own."""

    @given(st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.binary()))
    def test_literal_contains_only_safe_characters(self, value):
        assert re.fullmatch(r"NULL|true|false|'-?[0-9]+'|E'\\\\x[0-9a-f]*'", literal(value))

    def test_a_member_of_an_enumeration_is_its_number(self):
        assert literal(HTTPStatus.CREATED) == "'201'"

    @pytest.mark.parametrize("value", ["text", 1.5, [1]])
    def test_unsupported_literal_type_raises(self, value):
        with pytest.raises(TypeError):
            literal(value)

    @pytest.mark.parametrize("conforming", ["on", "off"])
    @pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SJIS"])
    def test_server_reads_literals_unchanged(self, dsn, conforming, encoding):
        values = [bytes([one]) for one in range(256)] + [b"", b"\\x41", b"'';--", "é𝄞".encode(), b"\\'" * 9]
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"SET standard_conforming_strings = {conforming}".encode())
            connection.execute(f"SET client_encoding = '{encoding}'".encode())
            said = ", ".join(f"{literal(value)}::bytea" for value in values)
            read = connection.execute(f"SELECT {said}".encode(), binary=True).fetchone()
            assert list(read) == values
            for number in (-(2**63), 2**63 - 1, 0):
                assert connection.execute(f"SELECT {literal(number)}::bigint".encode()).fetchone() == (number,)
