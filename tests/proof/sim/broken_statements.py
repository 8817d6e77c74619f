"""Statements with one thing missing: wrappers that falsify what the real statement compares or writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.stores.memory import COMMANDS
from proof.sim.onecommit import ONE_COMMIT
from proof.sim.upkeep import UPKEEP

if TYPE_CHECKING:
    from oncekey.core.flow import Command, Rows


Cell: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[tuple[str, str], Cell]
Function: TypeAlias = "Callable[..., Rows]"
Flaw: TypeAlias = Callable[[Function], Function]

STEPS: Final = ("checkpoint", "announce", "result", "withdraw", "settle_handed_back")
OWNERS: Final = (
    "renew",
    "settle_completed",
    "settle_retryable",
    "settle_unknown",
    "settle_deferred",
    "discard",
    *STEPS,
)
_OF_A_PARCEL: Final = frozenset({"park", "postpone", "deliver"})
STRANGERS: Final = (
    "take_over",
    "supersede",
    "mark_unknown",
    "commit_retryable",
    "commit_anew",
    "defer_anew",
    *(name for name in UPKEEP if name not in _OF_A_PARCEL),
)


def with_flaws(*flaws: tuple[Flaw, Iterable[str]]) -> dict[str, Command]:
    """All statements, the named ones with their flaw."""
    commands: dict[str, Command] = {**COMMANDS, **ONE_COMMIT, **UPKEEP}
    for flaw, names in flaws:
        for name in names:
            command = commands[name]
            assert callable(command)
            commands[name] = flaw(command)
    return commands


def cell_of(table: Table, params: Cell) -> Cell | None:
    """The row that a statement is about."""
    return table.get((params["scope"], params["key"]))


def assuming(**columns: str) -> Flaw:
    """Compare a column of the row with itself: `assuming(fence="fence")` compares no fence."""

    def flaw(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:
            cell = cell_of(table, params)
            own = {} if cell is None else {name: cell[column] for name, column in columns.items()}
            return command(table, **{**params, **own})

        return run

    return flaw


def pretending(**columns: Any) -> Flaw:
    """Take the row for another: `pretending(state="in_progress")` has no state predicate."""

    def flaw(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:
            cell = cell_of(table, params)
            before = dict(cell or {})
            if cell is not None:
                cell.update(columns)
            rows = command(table, **params)
            if cell is not None and not rows:
                cell.update(before)
            return rows

        return run

    return flaw


def both(first: Flaw, second: Flaw) -> Flaw:
    """Two things missing at once."""
    return lambda command: first(second(command))


def keeping(*columns: str) -> Flaw:
    """Leave columns as they were, whatever the statement writes to them."""

    def flaw(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:
            before = dict(cell_of(table, params) or {})
            rows = command(table, **params)
            cell = cell_of(table, params)
            if before and cell is not None:
                cell.update({column: before[column] for column in columns})
                return [{**row, **{column: before[column] for column in columns}} for row in rows]
            return rows

        return run

    return flaw


def setting(change: Callable[[Cell, Cell], Cell]) -> Flaw:
    """After a write, set further columns from the row before and the parameters."""

    def flaw(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:
            before = dict(cell_of(table, params) or {})
            rows = command(table, **params)
            cell = cell_of(table, params)
            if rows and cell is not None and cell != before:
                cell.update(change(before, params))
            return [{**row, **(cell or {})} for row in rows]

        return run

    return flaw


def showing(change: Callable[[Cell, Cell], Cell]) -> Flaw:
    """Report a row other than it is, from what it is and what was asked."""

    def flaw(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:
            return [{**row, **change(dict(row), params)} for row in command(table, **params)]

        return run

    return flaw


def expired_first(row: Cell, _: Cell) -> Cell:
    """What is past its expiry is shown as expired, whatever its state."""
    return {"state": "expired"} if row["expires_at"] is not None and row["expires_at"] <= row["now"] else {}


def askers_fingerprint(row: Cell, asked: Cell) -> Cell:
    """What may be taken over is shown with the fingerprint of whoever asks."""
    over = row["lease_until"] is not None and row["lease_until"] <= row["now"]
    free = over or row["state"] == "failed_retryable"
    return {"fingerprint": asked["fingerprint"]} if free else {}


def locks_nobody(table: Table, **params: Any) -> Rows:
    """Look, and say that the lock was got."""
    lock = ONE_COMMIT["lock"]
    assert callable(lock)
    return lock(table, **{**params, "locks": {}})


def anyhow(table: Table, **params: Any) -> Rows:
    """Delete the row, whoever owns it and whatever it says."""
    cell = table.pop((params["scope"], params["key"]), None)
    return [] if cell is None else [{**cell, "now": params["now"]}]
