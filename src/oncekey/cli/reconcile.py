"""`oncekey reconcile`: asks resolvers about unknown outcomes, and compares the provider's books with the store."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli import observing, options
from oncekey.cli.printing import as_json as as_json_document
from oncekey.cli.printing import table
from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from oncekey.once import Once as Application
    from oncekey.reconcile import Difference, Expected, Report
    from oncekey.reconcile.books import Books

App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:NAME", help="Where the application's Once object is, for its resolvers."),
]
Once = Annotated[bool, typer.Option("--once", help="Do what is due now, and exit; without it, go on until SIGTERM.")]


def register(app: typer.Typer) -> None:
    """Add the group `reconcile`."""
    group = typer.Typer(invoke_without_command=True)
    group.callback(help=reconcile.__doc__)(reconcile)
    group.command("ledger")(ledger)
    app.add_typer(group, name="reconcile")


def reconcile(context: typer.Context, *, app: App = None, once: Once = False, as_json: options.AsJson = False) -> None:
    """Ask the application's resolvers about keys whose outcome is unknown, and apply what webhooks brought.

    A call that was executed or declined is settled at once. "Not executed" is believed only if the resolver was asked
    after the last moment at which the call could be sent, by the clock of this very process too: so a single --once
    never believes it, unless the resolver closed the reference. After `reconcile_max_tries` questions without a result
    an operator has to settle the key: see `oncekey unknown list` and `oncekey keys resolve`. `oncekey worker` does the
    same all the time.

    JSON, with --once: {"settled", "postponed", "waiting", "exhausted", "contradictions"}.
    """
    if context.invoked_subcommand is not None:
        return
    if app is None:
        raise ConfigurationError("resolvers are functions of the application: say --app MODULE:NAME")
    from oncekey.cli.worker import load

    observing.log_plainly()
    counts = asyncio.run(_reconcile(observing.joined(load(app)), only_once=once))
    if counts is None:
        return
    if as_json:
        as_json_document(counts)
    else:
        typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))


async def _reconcile(application: Application, *, only_once: bool) -> dict[str, int] | None:
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
        str | None, typer.Option(help="Only calls of ours since then, as 2026-11-16T00:00:00Z.", metavar="INSTANT")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="What a field is called there: downstream_key, provider_id, amount, currency, at. Repeatable.",
            metavar="FIELD=NAME",
        ),
    ] = None,
    amount: Annotated[
        str | None,
        typer.Option("--amount", metavar="POINTER", help="Where the amount is in a call's result, as /amount_cents."),
    ] = None,
    currency: Annotated[
        str | None, typer.Option("--currency", metavar="POINTER", help="The same for the currency, as /currency.")
    ] = None,
    inline: Annotated[
        list[str] | None,
        typer.Option(
            help="The call of an INLINE operation, which announces none, as pay=charge. Repeatable; --app knows them.",
            metavar="OPERATION=CALL",
        ),
    ] = None,
    app: App = None,
    *,
    as_json: options.AsJson = False,
) -> None:
    """Compare the provider's charges with what our records say of each call. Changes nothing.

    Reports charges that one side lacks, calls that were charged twice or although they were refused, and amounts that
    differ. Give a ledger that begins no later than --since, and leave out the last minutes: what is under way now is
    reported as charged_while_unknown.

    JSON: {"agree", "charges", "calls", "agreed", "differences": [{"kind", "meaning", "downstream_key", "provider_id",
    "operation", "key_digest", "charges", "ours", "theirs"}]}.

    Exit code: 0 the books agree, 1 they differ, 2 a mistake or no store.
    """
    from oncekey.reconcile import compare
    from oncekey.reconcile.books import FIELDS, Books, Pointers, entries

    columns = option_pairs(column, "--column")
    for name in columns:
        if name not in FIELDS:
            raise ConfigurationError(f"--column {name}=...: a field is one of {', '.join(FIELDS)}")
    ours = Books(
        since=0 if since is None else options.instant(since),
        pointers=Pointers(_pointer(amount, "--amount"), _pointer(currency, "--currency")),
        inline={**inline_calls(app), **option_pairs(inline, "--inline")},
    )
    theirs = list(entries(books, columns))
    report = compare(theirs, _read(store, ours))
    if as_json:
        as_json_document(_shape(report))
    else:
        _show(report)
    if not report.agree:
        raise typer.Exit(1)


def _read(store: str, ours: Books) -> list[Expected]:
    from oncekey.flow import adrive
    from oncekey.reconcile.books import read

    async def reading(engine: AsyncEngine) -> list[Expected]:
        return await adrive(read(engine.store, ours), engine.driver.run)

    return options.work(store, reading)


def inline_calls(app: str | None) -> dict[str, str]:
    """The calls of INLINE operations that the application's resolvers name."""
    if app is None:
        return {}
    from oncekey.cli.worker import load

    return dict(load(app).resolvers.inline_calls)


def option_pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """The values of an option that takes NAME=VALUE."""
    pairs: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigurationError(f"{option} {text}: say it as NAME=VALUE")
        pairs[name] = value
    return pairs


def _pointer(text: str | None, option: str) -> str | None:
    if text is not None and not text.startswith("/"):
        raise ConfigurationError(f"{option} {text}: a pointer begins with a slash, as in /amount_cents")
    return text


def _show(report: Report) -> None:
    from oncekey.reconcile.ledger import MEANING

    table(
        ("difference", "downstream key", "provider id", "operation", "ours", "theirs", "charges"),
        [
            (line["kind"], line["downstream_key"], line["provider_id"], line["operation"], *_amounts(line))
            for line in map(_line, report.differences)
        ],
        empty="the books agree",
        first=("difference", "downstream key", "provider id", "charges"),
    )
    typer.echo(f"{report.charges} charges, {report.calls} calls, {report.agreed} agree")
    for kind in dict.fromkeys(one.kind for one in report.differences):
        typer.echo(f"{kind}: {MEANING[kind]}")


def _amounts(line: dict[str, Any]) -> tuple[str, str, int]:
    ours, theirs = (" ".join(part for part in (line[side] or {}).values() if part) for side in ("ours", "theirs"))
    return ours, theirs, line["charges"]


def _shape(report: Report) -> dict[str, Any]:
    return {
        "agree": report.agree,
        "charges": report.charges,
        "calls": report.calls,
        "agreed": report.agreed,
        "differences": [_line(one) for one in report.differences],
    }


def _line(one: Difference) -> dict[str, Any]:
    from oncekey.reconcile.ledger import MEANING

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
