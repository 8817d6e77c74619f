"""What a handler does to its own transaction is never an outage: its record is stored, or its execution failed.

503 is for a store that is away. A client that gets it tries again, and a handler that does the same again would be
refused again, for ever.
"""

import logging
from typing import Any

import psycopg
import pytest
from psycopg.adapt import Loader

from drivers.speaking import saying
from frameworks.shop import new_key
from oncekey.core.errors import TransactionControlError
from oncekey.core.flow import Mode
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver
from sessions.ways import WAYS, Shop

TABLES = """
    CREATE TABLE sales (item text, seller text DEFAULT current_user);
    CREATE TABLE witnesses (who text);
    CREATE FUNCTION bear_witness() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO witnesses VALUES (current_user); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER witness AFTER INSERT ON sales DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.item = 'witnessed') EXECUTE FUNCTION bear_witness();
    CREATE FUNCTION complain() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION USING ERRCODE = NEW.item, MESSAGE = 'no'; END $$;
    CREATE CONSTRAINT TRIGGER complaint AFTER INSERT ON sales DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (length(NEW.item) = 5) EXECUTE FUNCTION complain();
    CREATE FUNCTION hidden(setting text, value text) RETURNS text LANGUAGE sql AS
        $$ SELECT set_config(setting, value, true) $$;
"""
SLOW_RECORDS = """
    CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(2.5); RETURN NEW; END $$;
    CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON oncekey.record
        FOR EACH ROW WHEN (NEW.state = 'completed') EXECUTE FUNCTION dawdle();
"""
SELL = "INSERT INTO sales VALUES ('tea')"

GOES_WELL = {
    "a role": ["SET LOCAL ROLE {role}", SELL],
    "a role by a function of PostgreSQL": ["SELECT set_config('role', '{role}', true)", SELL],
    "a lock's time": ["SET LOCAL lock_timeout = '1ms'", SELL],
    "a path": ["SET LOCAL search_path = pg_temp", "INSERT INTO public.sales VALUES ('tea')"],
    "silence": ["SET LOCAL client_min_messages = 'error'", SELL],
    "another encoding": ["SET LOCAL client_encoding = 'LATIN1'", SELL],
    "a savepoint": ["SAVEPOINT mine", SELL],
    "a cursor": [SELL, "DECLARE mine CURSOR FOR SELECT 1"],
    "constraints": ["SET CONSTRAINTS ALL DEFERRED", SELL],
}
FAILS = {
    "a role that a function set": (["SELECT hidden('role', '{role}')"], "42501"),
    "no writes": ([SELL, "SET LOCAL transaction_read_only = on"], "25006"),
    "no writes, by a function": (["SELECT hidden('transaction_read_only', 'on')"], "25006"),
    "a trigger's refusal of a password": (["INSERT INTO sales VALUES ('28P01')"], "28P01"),
    "a trigger's own complaint": (["INSERT INTO sales VALUES ('P0001')"], "P0001"),
    "a lost conflict": (["INSERT INTO sales VALUES ('40001')"], "40001"),
}


@pytest.fixture
def role(tables_dsn):
    """A role that may write the application's tables and none of oncekey's."""
    name = f"tenant_{tables_dsn.rpartition('_')[2]}"
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute(f"CREATE ROLE {name}".encode())
        connection.execute(f"GRANT ALL ON sales, witnesses TO {name}".encode())
    yield name
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {name} CASCADE".encode())
        connection.execute(f"DROP ROLE {name}".encode())


def rows(dsn: str, sql: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(sql.encode()).fetchall()


@pytest.mark.parametrize("way", WAYS)
async def test_transaction_settings_of_a_handler_do_not_affect_the_record(way, tables_dsn, role):
    shop = Shop(way, tables_dsn)
    async with shop.open():
        for what, statements in GOES_WELL.items():
            key = new_key()
            inside = shop.saying(*[statement.format(role=role) for statement in statements])
            assert [(await shop.send(inside, key=key)).status for _ in range(2)] == [200, 200], what
        assert shop.runs == len(GOES_WELL)
        assert set(rows(tables_dsn, "SELECT DISTINCT seller FROM sales")) == {(role,), ("postgres",)}


@pytest.mark.parametrize("way", WAYS)
async def test_statement_timeout_of_a_handler_does_not_affect_the_record(way, tables_dsn, role):
    shop = Shop(way, tables_dsn)
    async with shop.open():
        with psycopg.connect(tables_dsn, autocommit=True) as connection:
            connection.execute(SLOW_RECORDS)
        assert (await shop.send(shop.saying("SET LOCAL statement_timeout = '2s'"))).status == 200


@pytest.mark.parametrize("way", WAYS)
async def test_a_refusal_that_the_handler_caused_is_a_failed_execution(way, tables_dsn, role, caplog):
    shop = Shop(way, tables_dsn)
    async with shop.open():
        for what, (statements, code) in FAILS.items():
            caplog.clear()
            with caplog.at_level(logging.ERROR, "oncekey"):
                reply = await shop.send(shop.saying(*[statement.format(role=role) for statement in statements]))
            assert (reply.status, reply.json()["code"]) == (500, "idempotency_execution_failed"), what
            assert code in caplog.text, what
        assert (await shop.send(shop.saying(SELL))).status == 200
        assert rows(tables_dsn, "SELECT item FROM sales") == [("tea",)]


@pytest.mark.parametrize("way", WAYS)
async def test_deferred_triggers_run_as_the_role_of_the_handler(way, tables_dsn, role):
    shop = Shop(way, tables_dsn)
    async with shop.open():
        inside = shop.saying(f"SET LOCAL ROLE {role}", "INSERT INTO sales VALUES ('witnessed')")
        assert (await shop.send(inside)).status == 200
        assert rows(tables_dsn, "SELECT who FROM witnesses") == [(role,)]


def leave_open(connection: Any, what: str) -> Any:
    """Begin what is to be ended in a `with` block, and do not end it."""
    if what == "pipeline":
        return connection.pipeline()
    cursor = connection.cursor()
    if what == "copy":
        return cursor.copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
    return cursor.stream("SELECT generate_series(1, 100000)")


@pytest.mark.parametrize("what", ["pipeline", "copy", "stream"])
@pytest.mark.parametrize("blocking", [False, True], ids=["asyncio", "threads"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is refused when it is collected
async def test_open_cursor_or_stream_prevents_the_commit(what, blocking, tables_dsn):
    if blocking:
        driver = PsycopgDriver(tables_dsn, pool_size=1, statement_timeout=0.2)
        tx = driver.begin()
        left = leave_open(tx.connection, what)
        next(left) if what == "stream" else left.__enter__()
        with pytest.raises(TransactionControlError):
            tx.commit()
        assert driver.run(saying(Mode.READ, "SELECT 1")) == [[(1,)]]
        driver.close()
        return
    other = AsyncPsycopgDriver(tables_dsn, pool_size=1, statement_timeout=0.2)
    atx = await other.begin()
    open_one = leave_open(atx.connection, what)
    await (anext(aiter(open_one)) if what == "stream" else open_one.__aenter__())
    with pytest.raises(TransactionControlError):
        await atx.commit()
    assert await other.run(saying(Mode.READ, "SELECT 1")) == [[(1,)]]
    await other.close()


@pytest.mark.parametrize("way", ["asyncpg", "psycopg"])
async def test_type_codecs_of_a_handler_are_removed_afterwards(way, tables_dsn):
    shop = Shop(way, tables_dsn)

    async def teaches(op: Any) -> Any:
        if way == "asyncpg":
            await op.connection.set_type_codec(
                "json", schema="pg_catalog", encoder=str, decoder=lambda _: "mine", format="text"
            )
        else:
            op.connection.adapters.register_loader("json", Mine)
        return (await shop.say(op.connection, "SELECT '1'::json"))[0][0]

    async with shop.open():
        assert (await shop.send(teaches)).json() == "mine"
        for _ in range(3):
            assert (await shop.send(shop.saying("SELECT '1'::json"))).json() != [["mine"]]


class Mine(Loader):
    """Takes everything for the same."""

    def load(self, _: Any) -> str:
        return "mine"
