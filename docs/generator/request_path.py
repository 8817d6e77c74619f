"""`request-path.md`: the files behind a LOCAL request on FastAPI and asyncpg, in reading order."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .markdown import page as put_together
from .markdown import table, title

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"
MOST_MODULES: Final = 80
MOST_LINES: Final = 17_500

SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Decisions, without a clock and without I/O": (
            "core.model core.errors core.transitions core.guards core.rulings core.endings core.onecommit core.policy "
            "core.checks core.keys core.scope core.headers core.answers core.problems core.envelopes core.migrations "
            "core.sqltext canonical.digests canonical.fingerprint canonical.jcs"
        ),
        "The life of a request, as generators": (
            "engine.claiming engine.enrolment engine.actions engine.run engine.serve engine.admit "
            "engine.breaker engine.local engine.request engine.deciding engine.settle engine.capture engine.operation "
            "flow"
        ),
        "The store: statements and rows": (
            "stores.postgres stores.sql stores.keystore stores.locks stores.statements stores.rows driver_ports"
        ),
        "The driver: asyncpg and PostgreSQL": (
            "drivers.postgres.asyncpg drivers.postgres.asyncpg_connections drivers.postgres.asyncpg_transactions "
            "drivers.postgres.server drivers.postgres.unconfirmed drivers.retries drivers.slots drivers.placeholders "
            "drivers.handler_sql"
        ),
        "The runtime and the framework": (
            "runtimes runtimes.aio frameworks.shared frameworks.asgi frameworks.asgi.middleware "
            "frameworks.asgi.exchange frameworks.asgi.messages frameworks.asgi.nesting "
            "frameworks.asgi.protect frameworks.asgi.installation frameworks.resources"
        ),
        "Start-up": (
            "__init__ lazy once options starting wire addresses drivers.postgres.address engine.shell engine.migrating "
            "frameworks.starlette frameworks.fastapi"
        ),
        "Packages without code": "core canonical engine stores drivers drivers.postgres frameworks",
    }
)
"""The modules that the served application loads, by their names below `oncekey`, in the order to read them."""

STATEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "locks.sql": "The lock of a key, and the finished record of LOCAL in one commit.",
        "queries.sql": "Reading, claiming, renewing and settling a record.",
        "functions.sql": "The functions that those statements call, as they are after all migrations.",
    }
)
"""The SQL of PostgreSQL that these requests send, below `oncekey/stores/postgres`."""

_LAYOUT: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def modules() -> tuple[str, ...]:
    """The whole names of the modules, in reading order."""
    names = [name for names in SECTIONS.values() for name in names.split()]
    return tuple("oncekey" if name == "__init__" else f"oncekey.{name}" for name in names)


def path_of(module: str, source: Path = SOURCE) -> Path:
    """The file of a module."""
    place = source.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines_of(path: Path) -> int:
    """How many lines of a module hold code: no comment, no docstring, and not empty."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def _sentence(path: Path) -> str:
    documented = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(documented.partition("\n\n")[0].split())


def _linked(path: Path) -> str:
    below = path.relative_to(SOURCE)
    return f"[`{below.relative_to('oncekey')}`](../../src/{below})"


def _section(name: str, names: str) -> list[str]:
    paths = [path_of("oncekey" if one == "__init__" else f"oncekey.{one}") for one in names.split()]
    lines, code = sum(map(lines_of, paths)), sum(map(code_lines_of, paths))
    rows = [(_linked(path), str(lines_of(path)), str(code_lines_of(path)), _sentence(path)) for path in paths]
    return [
        f"## {name}",
        f"{len(paths)} files, {lines:,} lines, {code:,} of them code.",
        table(("File", "Lines", "Code", "What it is"), rows),
    ]


def page() -> str:
    """The page."""
    paths = [path_of(module) for module in modules()]
    folder = SOURCE / "oncekey" / "stores" / "postgres"
    statements = [(_linked(folder / name), str(lines_of(folder / name)), why) for name, why in STATEMENTS.items()]
    return put_together(
        title("What a request trusts"),
        "These are the files that a served application has loaded when it runs one `LOCAL` route on FastAPI, asyncpg "
        "and PostgreSQL, with the status resource: everything that its requests execute, and what checked the "
        f"application at its start. They are {len(paths)} files and {sum(map(lines_of, paths)):,} lines, of which "
        f"{sum(map(code_lines_of, paths)):,} are code. Read them in this order.",
        "Workers, other stores and drivers, WSGI, sealing, fronts, limits, observers, functions, the console and the "
        "commands are not loaded: a process imports them when they are configured "
        "([decision](../adr/0096-a-process-imports-what-its-requests-need.md)), and no request imports a module. "
        "`tests/frameworks/test_request_path.py` starts this application, sends it a new key, a replay, a request with "
        "another body and a duplicate in flight, and fails if a module is loaded that is not listed here, if a request "
        f"imports one, or if the list grows past {MOST_MODULES} modules or {MOST_LINES:,} lines.",
        *(part for name, names in SECTIONS.items() for part in _section(name, names)),
        "## SQL",
        "The migrations create the functions step by step; `functions.sql` is what a database has after all of them. "
        "`python -m tools.postgres_functions` writes it, and a test compares it with a migrated database. At run time "
        "nothing reads it.",
        table(("File", "Lines", "What it is"), statements),
        "## Requests that import a module",
        "Two documents import their module when they are first requested: the OpenAPI document, and the page that "
        "refusals link to. A LOCAL route imports `engine/phases.py` and `engine/steps.py` if it resumes a record that "
        "an earlier deploy began as PHASED. `once.connection` imports `frameworks/asgi/transactions.py` if an "
        "application first reads that attribute inside a request.",
    )
