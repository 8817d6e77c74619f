"""Which record is meant: by its tenant or scope, or by the key alone; and how a command names it again."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import RecordId
from oncekey.core.operate import Forbidden
from oncekey.core.scope import NO_NAMESPACE, BindTo, bound_scope, parts_of
from oncekey.engine.operate import desk_of
from oncekey.flow import adrive

if TYPE_CHECKING:
    from oncekey.core.model import Instant, Record
    from oncekey.engine.shell import AsyncEngine

NAMESPACE: Final = "ONCEKEY_NAMESPACE"
SHORTEST: Final = 4
"""With fewer letters of a key nothing is looked for."""
SHOWN: Final = 20
NOT_HERE: Final = (
    "there is no such key here (a LOCAL request under way on PostgreSQL has no row yet, and is seen with --tenant only)"
)


@dataclass(frozen=True, slots=True)
class Several:
    """More than one key fits what was typed."""

    records: tuple[Record, ...]
    more: bool
    now: Instant


async def find(engine: AsyncEngine, key: str, scope: str | None) -> RecordId | Several | Forbidden:
    """The record of a key or of its beginning; whose it is need not be said where only one fits."""
    page = await adrive(desk_of(engine.store).named(key, scope, SHOWN + 1), engine.driver.run)
    same = tuple(one for one in page.records if one.id.key == key)
    fitting = same or page.records
    if len(fitting) > 1:
        return Several(fitting[:SHOWN], len(fitting) > SHOWN, page.now)
    if fitting and (same or len(key) >= SHORTEST):
        return fitting[0].id
    if fitting:
        return Forbidden(f"{SHORTEST} letters of a key are needed to look for it")
    # Its tenant is known, so what has no row is looked for by its lock, and what is gone by its lines of the audit.
    return Forbidden(NOT_HERE) if scope is None else RecordId(scope, key)


async def called(engine: AsyncEngine, app: str | None) -> dict[str, tuple[str, ...]]:
    """By operation, the calls of INLINE handlers: as workers wrote them down, and as an application's code says."""
    found: dict[str, tuple[str, ...]] = {}
    if engine.store.upkeep is not None:
        roll = await adrive(engine.store.upkeep.workers(), engine.driver.run)
        for operation in {name for one in roll.workers for name in one.calls}:
            found[operation] = roll.inline_calls(operation)
    if app is not None:
        from oncekey.cli.worker import load
        from oncekey.workers.declared import inline_calls_of

        found |= inline_calls_of(load(app))
    return found


def scope_named(tenant: str | None, namespace: str | None, principal: str | None, scope: str | None) -> str | None:
    """The scope, as requests make it; None if none is named."""
    if scope is not None:
        if tenant is not None or principal is not None:
            raise ConfigurationError("--scope is instead of --tenant and --principal: say one or the other")
        return scope
    if tenant is None:
        if principal is not None:
            raise ConfigurationError("--principal is somebody in a tenant: say --tenant too")
        return None
    bind_to = BindTo.TENANT if principal is None else BindTo.PRINCIPAL
    return bound_scope(bind_to, namespace or NO_NAMESPACE, tenant, principal=principal)


def typed(record_id: RecordId) -> str:
    """A key with the options that name whose it is, ready for a shell."""
    return " ".join(part for part in words_of(record_id) if part)


def words_of(record_id: RecordId) -> tuple[str, str]:
    """The same in two parts, the second for the end of the line: a key with a dash would be taken for an option."""
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
