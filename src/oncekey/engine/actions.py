"""The actions that a flow can request from the runtime that runs it.

A flow of the lifecycle is a generator. It yields one of these actions, or a `Transaction` of the store, and a runtime
(asyncio, threads, the simulator, the crasher) performs the action and sends its result back; a failure is thrown into
the flow at the same place. A flow itself never waits, reads a clock or does I/O. So it can stop at the handler and be
resumed by another task or thread, a cancelled flow can continue in another task, and a test can stop, kill or
interleave it before and after every action.

A runtime dispatches by `type(action)`, so none of these classes is subclassed. They are plain classes, because a frozen
dataclass costs one more call per field.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from oncekey.core.flow import Body, Flow, Fold, Transaction

if TYPE_CHECKING:
    from oncekey.core.fronts import Command
    from oncekey.core.model import RecordId
    from oncekey.ports.store import FrontConnection

T = TypeVar("T")

Tx: TypeAlias = Any
"""An open business transaction, of a type private to the runtime. Flows only pass it back; it has a `.connection`."""


class Interrupted(BaseException):
    """The caller was cancelled. A runtime throws it at most once, and performs every action that follows.

    Before the handler, the flow cleans up and re-raises it. During a settlement, the flow continues to its response:
    the outcome of what was executed has to be stored.
    """


class Begin:
    """Open a business transaction and run `first` in it. Result: `(tx, result of first)`; `(tx, None)` without one.

    A driver may send the first statement in the same message as BEGIN. `blocking`: a `def` handler will write through
    the transaction, in a thread. If `first` fails, the runtime leaves nothing open.
    """

    __slots__ = ("blocking", "first")

    def __init__(self, first: Body[Any] | None = None, *, blocking: bool = False) -> None:
        self.first = first
        self.blocking = blocking


class Execute:
    """Run statements in an open transaction. Result: what they return."""

    __slots__ = ("body", "tx")

    def __init__(self, tx: Tx, body: Body[Any]) -> None:
        self.tx = tx
        self.body = body


class Keep:
    """The result of the last statements of a transaction that is to be committed."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:  # noqa: ANN401  (its type depends on the flow)
        self.value = value


class Drop:
    """The result of the last statements of a transaction that is to be rolled back."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:  # noqa: ANN401  (its type depends on the flow)
        self.value = value


class Commit:
    """Run `last`, then commit what it keeps or roll back what it drops. Result: that `Keep` or `Drop`.

    It is one action, so no other flow can run between writing a record and its COMMIT. `fold` is for drivers that can
    send a statement and COMMIT in one message: if it succeeds, it does the same as `last` (the result is then `Keep` of
    what it reads); if its place is taken, the result is `Drop(None)`. A runtime that cannot fold runs `last`.
    """

    __slots__ = ("fold", "last", "tx")

    def __init__(self, tx: Tx, last: Body[Keep | Drop] | None = None, fold: Fold[Any] | None = None) -> None:
        self.tx = tx
        self.last = last
        self.fold = fold


class Rollback:
    """Roll back a transaction and return its connection; no-op if the transaction has ended.

    With `wait=False` the flow does not wait for the reply, if the runtime can avoid it.
    """

    __slots__ = ("tx", "wait")

    def __init__(self, tx: Tx, *, wait: bool = True) -> None:
        self.tx = tx
        self.wait = wait


class Flush:
    """Write the pending changes of an object-relational session, while the application can still handle an error."""

    __slots__ = ("tx",)

    def __init__(self, tx: Tx) -> None:
        self.tx = tx


class Call:
    """Call the application's code, and await what it returns if that is awaitable. Result: what it returns.

    `limit`: the runtime waits at most this many seconds, then raises `TimeoutError`. `within`: the transaction that
    the code writes through; sessions that dependencies got from the runtime join it until it ends.
    """

    __slots__ = ("arguments", "fn", "limit", "within")

    def __init__(
        self, fn: Callable[..., Any], arguments: tuple[Any, ...] = (), *, limit: float | None = None, within: Tx = None
    ) -> None:
        self.fn = fn
        self.arguments = arguments
        self.limit = limit
        self.within = within


class Sleep:
    """Wait, holding no transaction or connection."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class ReturnReaders:
    """The flow is about to wait: the runtime returns the connections of sessions that only read."""

    __slots__ = ()


class ReleaseConnections:
    """The request is refused: the runtime ends all transactions and sessions that dependencies got before the claim."""

    __slots__ = ()


class Aside:
    """Run a store's flow that looks for a stored response while all connections are in use, one request at a time.

    A runtime may wait a moment first. Result: what the flow returns, or None if a connection became free meanwhile.
    `blocking`: this concerns the connections of `def` handlers.
    """

    __slots__ = ("blocking", "flow")

    def __init__(self, flow: Flow[Any], *, blocking: bool = False) -> None:
        self.flow = flow
        self.blocking = blocking


class Recall:
    """Read the response of a finished record for a retry. Result: its `Glimpse`, or None (`Recalls.recall`).

    A runtime may read for several retries at once.
    """

    __slots__ = ("record_id",)

    def __init__(self, record_id: RecordId) -> None:
        self.record_id = record_id


class Consult:
    """Send commands to a shared front. Result: its reply to each command; None: it did not reply.

    It never raises: without a reply, the flow reads the store. With `wait=False` the runtime does not wait for the
    reply if it can avoid it, and the result is None.
    """

    __slots__ = ("commands", "line", "wait")

    def __init__(self, line: FrontConnection, commands: tuple[Command, ...], *, wait: bool = True) -> None:
        self.line = line
        self.commands = commands
        self.wait = wait


class Beat:
    """Start a heartbeat: `renew()` every `every` seconds, up to `until` seconds from now. Result: its `Pulse`."""

    __slots__ = ("every", "renew", "until")

    def __init__(self, renew: Callable[[], Flow[Any]], every: float, until: float) -> None:
        self.renew = renew
        self.every = every
        self.until = until


class Later:
    """Retry a store's flow in the background until the store replies or `patience` seconds have passed."""

    __slots__ = ("flow", "patience")

    def __init__(self, flow: Callable[[], Flow[Any]], patience: float) -> None:
        self.flow = flow
        self.patience = patience


class Invoke:
    """The flow stops here while the adapter runs the handler; the adapter resumes it with a `Decision`."""

    __slots__ = ()


RETURN_READERS: Final = ReturnReaders()
RELEASE_CONNECTIONS: Final = ReleaseConnections()
INVOKE: Final = Invoke()

Action: TypeAlias = (
    Transaction[Any]
    | Begin
    | Execute
    | Commit
    | Rollback
    | Flush
    | Call
    | Sleep
    | ReturnReaders
    | ReleaseConnections
    | Aside
    | Recall
    | Consult
    | Beat
    | Later
    | Invoke
)
Life: TypeAlias = Generator[Action, Any, T]
"""A flow of actions. The result of a `yield` has the type that the action names: annotate each assignment."""


class StoppedAtHandler:
    """The result of `run` for a flow that stopped at `Invoke`; the adapter resumes it with the `Decision`."""

    __slots__ = ()


STOPPED_AT_HANDLER: Final = StoppedAtHandler()
