"""What an actor may wait for. Every step is a scheduling point: before it is done, anything else may happen."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from oncekey.core.errors import StoreError
from oncekey.core.flow import Mode
from oncekey.engine.actions import Interrupted

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Flow, Statement, Transaction
    from oncekey.core.model import Duration
    from oncekey_demo.history import Effect


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Saying:
    """A statement that writes: who said it, and when by the store's clock and by the one that nobody can set."""

    by: str
    statement: Statement
    now: int
    elapsed: int


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """A business transaction: what it wrote is seen by nobody until it commits."""

    host: str
    used_at: int
    begun: int = 0
    """The store's clock when it began."""
    rows: dict[tuple[str, str], dict[str, Any] | None] = field(default_factory=dict)
    said: dict[tuple[str, str], Saying] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    parcels: list[str] = field(default_factory=list)
    open: bool = True

    @property
    def connection(self) -> OpenTransaction:
        """What a handler writes through."""
        return self


@dataclass(slots=True, eq=False)
class Mailbox:
    """Where one reply arrives, or the news that none will (`broken`)."""

    content: Any = None
    full: bool = False
    broken: bool = False

    def put(self, content: object) -> None:
        """Deliver; what comes twice, or to somebody who has left, is dropped by whoever reads."""
        self.content, self.full = content, True


@dataclass(frozen=True, slots=True)
class Say:
    """Execute one statement; it commits by itself unless it is said inside a transaction."""

    statement: Statement
    tx: OpenTransaction | None = None
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a business transaction."""


@dataclass(frozen=True, slots=True)
class Insert:
    """Write a business row inside a transaction."""

    tx: OpenTransaction
    effect: Effect


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit a transaction; its reply can be lost."""

    tx: OpenTransaction


@dataclass(frozen=True, slots=True)
class Rollback:
    """Undo a transaction."""

    tx: OpenTransaction


@dataclass(frozen=True, slots=True)
class Wait:
    """Let time pass."""

    span: Duration


@dataclass(frozen=True, slots=True)
class Point:
    """Nothing but a place where something can go wrong, and if it is `critical`, does so more often.

    `slack` bounds how long a pause may last here.
    """

    label: str
    critical: bool = False
    slack: Duration | None = None


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a reply: its content, or None when it did not come."""

    mailbox: Mailbox
    patience: Duration


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer somebody."""

    mailbox: Mailbox
    content: object


Step: TypeAlias = Say | Open | Insert | Commit | Rollback | Wait | Point | Receive | Reply
Process: TypeAlias = Generator[Step, Any, T]


def talk(flow: Flow[T]) -> Process[T]:
    """Drive a real flow: its transactions become steps, and a failing store is told to it."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = yield from transact(transaction)
            except StoreError as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


def within(tx: OpenTransaction, steps: Body[T]) -> Process[T]:
    """Run statements inside a transaction that is already open."""
    return (yield from _spoken(steps, tx=tx, writes=True))


def transact(transaction: Transaction[T]) -> Process[T]:
    """One transaction of a flow, statement by statement."""
    if transaction.mode is not Mode.ATOMIC:
        return (yield from _spoken(transaction.body(), tx=None, writes=transaction.mode is not Mode.READ))
    tx: OpenTransaction = yield Open()
    try:
        result = yield from within(tx, transaction.body())
        yield Commit(tx)
    except (Exception, Interrupted):
        yield Rollback(tx)
        raise
    return result


def _spoken(steps: Body[T], *, tx: OpenTransaction | None, writes: bool) -> Process[T]:
    try:
        statement = next(steps)
        while True:
            statement = steps.send((yield Say(statement, tx, writes)))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
