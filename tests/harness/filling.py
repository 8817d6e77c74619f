"""Tables full of records, made by the database itself: what a year of requests leaves, in seconds."""

from __future__ import annotations

import time
from typing import Any

POSTGRES = """
INSERT INTO oncekey.record (
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, outcome, entered, fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts,
    recovery_point, response_status, response_headers, response_body, response_schema, last_error,
    created_at, last_run_at, finished_at, expires_at)
SELECT
    COALESCE(%(scope)s::text, 'shop|tenant-' || mod(n, %(tenants)s)), md5(n::text), md5('i' || n)::uuid,
    'create_order', 'local', 'retry',
    'POST', '/orders',
    'jcs1:sha256:' || repeat('5c', 32), decode(repeat('00', 32), 'hex'),
    made.state, CASE WHEN made.state = 'completed' THEN 'success' END, true, 1, 2,
    CASE WHEN made.state = 'in_progress' THEN 'host:1' END,
    CASE WHEN made.state = 'in_progress' THEN %(now)s + 300000000 END,
    %(now)s + 3600000000, 30000000, 86400000000, 1, 'finished',
    CASE WHEN made.state = 'completed' THEN 201 END,
    CASE WHEN made.state = 'completed' THEN '[["content-type", "application/json"]]' END,
    CASE WHEN made.state = 'completed' THEN convert_to('{"id":' || n || ',"total_cents":4200}', 'UTF8') END,
    CASE WHEN made.state = 'completed' THEN 1 END,
    CASE WHEN made.state IN ('unknown', 'failed_retryable') THEN 'time_out' END,
    made.at, made.at, CASE WHEN made.state = 'completed' THEN made.at + 20000 END, made.at + 86400000000
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,
     LATERAL (SELECT CASE WHEN %(finished)s THEN 'completed'
                          WHEN mod(n, 1000) < 2 THEN 'in_progress' WHEN mod(n, 1000) < 4 THEN 'unknown'
                          WHEN mod(n, 1000) < 14 THEN 'failed_retryable' ELSE 'completed' END AS state,
                     %(now)s - %(age)s - mod(n * 7919, 82800000000) AS at) AS made
"""
DOUBTED = """
INSERT INTO oncekey.work (incarnation, scope, key, reconcile_after)
SELECT incarnation, scope, key, %(now)s + 60000000 FROM oncekey.record WHERE state = 'unknown'
ON CONFLICT DO NOTHING
"""


def fill_postgres(
    connection: Any,
    first: int,
    last: int,
    *,
    age: int = 0,
    finished: bool = False,
    tenants: int = 1000,
    scope: str | None = None,
) -> None:
    """Records number `first` to `last`, begun within the day before `age` microseconds ago, in all states or finished.

    Two in a thousand are in progress, two unknown, one in a hundred is retryable, all others are completed. They
    belong to so many tenants, or to one scope.
    """
    now = time.time_ns() // 1000
    for start in range(first, last + 1, 500_000):
        given = {
            "first": start,
            "last": min(start + 499_999, last),
            "now": now,
            "age": age,
            "finished": finished,
            "tenants": tenants,
            "scope": scope,
        }
        connection.execute(POSTGRES, given)
        connection.execute(DOUBTED, given)


MIXED = (
    "UPDATE oncekey.record SET state = 'expired' WHERE state = 'completed' AND abs(hashtext(key)) % 8 = 0",
    (
        "UPDATE oncekey.record SET state = 'pending', effects = 'outbox', outcome = NULL, response_status = NULL, "
        "finished_at = NULL WHERE state = 'completed' AND abs(hashtext(key)) % 8 = 1"
    ),
)
BESIDE = {
    "work (incarnation, scope, key)": "md5('w' || n)::uuid, 's', 'k' || n",
    "audit (at, scope, key_digest, incarnation, operation, fence, trigger, actor, who, why)": (
        "n, 's', md5(n::text), md5(n::text)::uuid, 'o', 1, 'purge', 'reaper', 'w', ''"
    ),
    "call (incarnation, phase, downstream_key, provider_id, scope, key, operation, at)": (
        "md5(n::text)::uuid, 'charge', 'dk-' || n, 'ch-' || n, 's', 'k', 'o', n"
    ),
    "evidence (at, source, event_id, downstream_key, provider_id, said, verdict)": (
        "n, 'hook', n::text, 'dk-' || n, 'ch-' || n, '{}', CASE WHEN n % 2 = 0 THEN 'settled' END"
    ),
    "outbox (id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key,"
    " position, state, attempts, fence, due_at, created_at)": (
        "md5(n::text)::uuid, 't', 'a', 't', '{}', 'emit', 's', 'k', md5(n::text)::uuid, 'dk', 0, 'ready', 0, 0, n, n"
    ),
    "dead_letter (id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key,"
    " position, attempts, fence, created_at, last_error, died_at)": (
        "md5('d' || n)::uuid, 't', 'a', 't', '{}', 'emit', 's', 'k', md5('d' || n)::uuid, 'dk', 0, 8, 1, n, 'e', n"
    ),
}


def fill_beside(connection: Any, rows: int, *, mixed: bool = True) -> None:
    """So many rows of the other tables; `mixed` makes some records expired and pending, too."""
    for said in MIXED if mixed else ():
        connection.execute(said)
    for table, values in BESIDE.items():
        connection.execute(f"INSERT INTO oncekey.{table} SELECT {values} FROM generate_series(1, {rows}) AS n")
