"""The programs of README, home page, tutorial and guides run, and do what their pages say."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pytest

from harness.pages import Block, Page, load, pages
from harness.ports import free_port
from harness.walkthrough import with_store
from oncekey.wire import aconnect

WALKED = pages("README.md", "docs/index.md", "docs/tutorial.md", "docs/howto/*.md")
EVERY = pages("README.md", "docs/**/*.md")
SERVES = re.compile(r"^(?:app|application) = (?:FastAPI|Starlette|flask\.Flask|once\.asgi|once\.wsgi)\(", re.MULTILINE)
KEY = {"Idempotency-Key": "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999"}


@dataclass(frozen=True)
class Send:
    """A request, and the status and members that its answer must have."""

    path: str
    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=lambda: KEY)
    method: str = "POST"
    has: dict[str, Any] = field(default_factory=dict)
    replayed: bool = False


def _as(token: str) -> dict[str, str]:
    return {**KEY, "Authorization": f"Bearer {token}"}


EXERCISES: dict[str, tuple[Sequence[str], Sequence[Send]]] = {
    "docs/index.md:shop.py": (
        ("CREATE TABLE orders (product TEXT)",),
        (
            Send("/orders?product=tea", 400, headers={}),
            Send("/orders?product=tea", 201, has={"product": "tea"}),
            Send("/orders?product=tea", 201, has={"product": "tea"}, replayed=True),
            Send("/orders?product=jam", 422),
        ),
    ),
    "docs/howto/moving.md:moved.py": (
        (
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)",
            "CREATE TABLE request_keys (key TEXT PRIMARY KEY, tenant TEXT, status INTEGER, body TEXT)",
            """INSERT INTO request_keys VALUES ('answered-by-the-old-service', 't', 201, '{"id": 77}'),
               ('left-by-the-old-service', 't', NULL, NULL)""",
        ),
        (
            Send("/orders", 201, {"product": "a"}, {"Idempotency-Key": "answered-by-the-old-service"}, has={"id": 77}),
            Send("/orders", 201, {"product": "a"}, {"Idempotency-Key": "answered-by-the-old-service"}, replayed=True),
            Send("/orders", 503, {"product": "b"}, {"Idempotency-Key": "left-by-the-old-service"}),
            Send("/orders", 503, {"product": "b"}, {"Idempotency-Key": "left-by-the-old-service"}),
            Send("/orders", 201, {"product": "c"}, has={"id": 1}),
        ),
    ),
    "docs/howto/moving.md:workflow.py": (
        ("CREATE TABLE payments (id INTEGER PRIMARY KEY, amount INTEGER, charge TEXT)",),
        (
            Send("/payments", 201, {"amount": 1999}, has={"id": 1, "charged": True}),
            Send("/payments", 201, {"amount": 1999}, has={"id": 1}, replayed=True),
        ),
    ),
    "docs/howto/enrol-a-route.md:enrol.py": (
        ("CREATE TABLE orders (id INTEGER PRIMARY KEY, text TEXT)",),
        (
            Send("/orders", 201, {"text": "a"}, has={"id": 1}),
            Send("/orders", 201, {"text": "a"}, has={"id": 1}, replayed=True),
            Send("/orders", 400, {"text": "a"}, headers={}),
            Send("/comments", 422, {"text": "a"}),  # the key is the order's
            Send("/comments", 201, {"text": "b", "client_time": "1"}, headers={"Idempotency-Key": "c" * 16}),
            Send(
                "/comments",
                201,
                {"text": "b", "client_time": "2"},
                headers={"Idempotency-Key": "c" * 16},
                replayed=True,
            ),
            Send("/comments", 201, {"text": "c"}, headers={}),
            Send("/comments", 400, {"text": "c"}, headers={"Idempotency-Key": '""'}),
            Send(f"/idempotency-keys/{KEY['Idempotency-Key']}", 200, method="GET", has={"operation": "create_order"}),
            Send("/idempotency", 200, method="GET", headers={}),
        ),
    ),
    "docs/howto/tenant-scope.md:scopes.py": (
        (),
        (
            Send("/invoices", 401),
            Send("/invoices", 201, headers=_as("token-of-ann"), has={"for": "ann"}),
            Send("/invoices", 201, headers=_as("token-of-ann"), has={"for": "ann"}, replayed=True),
            Send("/invoices", 201, headers=_as("token-of-bob"), has={"for": "bob"}),
        ),
    ),
    "docs/howto/tenant-scope.md:depending.py": (
        (),
        (
            Send("/invoices", 401),
            Send("/invoices", 201, headers=_as("token-of-acme"), has={"for": "acme"}),
            Send("/invoices", 201, headers=_as("token-of-acme"), has={"for": "acme"}, replayed=True),
            Send("/invoices", 201, headers=_as("token-of-bolt"), has={"for": "bolt"}),
            Send(f"/idempotency-keys/{KEY['Idempotency-Key']}", 401, method="GET"),
            Send(f"/idempotency-keys/{KEY['Idempotency-Key']}", 200, headers=_as("token-of-bolt"), method="GET"),
        ),
    ),
    "docs/howto/enrol-a-route.md:mounted.py": (
        (),
        (
            Send("/v1/cards", 401),
            Send("/v1/cards", 201, headers=_as("token-a"), has={"tenant": "acme"}),
            Send("/v1/cards", 201, headers=_as("token-b"), has={"tenant": "bolt"}),
            Send("/v1/cards", 201, headers=_as("token-a"), has={"tenant": "acme"}, replayed=True),
            Send("/reindex", 201, has={"tenant": "operators"}),
            Send(f"/v1/idempotency-keys/{KEY['Idempotency-Key']}", 200, headers=_as("token-a"), method="GET"),
            Send(f"/idempotency-keys/{KEY['Idempotency-Key']}", 200, method="GET", has={"operation": "reindex"}),
        ),
    ),
    "docs/howto/fastapi.md:blocking.py": (
        ("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)",),
        (
            Send("/orders", 201, {"product": "teapot"}, has={"id": 1}),
            Send("/orders", 201, {"product": "teapot"}, has={"id": 1}, replayed=True),
        ),
    ),
    "docs/howto/postgresql.md:production.py": (
        ("CREATE TABLE visits (id bigint GENERATED ALWAYS AS IDENTITY)",),
        (Send("/visits", 201, has={"id": 1}), Send("/visits", 201, has={"id": 1}, replayed=True)),
    ),
    "docs/howto/enrol-a-route.md:legacy.py": (
        (),
        (
            Send("/legacy/7/pay", 400, headers={}),
            Send("/legacy/7/pay", 201, has={"paid": "7"}),
            Send("/legacy/7/pay", 201, has={"paid": "7"}, replayed=True),
            Send("/legacy/8/pay", 422),
        ),
    ),
    "docs/howto/enrol-a-route.md:wrapped.py": (
        (),
        (Send("/jobs", 201), Send("/jobs", 201, replayed=True), Send("/jobs", 400, headers={})),
    ),
    "docs/howto/unit-tests.md:orders.py": (
        ("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)",),
        (Send("/orders", 201, {"product": "teapot"}, has={"id": 1}), Send("/orders", 422, {"product": "unicorn"})),
    ),
    "docs/howto/enrol-a-route.md:errors.py": (
        (),
        (
            Send("/things", 201, {"a": 1}),
            Send(
                "/things",
                400,
                {"a": 2},
                has={"type": "https://api.example.com/problems/key-mismatch"},
            ),
        ),
    ),
}
"""The programs that no command of their page serves: the tables that they need, and what is sent to them."""

ELSEWHERE = {
    "docs/howto/audit.md:audited.py",
    "docs/howto/unknown.md:payments.py",
    "docs/howto/limits.md:limited.py",
    "docs/howto/live-endpoint.md:live.py",
    "docs/howto/sqlalchemy.md:ledger.py",
    "docs/howto/phased.md:completed.py",
    "docs/howto/sqlalchemy.md:sessions.py",
    "docs/howto/webhooks.md:payments.py",
    "docs/howto/webhooks.md:shop.py",
    "docs/howto/wsgi.md:plain.py",
}
"""Programs with a test of their own, below or in a module of its own."""


def _name(page: Page, block: Block) -> str:
    return f"{page.name}:{block.file or page.blocks('python').index(block) + 1}"


def _programs(*languages: str) -> Iterator[tuple[Page, Block]]:
    for page in WALKED:
        for block in page.blocks(*languages):
            if SERVES.search(block.text):
                yield page, block


def _served_by_its_page(page: Page, block: Block) -> bool:
    module = (block.file or "").removesuffix(".py")
    return any(f"uvicorn {module}:app" in shell.text for shell in page.blocks("sh"))


BLOCKS = {_name(page, block): block for page, block in _programs("python")}


def _prepare(module: ModuleType, statements: Sequence[str]) -> None:
    """Make the tables that a page takes for granted."""
    store = module.once.store
    if store.startswith("sqlite:///"):
        with sqlite3.connect(store.removeprefix("sqlite:///")) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        return
    with psycopg.connect(re.sub(r"\?.*", "", store)) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@asynccontextmanager
async def _served(app: Any) -> AsyncIterator[None]:
    """What a server says to an application before the first request and after the last."""
    asked: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    living = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, asked.get, said.put))
    for step in ("startup", "shutdown"):
        await asked.put({"type": f"lifespan.{step}"})
        assert (await said.get())["type"] == f"lifespan.{step}.complete"
        if step == "startup":
            yield
    await living


@asynccontextmanager
async def _running(module: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    """The program between its start and its stop, with an authentication before it that always says `acme`."""
    app = module.app
    lifespan = app.router.lifespan_context(app) if hasattr(app, "router") else _served(app)

    async def authenticated(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"tenant": "acme"}
        await app(scope, receive, send)

    transport = httpx.ASGITransport(authenticated, raise_app_exceptions=False)
    async with lifespan, httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
        yield client


async def _send(client: httpx.AsyncClient, send: Send) -> None:
    content = None if send.body is None else json.dumps(send.body)
    headers = {**send.headers, **({} if content is None else {"Content-Type": "application/json"})}
    answer = await client.request(send.method, send.path, content=content, headers=headers)
    assert answer.status_code == send.status, answer.text
    assert (answer.headers.get("Idempotent-Replayed") == "true") is send.replayed
    for name, value in send.has.items():
        assert answer.json()[name] == value


def test_every_program_of_the_pages_is_run_by_a_test() -> None:
    forgotten = [
        _name(page, block)
        for page, block in _programs("python")
        if not _served_by_its_page(page, block) and _name(page, block) not in {*EXERCISES, *ELSEWHERE}
    ]
    assert forgotten == []
    assert {*EXERCISES, *ELSEWHERE} <= set(BLOCKS), "a program was renamed or removed"


@pytest.fixture
def dsn(request: pytest.FixtureRequest) -> Callable[[], str]:
    """The test's database, made when a program names one."""
    return cache(lambda: str(request.getfixturevalue("postgres_dsn")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which programs find their files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", EXERCISES)
def test_guide_program_works_as_its_page_describes(
    name: str, folder: Path, dsn: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statements, sends = EXERCISES[name]
    module = load(with_store(BLOCKS[name].text, dsn), "program.py", folder, monkeypatch)
    _prepare(module, statements)

    async def exercise() -> None:
        engine = aconnect(module.once.store)
        await engine.migrate()
        await engine.close()
        async with _running(module) as client:
            for send in sends:
                await _send(client, send)

    asyncio.run(exercise())


def test_unsent_call_is_retried_and_a_lost_call_is_unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # R100, R101, R102
    name, port = "docs/howto/unknown.md:payments.py", str(free_port())
    module = load(BLOCKS[name].text.replace("2525", port), "payments.py", folder, monkeypatch)
    keys: list[str] = []

    async def provide(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(re.findall(r"content-length: (\d+)", head)[0]))
        keys.extend(re.findall(r"idempotency-key: (\S+)", head))
        amount = json.loads(body)["amount"]
        if amount == 13:
            writer.close()
            return
        status, answer = ("402 No", b"{}") if amount == 99 else ("201 Created", b'{"id": "ch_1"}')
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(answer), answer))
        await writer.drain()
        writer.close()

    async def exercise() -> None:
        paid, declined, lost = ({"Idempotency-Key": f"{n}" * 16} for n in range(3))
        async with _running(module) as client:
            refused = Send("/payments", 500, {"amount": 5}, paid, has={"code": "idempotency_execution_failed"})
            await _send(client, refused)
            async with await asyncio.start_server(provide, "127.0.0.1", int(port)):
                await _send(client, Send("/payments", 201, {"amount": 5}, paid, has={"charge": "ch_1"}))
                await _send(client, Send("/payments", 201, {"amount": 5}, paid, replayed=True))
                await _send(client, Send("/payments", 402, {"amount": 99}, declined))
                await _send(client, Send("/payments", 402, {"amount": 99}, declined, replayed=True))
                await _send(client, Send("/payments", 500, {"amount": 13}, lost))
                unknown = {"code": "idempotency_outcome_unknown"}
                await _send(client, Send("/payments", 409, {"amount": 13}, lost, has=unknown))
        assert len(keys) == len(set(keys)) == 3, "each request called once, with a key of its own"

    asyncio.run(exercise())


def _tested_by_its_page(page: Page, block: Block) -> bool:
    return block.file is not None and any(f"pytest {block.file}" in shell.text for shell in page.blocks("sh"))


def _run_by_alembic(block: Block) -> bool:
    return (block.file or "").startswith("migrations/")


def _run_in_a_walk(page: Page, block: Block) -> bool:
    module = (block.file or "").removesuffix(".py")
    ways = f"python {module}.py", f"flask --app {module} run"
    return module != "" and any(way in shell.text for shell in page.blocks("sh") for way in ways)


def _run_by_its_page(page: Page, block: Block) -> bool:
    of_django = (block.file or "").startswith("shop/")  # a project of several files: test_django_page.py
    ways = (_served_by_its_page, _run_in_a_walk, _tested_by_its_page)
    return of_django or _run_by_alembic(block) or any(way(page, block) for way in ways)


def _fragments() -> Iterator[tuple[str, Block]]:
    for page in EVERY:
        for block in page.blocks("python"):
            if not SERVES.search(block.text) and not _run_by_its_page(page, block):
                yield f"{_name(page, block)}@{block.line}", block


FRAGMENTS = dict(_fragments())


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_other_python_block_can_be_imported(
    name: str, folder: Path, dsn: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(with_store(FRAGMENTS[name].text, dsn), "fragment.py", folder, monkeypatch)
