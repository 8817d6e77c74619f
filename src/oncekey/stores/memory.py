"""Memory: the same statements as functions over a dictionary, for tests and for a single process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from oncekey.stores.keystore import KeyStore
from oncekey.stores.rows import COLUMNS

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Rows

Line: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[tuple[str, str], Line]

_BLANK: Line = dict.fromkeys(COLUMNS)
_FREE: Line = {"owner": None, "lease_until": None}


def find(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """One row with the clock, its record's columns empty if there is none."""
    return [{**_BLANK, **table.get((scope, key), {}), "now": now}]


def claim(table: Table, *, now: Instant, lease: int, deadline: int, **columns: Any) -> Rows:
    """Insert unless there is a row; answer with the row that is there."""
    where = (columns["scope"], columns["key"])
    if where not in table:
        table[where] = {**_started(now, lease, deadline, columns), "fence": 1, "version": 1}
    return [{**table[where], "now": now}]


def take_over(
    table: Table, *, now: Instant, lease: int, deadline: int, owner: str, entered: bool, **proof: Any
) -> Rows:
    line = _seen(table, proof)
    if line is None:
        return []
    line.update(
        state="in_progress",
        entered=entered,
        fence=line["fence"] + 1,
        owner=owner,
        lease_until=now + lease,
        deadline=now + deadline,
        attempts=line["attempts"] + 1,
        last_run_at=now,
        last_error=None,
        reconcile_after=None,
    )
    return _written(line, now)


def supersede(table: Table, *, now: Instant, lease: int, deadline: int, **columns: Any) -> Rows:
    line = _seen(table, columns)
    if line is None:
        return []
    fence, version = line["fence"], line["version"]
    line.update(_started(now, lease, deadline, columns), fence=fence + 1, version=version)
    return _written(line, now)


def doubt(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = _seen(table, proof)
    if line is None:
        return []
    line.update(_FREE, state="unknown", last_error=last_error, reconcile_after=now)
    return _written(line, now)


def renew(table: Table, *, now: Instant, lease: int, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or now >= line["deadline"]:
        return []
    line["lease_until"] = min(now + lease, line["deadline"])
    return _written(line, now)


def settle_completed(table: Table, *, now: Instant, outcome: str, **columns: Any) -> Rows:
    line = _owned(table, columns)
    if line is None or not _may_complete(line):
        return []
    line.update(
        _FREE,
        state="completed",
        outcome=outcome,
        intent=None,
        last_error=None,
        reconcile_after=None,
        finished_at=now,
        recovery_point="finished",
        request=None,
        expires_at=max(line["expires_at"], now + line["ttl"]),
        **{name: value for name, value in columns.items() if name.startswith("response_")},
    )
    return _written(line, now)


def settle_retryable(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["memo"] or line["intent"]:
        return []
    line.update(_FREE, state="failed_retryable", last_error=last_error)
    return _written(line, now)


def settle_unknown(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress":
        return []
    line.update(_FREE, state="unknown", last_error=last_error, reconcile_after=now)
    return _written(line, now)


def settle_handed_back(
    table: Table, *, now: Instant, last_error: str, resume_after: int, spared: int, **proof: Any
) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "phased":
        return []
    if line["intent"] is not None and not _repeatable(line, now):
        return []
    line.update(
        _FREE,
        state="failed_retryable",
        last_error=last_error,
        attempts=line["attempts"] - spared,
        reconcile_after=now + resume_after,
    )
    return _written(line, now)


def settle_deferred(table: Table, *, now: Instant, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "outbox" or line["memo"] or line["intent"]:
        return []
    line.update(_FREE, state="pending", last_error=None)
    return _written(line, now)


def discard(table: Table, *, now: Instant, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["memo"] or line["intent"]:
        return []
    del table[proof["scope"], proof["key"]]
    return [{**line, "now": now}]


def checkpoint(
    table: Table,
    *,
    now: Instant,
    seen_memo: str | None,
    memo: str | None,
    recovery_point: str,
    lease: int,
    **proof: Any,
) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["intent"] or line["memo"] != seen_memo:
        return []
    line.update(
        memo=memo,
        recovery_point=recovery_point,
        lease_until=max(line["lease_until"], min(now + lease, line["deadline"])),
    )
    return _written(line, now)


def announce(
    table: Table,
    *,
    now: Instant,
    seen_memo: str | None,
    memo: str | None,
    recovery_point: str,
    send_window: int,
    busy: int,
    repeatable: int | None,
    **said: Any,
) -> Rows:
    line = _owned(table, said)
    if (
        line is None
        or line["state"] != "in_progress"
        or line["memo"] != seen_memo
        or not _announceable(line, said, now)
    ):
        return []
    first = now if line["intent"] is None else json.loads(line["intent"])["first_sent_at"]
    intent = {
        **{name: said[name] for name in ("phase", "downstream_key", "digest", "sends")},
        "first_sent_at": first,
        "send_by": now + send_window,
        "repeatable_until": None if repeatable is None else first + repeatable,
    }
    line.update(
        memo=memo,
        recovery_point=recovery_point,
        intent=json.dumps(intent),
        lease_until=max(line["lease_until"], now + busy),
    )
    return _written(line, now)


def result(
    table: Table,
    *,
    now: Instant,
    seen_memo: str | None,
    memo: str | None,
    recovery_point: str,
    lease: int,
    owner: str,
    **proof: Any,
) -> Rows:
    line = _owned(table, proof)
    states = ("in_progress", "unknown", "failed_retryable")
    if line is None or line["state"] not in states or line["effects"] != "phased" or line["memo"] != seen_memo:
        return []
    line.update(
        state="in_progress",
        memo=memo,
        recovery_point=recovery_point,
        intent=None,
        owner=owner,
        lease_until=min(now + lease, max(line["deadline"], now)),
        last_error=None,
        reconcile_after=None,
    )
    return _written(line, now)


def withdraw(table: Table, *, now: Instant, **proof: Any) -> Rows:
    line = _owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "phased" or not line["intent"]:
        return []
    if json.loads(line["intent"])["sends"] != 1:
        return []
    line.update(intent=None)
    return _written(line, now)


def resumable(table: Table, *, now: Instant, after_created: int, after_scope: str, after_key: str, limit: int) -> Rows:
    after = (after_created, after_scope, after_key)
    lines = [line for line in table.values() if _place(line) > after and _is_resumable(line, now)]
    return [{**line, "now": now} for line in sorted(lines, key=_place)[:limit]]


def _place(line: Line) -> tuple[int, str, str]:
    return (line["created_at"], line["scope"], line["key"])


def _is_resumable(line: Line, now: Instant) -> bool:
    if line["effects"] != "phased" or line["request"] is None:
        return False
    if line["state"] == "in_progress":
        return bool(line["lease_until"] <= now)
    begun = line["memo"] is not None or line["intent"] is not None
    return line["state"] == "failed_retryable" and begun and (line["reconcile_after"] or 0) <= now


def _started(now: Instant, lease: int, deadline: int, columns: Line) -> Line:
    return {
        **_BLANK,
        **{name: value for name, value in columns.items() if name in _BLANK},
        "state": "in_progress",
        "lease_until": now + lease,
        "deadline": now + deadline,
        "attempts": 1,
        "recovery_point": "started",
        "reconcile_tries": 0,
        "created_at": now,
        "last_run_at": now,
        "expires_at": now + columns["ttl"],
    }


def _repeatable(line: Line, now: Instant) -> bool:
    until = json.loads(line["intent"])["repeatable_until"]
    return until is not None and until > now


def _announceable(line: Line, said: Line, now: Instant) -> bool:
    """A first call, or the next send of the very call that is open, in its window."""
    if line["intent"] is None:
        return bool(said["sends"] == 1)
    there = json.loads(line["intent"])
    same = (there["phase"], there["digest"], there["sends"]) == (said["phase"], said["digest"], said["sends"] - 1)
    return same and _repeatable(line, now)


def _may_complete(line: Line) -> bool:
    call_done = line["intent"] is None or line["effects"] == "inline"
    match line["state"]:
        case "in_progress":
            return line["intent"] is None
        case "unknown":
            return call_done
        case "failed_retryable":
            return call_done and not line["memo"]
        case _:
            return False


def _owned(table: Table, proof: Line) -> Line | None:
    line = table.get((proof["scope"], proof["key"]))
    if line and line["incarnation"] == proof["incarnation"] and line["fence"] == proof["fence"]:
        return line
    return None


def _seen(table: Table, proof: Line) -> Line | None:
    line = table.get((proof["scope"], proof["key"]))
    if line and (line["incarnation"], line["version"]) == (proof["seen_incarnation"], proof["seen_version"]):
        return line
    return None


def _written(line: Line, now: Instant) -> Rows:
    line["version"] += 1
    return [{**line, "now": now}]


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "find": find,
        "claim": claim,
        "take_over": take_over,
        "supersede": supersede,
        "doubt": doubt,
        "renew": renew,
        "settle_completed": settle_completed,
        "settle_retryable": settle_retryable,
        "settle_unknown": settle_unknown,
        "settle_handed_back": settle_handed_back,
        "settle_deferred": settle_deferred,
        "discard": discard,
        "checkpoint": checkpoint,
        "announce": announce,
        "result": result,
        "withdraw": withdraw,
        "resumable": resumable,
    }
)
"""What memory says for each name; the simulator runs the same, and breaks one at a time."""


class MemoryStore(KeyStore):
    """Records in a dictionary that the driver holds."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__(COMMANDS, clock=clock)
