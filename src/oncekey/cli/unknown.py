"""`oncekey unknown list`: what may have happened, and nobody knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from oncekey.cli import desk
from oncekey.cli.keys_show import in_doubt
from oncekey.core.model import State
from oncekey.core.operate import Search
from oncekey.core.showing import moment
from oncekey.engine import operate
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.core.upkeep import Page
    from oncekey.engine.shell import AsyncEngine


def register(app: typer.Typer) -> None:
    """Add the group `unknown`."""
    group = typer.Typer(
        help="Keys whose outcome nobody knows: no retry executes them until somebody settles them.",
        no_args_is_help=True,
    )
    group.callback()(lambda: None)
    group.command("list")(list_unknown)
    app.add_typer(group, name="unknown")


def list_unknown(
    store: desk.StoreUrl,
    *,
    tenant: desk.Tenant = None,
    namespace: desk.Namespace = None,
    principal: desk.Principal = None,
    scope: desk.Scope = None,
    older_than: Annotated[str, typer.Option(help="Only what is older: 90s, 15m, 2h, 3d.", metavar="SPAN")] = "0",
    given_up: Annotated[
        bool, typer.Option("--given-up", help="Only what no resolver asks about any more: the operators' own.")
    ] = False,
    limit: desk.Limit = 100,
    as_json: desk.AsJson = False,
) -> None:
    """List the keys whose outcome is unknown, the newest first. Changes nothing.

    The downstream key is what the provider knows the call by: look there, then say what you found with
    `oncekey keys resolve KEY --executed | --declined | --not-executed`. A resolver asks by itself; what it gave up is
    listed all the same.

    JSON: {"now", "unknown": [what `keys list` shows, and "open_call", "not_executed_is_believed_from",
    "reconcile_after", "reconcile_tries", "given_up"]}.
    """
    whose = desk.scope_named(tenant, namespace, principal, scope)
    wanted = Search(scope=whose, state=State.UNKNOWN, older_than=desk.span(older_than))

    async def looking(engine: AsyncEngine) -> Page:
        return await adrive(operate.desk_of(engine.store).search(wanted, limit), engine.driver.run)

    page = desk.work(store, looking)
    records = [one for one in page.records if one.reconcile_after is None or not given_up]
    if as_json:
        desk.as_json({"now": moment(page.now), "unknown": [in_doubt(one, page.now) for one in records]})
        return
    desk.table(
        ("key", "scope", "operation", "effects", "last error", "open call", "downstream key", "looks", "age"),
        [
            (
                one.id.key,
                one.id.scope,
                one.operation,
                one.effects,
                one.last_error,
                None if one.intent is None else one.intent.phase,
                None if one.intent is None else one.intent.downstream_key,
                "given up" if one.reconcile_after is None else one.reconcile_tries,
                desk.age(one.created_at, page.now),
            )
            for one in records
        ],
        empty="nothing is unknown",
    )
