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
_ALWAYS: Final = "the statement always sets one of these: the condition belongs to a part that others share"
_DUE: Final = (
    "what is not due is left out when it is found, when it is locked and when it is written: each alone is enough"
)
_DURABLE: Final = "it is always true: it makes PostgreSQL evaluate the setting that makes the commit durable"
_LAZY: Final = "it is always true: it makes PostgreSQL evaluate the setting that lets the commit not wait for the disk"
_HALVES: Final = "both halves of the UNION together have every row, and each names the rows of its index"
_EITHER: Final = (
    "otherwise the part before it writes the same row, and PostgreSQL makes one of two changes to a row in a statement:"
    " the guard makes sure of which"
)
_INDEX: Final = "the condition beside it implies it: it names the rows of a partial index, for the planner"


UNMUTATED: Final[Mapping[str, str]] = {
    "lock_request_2(): NOT locked": "a request that has the lock and its mark is its holder: it need not look for it",
    "*: clock.durable = 'on'": _DURABLE,
    "*: clock.lazy = 'off'": _LAZY,
    **{
        f"{name}: {record}state = 'in_progress'": _LEASED
        for name in ("take_over", "mark_unknown", "sweep_retryable")
        for record in ("", "record.")
    },
    "stale: record.state = 'in_progress'": _LEASED,
    **{
        f"{name}: record.state IN ('completed', 'failed_retryable', 'pending')": _INDEX
        for name in ("purge_expired", "mark_expired")
    },
    **{f"keys_named: {half}.verdict IS {what}": _HALVES for half, what in (("open", "NULL"), ("judged", "NOT NULL"))},
    "held: locktype = 'advisory'": "no other lock has all of the numbers that are compared beside it",
    "lock_holder(): locktype = 'advisory'": "no other lock has all of the numbers that are compared beside it",
    "held: granted": "who waits for a lock waits for a holder of it",
    "*: num_nonnulls (written.memo, written.intent, written.request, written.reconcile_after) = 0": _EITHER,
    "*: written.reconcile_tries = 0": _EITHER,
    **{
        f"{name}: num_nonnulls (written.memo, written.intent, written.request, written.reconcile_after) > 0*": _ALWAYS
        for name in (
            *("settle_unknown", "checkpoint", "announce", "result", "take_up", "deferred_result", "still_unknown"),
            *("operator_result", "operator_replace", "expire_begun", "settle_handed_back"),
        )
    },
    **{
        f"due: {parcel}.due_at <= {now}": _DUE
        for parcel, now in (
            ("parcel", "(SELECT clock.now FROM clock)"),
            ("head", "(SELECT clock.now FROM clock)"),
            ("parcel", "clock.now"),
        )
    },
    "due: parcel.order_by IS NOT NULL": "the order has NULL last, and others come first where this part is read",
    **{
        f"evidence_about: {call}.provider_id IS NOT NULL": "NULL is in no list: it names the rows of an index"
        for call in ("called", "call")
    },
}
"""The guards, as `statement: guard`, and why their mutants live."""

VERSIONED: Final = (
    "lock_request_2(): current_setting ('server_version_num')::integer >= 170000",
    "enter_2(): (CASE WHEN current_setting ('server_version_num')::integer < 170000*",
)
"""Guards that ask for PostgreSQL 17, which has `transaction_timeout`: the server decides whose mutants live."""
