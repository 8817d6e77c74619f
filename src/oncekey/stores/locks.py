"""LOCAL in one commit: a lock that ends with its transaction, and the finished record as its last statement.

Nothing is written before the handler has finished. So a process that dies leaves no row behind, and the row is
written once and leaves no dead tuple.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.errors import ConfigurationError, StoreError, TransactionControlError
from oncekey.core.flow import Body, Flow, Fold, Row, Rows, Statement, Value
from oncekey.core.model import SECOND, Claim, Completed, Deferred, Duration, Instant, Outcome, Snapshot, StoredResponse
from oncekey.core.onecommit import Holder, Lock, Locked, Stored, WriteKind, WriteTarget
from oncekey.stores.keystore import NO_OUTBOX
from oncekey.stores.rows import (
    HALF_A_PAIR,
    LONGEST_FOLDED,
    claim_params,
    headers_text,
    response_params,
    snapshot_of,
    version_proof,
)
from oncekey.stores.statements import Statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.ports.store import ParcelWriter

ASKED: tuple[str, ...] = ("lock", "enter", "seal", "was_sealed", "held", "holder")
"""The statements of a database that can report who holds which lock."""

WRITTEN: tuple[str, ...] = (
    "commit_new",
    "commit_retryable",
    "commit_anew",
    "defer_new",
    "defer_anew",
)

FRESH: Final = Snapshot(None, 0)
"""The snapshot of a new key from a message that returns no rows. It has no clock: nothing is written before COMMIT."""

MOST_MILLIS: Final = 2**31 - 1


class Guess:
    """Predicts the second at which a record that is written now will expire, by the server's clock.

    The first response has that second in a header, and returning it from the message of a COMMIT costs a separate
    packet. So the store predicts it, and the server, whose clock alone counts, sends a notice only if it is wrong. A
    notice arrives some time after the clock was read. So the clock is never overestimated, and the highest estimate is
    the best one, until a clock is set.
    """

    __slots__ = ("_ahead", "_clock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ahead: int | None = None

    def second(self, ttl: Duration) -> int | None:
        """The predicted second. None: the server has not reported its clock yet."""
        return None if self._ahead is None else (int(self._clock() * SECOND) + self._ahead + ttl) // SECOND

    def learn(self, instant: Instant) -> None:
        """Note the server's clock, as it was a moment ago."""
        ahead = instant - int(self._clock() * SECOND)
        if self._ahead is None or not 0 <= self._ahead - ahead <= SECOND:
            self._ahead = ahead


NOT_OURS = "the transaction of this operation ended before oncekey could commit it, and another one has begun"


class LockStore:
    """Locks, and records that are written once, in any store that has the named statements."""

    one_writer = False
    asked = ASKED

    def __init__(self, statements: Statements, parcels: ParcelWriter | None = None) -> None:
        statements.require((*self.asked, *WRITTEN))
        self._statements = statements
        self._parcels = parcels
        self._guess = Guess()

    def locking(self, lock: Lock, claim: Claim) -> Body[Locked]:
        """Try the lock, then read: the first statement of the transaction, which sets its time-outs (L1, L4)."""
        try:
            scope, key = claim.id.scope.encode(), claim.id.key.encode()
        except UnicodeEncodeError:
            raise StoreError(HALF_A_PAIR) from None
        params: dict[str, Value] = {
            "lock": lock.number,
            "family": lock.family,
            "mark": lock.mark,
            "scope": scope,
            "key": key,
            # At least one, because zero means no limit, and no more than the server's integer can hold.
            "lease_ms": min(max(1, claim.lease // 1000), MOST_MILLIS),
            "deadline_ms": min(max(1, claim.deadline // 1000), MOST_MILLIS),
        }
        rows = yield self._statements.fold("lock", params, text_command="enter")
        if not rows:
            return Locked(got=True, snapshot=FRESH, begun=lock.number)
        row = rows[0]
        return Locked(
            got=bool(row["locked"]),
            snapshot=snapshot_of(row, self._statements.content),
            begun=int(row["begun"]),
            other=bool(row["other"]),
        )

    def completing(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int | None
    ) -> Body[Stored | None]:
        """Write the finished record, as the last statement before the commit (L3). None: the key is not ours.

        `begun` is None if no lock was taken in this transaction, as in tests that write a history.
        """
        rows = yield self._finished(claim, target, settlement)
        if not rows:
            return None
        yield from self._deferred(settlement)
        return self._stored(rows[0], begun)

    def _deferred(self, settlement: Completed | Deferred) -> Body[None]:
        """Put the parcel of a deferred request into the outbox."""
        if isinstance(settlement, Deferred):
            if self._parcels is None:
                raise ConfigurationError(NO_OUTBOX)
            yield from self._parcels.putting((settlement.parcel,))

    def _finished(self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred) -> Statement:
        content = self._statements.content
        params = claim_params(claim, content)
        # A retried request continues in the incarnation that it found.
        owner = target.seen if target.kind is WriteKind.RETRYABLE and target.seen is not None else claim
        if target.seen is not None:
            params.update(version_proof(target.seen))
        match settlement:
            case Completed(response, outcome):
                name = f"commit_{target.kind}"
                params.update(outcome=outcome.value, **response_params(response, owner, content))
            case Deferred(accepted=accepted):
                name = f"defer_{target.kind}"
                params.update(request=accepted if content is None else content.closed_accepted(accepted, owner))
            case _:
                assert_never(settlement)
        return self._statements.statement(name, params)

    def _stored(self, row: Row, begun: int | None) -> Stored:
        """The stored record; a transaction without the lock's number is not the one that was begun (L5).

        PostgreSQL's own drivers mark a transaction without a lock by 0, and other drivers do not mark it.
        """
        if (row["begun"] or None) != begun:
            raise TransactionControlError(NOT_OURS)
        return Stored(expires_at=int(row["expires_at"]))

    def completing_at_commit(
        self, claim: Claim, target: WriteTarget, settlement: Completed | Deferred, begun: int
    ) -> Fold[Stored] | None:
        """`completing` as one statement that fails if the key is taken, to be sent with the COMMIT.

        Only for the common case: a key without a record, and a response that is not long.
        """
        if target.kind is not WriteKind.NEW or target.seen is not None or not isinstance(settlement, Completed):
            return None
        response, content = settlement.response, self._statements.content
        if content is not None:
            response = content.closed_answer(response, claim)
        if response.body is not None and len(response.body) > LONGEST_FOLDED:
            return None
        now, ttl = self._statements.instant, claim.ttl
        row_value = finished_row(claim, settlement.outcome, response)
        guess = self._guess.second(ttl) if now is None else (now + ttl) // SECOND
        params: dict[str, Value] = {"given": row_value, "response_body": response.body, "now": now, "guess": guess}

        def read(rows: Rows) -> Stored:
            if rows:
                self._guess.learn(int(rows[0]["expires_at"]) - ttl)
                return self._stored(rows[0], begun)
            return Stored(expires_at=None if guess is None else guess * SECOND)

        return Fold(self._statements.fold("seal", params, text_command="seal", proof="was_sealed"), read)

    def held(self, number: int) -> Flow[bool]:
        rows = yield from self._statements.read("held", {"lock": number})
        return bool(rows[0]["held"])

    def holder(self, lock: Lock) -> Flow[Holder]:
        asked: dict[str, Value] = {"lock": lock.number, "family": lock.family, "mark": lock.mark}
        rows = yield from self._statements.read("holder", asked)
        return Holder(rows[0]["holder"])


def finished_row(claim: Claim, outcome: Outcome, response: StoredResponse) -> bytes:
    """A finished record as a value of the type `oncekey.sealed`: the server parses one faster than two dozen values."""
    record_id, headers = claim.id, headers_text(response.headers)
    kind = _kind_text(claim.operation, claim.effects._value_, claim.recovery._value_)
    spans = _spans_text(claim.entered, claim.deadline, claim.call_timeout, claim.ttl)
    scope, key, method, path, fingerprint, headers = [
        text.replace("\\", "\\\\").replace('"', '""')  # as `row_text` does, without a call for each
        for text in (record_id.scope, record_id.key, claim.method, claim.path, claim.fingerprint, headers)
    ]
    text = (
        f'("{scope}","{key}","{claim.incarnation.hex}",{kind},"{method}","{path}","{fingerprint}",'
        f'"\\\\x{claim.seed.hex()}",'
        f'"{outcome._value_}",{spans},{int(response.status)},"{headers}",{response.schema_version})'
    )
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise StoreError(HALF_A_PAIR) from None


# Texts that are the same for every request of a handler are cached.


@lru_cache(maxsize=256)
def _kind_text(operation: str, effects: str, recovery: str) -> str:
    texts = [text.replace("\\", "\\\\").replace('"', '""') for text in (operation, effects, recovery)]
    return '"' + '","'.join(texts) + '"'


@lru_cache(maxsize=256)
def _spans_text(entered: bool, deadline: Duration, call_timeout: Duration, ttl: Duration) -> str:  # noqa: FBT001
    return f"{entered},{deadline:d},{call_timeout:d},{ttl:d}"
