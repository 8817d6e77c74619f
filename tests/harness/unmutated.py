"""Guards whose mutants no test can tell from the statement, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SHOWN_FILES: Final = ("console.sql", "doctor.sql")
SHOWN: Final = frozenset(
    {
        *("list_records", "find_key", "find_open_keys", "find_done_keys", "last_results", "stats", "standing"),
        *("unresolved", "outbox_census", "letter_census", "dead_letters", "workers", "runs", "list_calls", "seals"),
    }
)
"""Files and statements that only show records to operators: nothing is written or answered by what they read."""

_LEASED: Final = "only a record in progress has a lease, so the comparison of the lease beside it implies the state"
_DURABLE: Final = "it is always true: it makes PostgreSQL evaluate the setting that makes the commit durable"
_HALVES: Final = "both halves of the UNION together have every row, and each names the rows of its index"
_INDEX: Final = "the condition beside it implies it: it names the rows of a partial index, for the planner"

UNMUTATED: Final[Mapping[str, str]] = {
    "*: clock.durable = 'on'": _DURABLE,
    **{
        f"{name}: {record}state = 'in_progress'": _LEASED
        for name in ("take_over", "doubt", "sweep_retryable", "stale")
        for record in ("", "record.")
    },
    **{
        f"{name}: record.state IN ('completed', 'failed_retryable', 'pending')": _INDEX
        for name in ("purge_expired", "mark_expired")
    },
    **{f"keys_named: {half}.verdict IS {what}": _HALVES for half, what in (("heard", "NULL"), ("judged", "NOT NULL"))},
    **{
        f"evidence_about: {call}.provider_id IS NOT NULL": "NULL is in no list: it names the rows of an index"
        for call in ("called", "call")
    },
}
"""The guards, as `statement: guard`, and why their mutants live."""
