"""Memory: the same statements as functions over a dictionary, for tests and for a single process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oncekey.stores.audit import AuditStore
from oncekey.stores.keystore import KeyStore
from oncekey.stores.memory_lines import owned, repeatable_now, seen, written
from oncekey.stores.memory_phases import PHASES
from oncekey.stores.memory_upkeep import UPKEEP, audit_commands, roll_commands
from oncekey.stores.rows import COLUMNS
from oncekey.stores.upkeep import UpkeepStore

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Rows
    from oncekey.stores.memory_lines import Line, Table

_BLANK: Line = dict.fromkeys(COLUMNS)
_FREE: Line = {"owner": None, "lease_until": None}


def find(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """One row with the clock, its record's columns empty if there is none."""
    return [{**_BLANK, **table.get((scope, key), {}), "now": now}]


def recall(table: Table, *, scope: str, key: str, now: Instant) -> Rows:
    """A completed record with the clock, or no row."""
    line = table.get((scope, key))
    return [] if line is None or line["state"] != "completed" else [{**line, "now": now}]


def recall_all(table: Table, *, asked: str, now: Instant) -> Rows:
    """The same for many keys."""
    return [row for one in json.loads(asked) for row in recall(table, **one, now=now)]


def claim(table: Table, *, now: Instant, lease: int, deadline: int, **columns: Any) -> Rows:
    """Insert unless there is a row; answer with the row that is there."""
    where = (columns["scope"], columns["key"])
    if where not in table:
        table[where] = {**_started(now, lease, deadline, columns), "fence": 1, "version": 1}
    return [{**table[where], "now": now}]


def take_over(
    table: Table, *, now: Instant, lease: int, deadline: int, owner: str, entered: bool, **columns: Any
) -> Rows:
    line = seen(table, columns)
    if line is None:
        return []
    if line["memo"] is None and line["intent"] is None:
        # Nothing was done yet, so what a crash means is up to the handler that runs now; a deploy may have changed it.
        line.update({name: columns[name] for name in ("effects", "recovery", "call_timeout")})
        line["request"] = columns["request"] if line["request"] is None else line["request"]
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
    return written(line, now)


def supersede(table: Table, *, now: Instant, lease: int, deadline: int, **columns: Any) -> Rows:
    line = seen(table, columns)
    if line is None:
        return []
    fence, version = line["fence"], line["version"]
    line.update(_started(now, lease, deadline, columns), fence=fence + 1, version=version)
    return written(line, now)


def doubt(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = seen(table, proof)
    if line is None:
        return []
    line.update(_FREE, state="unknown", last_error=last_error, reconcile_after=now)
    return written(line, now)


def renew(table: Table, *, now: Instant, lease: int, **proof: Any) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or now >= line["deadline"]:
        return []
    # The lease of an announced call is longer, and is not made shorter.
    line["lease_until"] = max(line["lease_until"] or 0, min(now + lease, line["deadline"]))
    return written(line, now)


def settle_completed(table: Table, *, now: Instant, outcome: str, **columns: Any) -> Rows:
    line = owned(table, columns)
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
    return written(line, now)


def settle_retryable(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["memo"] or line["intent"]:
        return []
    line.update(_FREE, state="failed_retryable", last_error=last_error)
    return written(line, now)


def settle_unknown(table: Table, *, now: Instant, last_error: str, **proof: Any) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress":
        return []
    line.update(_FREE, state="unknown", last_error=last_error, reconcile_after=now)
    return written(line, now)


def settle_handed_back(
    table: Table, *, now: Instant, last_error: str, resume_after: int, spared: int, **proof: Any
) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "phased":
        return []
    if line["intent"] is not None and not repeatable_now(line, now):
        return []
    line.update(
        _FREE,
        state="failed_retryable",
        last_error=last_error,
        attempts=line["attempts"] - spared,
        reconcile_after=now + resume_after,
    )
    return written(line, now)


def settle_deferred(table: Table, *, now: Instant, **proof: Any) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "outbox" or line["memo"] or line["intent"]:
        return []
    line.update(_FREE, state="pending", last_error=None)
    return written(line, now)


def discard(table: Table, *, now: Instant, **proof: Any) -> Rows:
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["memo"] or line["intent"]:
        return []
    del table[proof["scope"], proof["key"]]
    return [{**line, "now": now}]


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


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "find": find,
        "recall": recall,
        "recall_all": recall_all,
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
        **PHASES,
        **UPKEEP,
    }
)
"""What memory says for each name; the simulator runs the same, and breaks one at a time."""


class MemoryStore(KeyStore):
    """Records in a dictionary that the driver holds."""

    def __init__(self, *, clock: Callable[[], Instant] | None = None) -> None:
        super().__init__({**COMMANDS, **audit_commands(), **roll_commands()}, clock=clock)
        self.audit = AuditStore(self._statements)
        self.upkeep = UpkeepStore(self._statements, self.audit)
