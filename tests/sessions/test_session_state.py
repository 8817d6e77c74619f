"""What a handler leaves in a session does not reach the next request, of another tenant, on the same connection."""

import asyncio
import time
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import Depends, Request
from sqlalchemy import event, text

from frameworks.shop import new_key
from harness.asgi import Caller
from harness.dsn import through
from harness.patience import PATIENCE
from harness.proxy import Proxy
from harness.tables import make_tables
from oncekey.core.errors import TransactionControlError
from oncekey.core.model import INLINE, LOCAL, PHASED
from sessions.ways import SQLALCHEMY, WAYS, Shop

RULES = """
    CREATE TABLE secrets (tenant text, secret text);
    INSERT INTO secrets VALUES ('acme', 'of acme'), ('bolt', 'of bolt');
    ALTER TABLE secrets ENABLE ROW LEVEL SECURITY;
    CREATE POLICY own ON secrets USING (tenant = current_setting('app.tenant', true));
    CREATE FUNCTION become(who text) RETURNS void LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE format('SET app.tenant = %L', who); END $$;
    CREATE FUNCTION hear(what text) RETURNS void LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE format('LISTEN %I', what); END $$;
    GRANT ALL ON secrets TO PUBLIC;
"""
SECRETS = "SELECT coalesce(string_agg(secret, ',' ORDER BY secret), 'nothing') FROM secrets"
LEFT = {
    "set_config": ("SELECT set_config('app.tenant', 'acme', false)", SECRETS, "nothing"),
    "a SET in a function": ("SELECT become('acme')", SECRETS, "nothing"),
    "a role": ("SELECT set_config('role', 'pg_monitor', false)", "SELECT (current_user <> 'pg_monitor')::text", "true"),
    "a search path": (
        "SELECT set_config('search_path', 'pg_catalog', false)",
        "SELECT current_setting('search_path')",
        '"$user", public',
    ),
    "a temporary table": ("CREATE TEMP TABLE mine (x int)", "SELECT (to_regclass('mine') IS NULL)::text", "true"),
    "a cursor": (
        "DECLARE mine CURSOR WITH HOLD FOR SELECT 1",
        "SELECT count(*)::text FROM pg_cursors WHERE name = 'mine'",
        "0",
    ),
    "a channel": ("SELECT hear('news')", "SELECT count(*)::text FROM pg_listening_channels()", "0"),
    "a lock": ("SELECT pg_advisory_lock(4711)", "SELECT pg_try_advisory_xact_lock(4711)::text", "true"),
}


@pytest.fixture
def shop_dsn(postgres_dsn, postgres_server):
    """The database as a role without privileges sees it: row-level security does not bind a superuser."""
    role = f"shop_{postgres_dsn.rpartition('_')[2]}"
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(RULES)
        connection.execute(f"CREATE ROLE {role} LOGIN IN ROLE pg_monitor".encode())
        connection.execute(f'GRANT CREATE ON DATABASE "{name}" TO {role}'.encode())
    yield postgres_dsn.replace("postgres@", f"{role}@", 1)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {role} CASCADE".encode())
        connection.execute(f"DROP ROLE {role}".encode())


def let_monitors_in(dsn: str) -> None:
    """A handler that changes its role has to be able to store its answer as that role."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("GRANT ALL ON SCHEMA oncekey TO pg_monitor")
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA oncekey TO pg_monitor")


async def backend(shop: Shop, connection: Any) -> int:
    (row,) = await shop.say(connection, "SELECT pg_backend_pid()")
    return int(row[0])


@pytest.mark.parametrize("way", WAYS)
async def test_session_state_does_not_reach_the_next_request(shop_dsn, way):  # X12
    shop = Shop(way, shop_dsn)
    backends: list[int] = []

    def leaves(statement: str) -> Any:
        async def inside(op: Any) -> None:
            backends.append(await backend(shop, op.connection))
            await shop.say(op.connection, statement)

        return inside

    def finds(query: str) -> Any:
        async def inside(op: Any) -> Any:
            backends.append(await backend(shop, op.connection))
            return (await shop.say(op.connection, query))[0][0]

        return inside

    async with shop.open():
        let_monitors_in(shop_dsn)
        assert (await shop.send(finds(SECRETS), tenant="bolt")).json() == "nothing"
        for what, (statement, query, expected) in LEFT.items():
            assert (await shop.send(leaves(statement), tenant="acme")).status == 200, what
            for _ in range(3):
                assert (await shop.send(finds(query), tenant="bolt")).json() == expected, what
    # They shared connections, and the reset did not cost any.
    assert len(set(backends)) <= 2


@pytest.mark.parametrize("way", WAYS)
async def test_advisory_lock_is_released_after_the_request(shop_dsn, way):  # X12
    shop = Shop(way, shop_dsn)
    async with shop.open():
        await shop.send(shop.saying("SELECT pg_advisory_lock(4711)"))
        await until_free(shop_dsn)


async def until_free(dsn: str) -> None:
    """A session is reset soon after its request, which does not wait for that."""
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
    with psycopg.connect(dsn, autocommit=True) as outside:
        deadline = time.monotonic() + PATIENCE
        while outside.execute(held).fetchone() != (0,):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("way", WAYS)
async def test_connection_options_survive_the_reset(shop_dsn, way):
    asked = "SELECT current_setting('app.service') || current_setting('lock_timeout') || current_user"
    options, plain = {}, shop_dsn
    if way == "sa-asyncpg":
        settings = {"app.service": "shop", "lock_timeout": "7s", "role": "pg_monitor"}
        options["connect_args"] = {"server_settings": settings}
    else:
        mark = "&" if "?" in shop_dsn else "?"
        shop_dsn += f"{mark}options=-c%20app.service%3Dshop%20-c%20lock_timeout%3D7s%20-c%20role%3Dpg_monitor"
    shop = Shop(way, shop_dsn, **options)
    shop.once._migrate = False
    let_monitors_in(make_tables(plain))
    async with shop.open():
        for _ in range(3):
            await shop.send(shop.saying("SELECT set_config('lock_timeout', '1s', false)"))
            assert (await shop.send(shop.saying(asked))).json() == [["shop7spg_monitor"]]


@pytest.mark.parametrize("way", SQLALCHEMY)
async def test_settings_of_a_connect_listener_survive_the_reset(shop_dsn, way):
    shop = Shop(way, shop_dsn)
    assert shop.engine is not None

    @event.listens_for(shop.engine.sync_engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SET app.service = 'shop'")
        cursor.close()
        connection.commit()

    asked = "SELECT current_setting('app.service') || coalesce(current_setting('app.tenant', true), '')"
    async with shop.open():
        for _ in range(3):
            await shop.send(shop.saying("SELECT set_config('app.tenant', 'acme', false)"))
            assert (await shop.send(shop.saying(asked), tenant="bolt")).json() == [["shop"]]


@pytest.mark.parametrize("way", WAYS)
async def test_prepare_is_refused(shop_dsn, way):  # X12
    shop = Shop(way, shop_dsn)
    said: list[str] = []

    async def prepares(op: Any) -> None:
        with pytest.raises(TransactionControlError) as refused:
            await shop.say(op.connection, "PREPARE mine AS SELECT 1")
        said.append(str(refused.value))

    async with shop.open():
        assert (await shop.send(prepares)).status == 200
    assert "PREPARE is refused here" in said[0]


@pytest.mark.parametrize("way", WAYS)
async def test_a_reset_that_does_not_arrive_ends_the_connection(shop_dsn, way):  # X12
    with Proxy.before(shop_dsn) as proxy:
        shop = Shop(way, through(shop_dsn, proxy.port))
        async with shop.open():
            for _ in range(3):
                lost = proxy.lose_request(b"RESET ALL")
                reply = await shop.send(shop.saying("SELECT set_config('app.tenant', 'acme', false)"))
                # Where the reset travels with the COMMIT, that does not arrive either, and nothing was executed.
                assert reply.status == (503 if way in ("asyncpg", "psycopg") else 200)
                assert await asyncio.to_thread(lost.wait, 10)
                assert (await shop.send(shop.saying(SECRETS), tenant="bolt")).json() == [["nothing"]]
            await until_free(shop_dsn)


@pytest.mark.parametrize("way", WAYS)
async def test_a_replay_resets_nothing(shop_dsn, way, postgres_dsn):
    shop = Shop(way, shop_dsn)
    resets = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query = 'DISCARD TEMP'"
    with psycopg.connect(postgres_dsn, autocommit=True) as outside:
        outside.execute("CREATE EXTENSION pg_stat_statements")
        outside.execute("SELECT pg_stat_statements_reset(0, oid) FROM pg_database WHERE datname = current_database()")
        resets += " AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        async with shop.open():
            for replayed in (False, True, True):
                reply = await shop.send(shop.saying("SELECT 1"), key="key-of-the-replays")
                assert reply.replayed == replayed
        assert outside.execute(resets).fetchone() == (1,)


@pytest.mark.parametrize("way", SQLALCHEMY)
@pytest.mark.parametrize("effects", [INLINE, LOCAL, PHASED])
async def test_state_of_a_dependency_session_does_not_reach_the_next(shop_dsn, way, effects):  # X12
    """Authentication that sets the tenant for row-level security through `once.session`, as it is often done."""
    shop = Shop(way, shop_dsn)

    async def authenticate(session: Annotated[Any, Depends(shop.once.session)]) -> None:
        await session.execute(text("SELECT set_config('app.tenant', 'acme', false), pg_advisory_lock(4711)"))
        if effects is INLINE:
            await session.commit()

    @shop.app.post("/lent", dependencies=[Depends(authenticate)])
    @shop.once.protect(effects=effects)
    async def lent(request: Request) -> int:
        return 1

    @shop.app.get("/lent", dependencies=[Depends(authenticate)])
    async def reading() -> int:
        return 1

    async with shop.open():
        for method in ("POST", "GET"):
            lines = [("Idempotency-Key", new_key()), ("X-Tenant", "acme")]
            assert (await Caller(shop.app, method, "/lent", headers=lines).run()).status == 200
            for _ in range(3):
                assert (await shop.send(shop.saying(SECRETS), tenant="bolt")).json() == [["nothing"]]
            await until_free(shop_dsn)


@pytest.mark.parametrize("way", ["asyncpg", "psycopg", *SQLALCHEMY])
async def test_state_of_a_dependency_connection_does_not_reach_the_next(shop_dsn, way):  # X12
    shop = Shop(way, shop_dsn)

    async def authenticate(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        await shop.say(connection, "SELECT set_config('app.tenant', 'acme', false), pg_advisory_lock(4711)")

    @shop.app.post("/lent", dependencies=[Depends(authenticate)])
    @shop.once.protect(effects=PHASED)
    async def lent(request: Request) -> int:
        return 1

    @shop.app.get("/lent", dependencies=[Depends(authenticate)])
    async def reading() -> int:
        return 1

    async with shop.open():
        for method in ("POST", "GET"):
            lines = [("Idempotency-Key", new_key()), ("X-Tenant", "acme")]
            assert (await Caller(shop.app, method, "/lent", headers=lines).run()).status == 200
            assert (await shop.send(shop.saying(SECRETS), tenant="bolt")).json() == [["nothing"]]
            await until_free(shop_dsn)
