"""Litestar's SQLAlchemy plugin: the injected session is the transaction that the key commits with."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar, post
from sqlalchemy.ext.asyncio import AsyncSession

from harness.patience import wait_until
from litestar_server.sqlshop import SQLAlchemyAsyncConfig, SQLAlchemyPlugin, SqlShop
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import LOCAL
from oncekey.litestar import OncePlugin
from oncekey.once import Once
from wsgi.shop import execute, send


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("tables_dsn")
    return found


def new_key() -> str:
    return str(uuid.uuid4())


def sold(url: str) -> list[str]:
    return sorted(item for (item,) in execute(url, "SELECT item FROM sale"))


def records(url: str) -> int:
    table = "oncekey_record" if url.startswith("sqlite") else "oncekey.record"
    return int(execute(url, f"SELECT count(*) FROM {table}")[0][0])


@pytest.mark.parametrize("before_send", ["autocommit", None])
@pytest.mark.parametrize("first", [False, True])
def test_the_injected_session_commits_with_the_key(url: str, before_send: Any, first: bool) -> None:
    # R71: its commit() only flushes, and the plugin's own commit before the answer finds nothing to do; nor does it
    # matter which plugin is named first
    shop = SqlShop(url, before_send=before_send, first=first)
    with shop.served() as port:
        key = new_key()
        sent = send(port, "/sales", {"item": "tea"}, key=key)
        again = send(port, "/sales", {"item": "tea"}, key=key)
    assert (sent.status, again.body, again.replayed) == (201, sent.body, True)
    assert (sold(url), shop.runs, shop.commits.together) == (["tea"], ["tea"], [True])


def test_a_failed_litestar_commit_returns_500(tables_dsn: str) -> None:
    # The plugin swallows a failing commit: 201 and no row on the route that is not protected; ours is no success, and
    # leaves no record
    shop = SqlShop(tables_dsn)
    with shop.served() as port:
        key, order = new_key(), {"item": "tea", "does": "promise"}
        plain = send(port, "/plain", {"item": "lost", "does": "promise"}, key=None)
        ours = send(port, "/sales", order, key=key)
        assert (sold(tables_dsn).count("tea"), records(tables_dsn)) == (0, 0)
        again = send(port, "/sales", order, key=key)
    assert (plain.status, ours.status, again.status) == (201, 500, 500)
    assert ours.json()["code"] == "idempotency_execution_failed"
    assert sold(tables_dsn) == ["lost"]  # what its own commit() had committed before


def test_exceptions_and_rollbacks_leave_no_rows(url: str) -> None:
    # L6, F20
    shop = SqlShop(url)
    with shop.served() as port:
        assert send(port, "/sales", {"item": "a", "does": "raise"}, key=new_key()).status == 500
        assert send(port, "/sales", {"item": "b", "does": "roll back"}, key=new_key()).status == 500
        refused = send(port, "/sales", {"item": "c", "status": 409}, key=(key := new_key()))
        again = send(port, "/sales", {"item": "c", "status": 409}, key=key)
    assert (refused.status, again.status, again.replayed) == (409, 409, True)
    assert sold(url) == ["c"]


def test_a_commit_statement_in_the_session_is_rejected(url: str) -> None:
    # L5
    shop = SqlShop(url)
    with shop.served() as port:
        replies = [send(port, "/sales", {"item": "tea", "does": "say commit"}, key=new_key()) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(500, False)] * 2
    assert sold(url) == []


def test_a_dependency_may_read_before_the_claim_and_not_write(url: str) -> None:
    shop = SqlShop(url)
    with shop.served() as port:
        key = new_key()
        assert send(port, "/served", {"item": "tea"}, key=key).status == 201
        assert send(port, "/served", {"item": "tea"}, key=key).replayed
        assert send(port, "/served", {"item": "milk"}, key=new_key()).status == 201
        assert send(port, "/early", {}, key=new_key()).status == 500
    assert shop.runs == ["knew 0", "tea", "knew 1", "milk"]
    assert (sold(url), shop.commits.together) == (["milk", "tea"], [True, True])


def test_keyless_and_unprotected_requests_commit(url: str) -> None:
    shop = SqlShop(url)
    with shop.served() as port:
        assert send(port, "/optional", {"item": "tea"}, key=None).status == 201
        assert send(port, "/optional", {"item": "undone", "does": "raise"}, key=None).status == 500
        assert send(port, "/plain", {"item": "plain"}, key=None).status == 201
        assert send(port, "/inline", {"item": "inline"}, key=new_key()).status == 201
    assert sold(url) == ["inline", "plain", "tea"]


def test_each_phase_commits_the_injected_session(url: str) -> None:
    # R116
    shop = SqlShop(url)
    with shop.served() as port:
        key = new_key()
        assert send(port, "/phases", {"item": "tea"}, key=key).status == 500
        assert sold(url) == ["tea"]
        again = send(port, "/phases", {"item": "tea"}, key=key)
        replayed = send(port, "/phases", {"item": "tea"}, key=key)
    assert (again.status, replayed.body, replayed.replayed) == (201, again.body, True)
    assert (sold(url), shop.runs) == (["tea paid"], ["phases", "phases"])


def test_no_connection_is_left_behind(url: str) -> None:
    # one connection for the rows and the key, and it is back in the pool when the answer is there
    shop = SqlShop(url)
    pool: Any = shop.engine.pool
    with shop.served() as port:
        key = new_key()
        for path, order in [
            ("/sales", {"item": "a"}),
            ("/sales", {"item": "b", "does": "raise"}),
            ("/served", {"item": "c"}),
        ]:
            send(port, path, order, key=key if path == "/sales" else new_key())
        send(port, "/sales", {"item": "a"}, key=key)
        wait_until(lambda: pool.checkedout() == 0, lambda: f"{pool.checkedout()} connections are out")


async def test_a_session_of_another_database_is_refused(tmp_path: Path) -> None:
    # One sentence at start-up: its rows would not commit with the key
    alchemy = SQLAlchemyAsyncConfig(connection_string=f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)

    @post("/sales")
    @once.protect(effects=LOCAL)
    async def sell(db_session: AsyncSession) -> None: ...

    app = Litestar([sell], plugins=[SQLAlchemyPlugin(config=alchemy), OncePlugin(once, tenant=lambda _: "acme")])
    with pytest.raises(ExceptionGroup) as raised:
        async with app.lifespan():
            pass
    sentence = r"sell depends on db_session, whose rows would not commit with the key"
    assert raised.group_contains(ConfigurationError, match=sentence)
    await alchemy.get_engine().dispose()
