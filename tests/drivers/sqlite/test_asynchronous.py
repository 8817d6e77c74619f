"""SQLite under asyncio: nobody blocks the loop, nobody waits in a ring, and cancelling leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drivers.speaking import ALL_ITEMS, a_stranger, insert, items_of, saying
from harness import flows
from harness.patience import PATIENCE
from oncekey.core.errors import StoreUnavailableError, TransactionControlError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.model import Replay
from oncekey.core.policy import Policy
from oncekey.databases.sqlite.asynchronous import AsyncSqliteDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.lane import _lanes, lane_of
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine.shell import AsyncEngine
from oncekey.ports.store import AsyncShares
from oncekey.testing.claims import a_claim, again, answered

INSERT = "INSERT INTO orders (item) VALUES (?)"


@pytest.fixture
def driver(path, module):
    return AsyncSqliteDriver(path, busy_timeout=PATIENCE, lock_timeout=PATIENCE, module=module)


async def items(driver) -> list[str]:
    return items_of(await driver.run(ALL_ITEMS))


async def until(condition) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  (threads and locks are looked at, which set no event)
            await asyncio.sleep(0)


class Gate:
    """A job in a thread that has begun and ends when it is let through."""

    def __init__(self):
        self.begun, self.let_through = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.let_through.wait(PATIENCE)
        return "through"

    async def reached(self):
        await until(self.begun.is_set)


async def test_rows_and_record_commit_together(driver):  # L4, L6
    engine = AsyncEngine(SqliteStore(), driver)
    claim = a_claim()
    lease = (await flows.abegin(engine, claim, Policy())).lease
    tx = await engine.open()
    await tx.connection.execute(INSERT, ("tea",))
    assert (await flows.asettle_within(engine, tx, lease, answered())).ours
    assert await items(driver) == []

    await tx.commit()

    assert await items(driver) == ["tea"]
    assert isinstance(await flows.abegin(engine, again(claim), Policy()), Replay)
    await engine.close()


async def test_driver_shares_application_transactions(driver):
    assert isinstance(driver, AsyncShares)
    await driver.close()


async def test_closed_driver_raises_store_unavailable(driver):
    await driver.run(saying(Mode.SINGLE, insert("tea")))
    await driver.close()

    for transaction in (ALL_ITEMS, saying(Mode.SINGLE, insert("milk")), saying(Mode.ATOMIC, insert("milk"))):
        with pytest.raises(StoreUnavailableError, match="closed"):
            await driver.run(transaction)
    tx = await driver.begin()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await tx.connection.execute(INSERT, ("milk",))
    await tx.rollback()


async def test_two_writers_in_one_loop_take_turns(driver):
    """The second waits without a thread and without the loop, however long the first thinks."""
    first = await driver.begin()
    await first.connection.execute(INSERT, ("tea",))
    second = await driver.begin()
    writing = asyncio.gather(
        second.connection.execute(INSERT, ("milk",)), driver.run(saying(Mode.SINGLE, insert("sugar")))
    )
    for _ in range(50):
        await asyncio.sleep(0)
    assert not writing.done()

    await first.commit()
    await until(lambda: len(lane_of(driver._driver.path)._waiting) == 1)
    await second.commit()
    await writing

    assert await items(driver) == ["tea", "milk", "sugar"]
    await driver.close()


async def test_transaction_without_writes_blocks_no_writer(driver):
    idle = await driver.begin()

    await driver.run(saying(Mode.SINGLE, insert("tea")))
    busy = await driver.begin()
    await busy.connection.execute(INSERT, ("milk",))
    await busy.commit()

    assert await (await idle.connection.execute("SELECT count(*) FROM orders")).fetchone() is not None
    await idle.rollback()
    assert await items(driver) == ["tea", "milk"]
    await driver.close()


async def test_readers_do_not_wait_for_a_writer(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))

    assert await items(driver) == []
    await tx.rollback()
    await driver.close()


async def test_event_loop_runs_while_another_process_writes(driver, path, module):
    other = SqliteDriver(path, module=module)
    theirs = other.begin()
    theirs.connection.execute(INSERT, ("tea",))
    ours = asyncio.ensure_future(driver.run(saying(Mode.SINGLE, insert("milk"))))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not ours.done()

    theirs.commit()
    await ours

    assert await items(driver) == ["tea", "milk"]
    other.close()
    await driver.close()


async def test_driver_does_not_use_the_default_executor(driver):
    await driver.run(saying(Mode.SINGLE, insert("tea")))
    await items(driver)

    assert asyncio.get_running_loop()._default_executor is None
    await driver.close()


async def test_waiting_for_the_turn_is_bounded(path, module):
    driver = AsyncSqliteDriver(path, lock_timeout=0.01, module=module)
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    late = await driver.begin()

    with pytest.raises(StoreUnavailableError, match="too long"):
        await driver.run(saying(Mode.SINGLE, insert("milk")))
    with pytest.raises(StoreUnavailableError, match="too long"):
        await late.connection.execute(INSERT, ("milk",))
    await late.rollback()
    await tx.rollback()

    await driver.run(saying(Mode.SINGLE, insert("sugar")))
    assert await items(driver) == ["sugar"]
    await driver.close()


async def test_concurrent_first_statements_begin_one_transaction(driver):
    tx = await driver.begin()
    await asyncio.gather(*(tx.connection.execute(INSERT, (f"item {number}",)) for number in range(8)))
    await tx.commit()

    assert sorted(await items(driver)) == [f"item {number}" for number in range(8)]
    await driver.close()


async def test_drivers_of_one_file_share_its_lane(driver, path, module):
    other = AsyncSqliteDriver(path.parent / "." / path.name, lock_timeout=0.01, module=module)
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))

    with pytest.raises(StoreUnavailableError, match="too long"):
        await other.run(saying(Mode.SINGLE, insert("milk")))

    await tx.rollback()
    await other.close()
    await driver.close()


def test_each_event_loop_has_its_own_write_lane(path, module):
    driver = AsyncSqliteDriver(path, module=module)

    async def write(item):
        await driver.run(saying(Mode.SINGLE, insert(item)))

    threads = [
        threading.Thread(target=lambda number=number: asyncio.run(write(f"item {number}"))) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def last():
        assert len(await items(driver)) == 4
        lane_of(str(path.parent / "another.db"))
        assert all(not loop.is_closed() for loop, _ in _lanes)
        await driver.close()

    asyncio.run(last())


# Cancelling


async def test_cancelled_statement_finishes_before_the_rollback(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    gate = Gate()
    statement = asyncio.ensure_future(tx.say(gate))
    await gate.reached()
    statement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await statement

    with pytest.raises(StoreUnavailableError, match="cancelled"):
        await tx.connection.execute(INSERT, ("milk",))
    rollback = asyncio.ensure_future(tx.rollback())
    waiting = asyncio.ensure_future(driver.run(saying(Mode.SINGLE, insert("sugar"))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not rollback.done()
    assert not waiting.done()
    gate.let_through.set()
    await rollback
    await waiting

    assert await items(driver) == ["sugar"]
    await driver.close()


async def test_a_transaction_with_a_cancelled_statement_is_not_committed(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    gate = Gate()
    statement = asyncio.ensure_future(tx.say(gate))
    await gate.reached()
    statement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await statement
    gate.let_through.set()

    with pytest.raises(StoreUnavailableError, match="rolled back"):
        await tx.commit()

    assert await items(driver) == []
    await driver.close()


async def test_a_cancelled_transaction_runs_to_its_end_and_lets_the_next_one_in(driver):
    gate = Gate()

    def body():
        yield Statement("insert", *insert("tea"))
        gate()

    running = asyncio.ensure_future(driver.run(Transaction("slow", Mode.ATOMIC, body)))
    await gate.reached()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    following = asyncio.ensure_future(driver.run(saying(Mode.SINGLE, insert("milk"))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not following.done()
    gate.let_through.set()
    await following

    assert await items(driver) == ["tea", "milk"]
    await driver.close()


async def test_cancelled_waiting_writer_does_not_write(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    late = await driver.begin()
    waiting = [
        asyncio.ensure_future(driver.run(saying(Mode.SINGLE, insert("milk")))),
        asyncio.ensure_future(late.connection.execute(INSERT, ("sugar",))),
    ]
    await until(lambda: len(lane_of(driver._driver.path)._waiting) == 2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await late.rollback()
    await tx.commit()

    await driver.run(saying(Mode.SINGLE, insert("jam")))
    assert await items(driver) == ["tea", "jam"]
    await driver.close()


async def test_statement_waiting_at_rollback_releases_its_turn(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    late = await driver.begin()
    waiting = asyncio.ensure_future(late.connection.execute(INSERT, ("milk",)))
    await until(lambda: len(lane_of(driver._driver.path)._waiting) == 1)
    await late.rollback()
    await tx.rollback()

    with pytest.raises(TransactionControlError, match="over"):
        await waiting
    await driver.run(saying(Mode.SINGLE, insert("sugar")))
    assert await items(driver) == ["sugar"]
    await driver.close()


async def test_cancelled_commit_is_still_executed(driver):  # P7
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    commit = asyncio.ensure_future(tx.commit())
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    await tx.rollback()  # the caller's clean-up finds nothing left to undo

    await driver.run(saying(Mode.SINGLE, insert("milk")))
    assert await items(driver) == ["tea", "milk"]
    await driver.close()


async def test_a_failed_first_statement_leaves_the_turn_to_others(path, module):
    driver = AsyncSqliteDriver(path, busy_timeout=0.01, module=module)
    other = a_stranger(path, module)
    tx = await driver.begin()
    with pytest.raises(StoreUnavailableError, match="SQLITE_BUSY"):
        await tx.connection.execute(INSERT, ("milk",))
    await tx.rollback()
    other.close()

    await driver.run(saying(Mode.SINGLE, insert("sugar")))
    assert await items(driver) == ["sugar"]
    await driver.close()


async def test_a_lost_transaction_frees_the_lane(driver):
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))
    with pytest.raises(tx.connection.IntegrityError):
        await tx.connection.execute("INSERT OR ROLLBACK INTO orders (item) VALUES ('tea')")

    with pytest.raises(TransactionControlError, match="the database rolled it back"):
        await tx.commit()
    await tx.rollback()

    await driver.run(saying(Mode.SINGLE, insert("milk")))
    assert await items(driver) == ["milk"]
    await driver.close()


# The facade


async def test_connection_wrapper_methods_are_awaitable(driver, module):
    tx = await driver.begin()
    connection = tx.connection
    cursor = await connection.execute(INSERT, ("tea",))
    assert (cursor.lastrowid, cursor.rowcount) == (1, 1)
    assert (await connection.executemany(INSERT, [("milk",), ("sugar",)])).rowcount == 2
    cursor = await connection.execute("SELECT id, item FROM orders WHERE id > :id ORDER BY id", {"id": 0})
    assert [column[0] for column in cursor.description] == ["id", "item"]
    assert (await cursor.fetchone())["item"] == "tea"
    assert [row["item"] async for row in cursor] == ["milk", "sugar"]
    assert await cursor.fetchall() == []
    assert await cursor.fetchone() is None
    await cursor.close()
    assert connection.IntegrityError is module.IntegrityError
    with pytest.raises(connection.IntegrityError):
        await connection.execute(INSERT, ("tea",))
    with pytest.raises(AttributeError, match="no backup"):
        _ = connection.backup
    await tx.commit()

    with pytest.raises(TransactionControlError, match="over"):
        await connection.execute("SELECT 1")
    assert await items(driver) == ["tea", "milk", "sugar"]
    await driver.close()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda connection: connection.commit(),
        lambda connection: connection.rollback(),
        lambda connection: connection.close(),
        lambda connection: connection.executescript("SELECT 1"),
        lambda connection: connection.execute("COMMIT"),
        lambda connection: connection.execute("/* well */ END"),
        lambda connection: connection.executemany("ROLLBACK", []),
        lambda connection: connection.__aenter__(),
    ],
)
async def test_handler_cannot_end_the_transaction(driver, attempt):  # F16, L5
    tx = await driver.begin()
    await tx.connection.execute(INSERT, ("tea",))

    with pytest.raises(TransactionControlError, match="ended by oncekey"):
        await attempt(tx.connection)
    with pytest.raises(TransactionControlError, match="ended by oncekey"):
        tx.connection.isolation_level = "DEFERRED"

    await tx.rollback()
    assert await items(driver) == []
    await driver.close()


async def test_empty_transaction_ends_without_effect(driver):
    for end in ("commit", "rollback"):
        tx = await driver.begin()
        await getattr(tx, end)()
        await getattr(tx, end)()
        with pytest.raises(TransactionControlError, match="over"):
            await tx.connection.execute("SELECT 1")
    await driver.close()
