"""Memory's statements for steps of phased records; what `phases.sql` says to a database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oncekey.stores.memory_lines import owned, repeatable_now, written

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Rows
    from oncekey.stores.memory_lines import Line, Table


def checkpoint(
    table: Table,
    *,
    now: Instant,
    seen_memo: str | None,
    memo: str | None,
    recovery_point: str,
    lease: int,
    **proof: Any,  # noqa: ANN401  (columns of any kind)
) -> Rows:
    """A finished phase (5)."""
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["intent"] or line["memo"] != seen_memo:
        return []
    line.update(
        memo=memo,
        recovery_point=recovery_point,
        lease_until=max(line["lease_until"], min(now + lease, line["deadline"])),
    )
    return written(line, now)


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
    **said: Any,  # noqa: ANN401  (columns of any kind)
) -> Rows:
    """A call that is about to be made, or made again (5)."""
    line = owned(table, said)
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
    return written(line, now)


def result(
    table: Table,
    *,
    now: Instant,
    seen_memo: str | None,
    memo: str | None,
    recovery_point: str,
    lease: int,
    owner: str,
    **proof: Any,  # noqa: ANN401  (columns of any kind)
) -> Rows:
    """What a call brought (6)."""
    line = owned(table, proof)
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
    return written(line, now)


def withdraw(table: Table, *, now: Instant, **proof: Any) -> Rows:  # noqa: ANN401  (columns of any kind)
    """A call that was provably never made (33)."""
    line = owned(table, proof)
    if line is None or line["state"] != "in_progress" or line["effects"] != "phased" or not line["intent"]:
        return []
    if json.loads(line["intent"])["sends"] != 1:
        return []
    line.update(intent=None)
    return written(line, now)


def resumable(table: Table, *, now: Instant, after_created: int, after_scope: str, after_key: str, limit: int) -> Rows:
    """What a completer may go on with, oldest first."""
    after = (after_created, after_scope, after_key)
    lines = [line for line in table.values() if _place(line) > after and _is_resumable(line, now)]
    return [{**line, "now": now} for line in sorted(lines, key=_place)[:limit]]


def _announceable(line: Line, said: Line, now: Instant) -> bool:
    """A first call, or the next send of the very call that is open, in its window."""
    if line["intent"] is None:
        return bool(said["sends"] == 1)
    there = json.loads(line["intent"])
    same = (there["phase"], there["digest"], there["sends"]) == (said["phase"], said["digest"], said["sends"] - 1)
    return same and repeatable_now(line, now)


def _place(line: Line) -> tuple[int, str, str]:
    return (line["created_at"], line["scope"], line["key"])


def _is_resumable(line: Line, now: Instant) -> bool:
    if line["effects"] != "phased" or line["request"] is None:
        return False
    if line["state"] == "in_progress":
        return bool(line["lease_until"] <= now)
    begun = line["memo"] is not None or line["intent"] is not None
    return line["state"] == "failed_retryable" and begun and (line["reconcile_after"] or 0) <= now


PHASES: Mapping[str, Command] = MappingProxyType(
    {
        "checkpoint": checkpoint,
        "announce": announce,
        "result": result,
        "withdraw": withdraw,
        "resumable": resumable,
    }
)
"""What memory says for each name of a step."""
