"""`oncekey unknown list`: lists the keys whose outcome is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from oncekey.cli import options
from oncekey.cli.keys_show import in_doubt
from oncekey.cli.options import age, called, scope_named
from oncekey.cli.printing import as_list, table
from oncekey.cli.reconcile import option_pairs
from oncekey.core.model import State
from oncekey.core.operate import Search
from oncekey.core.scope import shown_scope
from oncekey.engine import operate
from oncekey.flow import adrive
from oncekey.ops.explain_retry import downstream_keys

if TYPE_CHECKING:
    from oncekey.core.upkeep import Page
    from oncekey.engine.shell import AsyncEngine


def register(app: typer.Typer) -> None:
    """Add the group `unknown`."""
    group = typer.Typer(
        help="Keys whose outcome is unknown: no retry executes them until they are settled.",
        no_args_is_help=True,
    )
    group.callback()(lambda: None)
    group.command("list")(list_unknown)
    app.add_typer(group, name="unknown")


def list_unknown(
    store: options.StoreUrl,
    *,
    tenant: options.Tenant = None,
    namespace: options.Namespace = None,
    principal: options.Principal = None,
    scope: options.Scope = None,
    older_than: Annotated[str, typer.Option(help="Only what is older: 90s, 15m, 2h, 3d.", metavar="SPAN")] = "0",
    given_up: Annotated[
        bool, typer.Option("--given-up", help="Only keys that no resolver is asked about any more: operators have to.")
    ] = False,
    call: Annotated[
        list[str] | None,
        typer.Option(
            help="INLINE: an operation's call, as in op.downstream_key(NAME). Repeatable.", metavar="OPERATION=NAME"
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The application's Once object, whose code names calls."),
    ] = None,
    limit: options.Limit = 100,
    as_json: options.AsJson = False,
) -> None:
    """List the keys whose outcome is unknown, the newest first. Changes nothing.

    The downstream key is what the provider knows the call by: look there, then say what you found with
    `oncekey keys resolve KEY --executed | --declined | --not-executed`. The reconciler asks resolvers by itself; keys
    that it has given up are listed, too.

    An INLINE handler announces no call. Workers write down which ones their application's code names; --call
    OPERATION=NAME or --app names them where no worker runs.

    JSON: {"now", "items": [what `keys list` shows, and "open_call", "downstream_keys",
    "not_executed_is_believed_from", "reconcile_after", "reconcile_tries", "given_up"], "next"}.
    """
    wanted = Search(
        scope=scope_named(tenant, namespace, principal, scope),
        state=State.UNKNOWN,
        older_than=options.span(older_than),
    )

    async def looking(engine: AsyncEngine) -> tuple[Page, dict[str, tuple[str, ...]]]:
        page = await adrive(operate.operations_of(engine.store).search(wanted, limit), engine.driver.run)
        return page, await called(engine, app)

    page, calls = options.work(store, looking)
    records = [one for one in page.records if one.reconcile_after is None or not given_up]
    for operation, name in option_pairs(call, "--call").items():
        calls[operation] = (name,)
    if as_json:
        as_list([in_doubt(one, page.now, calls=calls.get(one.operation, ())) for one in records], now=page.now)
        return
    table(
        ("key", "downstream key", "whose", "operation", "effects", "last error", "open call", "looks", "age"),
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
                age(one.created_at, page.now),
            )
            for one in records
        ],
        empty="nothing is unknown",
        first=("key", "downstream key", "whose", "age", "operation", "last error"),
    )
    if records:
        typer.echo("What to do about one: oncekey keys show KEY", err=True)
