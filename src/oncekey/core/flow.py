"""Flows: sequences of transactions as generators that do no I/O.

A `Flow` yields named `Transaction`s and is sent the result of each. The body of a transaction is itself a generator:
it yields `Statement`s and is sent the rows of each. A driver supplies two functions: one that runs a transaction, and
one that executes a statement. So the same logic serves blocking code, asyncio, a thread, the caller's own connection,
the simulator and the crasher. Only the four functions below exist in a blocking and an asyncio version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from oncekey.core.errors import StoreError
from oncekey.core.model import value

T = TypeVar("T")
Q = TypeVar("Q")

Value: TypeAlias = bool | int | str | bytes | None
"""A value that may be bound to a statement."""

Row: TypeAlias = Mapping[str, Any]
"""A row by its column names: any object with `row["name"]`."""

Rows: TypeAlias = Sequence[Row]
Command: TypeAlias = str | Callable[..., Rows]
"""SQL with `:name` placeholders, or, for stores without SQL, a function that executes it or yields verbs that do."""


class Mode(StrEnum):
    """How the statements of a transaction are committed."""

    READ = "read"
    """Each by itself; none writes."""
    SINGLE = "single"
    """Each by itself: one statement is one commit, and costs one round trip."""
    ATOMIC = "atomic"
    """All together, or none."""


@value
class Statement:
    """One statement for a store. Logs, crashers and proxies identify it by its name."""

    name: str
    command: Command
    params: dict[str, Value] = field(default_factory=dict)
    folds: bool = False
    """Whether a driver may send it in the message of a BEGIN or a COMMIT: it then has to return at most one row.

    With a BEGIN it sets the transaction's own time-outs, so the driver sends no others.
    """
    text: str | None = None
    """The same statement for a driver that can send such a message only as text, and receives only the count of rows.

    The statement reports its row as JSON, in a notice with the SQLSTATE `OK001`. If it has a row and sends no notice,
    there is nothing to report, and its result is no rows; if it has no row, which may happen with a BEGIN, the driver
    executes `command`. Its parameters are those of `command`, and all texts among them are bytes.
    """
    proof: Command | None = None
    """For a statement sent with a COMMIT: a query with the same parameters that returns whether it is `committed`.

    The driver runs it if something fails after the COMMIT in the same message and the error does not show what.
    """
    reads: bool = False
    """Whether the driver may execute it before the transaction begins, if that means waiting for the one writer."""
    at_once: bool = False
    """Whether the driver may skip it and return no row, if beginning would mean a long wait for the one writer."""


@value
class Fold(Generic[T]):
    """A last statement that may be sent with the COMMIT: it fails if the commit must not happen."""

    statement: Statement
    read: Callable[[Rows], T]
    """Turns its rows into the result."""


Body: TypeAlias = Generator[Statement, Rows, T]
"""The statements of a transaction, one by one; each `yield` returns the rows of its statement."""


@value
class Transaction(Generic[T]):
    """A named transaction. `body` creates a new generator each time, so that a driver may run it again."""

    name: str
    mode: Mode
    body: Callable[[], Body[T]]


Flow: TypeAlias = Generator[Transaction[Any], Any, T]
Thrown: TypeAlias = type[Exception] | tuple[type[Exception], ...]


def drive(flow: Generator[Q, Any, T], run: Callable[[Q], Any], thrown: Thrown = StoreError) -> T:
    """Run a flow to its end; an error of the store, or of the given kinds, is thrown into it, and it may continue."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = run(transaction)
            except thrown as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


async def adrive(flow: Generator[Q, Any, T], run: Callable[[Q], Awaitable[Any]], thrown: Thrown = StoreError) -> T:
    """`drive`, awaiting each transaction."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = await run(transaction)
            except thrown as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


def run_body(body: Body[T], execute: Callable[[Statement], Rows]) -> T:
    """Run a transaction's body, statement by statement; an error ends it there."""
    try:
        statement = next(body)
        while True:
            statement = body.send(execute(statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        body.close()


async def arun_body(body: Body[T], execute: Callable[[Statement], Awaitable[Rows]]) -> T:
    """`run_body`, awaiting each statement."""
    try:
        statement = next(body)
        while True:
            statement = body.send(await execute(statement))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        body.close()
