"""The programs of the guides are killed with SIGKILL, at the events that their pages are about, and started again.

A program runs as a process of its own, with an observer that kills it when an event comes: a step was stored, the key
was reserved, the answer was committed. What a page promises is then true of its rows, of the retry, and of the worker.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port, listens
from harness.provider import Provider
from harness.tables import leases_run_out
from harness.walkthrough import with_store
from oncekey.wire import connect

KEY = {"Idempotency-Key": "a-key-of-a-client-that-retries"}
RUNNER = """
import importlib, os, signal, sys
module, dies_at, port = importlib.import_module(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def die(event):
    if ":".join([type(event).__name__, getattr(event, "name", "")]).rstrip(":") == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

module.once.observe(die)
app = getattr(module, "application", None) or module.app
if hasattr(app, "wsgi_app") or hasattr(module, "application"):
    from waitress import serve
    serve(app, host="127.0.0.1", port=port)
else:
    import uvicorn
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""


@dataclass(frozen=True)
class Program:
    """A program, what it takes for granted, a request, and where its process is killed."""

    page: str
    file: str
    tables: Sequence[str]
    path: str
    dies_at: Sequence[str]
    rows: tuple[str, list[tuple[Any, ...]]]
    """A query, and what it finds in the end."""
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    module: str | None = None
    """The program that makes the application, where the page's own only defines how."""
    worker: bool = False
    """Whether a worker finishes the request, without its client."""
    charges: int | None = None
    """How many charges the provider has in the end."""
    first: int = 201

    @property
    def name(self) -> str:
        return f"{self.page}:{self.file}"


ORDERS = "CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)"
USERS = ("CREATE TABLE users (token text PRIMARY KEY, tenant text)", "INSERT INTO users VALUES ('ann', 'shop-1')")
AS_ANN = {"Authorization": "Bearer ann"}
LOCAL_DEATHS = ("Reserved", "Settled")

PROGRAMS = (
    Program(
        "docs/howto/phased.md",
        "phased.py",
        ("CREATE TABLE payments (id INTEGER PRIMARY KEY, amount INTEGER, charge TEXT)",),
        "/payments",
        ("Stepped:payment_created", "Stepped:charge_created"),
        ("SELECT amount, charge IS NULL FROM payments", [(1999, 0)]),
        {"customer": "c-1", "amount": 1999},
        worker=True,
        charges=1,
    ),
    Program(
        "docs/howto/phased.md",
        "completed.py",
        (
            "CREATE TABLE refunds (id INTEGER PRIMARY KEY, region TEXT)",
            "CREATE TABLE bookings (refund INTEGER)",
        ),
        "/refunds",
        ("Stepped:refund_created",),
        ("SELECT region, refund FROM refunds JOIN bookings ON refund = id", [("eu", 1)]),
        headers={"Authorization": "Bearer s3cret", "X-Region": "eu"},
        worker=True,
    ),
    Program(
        "docs/howto/sqlalchemy.md",
        "ledger.py",
        (
            *USERS,
            "CREATE TABLE payments (id serial PRIMARY KEY, tenant text, amount integer, charge text)",
        ),
        "/payments",
        ("Stepped:charge_created",),
        ("SELECT tenant, amount, charge IS NULL FROM payments", [("shop-1", 1999, False)]),
        {"customer": "c-1", "amount": 1999},
        AS_ANN,
        worker=True,
        charges=1,
    ),
    Program(
        "docs/howto/litestar.md",
        "shop.py",
        (ORDERS,),
        "/payments",
        ("Stepped:charged",),
        ("SELECT id, product FROM orders", [(1, "tea")]),
        {"product": "tea"},
        worker=True,
    ),
    Program(
        "docs/howto/litestar.md",
        "orders.py",
        (),
        "/orders",
        LOCAL_DEATHS,
        ("SELECT id, product FROM orders", [(1, "tea")]),
        {"product": "tea"},
    ),
    Program(
        "docs/howto/flask.md",
        "shop.py",
        (
            "CREATE TABLE users (id INTEGER PRIMARY KEY, token TEXT UNIQUE, tenant TEXT)",
            "INSERT INTO users (token, tenant) VALUES ('a-long-token-of-ann', 'acme')",
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, tenant TEXT, seat TEXT UNIQUE, charge TEXT)",
        ),
        "/payments",
        ("Stepped:charged",),
        ("SELECT tenant, seat, charge IS NULL FROM orders", [("acme", "1A", 0)]),
        {"seat": "1A"},
        {"Authorization": "Bearer a-long-token-of-ann"},
        module=(
            "from pathlib import Path\nfrom shop import create_app, once\n"
            'app = create_app(f"sqlite:///{Path.cwd()}/shop.db")\n'
        ),
        worker=True,
    ),
    Program(
        "docs/howto/fastapi.md",
        "payments.py",
        ("CREATE TABLE payments (id serial PRIMARY KEY, amount integer NOT NULL, charge text)",),
        "/payments",
        ("Stepped:charge_created",),
        ("SELECT amount, charge FROM payments", [(1999, "ch_1")]),
        {"amount": 1999},
        {"Authorization": "Bearer token-of-acme"},
        worker=True,
    ),
    Program(
        "docs/howto/outbox.md",
        "outbox.py",
        ("CREATE TABLE transfers (id INTEGER PRIMARY KEY, amount INTEGER)",),
        "/transfers",
        ("Settled",),
        ("SELECT amount FROM transfers", [(1999,)]),
        {"amount": 1999, "account": "c-1"},
        worker=True,
        charges=1,
    ),
    Program(
        "docs/howto/workers.md",
        "jobs.py",
        (),
        "/orders",
        ("Settled",),
        ("SELECT count(*) FROM oncekey_outbox", [(1,)]),
    ),
    Program(
        "docs/howto/fastapi.md",
        "blocking.py",
        (ORDERS,),
        "/orders",
        ("Reserved",),
        ("SELECT id, product FROM orders", [(1, "tea")]),
        {"product": "tea"},
    ),
    Program(
        "docs/howto/wsgi.md",
        "plain.py",
        (ORDERS,),
        "/orders",
        LOCAL_DEATHS,
        ("SELECT id, product FROM orders", [(1, "tea")]),
        {"product": "tea"},
    ),
    Program(
        "docs/howto/sqlalchemy.md",
        "sessions.py",
        (
            *USERS,
            "CREATE TABLE bookings (id serial PRIMARY KEY, tenant text, seat text UNIQUE)",
        ),
        "/bookings",
        LOCAL_DEATHS,
        ("SELECT tenant, seat FROM bookings", [("shop-1", "1A")]),
        {"seat": "1A"},
        AS_ANN,
    ),
)
CASES = [pytest.param(one, died, id=f"{one.name}-{died}") for one in PROGRAMS for died in one.dies_at]


class Running:
    """The files of a program in a folder, and what is done with them."""

    def __init__(self, program: Program, folder: Path, dsn: Callable[[], str], provider: str | None) -> None:
        self.program, self.folder = program, folder
        texts = {one.file: one.text for one in Page(ROOT / program.page).blocks("python") if one.file is not None}
        for file, text in texts.items():
            here = text if provider is None else text.replace("http://127.0.0.1:2525", provider)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(with_store(here, dsn))
        self.module = program.file.removesuffix(".py")
        if program.module is not None:
            self.module = "served"
            (folder / "served.py").write_text(program.module)
        (folder / "run_and_die.py").write_text(RUNNER)
        found = re.search(r'"sqlite(?:\+\w+)?:///(\w+\.db)"', program.module or texts[program.file])
        named = found[1] if found else "shop.db"
        imported = (texts[file] for file in texts if f"from {file.removesuffix('.py')} import" in texts[program.file])
        self.is_postgres = any("postgresql" in text for text in (texts[program.file], *imported))
        self.url = dsn() if self.is_postgres and program.module is None else f"sqlite:///{folder}/{named}"

    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        if self.url.startswith("sqlite:"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file, file:
                return [tuple(row) for one in statements for row in file.execute(one)]
        with psycopg.connect(self.url) as connection:
            cursors = [connection.execute(one.encode()) for one in statements]
            return [row for one in cursors if one.description for row in one]

    def oncekey(self, *words: str) -> None:
        done = subprocess.run(
            [Path(sys.executable).with_name("oncekey"), *words],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT / "src")])}

    @contextmanager
    def served(self, dies_at: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
        port, log = free_port(), self.folder / "log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "run_and_die.py", self.module, dies_at, str(port)],
                cwd=self.folder,
                env=self._environment,
                stdout=out,
                stderr=out,
            )
        try:
            wait_until(lambda: process.poll() is not None or listens(port), log.read_text)
            assert process.poll() is None, log.read_text()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, verify=False) as client:
                yield process, client
        finally:
            process.kill()
            process.wait()

    def send(self, client: httpx.Client) -> httpx.Response:
        program = self.program
        return client.post(program.path, json=program.body, headers={**KEY, **program.headers})


@pytest.mark.parametrize(("program", "dies_at"), CASES)
def test_killed_program_of_a_guide_leaves_the_documented_state(
    program: Program, dies_at: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dsn = cache(lambda: str(request.getfixturevalue("postgres_dsn")))
    with ExitStack() as stack:
        provider = None if program.charges is None else stack.enter_context(Provider(tmp_path))
        running = Running(program, tmp_path, dsn, None if provider is None else provider.url)
        running.query(*program.tables)
        if running.url.startswith("postgresql"):
            with closing(connect(running.url)) as engine:
                engine.migrate()

        with running.served(dies_at) as (process, client):
            with pytest.raises(httpx.TransportError):
                running.send(client)
            assert process.wait(PATIENCE) == -signal.SIGKILL

        leases_run_out(running.url)
        if program.worker:
            running.oncekey("worker", "--app", f"{running.module}:once", "--once")
            assert running.query(program.rows[0]) == program.rows[1], "the worker finished it, without the client"
        with running.served("nothing") as (_, client):
            answer, again = running.send(client), running.send(client)
        assert (answer.status_code, answer.content) == (program.first, again.content), answer.text
        assert again.headers["Idempotent-Replayed"] == "true"
        finished_before = program.worker or dies_at == "Settled"
        assert (answer.headers.get("Idempotent-Replayed") == "true") is finished_before
        assert running.query(program.rows[0]) == program.rows[1]
        assert provider is None or len(provider.charges()) == program.charges
