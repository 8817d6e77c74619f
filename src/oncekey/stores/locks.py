"""LOCAL in one commit: a lock that ends with its transaction, and the finished record as its last statement.

Nothing is written before the business is done. So a process that dies leaves no row behind, and the row that is
written once is never a dead tuple.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.model import Completed, Deferred
from oncekey.core.onecommit import Ground, Holder, Kind, Locked, Sealed
from oncekey.flow import Fold, Mode, Transaction
from oncekey.stores.rows import claim_params, response_params, snapshot_of, version_proof
from oncekey.stores.saying import said

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.locks import Lock
    from oncekey.core.model import Claim, Duration, Instant
    from oncekey.flow import Flow, Row, Rows, Statement, Steps, Value
    from oncekey.ports import Outbox
    from oncekey.stores.statements import Statements

ASKED: tuple[str, ...] = ("lock", "enter", "seal", "held", "holder")
"""What is asked of a database that knows who has which lock."""

WRITTEN: tuple[str, ...] = (
    "commit_new",
    "commit_retryable",
    "commit_anew",
    "defer_new",
    "defer_anew",
)

LONGEST_FOLDED: Final = 32 * 1024
"""Bytes of an answer that may travel as text in the message of a COMMIT; a longer one is cheaper in one of its own."""

NO_OUTBOX = "effects=OUTBOX needs a store with an outbox: SQLite or PostgreSQL"


class LockStore:
    """Locks and records written once, in whatever understands the named statements."""

    one_writer = False
    asked = ASKED

    def __init__(self, statements: Statements, outbox: Callable[[], Outbox | None] = lambda: None) -> None:
        statements.require((*self.asked, *WRITTEN))
        self._statements = statements
        self._outbox = outbox

    def locking(self, lock: Lock, claim: Claim) -> Steps[Locked]:
        """Try the lock, then look: the first statement of the transaction, whose time-outs it sets (L1, L4)."""
        params: dict[str, Value] = {
            **_numbers(lock),
            "scope": _utf8(claim.id.scope),
            "key": _utf8(claim.id.key),
            "lease_ms": _millis(claim.lease),
            "deadline_ms": _millis(claim.deadline),
        }
        row = (yield self._statements.fold("lock", params, told="enter"))[0]
        return Locked(
            got=bool(row["locked"]), snapshot=snapshot_of(row), begun=int(row["begun"]), other=bool(row["other"])
        )

    def completing(
        self, claim: Claim, ground: Ground, settlement: Completed | Deferred, begun: Instant
    ) -> Steps[Sealed | None]:
        """The finished record, as the last statement before the commit (L3). None: the key is not ours."""
        rows = yield self._finished(claim, ground, settlement)
        if not rows:
            return None
        if isinstance(settlement, Deferred):
            outbox = self._outbox()
            if outbox is None:
                raise ConfigurationError(NO_OUTBOX)
            yield from outbox.putting((settlement.parcel,))
        return self._sealed(rows[0], begun)

    def _finished(self, claim: Claim, ground: Ground, settlement: Completed | Deferred) -> Statement:
        params = claim_params(claim)
        if ground.seen is not None:
            params.update(version_proof(ground.seen))
        match settlement:
            case Completed(response, outcome):
                name = f"commit_{ground.kind}"
                params.update(outcome=outcome.value, **response_params(response))
            case Deferred():
                name = f"defer_{ground.kind}"
            case _:
                assert_never(settlement)
        return self._statements.say(name, params)

    def _sealed(self, row: Row, begun: Instant) -> Sealed:
        """What the written record says; a transaction that began at another time is not the first one any more."""
        return Sealed(expires_at=int(row["expires_at"]), in_one_commit=int(row["begun"]) == begun)

    def sealing(
        self, claim: Claim, ground: Ground, settlement: Completed | Deferred, begun: Instant
    ) -> Fold[Sealed] | None:
        """`completing` as one statement that fails where the key is taken, for the message of the COMMIT.

        Only for what nearly every request is: a key without a record, and an answer that is not long.
        """
        if ground.kind is not Kind.NEW or ground.seen is not None or not isinstance(settlement, Completed):
            return None
        response = settlement.response
        if response.body is not None and len(response.body) > LONGEST_FOLDED:
            return None
        plain = {**claim_params(claim), "outcome": settlement.outcome.value, **response_params(response)}
        params: dict[str, Value] = {
            name: _utf8(value) if isinstance(value, str) else value for name, value in plain.items()
        }
        params["incarnation"] = claim.incarnation.bytes

        def read(rows: Rows) -> Sealed:
            return Sealed(expires_at=int(rows[0]["expires_at"]), in_one_commit=int(rows[0]["begun"]) == begun)

        return Fold(self._statements.fold("seal", params, told="seal"), read)

    def held(self, number: int) -> Flow[bool]:
        """Whether the lock of a key is held, by whatever request; asking takes none (L8)."""

        def body() -> Steps[bool]:
            rows = yield self._statements.say("held", {"lock": number})
            return bool(rows[0]["held"])

        return (yield from said(Transaction("held", Mode.READ, body)))

    def holder(self, lock: Lock) -> Flow[Holder]:
        """Which request holds the lock; asking takes none. A record that is read before does not count (L8)."""

        def body() -> Steps[Holder]:
            rows = yield self._statements.say("holder", _numbers(lock))
            return Holder(rows[0]["holder"])

        return (yield from said(Transaction("holder", Mode.READ, body)))


def _numbers(lock: Lock) -> dict[str, Value]:
    return {"lock": lock.number, "family": lock.family, "mark": lock.mark}


def _utf8(text: str) -> bytes:
    """A text as bytes: in a message that is all text, nothing but their hexadecimal digits is written."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise StoreError("half of a surrogate pair cannot be stored") from None


def _millis(span: Duration) -> int:
    """A span as the server takes it: at least one, because none would be for ever, and no more than it can count."""
    return min(max(1, span // 1000), 2**31 - 1)
