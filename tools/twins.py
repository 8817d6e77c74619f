"""Blocking twins of drivers that are written for asyncio: the same code without `await`, generated.

`python -m tools.twins` writes them into folders called `generated`; `--check` fails if one is not what it would write.
People edit the module for asyncio. What only asyncio has is marked there by a comment, `# asyncio only`, on the first
line of a function or of a statement, and has no twin. Where two libraries differ in more than `await`, that part stands
in modules of its own, which are written by hand, and the twin imports the blocking one.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DRIVERS: Final = ROOT / "src" / "oncekey" / "databases"
ONLY: Final = "# asyncio only"
HEADER: Final = "# Generated from {source} by `python -m tools.twins`: edit that one.\n"

COMMON: Final = {
    "asyncio": "threading",
    "asynccontextmanager": "contextmanager",
    "aconnect": "connect",
    "aiter": "iter",
    "anext": "next",
    "aretrying": "retrying",
    "arun_body": "run_body",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
"""Names of asyncio's side, and what they are called on the other. Besides, `AsyncAnything` becomes `Anything`."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A module for asyncio, and the blocking one that is generated from it."""

    source: str
    target: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of names that differ; the longest that fits comes first."""
    phrases: Mapping[str, str] = field(default_factory=dict)
    """Passages of comments and docstrings that differ. Each has to occur."""


TWINS: Final = (
    Twin(
        "mariadb/aiomysql.py",
        "mariadb/generated/pymysql.py",
        names={"aiomysql": "pymysql", "Aiomysql": "Pymysql"},
        phrases={
            "through aiomysql, for asyncio.": "through PyMySQL, for threads.",
            "under asyncio; one per event loop.": "from any number of threads.",
            "The sessions of one event loop.": "The sessions for threads.",
            "an `async def` handler": "a blocking handler",
            "(as aiomysql takes it)": "(as PyMySQL takes it)",
            "(as aiomysql)": "(as PyMySQL)",
        },
    ),
    Twin(
        "postgres/psycopg_async.py",
        "postgres/generated/psycopg.py",
        names={"psycopg_async": "psycopg"},
        phrases={
            "through psycopg, for asyncio.": "through psycopg, for threads.",
            "in the caller's own task": "in the caller's own thread",
            "under asyncio. One for each event loop.": "from any number of threads.",
            "Connections for asyncio.": "Connections for threads.",
            "databases.postgres import psycopg_async_": "databases.postgres.generated import psycopg_async_",
        },
    ),
    Twin(
        "postgres/psycopg_async_transactions.py",
        "postgres/generated/psycopg_transactions.py",
        names={"psycopg_async": "psycopg"},
        phrases={
            "on psycopg for asyncio": "on psycopg for threads",
            "databases.postgres.psycopg_async import": "databases.postgres.generated.psycopg_async import",
            "an `async def` handler": "a blocking handler",
            "`async with connection:`": "`with connection:`",
        },
    ),
    Twin(
        "sqlalchemy/connections.py",
        "sqlalchemy/generated/connections.py",
        phrases={
            "an `AsyncEngine`": "a blocking `Engine`",
            "from sqlalchemy.ext.asyncio import": "from sqlalchemy.engine import",
            "connection.sync_connection": "connection",
            "Callable[[], Awaitable[bool]]": "Callable[[], bool]",
            ".cancel_and_close(raw)": ".cancel_and_close_blocking(raw)",
            ".cleaned(raw)": ".cleaned_blocking(raw)",
            ".is_pooled(raw)": ".is_pooled_blocking(raw)",
            "greenlet_spawn(connected, connection, [note_file])": "connected(connection, [note_file])",
            "greenlet_spawn(connected, connection, found)": "connected(connection, found)",
        },
    ),
    Twin(
        "sqlalchemy/asynchronous.py",
        "sqlalchemy/generated/driver.py",
        names={
            "SqlalchemyDriver": "BlockingSqlalchemyDriver",
            "SqlalchemyTransaction": "BlockingTransaction",
            "SqlalchemyHandlerConnection": "BlockingHandlerConnection",
            "async_engines": "engines",
        },
        phrases={
            "a SQLAlchemy `AsyncEngine`, with the application's own pool and sessions.": (
                "a blocking SQLAlchemy `Engine`."
            ),
            "from sqlalchemy.ext.asyncio import": "from sqlalchemy.engine import",
            "from oncekey.databases.sqlalchemy import connections, handler_connection": (
                "from oncekey.databases.sqlalchemy import handler_connection\n"
                "from oncekey.databases.sqlalchemy.generated import connections"
            ),
            "Wait for the connections that are being returned to the pool; the engine belongs to the application.": (
                "No-op: the engine belongs to the application."
            ),
            "engine.sync_engine": "engine",
            ".sync_connection": "",
            "watch.quiet(": "watch.quiet_blocking(",
            "to, through a connection or a session;": "to;",
            "and returns the connection, in a task that is never cancelled.": "and returns the connection.",
            'Callable[[AsyncSession | None], "asyncio.Task[None]"]': "Callable[[], None]",
            ", session: AsyncSession | None)": ")",
            "-> asyncio.Task[None]": "-> None",
            "return self._in_background(self._ended(connection, session))": "self._ended(connection)",
            "asyncio.shield(self._in_background(connections.closed(connection)))": "connections.closed(connection)",
            "self._ending = self._end(self._session)": "self._end()",
        },
    ),
)


def generated(twin: Twin, source: str) -> str:
    """The text of a twin, before it is formatted."""
    text = _without_asyncios_own(source)
    for passage, other in twin.phrases.items():
        if passage not in text:
            raise ValueError(f"{twin.source} has no passage {passage!r} any more")
        text = text.replace(passage, other)
    return HEADER.format(source=Path(twin.source).name) + "".join(_translated(text, twin.names))


def _without_asyncios_own(source: str) -> str:
    """The source without what is marked as asyncio's alone."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and ONLY in lines[node.lineno - 1]:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(one.lineno for one in decorators)])
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1 if node.end_lineno else 1)
    return "".join(lines)


def _translated(text: str, names: Mapping[str, str]) -> Iterator[str]:
    """The text piece by piece: `async` and `await` go with the blank behind them, and names are replaced."""
    lines = text.splitlines(keepends=True)
    row, column = 1, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NAME:
            continue
        yield _between(lines, (row, column), token.start)
        row, column = token.end
        if token.string in {"async", "await"}:
            column += 1
        else:
            yield _name(token.string, names)
    yield _between(lines, (row, column), (len(lines) + 1, 0))


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    last = lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else ""
    return lines[start[0] - 1][start[1] :] + "".join(lines[start[0] : end[0] - 1]) + last


def _name(name: str, names: Mapping[str, str]) -> str:
    if name in COMMON:
        return COMMON[name]
    name = re.sub(r"^(_?)Async(?=[A-Z])", r"\1", name)
    for part in sorted(names, key=len, reverse=True):
        if part in name:
            return name.replace(part, names[part])
    return name


def formatted(text: str, path: Path) -> str:
    """The text as the project's linter leaves it: without imports and exceptions that a twin does not need."""
    at = ["--stdin-filename", str(path), "-"]
    for command in (["check", "--fix-only", "--quiet", "--fixable", "F401,I001,RUF100"], ["format", "--quiet"]):
        done = subprocess.run(  # noqa: S603  (ruff, of this environment)
            [sys.executable, "-m", "ruff", *command, *at],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text


def twin_of(twin: Twin) -> str:
    """What the file of a twin has to hold."""
    return formatted(generated(twin, (DRIVERS / twin.source).read_text("utf-8")), DRIVERS / twin.target)


def main(arguments: list[str] | None = None) -> int:
    """Write the twins, or say which are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m tools.twins", description="Write the blocking twins of drivers.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a twin is out of date")
    check: bool = parser.parse_args(arguments).check
    stale = []
    for twin in TWINS:
        path, text = DRIVERS / twin.target, twin_of(twin)
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(text, "utf-8")
    for name in stale:
        print(f"{name} is out of date: run `python -m tools.twins`" if check else f"{name} is written")  # noqa: T201
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
