"""Shared by the operators' commands: the options for the store, a record and a response, and the output of a move.

An operator identifies a record by its key, and by its tenant or scope if several records have that key. Output always
identifies it in full.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer

from oncekey import wire
from oncekey.cli.applications import load, url_of
from oncekey.cli.printing import as_json, broken, plain
from oncekey.core import model
from oncekey.core.checks import MEMORY, Front
from oncekey.core.errors import CommitAmbiguousError, ConfigurationError, ResultNotStorableError
from oncekey.core.flow import adrive
from oncekey.core.memo import decode, encode, rejected
from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant, Record, RecordId, lapse, moment
from oncekey.core.operate import Forbidden, Moved, Possibility
from oncekey.core.policy import Policy
from oncekey.core.scope import NO_NAMESPACE, BindTo, bound_scope, parts_of, shown_scope
from oncekey.core.transitions import Actor, Mover
from oncekey.databases.address import Kind
from oncekey.engine.operate import operations_of
from oncekey.ops.explain_retry import prospect
from oncekey.sealing import from_environment

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine

NAMESPACE: Final = "ONCEKEY_NAMESPACE"
SHORTEST: Final = 4
"""The minimum length of a prefix to search for a key."""
SHOWN: Final = 20
NOT_HERE: Final = (
    "no such key (a LOCAL request in progress on PostgreSQL has no row yet: pass --tenant to find it, and "
    "--principal if keys are bound to principals)"
)


@dataclass(frozen=True, slots=True)
class Several:
    """More than one key matches the operator's input."""

    records: tuple[Record, ...]
    more: bool
    now: Instant


async def find(engine: AsyncEngine, key: str, scope: str | None) -> RecordId | Several | Forbidden:
    """The record of a key or of its prefix. The scope is needed only if several match."""
    page = await adrive(operations_of(engine.store).named(key, scope, SHOWN + 1), engine.driver.run)
    same = tuple(one for one in page.records if one.id.key == key)
    fitting = same or page.records
    if not same and len(key) < SHORTEST and (fitting or scope is None):
        return Forbidden(f"no such key, and a search by prefix needs at least {SHORTEST} characters")
    if len(fitting) > 1:
        return Several(fitting[:SHOWN], len(fitting) > SHOWN, page.now)
    if fitting:
        return fitting[0].id
    # With the tenant, a record without a row can be found by its lock, and a deleted one in the audit.
    return Forbidden(NOT_HERE) if scope is None else RecordId(scope, key)


async def called(engine: AsyncEngine, app: str | None) -> dict[str, tuple[str, ...]]:
    """The calls of INLINE handlers by operation, as registered by workers and found in the application's code."""
    found: dict[str, tuple[str, ...]] = {}
    if engine.store.upkeep is not None:
        roll = await adrive(engine.store.upkeep.workers(), engine.driver.run)
        for operation in {name for one in roll.workers for name in one.calls}:
            found[operation] = roll.inline_calls(operation)
    if app is not None:
        from oncekey.workers.tasks import inline_calls_of

        found |= inline_calls_of(load(app))
    return found


def scope_named(tenant: str | None, namespace: str | None, principal: str | None, scope: str | None) -> str | None:
    """The scope, built as for requests; None if no option names one."""
    if scope is not None:
        if tenant is not None or principal is not None:
            raise ConfigurationError("--scope replaces --tenant and --principal: pass one or the other")
        return scope
    if tenant is None:
        if principal is not None:
            raise ConfigurationError("--principal needs --tenant: it is a caller within a tenant")
        return None
    bind_to = BindTo.TENANT if principal is None else BindTo.PRINCIPAL
    return bound_scope(bind_to, namespace or NO_NAMESPACE, tenant, principal=principal)


def typed(record_id: RecordId) -> str:
    """A key with the options that name its owner, quoted for a shell."""
    return " ".join(part for part in words_of(record_id) if part)


def words_of(record_id: RecordId) -> tuple[str, str]:
    """The arguments of `typed` in two parts; the second, after `--`, is for a key that would look like an option."""
    match parts_of(record_id.scope):
        case [namespace, tenant]:
            words = [*_namespace(namespace), "--tenant", tenant]
        case [namespace, tenant, bound, principal] if bound == BindTo.PRINCIPAL:
            words = [*_namespace(namespace), "--tenant", tenant, "--principal", principal]
        case _:
            words = ["--scope", record_id.scope]
    if record_id.key.startswith("-"):
        return shlex.join(words), shlex.join(["--", record_id.key])
    return shlex.join([record_id.key, *words]), ""


def _namespace(name: str) -> list[str]:
    return ["--namespace", name] if name != NO_NAMESPACE or os.environ.get(NAMESPACE) else []


T = TypeVar("T")

REFUSED: Final = 1
"""The exit code if the record does not exist, or the move is not allowed: nothing was changed."""
SECRET: Final = "ONCEKEY_SECRET"  # noqa: S105  (the name of a variable, not a secret)
CODES: Final = "Exit code: 0 done, 1 not found or not allowed (nothing was changed), 2 a usage error or no store."

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="ONCEKEY_STORE", help=f"The store's URL: {wire.FORMS}.", metavar="URL")
]
OptionalStoreUrl = Annotated[
    str | None, typer.Option("--store", envvar="ONCEKEY_STORE", help=f"The store's URL: {wire.FORMS}.", metavar="URL")
]
StoreOfApp = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object, for its store."),
]
OnlyOnce = Annotated[
    bool, typer.Option("--once", help="Do everything that is due now, and exit; without it, run until SIGTERM.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[str, typer.Argument(help="The Idempotency-Key, without quotes, or a prefix of it.", metavar="KEY")]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        help="The tenant, as the application names it, with all of its principals; needed if several keys match.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every field, with the column names.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", envvar=NAMESPACE, help="The policy's `namespace`, if it has one.")
]
Principal = Annotated[
    str | None, typer.Option("--principal", help="The principal within the tenant, if keys are bound to principals.")
]
Scope = Annotated[
    str | None, typer.Option("--scope", help="The scope, as in the JSON of a list; replaces --tenant.", metavar="TEXT")
]
Reason = Annotated[
    str, typer.Option("--reason", help="The reason, for the audit; required for every change.", metavar="TEXT")
]
By = Annotated[
    str | None, typer.Option("--by", help="Your name, for the audit. [default: your login name]", metavar="NAME")
]
Version = Annotated[
    int | None,
    typer.Option("--version", help="Fail unless the record has this version, as shown by `keys show`.", metavar="N"),
]
ReplayCache = Annotated[
    str | None,
    typer.Option(
        "--replay-cache",
        envvar="ONCEKEY_REPLAY_CACHE",
        help=f"The Redis of the policy's `replay_cache`, if it has one; the policy's secret is in {SECRET}.",
        metavar="URL",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="The maximum number of results.")]


def work(url: str, doing: Callable[[AsyncEngine], Awaitable[T]], *, checked: bool = True) -> T:
    """Run `doing` with the store, after checking its schema. It uses asyncio: every database has a driver for it."""
    check_exists(url)

    async def within() -> T:
        engine = wire.sealing(wire.aconnect(url), from_environment())
        try:
            if checked:
                await engine.check()
            return await doing(engine)
        except CommitAmbiguousError as error:
            raise CommitAmbiguousError(
                "the connection was lost during the commit, so the change may have been made: check with `oncekey "
                "keys show` and `oncekey keys history` before you repeat it"
            ) from error
        finally:
            await engine.close()

    return asyncio.run(within())


def store_named(store: str | None, app: str | None) -> str:
    """The URL of the store: from --store or ONCEKEY_STORE, otherwise the application's."""
    if store is not None:
        return store
    if app is None:
        raise ConfigurationError("no store was given: pass --store URL or --app MODULE:NAME, or set ONCEKEY_STORE")
    return url_of(load(app), app)


def check_exists(url: str) -> None:
    """Reject an in-memory store, and a SQLite file that opening would create: reading must not change anything."""
    address = wire.understand(url)
    if address.kind is Kind.MEMORY:
        raise ConfigurationError("memory: is private to one process, so no command can read it: check --store")
    if address.kind is Kind.SQLITE and not Path(address.place).is_file():
        raise ConfigurationError(f"the file {address.place} does not exist: check --store")


def secret() -> bytes | None:
    """The policy's secret, from the environment only: other users can see command lines."""
    value = os.environ.get(SECRET)
    return value.encode() if value else None


def shared_front(url: str) -> Front:
    """The Redis of `--replay-cache`."""
    try:
        front = Front(url)
    except ValueError:
        front = Front(MEMORY)
    if not front.shared:
        raise ConfigurationError("--replay-cache is not a Redis URL: write it like redis://host:6379/0")
    if find_spec("redis") is None:
        raise ConfigurationError("redis is not installed: pip install 'oncekey[redis,encryption]'")
    return front


def operator(by: str | None) -> Mover:
    """The operator's name, for the audit."""
    try:
        name = (by if by is not None else getpass.getuser()).strip()
    except (KeyError, OSError):  # a container's user may have no name
        name = ""
    if not name:
        raise ConfigurationError("--by is empty: the audit needs your name")
    return Mover(Actor.OPERATOR, name)


def required_reason(reason: str) -> str:
    """The reason; raises if it is empty. The dots of a copied command are not a reason."""
    if not any(letter.isalnum() for letter in reason):
        raise ConfigurationError("--reason is empty: the audit needs one. Nothing was changed")
    return reason.strip()


def span(text: str) -> Duration:
    """`90`, `90s`, `15m`, `2h` or `3d`."""
    units = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": 24 * HOUR}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, SECOND)
    try:
        found = round(float(number) * unit)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ConfigurationError(f"{text!r} is not a duration: write it like 90s, 15m, 2h or 3d")
    return found


def instant(text: str) -> Instant:
    """An RFC 3339 timestamp, with its offset."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a timestamp: write it like 2026-11-16T01:50:00Z") from None
    if at.tzinfo is None:
        raise ConfigurationError(f"{text!r} has no offset: write it like 2026-11-16T01:50:00Z")
    return round(at.astimezone(UTC).timestamp() * SECOND)


def age(since: Instant | None, now: Instant) -> str:
    """The age as readable text."""
    return "" if since is None else lapse(now - since)


def print_move(moved: Moved, *, json_wanted: bool, verbose: bool = False) -> None:
    """Print the change of state, and the effect of a retry."""
    from oncekey.frameworks.resources import describe

    seen, after = moved.move.seen, moved.snapshot.record
    assert after is not None
    if json_wanted:
        as_json(
            {
                "changed": True,
                "row": moved.move.row.number,
                "from": seen.state.value,
                "to": after.state.value,
                "retry": prospect(after, moved.snapshot.now),
                "record": describe(after),
            }
        )
        return
    rule = f" by row {moved.move.row.number} of the table of moves" if verbose else ""
    change = f"{seen.state} -> {after.state}"
    if moved.move.expires_at is not None:
        change = f"kept until {moment(after.expires_at)}"
    typer.echo(f"{plain(after.id.key)} of {plain(shown_scope(after.id.scope))}: {change}{rule} (audited)")
    typer.echo(prospect(after, moved.snapshot.now))


def refuse(
    forbidden: Forbidden, *, json_wanted: bool, about: RecordId | None = None, verbose: bool = False, read: bool = False
) -> NoReturn:
    """Print why the change was refused, and the commands that are possible instead; exit. Nothing was changed.

    `read`: the command would have changed nothing.
    """
    if json_wanted:
        shown = [possibility(one, about) for one in forbidden.instead]
        as_json({"changed": False, "why": forbidden.why, "possible": shown})
        raise typer.Exit(REFUSED)
    typer.echo(f"oncekey: {'' if read else 'not done: '}{plain(forbidden.why)}", err=True)
    if verbose and forbidden.rule:
        typer.echo(f"Table of moves: {forbidden.rule}", err=True)
    if forbidden.instead:
        typer.echo("Possible now:", err=True)
        for one in forbidden.instead:
            for line in broken(possibility(one, about)["command"], indent=4):
                typer.echo(f"  {line}", err=True)
            if one.note:
                typer.echo(f"    {one.note}", err=True)
    elif about is not None:
        typer.echo("No manual change is possible now.", err=True)
    raise typer.Exit(REFUSED)


def refuse_several(several: Several, key: str, *, json_wanted: bool, read: bool = False) -> NoReturn:
    """Print the keys that match, each with the options that name it; exit. Nothing was changed."""
    if all(one.id.key == key for one in several.records):
        hint = "pass the options of one"
    elif len({one.id.scope for one in several.records}) == 1:
        hint = "give a longer prefix"
    else:
        hint = "give a longer prefix, or add --tenant"
    why = f"{'more than ' if several.more else ''}{len(several.records)} keys match {key}: {hint}"
    if json_wanted:
        found = [{"key": one.id.key, "scope": one.id.scope, "state": one.state.value} for one in several.records]
        as_json({"changed": False, "why": why, "possible": [], "found": found})
        raise typer.Exit(REFUSED)
    typer.echo(f"oncekey: {'' if read else 'not done: '}{plain(why)}", err=True)
    for one in several.records:
        about = f"{one.state}, {one.operation}, {age(one.created_at, several.now)} old"
        typer.echo(f"  {plain(typed(one.id))}\n    {plain(about)}", err=True)
    raise typer.Exit(REFUSED)


def possibility(one: Possibility, about: RecordId | None = None) -> dict[str, Any]:
    """A command that the transition table allows, as JSON."""
    if about is None:
        return {"command": one.command, "row": one.row, "to": one.to.value, "note": one.note}
    target, last = words_of(about)
    command = one.typed(target, last=last)
    return {"command": command, "row": one.row, "to": one.to.value, "note": one.note}


_ERRORS: Final = 400
_DEFAULTS: Final = Policy()

Body = Annotated[str | None, typer.Option("--body", help="The body of the response: a file, or - for standard input.")]
ContentType = Annotated[str, typer.Option("--content-type", help="The body's media type.")]
Status = Annotated[int | None, typer.Option("--status", min=200, max=599, help="The status code of the response.")]
Header = Annotated[
    list[str] | None,
    typer.Option("--header", help="'Name: value' of a response header; repeatable.", metavar="FIELD"),
]


def answer_of(
    status: int | None, body: str | None, content_type: str, header: list[str] | None, *, final_no: bool
) -> model.Completed | None:
    """The response that clients will receive; None if the options give none."""
    if status is None:
        if body is not None:
            raise ConfigurationError("a response needs a status: pass --status too")
        return None
    if final_no and status < _ERRORS:
        raise ConfigurationError(f"--declined is a failure, but {status} is not: pass --status 402 or similar")
    if not final_no and status >= _ERRORS:
        raise ConfigurationError(f"--executed is a success, but {status} is not: pass --declined for a final refusal")
    content = b"" if body is None else _read(body)
    if len(content) > _DEFAULTS.max_response_bytes:
        raise ConfigurationError(f"the body has {len(content)} bytes, but the limit is {_DEFAULTS.max_response_bytes}")
    if content and content_type == "application/json":
        try:
            json.loads(content)
        except ValueError as error:
            raise ConfigurationError(f"--body is not valid JSON: {error}; correct it, or pass --content-type") from None
    kind: model.Headers = ((b"content-type", _field(content_type)),) if content else ()
    headers = (*kind, *(_header(line) for line in header or ()))
    return model.Completed(
        model.StoredResponse(status, headers, content), model.Outcome.FAILURE if final_no else model.Outcome.SUCCESS
    )


def result_of(text: str, *, final_no: bool) -> str:
    """The stored form of a call's result, or of the provider's final refusal."""
    try:
        stored = encode(json.loads(text), _DEFAULTS.max_result_bytes)
    except (ValueError, ResultNotStorableError) as error:
        raise ConfigurationError(f"--result is not JSON that can be stored: {error}") from None
    entry = model.MemoEntry("-", model.EntryKind.CALL, stored)
    return rejected(entry).result if final_no else stored


def _read(body: str) -> bytes:
    if body == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(body).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--body {body} cannot be read: {error.strerror}") from None


def _header(line: str) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip().isascii() or not name.strip():
        raise ConfigurationError("--header takes 'Name: value'")
    return _field(name.strip().lower()), _field(value.strip())


def _field(text: str) -> bytes:
    if not text.isprintable():
        raise ConfigurationError("a header must not contain control characters")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ConfigurationError("a header must be Latin-1 text") from None


def checked_by(app: str | None, result: str | None) -> Callable[[Record], str | None]:
    """A check of a result against the handler's declaration: returns why it does not match, or None."""
    if app is None or result is None:
        return lambda _: None
    from oncekey.workers.tasks import result_mismatch

    application, value = load(app), decode(encode(json.loads(result), _DEFAULTS.max_result_bytes))

    def check(record: Record) -> str | None:
        wrong = result_mismatch(application, record, value)
        return None if wrong is None else f"--result is {wrong}"

    return check
