"""LOCAL in one commit on MariaDB and MySQL, and what storage engines do that others do not: each pitfall by itself."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import pymysql
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from frameworks.realshop import MariadbDatabase, RealShop
from harness.mariadb import MariadbInstallation, MariadbServer, MysqlInstallation, migrated
from harness.patience import PATIENCE, wait_until
from local.databases import lock_for
from oncekey import wire
from oncekey.core.errors import (
    CommitAmbiguousError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Mode, Statement, Transaction, drive
from oncekey.core.model import LOCAL, Completed, Outcome, RecordId, StoredResponse
from oncekey.core.onecommit import Holder, WriteKind, WriteTarget
from oncekey.databases.mariadb.aiomysql import AiomysqlDriver
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.messages import commit_error, statement_error
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.databases.sqlalchemy.mariadb import SqlalchemyMariadbDriver
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.testing.claims import a_claim

ANSWER = Completed(StoredResponse(201, ((b"content-type", b"application/json"),), b"{}"), Outcome.SUCCESS)
NEW = WriteTarget(WriteKind.NEW)
STORE = MariadbStore()
TOUCH = "INSERT INTO oncekey_lock (number, mark) VALUES (1, 1)"


@pytest.fixture
def driver(empty_either):
    with closing(PymysqlDriver(empty_either)) as driver:
        yield driver


def locked(driver, claim):
    tx = driver.begin()
    return tx, tx.run(STORE.locks.locking(lock_for(claim), claim))


def said(driver, flow):
    return drive(flow, driver.run)


def test_a_duplicate_in_flight_is_refused_and_the_first_one_commits_once(driver):
    """R69: the second one waits for nobody, whatever it is: its transaction finds the row of the lock."""
    claim = a_claim("twice")
    first, look = locked(driver, claim)
    assert (look.got, look.snapshot.record) == (True, None)
    again, refused = locked(driver, a_claim("twice"))
    assert (refused.got, refused.other) == (False, False)
    other, another = locked(driver, a_claim("twice", fingerprint="another"))
    assert (another.got, another.other) == (False, True)
    assert said(driver, STORE.locks.holder(lock_for(claim))) is Holder.UNKNOWN_HOLDER
    assert said(driver, STORE.locks.holder(lock_for(a_claim("twice", fingerprint="another")))) is Holder.OTHER
    for tx in (again, other):
        tx.rollback()
    sealed = first.run(STORE.locks.completing(claim, NEW, ANSWER, look.begun))
    assert sealed is not None
    # Its uncommitted answer is not shown to who reads the lock before it is committed.
    late, seen = locked(driver, claim)
    assert (seen.got, seen.snapshot.record) == (False, None)
    late.rollback()
    first.commit()
    assert said(driver, STORE.locks.holder(lock_for(claim))) is Holder.NOBODY
    assert said(driver, STORE.find(claim.id)).record.response == ANSWER.response
    third, found = locked(driver, claim)
    assert found.got
    assert found.snapshot.record is not None
    third.rollback()


def test_a_roll_back_leaves_nothing_behind(driver, either_server):
    claim = a_claim("undone")
    tx, _ = locked(driver, claim)
    tx.rollback()
    tx, look = locked(driver, claim)
    assert look.got
    tx.rollback()
    assert said(driver, STORE.find(claim.id)).record is None


@pytest.mark.parametrize("ended", ["COMMIT", "CREATE TABLE made_by_a_handler (x INT)", "SET autocommit = 0"])
def test_a_handler_that_ends_its_transaction_is_refused(driver, ended):
    tx, _ = locked(driver, a_claim("ends"))
    with pytest.raises(TransactionControlError), tx.connection.cursor() as cursor:
        cursor.execute(ended)
    with pytest.raises(TransactionControlError):
        tx.connection.commit()
    tx.rollback()


def test_a_commit_inside_a_procedure_is_noticed_by_its_savepoint(driver, empty_either, either_server):
    """A handler's own COMMIT that no text shows: its savepoint is gone, and nothing is stored."""
    name = empty_either.rpartition("/")[2]
    either_server.say("DROP PROCEDURE IF EXISTS sneak", name)
    either_server.say("CREATE PROCEDURE sneak() BEGIN COMMIT; START TRANSACTION; END", name)
    claim = a_claim("sneaks")
    tx, look = locked(driver, claim)
    with tx.connection.cursor() as cursor:
        cursor.execute("CALL sneak()")
    assert tx.run(STORE.locks.completing(claim, NEW, ANSWER, look.begun)) is not None
    with pytest.raises(TransactionControlError, match="ended before oncekey could commit it"):
        tx.commit()
    assert said(driver, STORE.find(claim.id)).record is None
    # The row of its lock was committed, so it is nobody's, and the next worker's upkeep takes it away.
    assert said(driver, STORE.locks.holder(lock_for(claim))) is Holder.NOBODY
    assert either_server.say("SELECT count(*) FROM oncekey_lock", name) == ((1,),)
    said(driver, STORE.upkeep.forget_workers(0))
    assert either_server.say("SELECT count(*) FROM oncekey_lock", name) == ((0,),)


def test_mariadb_session_state_is_reset_after_a_handler(driver):
    tx, _ = locked(driver, a_claim("leaves"))
    with tx.connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_mode = '', time_zone = '+05:00'")
        cursor.execute("CREATE TEMPORARY TABLE left_here (x INT)")
        cursor.execute("SELECT CONNECTION_ID()")
        (session,) = cursor.fetchone()
    tx.rollback()
    tx = driver.begin()
    with tx.connection.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID(), @@sql_mode, @@time_zone")
        number, mode, zone = cursor.fetchone()
        cursor.execute("SHOW VARIABLES WHERE variable_name IN ('tx_isolation', 'transaction_isolation')")
        (_, isolation) = cursor.fetchone()
        with pytest.raises(pymysql.ProgrammingError):
            cursor.execute("SELECT * FROM left_here")
    tx.rollback()
    assert (number, zone, isolation) == (session, "SYSTEM", "READ-COMMITTED")
    assert "STRICT_ALL_TABLES" in mode


def test_sql_mode_of_a_handler_cannot_break_literals(driver):
    """A key is a client's: what it holds stays a value, also where backslashes escape nothing."""
    key = "a\\' OR 1=1 -- \\"
    claim = a_claim(key)
    tx, look = locked(driver, claim)
    with tx.connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'")
    assert tx.run(STORE.locks.completing(claim, NEW, ANSWER, look.begun)) is not None
    tx.commit()
    assert said(driver, STORE.find(claim.id)).record.id.key == key
    assert said(driver, STORE.find(a_claim("a").id)).record is None


KILLED = """
import sys
from local.test_mariadb import STORE, locked
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.testing.claims import a_claim
tx, look = locked(PymysqlDriver(sys.argv[1]), a_claim("killed"))
assert look.got
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_frees_its_key(driver, empty_either):
    """R86: the server notices the closed socket, rolls back, and the key is anybody's."""
    client = subprocess.Popen(
        [sys.executable, "-c", KILLED, empty_either],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"locked\n"
    claim = a_claim("killed")
    tx, look = locked(driver, claim)
    assert not look.got
    tx.rollback()
    client.send_signal(signal.SIGKILL)
    client.communicate()

    def free():
        tx, look = locked(driver, claim)
        tx.rollback()
        return look.got

    wait_until(free)


def test_killed_mariadb_server_keeps_committed_records(crashable):
    """R75: what was acknowledged is there after kill -9; what was under way is not."""
    url = migrated(crashable.create_database("crash"))
    with closing(PymysqlDriver(url)) as driver:
        done, under_way = a_claim("done"), a_claim("under-way")
        tx, look = locked(driver, done)
        assert tx.run(STORE.locks.completing(done, NEW, ANSWER, look.begun)) is not None
        tx.commit()
        claimed = said(driver, STORE.claim(a_claim("claimed"))).record
        tx, look = locked(driver, under_way)
        assert tx.run(STORE.locks.completing(under_way, NEW, ANSWER, look.begun)) is not None
        crashable.kill()
        with pytest.raises(CommitAmbiguousError):
            tx.commit()
        with pytest.raises(StoreUnavailableError):
            said(driver, STORE.find(done.id))
        crashable.start()
        assert said(driver, STORE.find(done.id)).record.response == ANSWER.response
        assert said(driver, STORE.find(claimed.id)).record == claimed
        assert said(driver, STORE.find(under_way.id)).record is None
        tx, look = locked(driver, under_way)
        assert look.got
        tx.rollback()


@pytest.fixture(params=[MariadbInstallation, MysqlInstallation], ids=["mariadb", "mysql"])
def crashable(request):
    with MariadbServer(kind=request.param) as server:
        yield server


@pytest.mark.parametrize("way", ["pymysql", "aiomysql", "sqlalchemy"])
async def test_connection_to_a_read_only_server_is_dropped(empty_either, either_server, way):
    """R110: nothing ran, and the next connection may be to the server that takes writes by now."""
    name = empty_either.rpartition("/")[2]
    either_server.say("CREATE USER IF NOT EXISTS shop")  # an administrator writes nevertheless
    either_server.say(f"GRANT ALL ON `{name}`.* TO shop")
    url = empty_either.replace("root@", "shop@")
    engine = create_async_engine(url.replace("://", "+aiomysql://", 1))
    driver = {"pymysql": PymysqlDriver, "aiomysql": AiomysqlDriver}.get(way, lambda _: SqlalchemyMariadbDriver(engine))(
        url
    )

    async def done(result):
        return await result if inspect.isawaitable(result) else result

    def number():
        return (yield Statement("who", "SELECT CONNECTION_ID() AS number"))[0]["number"]

    async def connection():
        return await done(driver.run(Transaction("who", Mode.READ, number)))

    seen = [await connection()]
    either_server.say("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(StoreUnavailableError, match="is read-only"):
            await done(driver.run(Transaction("touch", Mode.SINGLE, lambda: (yield Statement("touch", TOUCH)))))
        seen.append(await connection())
        tx = await done(driver.begin())
        with pytest.raises(StoreUnavailableError, match="is read-only"):
            await done(tx.run(STORE.locks.locking(lock_for(a_claim("demoted")), a_claim("demoted"))))
        await done(tx.rollback())
        seen.append(await connection())
    finally:
        either_server.say("SET GLOBAL read_only = 0")
    await done(driver.close())
    await engine.dispose()
    assert len(set(seen)) == 3


def test_keys_are_bytes(driver):
    """`utf8mb4_bin` would take 'a ' for 'a', and other collations more: VARBINARY takes nothing for anything else."""
    keys = ["a", "a ", "A", "á", "a\u0301", "\uff41"]
    for key in keys:
        said(driver, STORE.claim(a_claim(key)))
    found = [said(driver, STORE.find(a_claim(key).id)).record for key in keys]
    assert [record.id.key for record in found] == [a_claim(key).id.key for key in keys]
    assert len({record.incarnation for record in found}) == len(keys)


def test_too_long_value_is_rejected_and_not_truncated(driver):
    """Without strict mode MariaDB would cut a text silently."""
    claim = a_claim("long")
    long = RecordId("s" * 2001, claim.id.key)
    with pytest.raises(StoreError):
        said(driver, STORE.claim(replace(claim, id=long)))


def test_lock_wait_timeout_rolls_back_the_whole_transaction(empty_either, either_server):
    """1205 leaves the rest of a transaction: what is ours is rolled back by the driver, and none of it committed."""
    with closing(PymysqlDriver(empty_either, statement_timeout=1)) as driver:
        claim = a_claim("waits")
        record = said(driver, STORE.claim(claim)).record
        name = empty_either.rpartition("/")[2]
        with either_server.connect(name) as connection, connection.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute("SELECT * FROM oncekey_record FOR UPDATE")

            def body():
                yield Statement("first", "INSERT INTO oncekey_lock (number, mark) VALUES (1, 1)")
                yield Statement("second", "UPDATE oncekey_record SET version = version + 1")

            with pytest.raises(StoreUnavailableError, match="1205"):
                driver.run(Transaction("both", Mode.ATOMIC, body))
        assert either_server.say("SELECT count(*) FROM oncekey_lock", name) == ((0,),)
        assert said(driver, STORE.find(claim.id)).record == record


@pytest.mark.parametrize(
    ("number", "mode", "kind"),
    [
        (2013, Mode.READ, "LostError"),
        (2013, Mode.SINGLE, "CommitAmbiguousError"),
        (1927, Mode.SINGLE, "CommitAmbiguousError"),
        (2013, Mode.ATOMIC, "LostError"),
        (1180, Mode.SINGLE, "CommitAmbiguousError"),
        (1180, Mode.ATOMIC, "StoreUnavailableError"),
        (1213, Mode.SINGLE, "ConflictError"),
        (1146, Mode.READ, "SchemaError"),
        (1290, Mode.SINGLE, "DemotedError"),
        (1406, Mode.SINGLE, "StoreError"),
    ],
)
def test_mariadb_error_numbers_map_to_store_errors(number, mode, kind):
    assert type(statement_error(pymysql.OperationalError(number, "said"), mode, "it")).__name__ == kind


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (2013, "CommitAmbiguousError"),
        (1047, "CommitAmbiguousError"),
        (1180, "CommitAmbiguousError"),
        (1213, "ConflictError"),
        (1452, "RolledBackError"),
    ],
)
def test_mariadb_commit_error_numbers_map_to_store_errors(number, kind):
    assert type(commit_error(pymysql.OperationalError(number, "said"), "it")).__name__ == kind


def test_a_crowd_of_threads_on_one_key_executes_once(driver, empty_either, either_server):
    """No deadlock either: nobody waits for the row of a lock (60 in 180 where they did)."""
    name = empty_either.rpartition("/")[2]
    either_server.say("CREATE TABLE IF NOT EXISTS effect (item VARCHAR(64))", name)
    either_server.say("DELETE FROM effect", name)
    start = threading.Barrier(6)
    failures: list[BaseException] = []

    def requests():
        try:
            for turn in range(20):
                start.wait(PATIENCE)
                claim = a_claim(f"crowd-{turn}")
                tx, look = locked(driver, claim)
                if look.got and look.snapshot.record is None:
                    with tx.connection.cursor() as cursor:
                        cursor.execute("INSERT INTO effect VALUES (%s)", (f"crowd-{turn}",))
                    assert tx.run(STORE.locks.completing(claim, NEW, ANSWER, look.begun)) is not None
                    tx.commit()
                else:
                    tx.rollback()
        except BaseException as error:
            failures.append(error)
            start.abort()
            raise

    threads = [threading.Thread(target=requests) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert either_server.say("SELECT count(*), count(DISTINCT item) FROM effect", name) == ((20, 20),)


def test_a_success_after_a_deadlock_is_refused(driver, empty_either, either_server):
    """1213 has rolled everything back: a handler that goes on has no rows to tell success of."""
    name = empty_either.rpartition("/")[2]
    places = [said(driver, STORE.claim(a_claim(key))).record.id for key in ("one", "two")]
    rows = [
        f"UPDATE oncekey_record SET version = version + 1 WHERE scope = '{place.scope}' AND `key` = '{place.key}'"
        for place in places
    ]
    claim = a_claim("deadlock")
    tx, look = locked(driver, claim)
    with (
        either_server.connect(name, autocommit=False) as other,
        other.cursor() as theirs,
        tx.connection.cursor() as ours,
    ):
        theirs.execute(rows[0])
        # InnoDB lets the one live that has written more.
        theirs.executemany("INSERT INTO oncekey_lock VALUES (%s, %s)", [(n, 1) for n in range(1000, 1100)])
        ours.execute(rows[1])
        waiting = threading.Thread(target=theirs.execute, args=(rows[1],))
        waiting.start()
        with pytest.raises(pymysql.OperationalError, match="1213"):
            ours.execute(rows[0])
        waiting.join()
    with pytest.raises(TransactionControlError, match="the database rolled it back"):
        tx.run(STORE.locks.completing(claim, NEW, ANSWER, look.begun))
    tx.rollback()
    assert said(driver, STORE.find(claim.id)).record is None


def test_concurrent_requests_after_rollbacks_raise_no_errors(driver):
    """MySQL lets who comes at the very same moment wait, and may find a deadlock: that is somebody at it as well."""
    start = threading.Barrier(6)
    failures: list[BaseException] = []
    got: list[int] = []

    def requests():
        try:
            for turn in range(30):
                start.wait(PATIENCE)
                tx, look = locked(driver, a_claim(f"undone-{turn}"))
                if look.got:
                    got.append(turn)
                assert tx.run(STORE.locks.locking(lock_for(a_claim(f"free-{id(tx)}")), a_claim(f"free-{id(tx)}"))).got
                tx.rollback()
        except BaseException as error:
            failures.append(error)
            start.abort()
            raise

    threads = [threading.Thread(target=requests) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(got) == set(range(30))


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "def"])
async def test_duplicate_over_http_returns_409_then_replays(either_url, blocking):
    """The same as a client sees it: 409 in flight, 422 for another request, then the same answer again."""
    shop = RealShop(MariadbDatabase(either_url, "aiomysql", pool_size=6))
    inside, free, go_on = asyncio.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    if blocking:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL)
        def create_blocking(op: SyncOperation, item: str = "tea") -> dict[str, str]:
            shop.database.insert_blocking(op.connection, item)
            loop.call_soon_threadsafe(inside.set)
            free.wait(PATIENCE)
            return {"item": item}
    else:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL)
        async def create(op: Operation, item: str = "tea") -> dict[str, str]:
            await shop.database.insert(op.connection, item)
            inside.set()
            await go_on.wait()
            return {"item": item}

    async with shop.open():
        first = asyncio.create_task(shop.send())
        await inside.wait()
        assert (await shop.send()).status == 409
        assert (await shop.send("/orders?item=milk")).status == 422
        assert shop.rows == []
        free.set()
        go_on.set()
        done = await first
        again = await shop.send()
    assert (done.status, again.status, again.body) == (201, 201, done.body)
    assert (shop.rows, shop.states) == (["tea"], ["completed"])


def test_mariadb_url_is_parsed():
    assert wire.understand("mysql://root@db/shop?pool_size=3").pool_size == 3
    assert wire.understand("mariadb+aiomysql://root@db/shop").package == "aiomysql"
    with pytest.raises(Exception, match="name of a database"):
        wire.understand("mysql://root@db")
    with pytest.raises(Exception, match="no option"):
        wire.understand("mysql://root@db/shop?charset=latin1")
