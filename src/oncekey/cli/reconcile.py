"""Unknown outcomes: `oncekey unknown list` lists them, and `oncekey reconcile` checks them with resolvers.

`oncekey reconcile ledger` compares the provider's ledger with the store.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import applications, options, printing
from oncekey.cli.keys_show import in_doubt
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import adrive
from oncekey.core.model import SECOND, Effects, Instant, State
from oncekey.core.operate import Search
from oncekey.core.scope import shown_scope
from oncekey.engine import operate
from oncekey.ops.explain_retry import downstream_keys

if TYPE_CHECKING:
    from oncekey.core.upkeep import Page
    from oncekey.engine.shell import AsyncEngine
    from oncekey.once import Once
    from oncekey.reconcile import Books, Difference, Expected, LedgerReport

App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object, for its resolvers."),
]


def register(app: typer.Typer) -> None:
    """Add the groups `unknown` and `reconcile`."""
    unknown = typer.Typer(
        help="Keys whose outcome is unknown: no retry executes them until they are resolved.",
        no_args_is_help=True,
    )
    unknown.callback()(lambda: None)
    unknown.command("list")(list_unknown)
    app.add_typer(unknown, name="unknown")
    reconciling = typer.Typer(invoke_without_command=True)
    reconciling.callback(help=reconcile.__doc__)(reconcile)
    reconciling.command("ledger")(ledger)
    app.add_typer(reconciling, name="reconcile")


def list_unknown(
    store: options.StoreUrl,
    *,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    older_than: Annotated[str, typer.Option(help="Only keys older than: 90s, 15m, 2h, 3d.", metavar="SPAN")] = "0",
    given_up: Annotated[
        bool,
        typer.Option("--given-up", help=("Only keys that no resolver checks any more: an operator must resolve them.")),
    ] = False,
    call: Annotated[
        list[str] | None,
        typer.Option(
            help="INLINE: the call of an operation, as in op.downstream_key(NAME). Repeatable.",
            metavar="OPERATION=NAME",
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The Once object, for the names of INLINE calls."),
    ] = None,
    limit: options.Limit = 100,
    as_json: options.AsJson = False,
) -> None:
    """List the keys whose outcome is unknown, newest first. Changes nothing.

    The downstream key identifies the call at the provider: check there, then record the outcome with `oncekey keys
    resolve KEY --executed | --declined | --not-executed`. The reconciler calls resolvers automatically; the
    list includes keys that it has given up.

    An INLINE handler does not announce its calls. Workers record the calls in their application's code; if no worker
    runs, pass --call OPERATION=NAME or --app.

    JSON: {"now", "items": [the fields of `keys list`, and "open_call", "downstream_keys",
    "not_executed_is_believed_from", "reconcile_after", "reconcile_tries", "given_up"], "next"}. "open_call" counts its
    "sends" since "first_sent_at"; it may have been sent before that, and declared not executed (`keys show`).
    """
    wanted = Search(
        scope=options.scope_named(tenant, namespace, principal, scope),
        state=State.UNKNOWN,
        older_than=options.span(older_than),
    )

    async def looking(engine: AsyncEngine) -> tuple[Page, dict[str, tuple[str, ...]]]:
        page = await adrive(operate.operations_of(engine.store).search(wanted, limit), engine.driver.run)
        return page, await options.called(engine, app)

    page, calls = options.work(store, looking)
    records = [one for one in page.records if one.reconcile_after is None or not given_up]
    for operation, name in option_pairs(call, "--call").items():
        calls[operation] = (name,)
    if as_json:
        printing.as_list([in_doubt(one, page.now, calls=calls.get(one.operation, ())) for one in records], now=page.now)
        return
    printing.table(
        ("key", "downstream key", "caller", "operation", "effects", "last error", "open call", "checks", "age"),
        [
            (
                one.id.key,
                ", ".join(downstream_keys(one, calls.get(one.operation, ())).values()),
                shown_scope(one.id.scope),
                one.operation,
                one.effects,
                one.last_error,
                None if one.intent is None else one.intent.phase,
                "given up" if one.reconcile_after is None else one.reconcile_tries,
                options.age(one.created_at, page.now),
            )
            for one in records
        ],
        empty="no unknown outcomes",
        first=("key", "downstream key", "caller", "age", "operation", "last error"),
    )
    if records:
        typer.echo("Details and commands: oncekey keys show KEY", err=True)


def reconcile(
    context: typer.Context, *, app: App = None, once: options.OnlyOnce = False, as_json: options.AsJson = False
) -> None:
    """Check unknown outcomes with the application's resolvers, and apply received webhooks.

    A call that was executed or declined is settled at once. "Not executed" is accepted only if the resolver was called
    after the last moment at which the call could be sent, also by this process's own clock: so a single --once never
    accepts it, unless the resolver closed the reference. After `reconcile_max_tries` checks without a result an
    operator must resolve the key: see `oncekey unknown list` and `oncekey keys resolve`. `oncekey worker` does the same
    continuously.

    JSON, with --once: {"settled", "postponed", "waiting", "exhausted", "contradictions"}.
    """
    if context.invoked_subcommand is not None:
        return
    if app is None:
        raise ConfigurationError("resolvers are functions of the application: pass --app MODULE:NAME")
    applications.log_plainly()
    counts = asyncio.run(_reconcile(applications.joined(applications.load(app)), only_once=once))
    if counts is None:
        return
    if as_json:
        printing.as_json(counts)
    else:
        typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))


async def _reconcile(application: Once, *, only_once: bool) -> dict[str, int] | None:
    from oncekey.workers.service import Service
    from oncekey.workers.tasks import reconciler_of

    await application.start()
    try:
        task = reconciler_of(application)
        if only_once:
            await task.run_once()
            names = ("settled", "postponed", "waiting", "exhausted", "contradictions")
            return {name: task.counts[name] for name in names}
        service = Service([task], notify=application.notify)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        await service.run()
        return None
    finally:
        await application.stop()


def ledger(  # noqa: PLR0917  (typer reads the parameters)
    store: options.StoreUrl,
    books: Annotated[
        str,
        typer.Option("--ledger", metavar="FILE|URL", help="The provider's charges: CSV, or JSON from a file or URL."),
    ],
    since: Annotated[
        str | None,
        typer.Option(help="Only calls since 2026-11-16T00:00:00Z, for example, or 25h (ago).", metavar="INSTANT|SPAN"),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="The ledger's name of a field: downstream_key, provider_id, amount, currency or at. Repeatable.",
            metavar="FIELD=NAME",
        ),
    ] = None,
    amount: Annotated[
        str | None,
        typer.Option(
            "--amount",
            metavar="POINTER",
            help=("The JSON pointer to the amount in a call's result, such as /amount_cents."),
        ),
    ] = None,
    currency: Annotated[
        str | None, typer.Option("--currency", metavar="POINTER", help="The JSON pointer to the currency.")
    ] = None,
    inline: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "The name of an INLINE operation's call, such as pay=charge, which is not announced. Repeatable; --app "
                "finds the names."
            ),
            metavar="OPERATION=CALL",
        ),
    ] = None,
    app: App = None,
    *,
    as_json: options.AsJson = False,
) -> None:
    """Compare the provider's charges with the recorded calls. Changes nothing.

    Reports charges that are missing on one side, double charges, charges for refused calls, and amounts that differ.
    Pass a ledger that begins no later than --since, and omit the last minutes: calls in progress are reported as
    charged_while_unknown.

    JSON: {"agree", "charges", "calls", "agreed", "differences": [{"kind", "meaning", "downstream_key", "provider_id",
    "operation", "key_digest", "charges", "ours", "theirs"}]}.

    Exit code: 0 the ledgers agree, 1 they differ, 2 a usage error or no store.
    """
    from oncekey.reconcile import FIELDS, Books, DifferenceKind, Pointers, compare, entries

    columns = option_pairs(column, "--column")
    for name in columns:
        if name not in FIELDS:
            raise ConfigurationError(f"--column {name}=...: a field is one of {', '.join(FIELDS)}")
    ours = Books(
        since=0 if since is None else _since(since),
        pointers=Pointers(_pointer(amount, "--amount"), _pointer(currency, "--currency")),
        inline={**inline_calls(app), **option_pairs(inline, "--inline")},
    )
    theirs = list(entries(books, columns))
    report = compare(theirs, _read(store, ours))
    if as_json:
        printing.as_json(_shape(report))
    else:
        _show(report)
        if not ours.inline and any(one.kind is DifferenceKind.ORPHAN for one in report.differences):
            _name_inline(store)
    if not report.agree:
        raise typer.Exit(1)


def _since(text: str) -> Instant:
    """A timestamp, or a duration before now."""
    if text[-1:].isalpha() and text[:-1].isdigit():
        return round(time.time() * SECOND) - options.span(text)
    return options.instant(text)


def _read(store: str, ours: Books) -> list[Expected]:
    from oncekey.core.flow import adrive
    from oncekey.reconcile import read

    async def reading(engine: AsyncEngine) -> list[Expected]:
        return await adrive(read(engine.store, ours), engine.driver.run)

    return options.work(store, reading)


def inline_calls(app: str | None) -> dict[str, str]:
    """The calls of INLINE operations that the application's resolvers name."""
    if app is None:
        return {}
    return dict(applications.load(app).resolvers.inline_calls)


def option_pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """The values of an option that takes NAME=VALUE."""
    pairs: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigurationError(f"{option} {text} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def _pointer(text: str | None, option: str) -> str | None:
    if text is not None and not text.startswith("/"):
        raise ConfigurationError(f"{option} {text} is not a JSON pointer: write it like /amount_cents")
    return text


def _name_inline(store: str) -> None:
    """Point out that an orphan may be the call of an INLINE operation, if the store has one."""

    async def looking(engine: AsyncEngine) -> Page:
        found = operate.operations_of(engine.store).search(Search(effects=Effects.INLINE), 1)
        return await adrive(found, engine.driver.run)

    for one in options.work(store, looking).records:
        typer.echo(
            f"{one.operation} is INLINE, so its calls were not announced: if one of them made the charge, "
            f"pass --inline {one.operation}=CALL or --app"
        )


def _show(report: LedgerReport) -> None:
    from oncekey.reconcile import MEANING

    printing.table(
        ("difference", "downstream key", "provider id", "operation", "ours", "theirs", "charges"),
        [
            (line["kind"], line["downstream_key"], line["provider_id"], line["operation"], *_amounts(line))
            for line in map(_line, report.differences)
        ],
        empty="the ledgers agree",
        first=("difference", "downstream key", "provider id", "charges"),
    )
    typer.echo(f"{report.charges} charges, {report.calls} calls, {report.agreed} agree")
    for kind in dict.fromkeys(one.kind for one in report.differences):
        typer.echo(f"{kind}: {MEANING[kind]}")


def _amounts(line: dict[str, Any]) -> tuple[str, str, int]:
    ours, theirs = (" ".join(part for part in (line[side] or {}).values() if part) for side in ("ours", "theirs"))
    return ours, theirs, line["charges"]


def _shape(report: LedgerReport) -> dict[str, Any]:
    return {
        "agree": report.agree,
        "charges": report.charges,
        "calls": report.calls,
        "agreed": report.agreed,
        "differences": [_line(one) for one in report.differences],
    }


def _line(one: Difference) -> dict[str, Any]:
    from oncekey.reconcile import MEANING

    ours, theirs = one.ours, one.theirs
    key = (theirs.downstream_key if theirs else None) or (ours.downstream_key if ours else None)
    provider_id = (theirs.provider_id if theirs else None) or (ours.provider_id if ours else None)
    return {
        "kind": one.kind.value,
        "meaning": MEANING[one.kind],
        "downstream_key": key,
        "provider_id": provider_id,
        "operation": None if ours is None else ours.operation,
        "key_digest": None if ours is None else ours.key_digest,
        "charges": one.charges,
        "ours": None if ours is None else {"amount": _text(ours.amount), "currency": ours.currency},
        "theirs": None if theirs is None else {"amount": _text(theirs.amount), "currency": theirs.currency},
    }


def _text(amount: object) -> str | None:
    return None if amount is None else str(amount)
