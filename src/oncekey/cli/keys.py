"""`oncekey keys list|show|history|resolve|release|bust|extend`: an operator inspects and changes records."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from string import hexdigits
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from oncekey.cli import applications, keys_show, options, printing
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.core.keys import key_digest
from oncekey.core.model import Effects, Record, RecordId, State
from oncekey.core.onecommit import lock_number
from oncekey.core.operate import Forbidden, Moved, OperatorCommand, Order, Search
from oncekey.core.policy import Policy
from oncekey.engine import operate
from oncekey.engine.fronts import check_fronts

if TYPE_CHECKING:
    from oncekey.core.resolution import AnnouncedCall
    from oncekey.core.transitions import AuditEntry
    from oncekey.core.upkeep import Page
    from oncekey.engine.shell import AsyncEngine

T = TypeVar("T")

NO_KEY: Final = "no such key"
CACHE_NOT_CLEARED: Final = (
    "the replay cache did not respond, so it may replay the old response until its `life` ends; bust continues"
)
App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="The Once object, for the names of INLINE calls."),
]
_PAGE: Final = 500
_SCHEMA: Final = "oncekey"


def register(app: typer.Typer) -> None:
    """Add the group `keys`."""
    group = typer.Typer(
        help="Inspect keys, and resolve them by hand. Every change needs a reason, is audited, and must be a legal "
        f"move of the record; otherwise the command prints why, and the moves that are possible.\n\n{options.CODES}",
        no_args_is_help=True,
    )
    for name, command in (
        ("list", list_keys),
        ("show", show),
        ("history", history),
        ("resolve", resolve),
        ("release", release),
        ("bust", bust),
        ("extend", extend),
    ):
        group.command(name)(command)
    app.add_typer(group, name="keys")


def list_keys(
    store: options.StoreUrl,
    *,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    state: Annotated[State | None, typer.Option(help="Only keys in this state.")] = None,
    operation: Annotated[str | None, typer.Option(help="Only keys of this operation.")] = None,
    effects: Annotated[Effects | None, typer.Option(help="Only operations with these effects.")] = None,
    older_than: Annotated[str, typer.Option(help="Only keys older than: 90s, 15m, 2h, 3d.", metavar="SPAN")] = "0",
    stale: Annotated[bool, typer.Option("--stale", help="Only keys in progress whose lease has ended.")] = False,
    digest: Annotated[
        str | None, typer.Option(help="Only the key with this digest, as shown in logs.", metavar="HEX")
    ] = None,
    limit: options.Limit = 50,
    before: Annotated[
        str | None, typer.Option(help="Continue after this position, from the previous list.", metavar="PLACE")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List keys, newest first. Changes nothing.

    Without --tenant it scans the whole table, which is slow on a large one.

    JSON: {"now", "items": [{"key", "scope", "state", "outcome", "operation", "effects", "recovery_point", "attempts",
    "last_error", "status", "created_at", "last_run_at", "lease_until", "expires_at", "digest", "stale"}], "next"}.
    """
    if digest is not None and not set(digest) <= set(hexdigits):
        raise ConfigurationError(f"--digest {digest} is not hexadecimal: copy it from the log")
    wanted = Search(
        scope=options.scope_named(tenant, namespace, principal, scope),
        state=state,
        operation=operation,
        effects=effects,
        older_than=options.span(older_than),
        stale=stale,
    )
    now, records, place = options.work(store, lambda engine: _list(engine, wanted, limit, _place(before), digest))
    if as_json:
        printing.as_list([keys_show.line_of(record, now) for record in records], now=now, following=place)
        return
    printing.table(
        keys_show.HEAD, [keys_show.row_of(one, now) for one in records], empty="no matching keys", first=keys_show.FIRST
    )
    if place is not None:
        typer.echo(f"more: --before {place}")


def show(
    key: options.Key,
    store: options.StoreUrl,
    *,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    call: Annotated[
        list[str] | None,
        typer.Option(help="INLINE: the name of a call, as in op.downstream_key(NAME). Repeatable.", metavar="NAME"),
    ] = None,
    app: App = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Show one key: the meaning of its state, the effect of a retry, and the commands that apply. Changes nothing.

    --tenant is not needed if only one key matches; a prefix of the key is enough. The command shows the same
    `state`, `recovery_point`, `attempts`, `last_error` and `expires_at` as GET /idempotency-keys/KEY. A LOCAL request
    on PostgreSQL has no row until it is done; the command finds it by its lock, and needs --tenant for that, and the
    policy's secret in ONCEKEY_SECRET if there is one.

    An INLINE handler does not announce its calls. Workers record the calls in their application's code; if no worker
    runs, pass --call or --app.

    JSON: the fields of GET /idempotency-keys/KEY, and "means", "why", "scope", "effects", "recovery", "incarnation",
    "fence", "version", "owner", "lease_until", "deadline", "reconcile_after", "reconcile_tries", "steps", "open_call",
    "downstream_keys", "result_shape", "not_executed_is_believed_from", "parcels", "evidence", "retry", "possible",
    "now". "open_call" counts its "sends" since "first_sent_at"; if it was also sent before that, they were declared not
    executed at "declared_not_executed_at".

    Exit code 1 if there is no such key, or if several match.
    """
    whose = options.scope_named(tenant, namespace, principal, scope)

    async def looking(engine: AsyncEngine) -> keys_show.RecordView | options.Several | Forbidden:
        found = await options.find(engine, key, whose)
        if not isinstance(found, RecordId):
            return found
        return await known_of(engine, found, tuple(call or ()), app)

    known = _one(options.work(store, looking), key, json_wanted=as_json, read=True)
    shape = keys_show.shown(known, key)
    if as_json:
        printing.as_json(shape)
    else:
        printing.lines(keys_show.record_lines(known, shape, verbose=verbose))
        if not verbose and "scope" in shape:
            typer.echo(
                "\n--verbose shows every field, `oncekey keys history` what workers, resolvers and operators changed.",
                err=True,
            )


def history(
    key: options.Key,
    store: options.StoreUrl,
    *,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the audit of a key: what workers, resolvers, webhooks and operators changed.

    It has releases by the sweeper, deletions by the reaper, settled outcomes, take-overs of a request whose owner died
    or failed, and failed attempts of a deferred call. It does not have the outcome of a run, whether a client's or a
    worker's request made it: the record has that (`oncekey keys show`). An outcome that was settled has the trigger
    `executed`, `declined`, `not_executed`, `discard` (a dead letter was given up) or `replace` (a result that an
    operator had entered was corrected).

    Entries outlive the record; the incarnation distinguishes successive records of one key. For a key whose record is
    gone, pass --tenant. The reaper writes one entry for the keys of a tenant that it deletes in one batch, unless the
    setting `audit` is `each`. For a key without a record the command also shows the latest of these entries, without
    incarnation and fence. Changes nothing.

    JSON: {"now", "items": [{"at", "from", "to", "trigger", "actor", "who", "why", "fence", "operation",
    "incarnation"}], "next"}.
    """
    whose = options.scope_named(tenant, namespace, principal, scope)
    nothing = "the audit has no entry for this key"
    if tenant is not None and principal is None:
        nothing += "; if keys are bound to principals, and its record is gone, pass --principal"

    async def looking(engine: AsyncEngine) -> tuple[AuditEntry, ...] | options.Several | Forbidden:
        found = await options.find(engine, key, whose)
        if not isinstance(found, RecordId):
            return found
        return await adrive(operate.history_of(engine.store, found), engine.driver.run)

    found = _one(options.work(store, looking), key, json_wanted=as_json, read=True)
    entries = [keys_show.shown_entry(entry) for entry in found]
    if as_json:
        printing.as_list(entries)
        return
    head = ("at", "from", "to", "trigger", "actor", "who", "why", "fence")
    rows = [[entry[name] for name in head] for entry in entries]
    printing.table(head, rows, empty=nothing, first=("at", "to", "why", "who", "trigger", "from"))


def resolve(
    key: options.Key,
    store: options.StoreUrl,
    *,
    reason: options.Reason,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    executed: Annotated[bool, typer.Option("--executed", help="The provider executed the call.")] = False,
    declined: Annotated[bool, typer.Option("--declined", help="The provider declined the call permanently.")] = False,
    not_executed: Annotated[bool, typer.Option("--not-executed", help="The call was not executed.")] = False,
    closed: Annotated[
        bool,
        typer.Option(
            "--closed",
            help=("With --not-executed: the reference was closed at the provider, so it cannot be executed later."),
        ),
    ] = False,
    asked_at: Annotated[
        str | None,
        typer.Option(help="With --not-executed: when you checked with the provider. [default: now]", metavar="INSTANT"),
    ] = None,
    provider_lag: Annotated[
        str, typer.Option(help="How long the provider may take to show an execution.", metavar="SPAN")
    ] = "60s",
    status: options.Status = None,
    body: options.Body = None,
    content_type: options.ContentType = "application/json",
    header: options.Header = None,
    result: Annotated[str | None, typer.Option(help="PHASED: the open call's result, as JSON.", metavar="JSON")] = None,
    version: options.Version = None,
    by: options.By = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object, to check --result."),
    ] = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Resolve a key whose outcome is unknown, after you checked with the provider.

    --executed, INLINE and OUTBOX: give the response with --status and --body. The record is completed with it, and a
    retry receives it; its dead letter is removed.

    --executed, PHASED: give the result of the open call with --result. The handler resumes from there, by a retry or a
    completer, and computes the response itself. With --app the result is first checked against the handler's `result=`.
    To correct a wrong one, repeat the command before the next step is stored.

    --declined: the same, with the provider's permanent refusal; a PHASED handler gets `RejectedError(result)`.

    --not-executed: a retry executes it; a deferred call goes back to the outbox. Because a call may still be on its
    way, it is accepted only if you checked after the time shown by `keys show`, or with --closed.

    Refused for any other state. Exit code 1: refused, nothing was changed.

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} or {"changed": false, "why", "possible"}. "row" is
    the number of the move in docs/explanation/states.md.
    """
    outcomes = {"--executed": executed, "--declined": declined, "--not-executed": not_executed}
    passed = [name for name, given in outcomes.items() if given]
    if not passed:
        raise ConfigurationError("the outcome is missing: pass one of --executed, --declined and --not-executed")
    if len(passed) > 1:
        raise ConfigurationError(f"pass only one of {', '.join(outcomes)}; you passed {' and '.join(passed)}")
    if not_executed and (status, body, result) != (None, None, None):
        raise ConfigurationError("--not-executed has no response: remove --status, --body and --result")
    if not not_executed and (closed or asked_at is not None):
        raise ConfigurationError("--closed and --asked-at need --not-executed")
    order = Order.NOT_EXECUTED if not_executed else Order.DECLINED if declined else Order.EXECUTED
    command = OperatorCommand(
        order,
        options.required_reason(reason),
        answer=options.answer_of(status, body, content_type, header, final_no=declined),
        result=None if result is None else options.result_of(result, final_no=declined),
        closed=closed,
        asked_at=None if asked_at is None else options.instant(asked_at),
        version=version,
        lag=options.span(provider_lag),
    )
    whose = options.scope_named(tenant, namespace, principal, scope)
    check = options.checked_by(None if declined else app, result)
    _act(RecordOptions(store, key, whose), command, by, check, verbose=verbose, json_wanted=as_json)


def release(
    key: options.Key,
    store: options.StoreUrl,
    *,
    reason: options.Reason,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    version: options.Version = None,
    by: options.By = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Release a key whose owner has died, as the sweeper would.

    In progress with an expired lease: LOCAL becomes retryable, and a retry executes it; PHASED becomes resumable, and a
    retry or a completer resumes it after the last finished step. INLINE, an open call that must not be repeated, and a
    key with too many attempts become unknown, because the operation may have been executed.

    Unknown without an open call becomes retryable. If a call is open, record its outcome with `keys resolve`. A live
    lease is never released: a retry would run concurrently with its owner.

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} or {"changed": false, "why", "possible"}. "row" is
    the number of the move in docs/explanation/states.md.
    """
    command = OperatorCommand(Order.RELEASE, options.required_reason(reason), version=version)
    whose = options.scope_named(tenant, namespace, principal, scope)
    _act(RecordOptions(store, key, whose), command, by, verbose=verbose, json_wanted=as_json)


def bust(
    key: options.Key,
    store: options.StoreUrl,
    *,
    reason: options.Reason,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    runs_again: Annotated[
        bool, typer.Option("--runs-again", help="Confirm that a stored success will be executed again.")
    ] = False,
    replay_cache: options.ReplayCache = None,
    version: options.Version = None,
    by: options.By = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Delete a stored response, so that the next retry executes.

    For a response that should not have been stored, such as a failure whose cause is fixed. A stored success needs
    --runs-again: LOCAL and INLINE execute from the beginning; PHASED keeps its finished steps and only computes its
    response again, when the client retries: a finished record has no stored request for a worker. A call that the
    provider declined is a finished step, so the provider is not called again: for another attempt the client needs a
    new key. An OUTBOX response cannot be busted, because its handler must not run twice. Refused while the record has
    entries in the outbox or dead letters.

    Applications with a shared `replay_cache` would replay the response for up to its `life`: --replay-cache removes it
    there first. The copies in the memory of processes last until their `life` ends.

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} or {"changed": false, "why", "possible"}. "row" is
    the number of the move in docs/explanation/states.md.
    """
    command = OperatorCommand(Order.BUST, options.required_reason(reason), runs_again=runs_again, version=version)
    whose, cache = options.scope_named(tenant, namespace, principal, scope), _cache_of(replay_cache)

    async def first(engine: AsyncEngine, record_id: RecordId) -> None:
        if cache is not None and not await _forgotten(engine, cache, record_id):
            typer.echo(f"oncekey: {CACHE_NOT_CLEARED}", err=True)

    _act(RecordOptions(store, key, whose), command, by, first=first, verbose=verbose, json_wanted=as_json)


def extend(
    key: options.Key,
    store: options.StoreUrl,
    *,
    life: Annotated[str, typer.Option("--for", help="How long from now, such as 36h or 7d.", metavar="SPAN")],
    reason: options.Reason,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    version: options.Version = None,
    by: options.By = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Keep a stored response longer than the ttl of its route.

    For a workflow that takes days, or a client that retries late: until then a retry receives the stored response, and
    does not execute. The expiry is never shortened. An unfinished key does not expire, so it needs no
    extension; an expired one is refused, because a request with it already counts as new.

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} or {"changed": false, "why", "possible"}. "row" is
    the number of the move in docs/explanation/states.md.
    """
    command = OperatorCommand(Order.EXTEND, options.required_reason(reason), life=options.span(life), version=version)
    whose = options.scope_named(tenant, namespace, principal, scope)
    _act(RecordOptions(store, key, whose), command, by, verbose=verbose, json_wanted=as_json)


def _cache_of(url: str | None) -> Policy | None:
    """A policy for the shared cache of responses: it decides the names and the encryption of entries."""
    if url is None:
        return None
    policy = Policy().override(replay_cache=options.shared_front(url), secret=options.secret())
    check_fronts((policy,), b"")
    return policy


async def _forgotten(engine: AsyncEngine, policy: Policy, record_id: RecordId) -> bool:
    from oncekey.frameworks.fronting import forget, fronts_here

    fronts = fronts_here()
    try:
        return await forget(fronts, (policy,), engine, record_id)
    finally:
        for line in fronts.lines.values():
            await line.close()


async def _nothing(_: AsyncEngine, __: RecordId) -> None:
    """For a command that needs no preparation."""


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """The arguments and options that name a record."""

    store: str
    key: str
    scope: str | None


def _act(
    target: RecordOptions,
    command: OperatorCommand,
    by: str | None,
    check: Callable[[Record], str | None] = lambda _: None,
    *,
    first: Callable[[AsyncEngine, RecordId], Awaitable[None]] = _nothing,
    verbose: bool,
    json_wanted: bool,
) -> None:
    mover = options.operator(by)
    about: list[RecordId] = []

    async def doing(engine: AsyncEngine) -> Moved | options.Several | Forbidden:
        found = await options.find(engine, target.key, target.scope)
        if not isinstance(found, RecordId):
            return found
        record = (await engine.find(found)).record
        wrong = None if record is None else check(record)
        if wrong is not None:
            return Forbidden(wrong)
        about.append(found)
        await first(engine, found)
        return await adrive(
            operate.act(engine.store, found, command, mover, notify=applications.notify()), engine.driver.run
        )

    done = options.work(target.store, doing)
    if isinstance(done, Forbidden):
        options.refuse(done, json_wanted=json_wanted, about=about[0] if about else None, verbose=verbose)
    options.print_move(_one(done, target.key, json_wanted=json_wanted), json_wanted=json_wanted, verbose=verbose)


def _one(found: T | options.Several | Forbidden, key: str, *, json_wanted: bool, read: bool = False) -> T:
    """The one result of a search; if none or several match, print why and exit."""
    if isinstance(found, options.Several):
        options.refuse_several(found, key, json_wanted=json_wanted, read=read)
    if isinstance(found, Forbidden):
        options.refuse(found, json_wanted=json_wanted, read=read)
    return found


async def known_of(
    engine: AsyncEngine, record_id: RecordId, calls: tuple[str, ...] = (), app: str | None = None
) -> keys_show.RecordView | Forbidden:
    """A key with its record, its audit, and the name and last result of its call."""
    number = lock_number(_SCHEMA, record_id, options.secret())
    sight = await adrive(operate.inspect(engine.store, record_id, number), engine.driver.run)
    if sight.snapshot.record is None and not sight.busy:
        deleted = await adrive(operate.deletion_of(engine.store, record_id), engine.driver.run)
        return Forbidden(NO_KEY if deleted is None else f"{NO_KEY}: {deleted}")
    record = sight.snapshot.record
    if record is None:
        return keys_show.RecordView(sight)
    audit: tuple[AuditEntry, ...] = ()
    if (record.last_error is not None or record.intent is not None) and engine.store.audit is not None:
        audit = await adrive(operate.history_of(engine.store, record_id), engine.driver.run)
    announced: tuple[AnnouncedCall, ...] = ()
    if record.intent is not None and engine.store.reconcile is not None:
        calls_of = engine.store.reconcile.calls_of(record.intent.downstream_key, None)
        announced = await adrive(calls_of, engine.driver.run)
    if record.effects is Effects.INLINE:
        calls = (*calls, *(await options.called(engine, app)).get(record.operation, ()))
    by_hand = record.memo[-1].name if record.memo and record.memo[-1].by_hand else None
    phase = by_hand if record.intent is None else record.intent.phase
    if phase is None or record.effects is not Effects.PHASED:
        return keys_show.RecordView(sight, calls=calls, audit=audit, announced=announced)
    last = await adrive(operate.operations_of(engine.store).last_result(record.operation, phase), engine.driver.run)
    return keys_show.RecordView(sight, last, calls, audit, announced)


async def _list(
    engine: AsyncEngine, wanted: Search, limit: int, before: tuple[int, str, str] | None, digest: str | None
) -> tuple[int, tuple[Record, ...], str | None]:
    """One page, and the place where the next begins. With a digest it reads pages until enough records match."""
    found: tuple[Record, ...] = ()
    while True:
        size = limit if digest is None else _PAGE
        page: Page = await adrive(operate.operations_of(engine.store).search(wanted, size, before), engine.driver.run)
        found += tuple(one for one in page.records if digest is None or key_digest(one.id.key) == digest.lower())
        last = page.records[-1] if page.records else None
        before = None if last is None else (last.created_at, last.id.scope, last.id.key)
        ended = len(page.records) < size
        if ended or len(found) >= limit:
            return page.now, found[:limit], None if ended or before is None else _token(before)


def _token(place: tuple[int, str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _place(token: str | None) -> tuple[int, str, str] | None:
    if token is None:
        return None
    try:
        at, scope, key = json.loads(base64.urlsafe_b64decode(token))
        return int(at), str(scope), str(key)
    except ValueError:
        raise ConfigurationError("--before takes the value of `next` in the previous list") from None
