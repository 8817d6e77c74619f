"""Flows: what is to be said to a store, as generators that do no I/O.

A `Flow` yields named `Transaction`s and is sent each one's result. A transaction's body is itself a generator
that yields `Statement`s and is sent the rows of each. A driver supplies the two verbs: how to run one
transaction, and how to execute one statement. So one piece of logic serves blocking code, asyncio, a thread,
the caller's own connection, the simulator and the crasher. The four functions below are the only twins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from oncekey.core.errors import StoreError

T = TypeVar("T")

Value: TypeAlias = bool | int | str | bytes | None
"""What may be bound to a statement."""

Row: TypeAlias = Mapping[str, Any]
"""A row by its column names; whatever a driver has that answers `row["name"]` will do."""

Rows: TypeAlias = Sequence[Row]
Command: TypeAlias = str | Callable[..., Rows]
"""SQL with `:name` placeholders, or, for stores without SQL, the function that does it or says which verbs do."""


class Mode(StrEnum):
    """How a transaction's statements are to be committed."""

    READ = "read"
    """Each for itself; none writes."""
    SINGLE = "single"
    """Each for itself: one statement is one commit, and costs one round trip."""
    ATOMIC = "atomic"
    """All together, or none."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing said to a store. The name is what logs, crashers and proxies know it by."""

    name: str
    command: Command
    params: dict[str, Value] = field(default_factory=dict)
    folds: bool = False
    """Whether it may travel in the message of a BEGIN or a COMMIT: it then has to answer with at most one row.

    With a BEGIN it sets the transaction's own time-outs, so a driver sends no others along.
    """
    told: str | None = None
    """The same for a driver that can send such a message only as text, and so sees how many rows there are, not them.

    It tells its row as JSON, in a notice with the SQLSTATE `OK001`. If it has a row and tells nothing, there is nothing
    to tell, and the statement is answered with no rows; if it has none, which may be with a BEGIN, `command` is to be
    executed. Its parameters are those of `command`, and all texts among them are bytes.
    """
    proof: Command | None = None
    """For one that travels with a COMMIT: says, with the same parameters, whether that is `committed`.

    It is asked if something fails after the COMMIT in the same message, and the driver cannot tell what did.
    """
    reads: bool = False
    """Whether it may be answered before its transaction begins, where beginning is to wait for a turn to write."""
    at_once: bool = False
    """Whether it is answered without a row, and not said, where beginning would mean a long wait for such a turn."""


@dataclass(frozen=True, slots=True)
class Fold(Generic[T]):
    """A last statement that may travel with the COMMIT: it fails where the commit must not happen."""

    statement: Statement
    read: Callable[[Rows], T]
    """What its rows mean."""


Steps: TypeAlias = Generator[Statement, Rows, T]


@dataclass(frozen=True, slots=True)
class Transaction(Generic[T]):
    """A named transaction. `body` makes a fresh generator, so that a driver may run it once more."""

    name: str
    mode: Mode
    body: Callable[[], Steps[T]]


Flow: TypeAlias = Generator[Transaction[Any], Any, T]


def drive(flow: Flow[T], run: Callable[[Transaction[Any]], Any]) -> T:
    """Run a flow to its end; the flow is told of a failing store and may go on."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = run(transaction)
            except StoreError as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


async def adrive(flow: Flow[T], run: Callable[[Transaction[Any]], Awaitable[Any]]) -> T:
    """`drive`, awaiting each transaction."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = await run(transaction)
            except StoreError as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


def step(steps: Steps[T], execute: Callable[[Statement], Rows]) -> T:
    """Run a transaction's body, statement by statement; an error ends it where it stands."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(execute(statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        steps.close()


async def astep(steps: Steps[T], execute: Callable[[Statement], Awaitable[Rows]]) -> T:
    """`step`, awaiting each statement."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await execute(statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        steps.close()
