"""What workers say to the memory store. Each statement proves the version that was read, as the table demands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from oncekey.core.flow import Command, Rows
    from oncekey.core.model import Instant


Cell: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[tuple[str, str], Cell]


def sweep(table: Table, *, now: Instant, to: str, last_error: str, **proof: Any) -> Rows:
    """Rows 14 and 15: a lease that ran out."""
    cell = _seen(table, proof)
    if cell is None:
        return []
    doubt = {"reconcile_after": now} if to == "unknown" else {}
    cell.update(state=to, owner=None, lease_until=None, last_error=last_error, **doubt)
    return _written(cell, now)


def resolve_executed(table: Table, *, now: Instant, outcome: str, **columns: Any) -> Rows:
    """Row 19: the provider has it in its books."""
    cell = _seen(table, columns)
    if cell is None:
        return []
    cell.update(
        state="completed",
        outcome=outcome,
        last_error=None,
        reconcile_after=None,
        finished_at=now,
        expires_at=max(cell["expires_at"], now + cell["ttl"]),
        **{name: value for name, value in columns.items() if name.startswith("response_")},
    )
    return _written(cell, now)


def resolve_result(table: Table, *, now: Instant, memo: str, recovery_point: str, **proof: Any) -> Rows:
    """Row 20: the provider's books have the result of the open call, for the handler to go on with."""
    cell = _seen(table, proof)
    if cell is None:
        return []
    cell.update(
        state="failed_retryable",
        memo=memo,
        recovery_point=recovery_point,
        intent=None,
        last_error=None,
        reconcile_after=None,
    )
    return _written(cell, now)


def resolve_not_executed(table: Table, *, now: Instant, to: str, **proof: Any) -> Rows:
    """Rows 21 and 22: the provider knows nothing of it, and was asked late enough."""
    cell = _seen(table, proof)
    if cell is None:
        return []
    cell.update(state=to, intent=None, reconcile_after=None)
    return _written(cell, now)


def still_unknown(table: Table, *, now: Instant, wait: int, **proof: Any) -> Rows:
    """Row 23: asked, and no wiser; somebody asks again."""
    cell = _seen(table, proof)
    if cell is None:
        return []
    cell.update(reconcile_after=now + wait, reconcile_tries=cell["reconcile_tries"] + 1)
    return _written(cell, now)


def expire(table: Table, *, now: Instant, to: str, **proof: Any) -> Rows:
    """Rows 18 and 29: what was begun is doubted, what is finished is kept and marked."""
    cell = _seen(table, proof)
    if cell is None or cell["expires_at"] > now:
        return []
    doubt = {"reconcile_after": now} if to == "unknown" else {}
    cell.update(state=to, **doubt)
    return _written(cell, now)


def take_up(table: Table, *, now: Instant, owner: str, intent: str | None, **proof: Any) -> Rows:
    """Row 24: a worker has the parcel, and says what it is going to do; the parcel's lease is the only one."""
    cell = _seen(table, proof)
    if cell is None:
        return []
    cell.update(
        state="in_progress", owner=owner, lease_until=None, intent=intent, fence=cell["fence"] + 1, last_run_at=now
    )
    return _written(cell, now)


def park(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    """Rows 25 and 27: nobody may send it again, and it is unknown what became of it."""
    cell = _mine(table, proof)
    if cell is None:
        return []
    cell.update(state="unknown", owner=None, last_error=last_error, reconcile_after=now)
    return _written(cell, now)


def postpone(table: Table, *, now: Instant, **proof: Any) -> Rows:
    """Row 26: it was not sent, so it waits for the next attempt."""
    cell = _mine(table, proof)
    if cell is None:
        return []
    cell.update(state="pending", owner=None, intent=None)
    return _written(cell, now)


def deliver(table: Table, *, now: Instant, outcome: str, **columns: Any) -> Rows:
    """Rows 6 and 7 in one: what the provider said is the answer."""
    cell = _mine(table, columns)
    if cell is None:
        return []
    cell.update(
        state="completed",
        outcome=outcome,
        owner=None,
        intent=None,
        last_error=None,
        finished_at=now,
        expires_at=max(cell["expires_at"], now + cell["ttl"]),
        **{name: value for name, value in columns.items() if name.startswith("response_")},
    )
    return _written(cell, now)


def purge(table: Table, *, now: Instant, **proof: Any) -> Rows:
    """Row 30: deleted; state and expiry are looked at once more in the statement itself."""
    cell = _seen(table, proof)
    if cell is None or cell["expires_at"] > now or cell["state"] in {"pending", "in_progress", "unknown"}:
        return []
    del table[proof["scope"], proof["key"]]
    return [{**cell, "now": now}]


UPKEEP: Mapping[str, Command] = MappingProxyType(
    {
        "sweep": sweep,
        "resolve_executed": resolve_executed,
        "resolve_result": resolve_result,
        "resolve_not_executed": resolve_not_executed,
        "still_unknown": still_unknown,
        "take_up": take_up,
        "park": park,
        "postpone": postpone,
        "deliver": deliver,
        "expire": expire,
        "purge": purge,
    }
)


def _seen(table: Table, proof: Cell) -> Cell | None:
    cell = table.get((proof["scope"], proof["key"]))
    if cell and (cell["incarnation"], cell["version"]) == (proof["seen_incarnation"], proof["seen_version"]):
        return cell
    return None


def _mine(table: Table, proof: Cell) -> Cell | None:
    """The row, if the worker that took it up still has it; one that comes by proves the version instead."""
    if "seen_version" in proof:
        return _seen(table, proof)
    cell = table.get((proof["scope"], proof["key"]))
    if cell and (cell["incarnation"], cell["fence"]) == (proof["incarnation"], proof["fence"]):
        return cell if cell["state"] == "in_progress" else None
    return None


def _written(cell: Cell, now: Instant) -> Rows:
    cell["version"] += 1
    return [{**cell, "now": now}]
