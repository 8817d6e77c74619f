"""From a URL to an engine, without touching anything."""

from __future__ import annotations

import re
import sys
import traceback

import pytest

from harness import flows
from oncekey import wire
from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.databases.address import Address, Kind
from oncekey.databases.memory import AsyncMemoryDriver, MemoryDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.asynchronous import AsyncSqliteDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.once import Once
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import ManualClock, a_claim

NOBODY = "postgresql://nobody:secret@127.0.0.1:1/nothing"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("memory:", Address(Kind.MEMORY)),
        ("memory://", Address(Kind.MEMORY)),
        ("sqlite:///shop.db", Address(Kind.SQLITE, "shop.db")),
        ("sqlite:///data/shop%20%3F.db", Address(Kind.SQLITE, "data/shop ?.db")),
        ("sqlite:////var/lib/shop.db", Address(Kind.SQLITE, "/var/lib/shop.db")),
        ("postgresql://u:p@h:5/d", Address(Kind.POSTGRES, "postgresql://u:p@h:5/d")),
        ("postgres://h/d", Address(Kind.POSTGRES, "postgresql://h/d")),
        ("postgresql+psycopg://h/d", Address(Kind.POSTGRES, "postgresql://h/d", "psycopg")),
        ("postgresql+asyncpg://h/d", Address(Kind.POSTGRES, "postgresql://h/d", "asyncpg")),
        ("postgresql://h/d?pool_size=3", Address(Kind.POSTGRES, "postgresql://h/d", pool_size=3)),
        (
            "postgresql://h/d?application_name=a+b&pool_size=7&options=-c%20x%3D1",
            Address(Kind.POSTGRES, "postgresql://h/d?application_name=a+b&options=-c%20x%3D1", pool_size=7),
        ),
        ("postgresql://u:p%23#x@h/d", Address(Kind.POSTGRES, "postgresql://u:p%23#x@h/d")),
        ("postgresql://u@[::1]:5,h/d", Address(Kind.POSTGRES, "postgresql://u@[::1]:5,h/d")),
        ("postgresql:///d?host=/run/pg", Address(Kind.POSTGRES, "postgresql:///d?host=/run/pg")),
    ],
)
def test_every_supported_url_form_is_parsed(url, address):
    assert wire.understand(url) == address


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "is not a store"),
        ("shop.db", "is not a store"),
        ("oracle://h/d", "no store for oracle: keys can be stored in .*PostgreSQL.* or memory; use memory:"),
        ("memory:x", "memory: has no name"),
        ("sqlite:", "three slashes"),
        ("sqlite://shop.db", "three slashes"),
        ("sqlite:///", "three slashes"),
        ("sqlite:///:memory:", "three slashes"),
        ("sqlite:///shop.db?mode=ro", "takes no options"),
        ("postgresql+pg8000://h/d", r"no driver pg8000 for postgresql: use .*postgresql\+asyncpg://"),
        ("sqlite+aiosqlite:///shop.db", r"no driver aiosqlite for sqlite: use sqlite://"),
        ("postgresql:h/d", "two slashes"),
        ("postgresql://u@h:port/d", "port that is not a number"),
        ("postgresql://u@h:0/d", "port that is not a number"),
        ("postgresql://u@a:1,b:65536/d", "port that is not a number"),
        ("postgresql://u@[::1/d", "closing bracket"),
        ("postgresql://u@[::1]x/d", "closing bracket"),
        ("postgresql://u:50%@h/d", "does not begin an escape"),
        ("postgresql://h/d?pool_size=0", "not a number of connections"),
        ("postgresql://h/d?pool_size=many", "not a number of connections"),
        ("postgresql://h/d?pool_size=", "not a number of connections"),
    ],
)
def test_an_unsupported_url_raises_with_the_supported_forms(url, sentence):
    for understood_by in (wire.understand, wire.connect, wire.aconnect, wire.migrations_for):
        with pytest.raises(ConfigurationError, match=sentence):
            understood_by(url)


def test_the_url_error_lists_forms_without_secrets():
    with pytest.raises(ConfigurationError) as caught:
        wire.connect("user:password-of-somebody@h/d")
    assert "password-of-somebody" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        wire.connect("what-was-meant-to-be-a-password")
    assert "password" not in str(caught.value)
    for form in ("memory:", "sqlite:///", "sqlite:////", "postgresql://"):
        assert form in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "{driver}://shop:{secret}%zz@127.0.0.1:5432/shop",
        "{driver}://shop:{secret}/x@127.0.0.1:5432/shop",
        "{driver}://shop:{secret}?x=1@127.0.0.1:5432/shop",
        "{driver}://shop:1?{secret}=1@127.0.0.1:1/shop",
        "{driver}://shop:{secret}@127.0.0.1:5432x/shop",
        "{driver}://shop:{secret}@[::1/shop",
        "{driver}://shop:{secret}@127.0.0.1:1/shop?bogus=1",
        "{driver}://shop:{secret}@127.0.0.1:1/shop",
        "{driver}:shop:{secret}@127.0.0.1:1/shop",
        "{driver}+pg8000://shop:{secret}@127.0.0.1:1/shop",
        "host=db password={secret}:x",
        "shop:{secret}@127.0.0.1:5432/shop",
    ],
)
@pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg", "postgresql+asyncpg"])
async def test_no_error_repeats_a_password(url, driver):  # X8
    secret = "S3cretPw"
    with pytest.raises((ConfigurationError, StoreUnavailableError)) as caught:
        await wire.aconnect(url.format(driver=driver, secret=secret)).driver.run(
            Transaction("test", Mode.READ, lambda: iter([Statement("test", "SELECT 1")]))
        )
    shown = "".join(traceback.format_exception(caught.value))
    assert secret not in re.sub(r"^    .*$", "", shown, flags=re.MULTILINE)  # but for our own lines of code
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, ConfigurationError):
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_an_unknown_libpq_option_is_reported():
    with pytest.raises(ConfigurationError, match="has the option bogus, which libpq does not support"):
        wire.connect("postgresql://u@127.0.0.1:1/x?bogus=1")


def test_connect_creates_blocking_engines_without_io(tmp_path, monkeypatch):
    from oncekey.databases.postgres.generated.psycopg import PsycopgDriver

    monkeypatch.chdir(tmp_path)
    for url, store, driver in (
        ("memory:", MemoryStore, MemoryDriver),
        ("sqlite:///shop.db", SqliteStore, SqliteDriver),
        (NOBODY, PostgresStore, PsycopgDriver),
    ):
        engine = wire.connect(url)
        assert isinstance(engine.store, store)
        assert isinstance(engine.driver, driver)
        engine.close()
    assert list(tmp_path.iterdir()) == []  # nothing was opened


async def test_aconnect_creates_async_engines_without_io(tmp_path, monkeypatch):
    from oncekey.databases.postgres.asyncpg import AsyncpgDriver
    from oncekey.databases.postgres.psycopg_async import AsyncPsycopgDriver

    monkeypatch.chdir(tmp_path)
    for url, store, driver in (
        ("memory:", MemoryStore, AsyncMemoryDriver),
        ("sqlite:///shop.db", SqliteStore, AsyncSqliteDriver),
        (NOBODY, PostgresStore, AsyncpgDriver),
        (NOBODY.replace("postgresql", "postgresql+asyncpg"), PostgresStore, AsyncpgDriver),
        (NOBODY.replace("postgresql", "postgresql+psycopg"), PostgresStore, AsyncPsycopgDriver),
    ):
        engine = wire.aconnect(url)
        assert isinstance(engine.store, store)
        assert isinstance(engine.driver, driver)
        await engine.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_can_be_made_where_no_event_loop_runs():
    for url in ("memory:", "sqlite:///shop.db", NOBODY):
        assert wire.aconnect(url).store is not None


@pytest.mark.parametrize(
    ("connect", "url", "missing", "command"),
    [
        (wire.connect, "postgresql://h/d", "psycopg", "oncekey[postgres]"),
        (wire.aconnect, "postgresql+psycopg://h/d", "psycopg", "oncekey[postgres]"),
        (wire.aconnect, "postgresql+asyncpg://h/d", "asyncpg", "oncekey[asyncpg]"),
    ],
)
def test_a_missing_driver_raises_with_the_install_command(monkeypatch, connect, url, missing, command):
    hide(monkeypatch, missing)

    with pytest.raises(ConfigurationError) as caught:
        connect(url)

    assert f"{missing} is not installed" in str(caught.value)
    assert f"pip install '{command}'" in str(caught.value)


def test_a_store_without_a_driver_is_rejected_at_construction(monkeypatch):
    hide(monkeypatch, "asyncpg")
    Once(NOBODY)  # psycopg serves both
    hide(monkeypatch, "psycopg")

    with pytest.raises(ConfigurationError, match=r"psycopg is not installed: pip install 'oncekey\[postgres\]'"):
        Once(NOBODY)


def test_each_url_scheme_belongs_to_one_store():
    schemes = [scheme for row in wire.STORES for scheme in row.schemes]
    assert len(schemes) == len(set(schemes))
    for row in wire.STORES:
        assert {wire.understand(form).kind for form in row.forms} == {row.kind}
        for way in (*row.blocking, *row.asynchronous):
            assert isinstance(way.load(), type)
    assert {row.kind for row in wire.STORES} == set(Kind)


async def test_psycopg_replaces_a_missing_asyncpg(monkeypatch):
    hide(monkeypatch, "asyncpg")

    engine = wire.aconnect(NOBODY)

    assert type(engine.driver).__name__ == "AsyncPsycopgDriver"
    await engine.close()


def hide(monkeypatch, package: str) -> None:
    found = wire.find_spec
    monkeypatch.setattr(wire, "find_spec", lambda name: None if name == package else found(name))


def test_connect_rejects_asyncpg_urls():
    with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg"):
        wire.connect("postgresql+asyncpg://h/d")


def test_connect_passes_the_clock_to_the_store():
    clock = ManualClock()
    verdict = flows.begin(wire.connect("memory:", clock=clock), a_claim(), Policy())

    assert isinstance(verdict, Proceed)
    assert verdict.record.created_at == clock.now


def test_the_migrations_of_a_url_need_no_database():
    assert "oncekey_record" in wire.migrations_for("sqlite:////nowhere/at/all.db").script()
    assert "oncekey.record" in wire.migrations_for(NOBODY).script()
    with pytest.raises(ConfigurationError, match="nothing to migrate"):
        wire.migrations_for("memory:")


def test_importing_wire_imports_no_optional_package():
    script = "import sys, oncekey.wire; sys.exit(any(name in sys.modules for name in ('psycopg', 'asyncpg', 'typer')))"
    import subprocess

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
