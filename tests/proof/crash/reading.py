"""From what is left to a history: diary, business and ledger, each read from where it cannot be falsified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oncekey_demo import history
from oncekey_demo.history import ClientOperation, Dispatch, Effect, History, Proof, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from oncekey.core.flow import Rows, Statement
    from proof.crash.crasher import Said
    from proof.crash.shop import Charge, Inbox


CHARGE: Final = "charge"
_BIRTHS: Final = frozenset({"claim", "commit_new", "defer_new"})


def history_of(
    left: Mapping[str, Rows],
    operations: Iterable[ClientOperation],
    charges: Iterable[Charge],
    inbox: Inbox,
    said: Iterable[Said],
    *,
    key: str,
    now: int,
    healed: bool = True,
) -> History:
    """Everything about one key, ready to be checked."""
    diary, records = left["diary"], left["records"]
    marks = {row["fingerprint"] for row in (*diary, *records)}
    mark, scope = next(iter(marks), "none"), next((row["scope"] for row in (*diary, *records)), "")
    known = _by_version(said)
    return History(
        operations=tuple(_told(op, scope, mark) for op in operations),
        ledger=tuple(Effect(one.id, scope, key, mark, one.at, kind=CHARGE) for one in charges if one.reference == key),
        business=tuple(
            Effect(f"{row['kind']} {row['at']}", scope, key, mark, now, operation=row["operation"], kind=row["kind"])
            for row in left["effects"]
        ),
        writes=_writes(diary, known),
        records=tuple(_final(row) for row in records),
        outbox=_dispatches(left, inbox, scope, key),
        healed=healed,
    )


def _told(op: ClientOperation, scope: str, mark: str) -> ClientOperation:
    return ClientOperation(
        id=op.id,
        scope=scope,
        key=op.key,
        fingerprint=mark,
        invoked=op.invoked,
        ended=op.ended,
        kind=op.kind,
        status=op.status,
        body=op.body,
        replayed=op.replayed,
        code=op.code,
        promises=op.promises,
    )


def _final(row: Any) -> history.Final:
    body = row["response_body"]
    return history.Final(
        scope=row["scope"],
        key=row["key"],
        incarnation=str(row["incarnation"]),
        state=row["state"],
        fingerprint=row["fingerprint"],
        status=row["response_status"],
        body=None if body is None else bytes(body),
        ticket=row["last_error"] is not None,
    )


def _writes(diary: Rows, known: Mapping[tuple[str, int], Said]) -> tuple[Write, ...]:
    writes: list[Write] = []
    last = 0
    for row in diary:
        one = None if row["state"] is None else known.get((str(row["incarnation"]), int(row["version"])))
        last = last if one is None else max(last, one.at)
        proof = {} if one is None else _proof(one.statement)
        stamped = None if one is None else _stamp(one)
        writes.append(
            Write(
                at=last,
                scope=row["scope"],
                key=row["key"],
                state=row["state"],
                incarnation=str(row["incarnation"]),
                fence=int(row["fence"]),
                version=int(row["version"]),
                name="" if one is None else one.statement.name,
                fingerprint=row["fingerprint"],
                now=stamped,
                lease_until=row["lease_until"],
                expires_at=row["expires_at"],
                ttl=row["ttl"],
                clock=None if one is None else one.clock,
                steps=int(row["steps"]),
                **proof,
            )
        )
    return tuple(writes)


def _stamp(one: Said) -> int | None:
    """The instant that a statement was made at, by the store's clock, if it says so."""
    if not one.rows or "now" not in set(one.rows[0].keys()):
        return None
    return int(one.rows[0]["now"])


def _by_version(said: Iterable[Said]) -> dict[tuple[str, int], Said]:
    """Which statement wrote which version; what was rolled back is said again, and the last one counts."""
    known: dict[tuple[str, int], Said] = {}
    for one in said:
        params, name = one.statement.params, one.statement.name
        if not one.rows or not _proof(one.statement):
            continue
        for row in one.rows:
            columns = set(row.keys())
            if "version" in columns and "scope" in columns:
                mine = name not in _BIRTHS or str(row["incarnation"]) == params["incarnation"]
                if mine:
                    known[str(row["incarnation"]), int(row["version"])] = one
            elif name in _BIRTHS:
                known[str(params["incarnation"]), 1] = one
    return known


def _proof(statement: Statement) -> dict[str, Any]:
    """What a statement was given to compare, whatever it then did with it."""
    params = statement.params
    if "seen_version" in params:
        return {
            "proof": Proof.VERSION,
            "proven_incarnation": params["seen_incarnation"],
            "proven_version": params["seen_version"],
        }
    if "fence" in params and "incarnation" in params:
        return {
            "proof": Proof.OWNER,
            "proven_incarnation": params["incarnation"],
            "proven_fence": params["fence"],
        }
    return {"proof": Proof.NO_ROW} if statement.name in _BIRTHS else {}


def _dispatches(left: Mapping[str, Rows], inbox: Inbox, scope: str, key: str) -> tuple[Dispatch, ...]:
    committed = {row["id"] for row in left["committed"] if row["kind"] == "emit"}
    calls = {row["id"] for row in left["committed"] if row["kind"] == "defer"}
    waiting, dead = {row["id"] for row in left["waiting"]}, {row["id"] for row in left["dead"]}
    seen = dict.fromkeys((*sorted(committed), *inbox.received, *sorted(waiting - calls)))
    found = [
        Dispatch(one, scope, key, one in committed, inbox.received.count(one), one in waiting, one in dead)
        for one in seen
    ]
    # A request's own call has no receiver but the provider: it is either waiting, or its record tells.
    found += [Dispatch(one, scope, key, committed=True, delivered=1, waiting=True) for one in sorted(calls & waiting)]
    return tuple(found)
