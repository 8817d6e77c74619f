"""`request-path.md`: the files behind a LOCAL request on FastAPI and asyncpg, in reading order."""

from __future__ import annotations

import ast
import io
import re
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
            "core.model core.errors core.guards core.transitions core.rulings core.endings core.onecommit core.policy "
            "core.checks core.keys core.scope core.headers core.answers core.problems core.envelopes core.migrations "
            "core.sqltext canonical.digests canonical.fingerprint canonical.jcs"
        ),
        "The lifecycle of a request, as generators": (
            "core.flow core.lazy engine.actions engine.enrolment engine.claiming engine.run engine.serve "
            "engine.admit engine.local engine.request engine.deciding engine.settle "
            "engine.capture engine.operation"
        ),
        "The store: statements and rows": (
            "stores.statements stores.rows stores.keystore stores.locks stores.sql databases.postgres.store"
        ),
        "The driver: asyncpg and PostgreSQL": (
            "databases.placeholders databases.handler_sql databases.retries databases.slots databases.postgres.server "
            "databases.postgres.unconfirmed databases.postgres.asyncpg_connections "
            "databases.postgres.asyncpg_transactions databases.postgres.asyncpg"
        ),
        "The runtime and the framework": (
            "ports.driver runtimes runtimes.aio frameworks.shared frameworks.asgi frameworks.asgi.middleware "
            "frameworks.asgi.requests frameworks.asgi.protect frameworks.asgi.installation frameworks.resources"
        ),
        "Start-up": (
            "__init__ once frameworks.options once.startup wire databases.address databases.postgres.address "
            "engine.shell engine.migrating frameworks.starlette frameworks.fastapi"
        ),
        "Packages without code": "core canonical ports engine stores databases databases.postgres frameworks",
    }
)
"""The modules that the served application loads, by their names below `oncekey`, in the order to read them."""

STATEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "locks.sql": "The lock of a key, and the finished record of LOCAL in one commit.",
        "queries.sql": "Reading, claiming, renewing and settling a record. LOCAL claims only a record of another kind.",
        "schema.sql": "Tables, indexes, view, types and functions, as they are after all migrations. LOCAL calls the "
        "functions `enter`, `lock_request_2`, `lock_holder`, `seal` and `was_sealed`.",
    }
)
"""The SQL files behind these requests, in `oncekey/databases/postgres`, and their purpose."""

FOLLOWED: Final = (
    (
        "{frameworks.asgi.middleware:OncekeyMiddleware.__call__} finds an `Idempotency-Key` and creates an "
        "{frameworks.asgi.middleware:Exchange} between the server and the application."
    ),
    (
        "FastAPI routes, authenticates and validates the request, and calls {frameworks.asgi.protect:protect.awaited} "
        "instead of the handler."
    ),
    (
        "{frameworks.asgi.middleware:Exchange.claim} reads key, body, fingerprint and tenant "
        "({frameworks.asgi.requests:read_claim_input}, {engine.claiming:claim_for}) and starts the flow "
        "{engine.serve:serve}. {runtimes.aio:AsyncRuntime.run} performs the actions that the flow yields."
    ),
    (
        "{engine.admit:_locked} yields `Begin`. {runtimes.aio:AsyncRuntime.begin} calls "
        "{databases.postgres.asyncpg:AsyncpgDriver.begin_with}, which sends `BEGIN` and the statement `enter` of "
        "{stores.locks:LockStore.locking} in one message."
    ),
    (
        "{engine.local:enter} decides by what the lock and the record show. If the key is new, the flow stops at "
        "`INVOKE` with the transaction open; a stored response or a refusal ends it."
    ),
    (
        "{frameworks.asgi.protect:_run} calls the handler. `op.connection` is an "
        "{databases.postgres.asyncpg_transactions:AsyncpgHandlerConnection} on that transaction."
    ),
    (
        "{frameworks.asgi.middleware:Exchange.send} captures the response. Its last message calls "
        "{frameworks.asgi.middleware:Exchange.finish}, and {engine.deciding:decided} decides what the ending means: by "
        "{core.endings:returned} for an ordinary success, else by {core.endings:decide} and its table."
    ),
    (
        "{engine.settle:settle} stores the decision: {engine.settle:_one_commit} takes the statement `seal` from "
        "{stores.locks:LockStore.completing_at_commit}. "
        "{runtimes.aio:AsyncRuntime.commit} calls "
        "{databases.postgres.asyncpg_transactions:AsyncpgTransaction.commit_with}, which sends "
        "`SELECT oncekey.seal(…); COMMIT; …` in one message: the handler's rows and the record, or neither."
    ),
    (
        "{frameworks.asgi.middleware:Exchange._conclude} sends the captured response, or the response of the record "
        "if that differs."
    ),
)
"""One request from the socket to its commit; `{module:name}` is a definition in a listed module."""

REPEATED: Final = (
    "A retry of a request that this process served needs no lock. On a route without dependencies it is replayed in "
    "step 1, by {frameworks.asgi.middleware:Exchange.recall} and {engine.admit:recall}, otherwise in step 4, by "
    "{engine.local:stored}; {core.rulings:rule_finished} decides. Every other retry is handled in step 5, where "
    "{core.rulings:rule} decides."
)

BESIDES: Final = ("core.transitions", "core.guards", "core.rulings", "core.endings", "core.onecommit")
"""The modules that decide in these steps, to be read with the modules that they name."""

_DEFINED: Final = re.compile(r"\{([\w.]+):([\w.]+)\}")

_LAYOUT: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def modules() -> tuple[str, ...]:
    """The full names of the modules, in reading order."""
    names = [name for names in SECTIONS.values() for name in names.split()]
    return tuple("oncekey" if name == "__init__" else f"oncekey.{name}" for name in names)


def path_of(module: str, source: Path = SOURCE) -> Path:
    """The file of a module."""
    place = source.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def lines_of(path: Path) -> int:
    """The number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines_of(path: Path) -> int:
    """The number of lines of a module with code: without comments, docstrings and empty lines."""
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


def defined(module: str, name: str) -> Path:
    """The file of a listed module that defines a class or a function, a nested one by its dotted name."""
    if module not in modules():
        raise LookupError(f"{module} is not listed")
    path = path_of(module)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            raise LookupError(f"{module} has no {name}: correct FOLLOWED")
        body = found[-1].body
    return path


def _linked_names(step: str) -> str:
    def linked(found: re.Match[str]) -> str:
        module, name = found.groups()
        path = defined(f"oncekey.{module}", name)
        shown = name if "." in name or name[0].isupper() else f"{module.rpartition('.')[2]}.{name}"
        return f"[`{shown}`](../../src/{path.relative_to(SOURCE)})"

    return _DEFINED.sub(linked, step)


def _follow_one_request() -> list[str]:
    named = {module for step in FOLLOWED for module, _ in _DEFINED.findall(step)} | set(BESIDES)
    paths = [path_of(f"oncekey.{name}") for name in named]
    paths += [SOURCE / "oncekey" / "databases" / "postgres" / "locks.sql"]
    besides = ", ".join(_linked(path_of(f"oncekey.{name}")) for name in BESIDES)
    return [
        "## Follow one request",
        "From the socket to the commit, for a new key:",
        "\n".join(f"{number}. {_linked_names(step)}" for number, step in enumerate(FOLLOWED, start=1)),
        _linked_names(REPEATED)
        + " [`ports/store.py`](../../src/oncekey/ports/store.py) has the types of `run.store` and its "
        "parts; only type checkers import it.",
        (
            f"If you have one day, read the files of these steps, {besides} and `locks.sql`: {len(paths)} files, "
            f"{sum(map(lines_of, paths)):,} lines."
        ),
    ]


def _section(name: str, names: str) -> list[str]:
    paths = [path_of("oncekey" if one == "__init__" else f"oncekey.{one}") for one in names.split()]
    lines, code = sum(map(lines_of, paths)), sum(map(code_lines_of, paths))
    rows = [(_linked(path), str(lines_of(path)), str(code_lines_of(path)), _sentence(path)) for path in paths]
    return [
        f"## {name}",
        f"{len(paths)} files, {lines:,} lines, {code:,} of them code.",
        table(("File", "Lines", "Code", "Purpose"), rows),
    ]


def page() -> str:
    """The page."""
    paths = [path_of(module) for module in modules()]
    folder = SOURCE / "oncekey" / "databases" / "postgres"
    statements = [(_linked(folder / name), str(lines_of(folder / name)), why) for name, why in STATEMENTS.items()]
    return put_together(
        title("What a request trusts"),
        "Read this page if you review oncekey before you use it for payments. It lists, in reading order, every source "
        "file that an application loads to serve one `async def` `LOCAL` route on FastAPI, asyncpg and PostgreSQL, "
        "with the status resource and the checks at start-up. There are "
        f"{len(paths)} files and {sum(map(lines_of, paths)):,} lines, "
        f"of which {sum(map(code_lines_of, paths)):,} are code.",
        "A code such as `P4` or `F16` is a rule of [the protocol](protocol.md) or a failure that it prevents, "
        '"row 13" is a row of '
        "[the moves](states.md#moves), and ADR is a [decision](../adr/README.md). Read [security](security.md), "
        "the [limits](limits.md) and the [production checklist](../howto/production-checklist.md) along with the code.",
        "`once.session` and `workers=True` load more, and so does a `def` handler: `frameworks/threaded.py`, "
        "`runtimes/threads.py`, `engine/sync_operation.py` and the driver of psycopg. Other stores, WSGI, encryption, "
        "caches, limits, observers, functions, the console and the commands are not loaded: a process imports them "
        "when they are configured "
        "([decision](../adr/0096-a-process-imports-what-its-requests-need.md)), and no request of this application "
        "imports a module ([others do](#requests-that-import-a-module)). "
        "`tests/frameworks/test_request_path.py` starts this application, sends a new key, a replay, a request with "
        "another body and a duplicate of a request in progress, and fails if a module is loaded that is not listed "
        "here, if a request "
        f"imports one, or if the list grows past {MOST_MODULES} modules or {MOST_LINES:,} lines.",
        *_follow_one_request(),
        *(part for name, names in SECTIONS.items() for part in _section(name, names)),
        "## SQL",
        "The migrations create tables and functions step by step; `schema.sql` shows the database after all of them. "
        "`python -m tools.postgres_schema` writes it, and a test compares it with migrated databases. At run "
        "time nothing reads it. The primary key of `oncekey.record` is the last line of defence: two records of one "
        "key cannot be committed. [Tables](../reference/schema.md) explains the columns.",
        "Until the `post` migration 0009 has run, the triggers of 0008 run, too. If a request takes over or supersedes "
        "a record, or marks it as unknown, it also writes an audit line (`note` in `upkeep.sql`) unless `audit=False`, "
        "and `op.emit` "
        "writes messages (`put_parcels` in `outbox.sql`). The functions `hold`, `keep` and `was_kept` serve OUTBOX and "
        "PHASED only.",
        table(("File", "Lines", "Purpose"), statements),
        "## Requests that import a module",
        "Two documents import their module when they are first requested: the OpenAPI document, and the help page that "
        "error responses link to. A LOCAL route imports `engine/phases.py` and `engine/steps.py` if it resumes a "
        "record that an earlier deployment began as PHASED. `once.connection` imports "
        "`frameworks/asgi/transactions.py` if an "
        "application first reads that attribute inside a request.",
    )
