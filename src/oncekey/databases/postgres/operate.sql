-- The reads and writes of operators. Writes prove the version that was read; the record is locked before its parcels,
-- as in workers. Lists return the clock even if they are empty, and no responses: bodies may be large.

-- part: listed(schema)
{all_but_content}, record.memo, record.response_status,
    '[]' AS response_headers, NULL::bytea AS response_body, {schema}, NULL::bytea AS request;

-- part: in_scopes
-- The scopes that begin with a text, by one lookup in the primary key for each scope of the store. Their order is the
-- collation's, so a range does not contain them.
(:within::text IS NULL OR record.scope = ANY (ARRAY(
          WITH RECURSIVE scopes (scope) AS (
              SELECT min(one.scope) FROM oncekey.record AS one
              UNION ALL
              SELECT (SELECT min(one.scope) FROM oncekey.record AS one WHERE one.scope > scopes.scope)
              FROM scopes
              WHERE scopes.scope IS NOT NULL
          )
          SELECT scopes.scope FROM scopes WHERE starts_with(scopes.scope, :within::text))))

-- name: list_records
-- List the records that match a search, newest first.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT {listed(1 AS response_schema)}
    FROM oncekey.whole AS record
    WHERE {in_scopes}
      AND (:state::text IS NULL OR record.state = :state::text)
      AND (:operation::text IS NULL OR record.operation = :operation::text)
      AND (:effects::text IS NULL OR record.effects = :effects::text)
      AND record.created_at <= (SELECT clock.now FROM clock) - :age::bigint
      AND (NOT :stale::boolean
           OR (record.state = 'in_progress' AND record.lease_until <= (SELECT clock.now FROM clock)))
      AND (record.created_at, record.scope, record.key) < (:before_at::bigint, :before_scope::text, :before_key::text)
    ORDER BY record.created_at DESC, record.scope DESC, record.key DESC
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.created_at DESC, page.scope DESC, page.key DESC;

-- name: find_key
-- Find a key in one scope, in all scopes that begin with a text, or in all.
-- One lookup in the primary key for each scope.
WITH RECURSIVE {clock}, scopes (scope) AS (
    SELECT COALESCE(:scope::text, (SELECT min(one.scope) FROM oncekey.record AS one))
    UNION ALL
    SELECT (SELECT min(one.scope) FROM oncekey.record AS one WHERE one.scope > scopes.scope)
    FROM scopes
    WHERE scopes.scope IS NOT NULL AND :scope::text IS NULL
)
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT {listed(record.response_schema)}
    FROM scopes
    JOIN oncekey.whole AS record ON record.scope = scopes.scope AND record.key = :first::text
    WHERE :last::text IS NOT NULL AND (:within::text IS NULL OR starts_with(scopes.scope, :within::text))
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: find_open_keys
-- Find the unfinished records whose key begins with a text.
-- Served by record_key.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT {listed(record.response_schema)}
    FROM oncekey.whole AS record
    WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
      AND record.key COLLATE "C" >= :first::text AND record.key COLLATE "C" < :last::text
      AND (:within::text IS NULL OR starts_with(record.scope, :within::text))
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: find_done_keys
-- Find the finished records whose key begins with a text.
-- No index is ordered by the bytes of finished keys: without a tenant this reads them all.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT {listed(record.response_schema)}
    FROM oncekey.whole AS record
    WHERE record.state IN ('completed', 'expired') AND starts_with(record.key, :first::text) AND :last::text IS NOT NULL
      AND {in_scopes}
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: last_results
-- Read the steps of the last records that made the same call, as a template for an operator's result.
-- Served by call_at: the newest calls, of which few are read.
SELECT record.memo
FROM (SELECT made.* FROM oncekey.call AS made ORDER BY made.at DESC, made.incarnation DESC, made.phase DESC
      LIMIT :looked_at::bigint) AS call
JOIN oncekey.whole AS record
  ON record.scope = call.scope AND record.key = call.key AND record.incarnation = call.incarnation
WHERE call.operation = :operation::text AND call.phase = :phase::text AND record.memo IS NOT NULL
ORDER BY call.at DESC
LIMIT :limit::bigint;

-- name: parcels_of
-- Read where the parcels of a record are: in the outbox or among the dead letters.
SELECT parcel.id, parcel.kind, false AS dead, parcel.lease_until
FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :incarnation::uuid
UNION ALL
SELECT letter.id, letter.kind, true, NULL
FROM oncekey.dead_letter AS letter
WHERE letter.incarnation = :incarnation::uuid;

-- name: hold_parcels_of
-- Lock the parcels of a record that are in the outbox.
SELECT parcel.id, parcel.kind, false AS dead, parcel.lease_until
FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :incarnation::uuid
ORDER BY parcel.id
FOR UPDATE;

-- name: letters_of
-- Read the parcels of a record that are dead letters.
SELECT letter.id, letter.kind, true AS dead, NULL AS lease_until
FROM oncekey.dead_letter AS letter
WHERE letter.incarnation = :incarnation::uuid
ORDER BY letter.id
FOR UPDATE;

-- name: operator_answer
-- Complete an unknown record with the response of an operator, a resolver or a webhook (row 19).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = record.version + 1,
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, finished_at = clock.now, recovery_point = 'finished',
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl),
    memo_version = CASE WHEN seen.memo IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'unknown' AND record.effects IN ('inline', 'outbox')
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, NULL::text AS intent, NULL::bytea AS request, NULL::bigint AS reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: operator_result
-- Store the result of the open call of an unknown record, so that it can be resumed (row 20).
-- A resumable record is not parked again before a worker could resume it.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = record.version + 1, recovery_point = :recovery_point::text,
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl),
    memo_version = CASE WHEN :memo::text IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'unknown' AND record.effects = 'phased' AND seen.intent IS NOT NULL
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, NULL::text AS intent, seen.request, NULL::bigint AS reconcile_after, seen.reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: operator_replace
-- Replace the last result of a record, which an operator entered (row 34).
-- An owner that ran with the former result can no longer write: the fence is raised.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', fence = record.fence + 1, version = record.version + 1,
    recovery_point = :recovery_point::text, expires_at = GREATEST(record.expires_at, clock.now + record.ttl),
    memo_version = CASE WHEN :memo::text IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state IN ('failed_retryable', 'unknown') AND record.effects = 'phased'
  AND seen.intent IS NULL AND seen.memo IS NOT NULL
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, NULL::text AS intent, seen.request, NULL::bigint AS reconcile_after, seen.reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: operator_unexecuted
-- Release an unknown record whose call was not executed (row 21).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = record.version + 1,
    expires_at = CASE WHEN seen.memo IS NULL THEN record.expires_at
                      ELSE GREATEST(record.expires_at, clock.now + record.ttl) END,
    memo_version = CASE WHEN seen.memo IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'unknown'
  AND (record.effects <> 'outbox' OR (seen.memo IS NULL AND seen.intent IS NULL))
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, NULL::text AS intent, seen.request, NULL::bigint AS reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: operator_pend
-- Leave an unknown deferred record pending: its parcel is delivered again (row 22).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'pending', version = record.version + 1,
    memo_version = CASE WHEN seen.memo IS NULL AND (:forget::boolean OR seen.intent IS NULL) THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'unknown' AND record.effects = 'outbox'
  AND (seen.memo IS NOT NULL OR seen.intent IS NOT NULL)
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, CASE WHEN :forget::boolean THEN NULL ELSE seen.intent END AS intent, seen.request, NULL::bigint AS reconcile_after,
    seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: operator_bust
-- Remove the stored response of a record, so that a retry runs (row 32).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET state = 'failed_retryable', outcome = NULL, fence = record.fence + 1, version = record.version + 1,
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    finished_at = NULL, recovery_point = :recovery_point::text, last_error = :last_error::text,
    expires_at = CASE WHEN seen.memo IS NULL THEN record.expires_at
                      ELSE GREATEST(record.expires_at, clock.now + record.ttl) END,
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'completed' AND record.effects <> 'outbox'
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.intent, seen.request, seen.reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: operator_extend
-- Extend the time to live of a completed record (row 35).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1, expires_at = GREATEST(record.expires_at, :expires_at::bigint),
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'completed' AND record.expires_at > clock.now
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.intent, seen.request, seen.reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.* FROM written;

-- name: drop_deferred
-- Delete the parcel of a deferred record that was completed by hand.
DELETE FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :seen_incarnation::uuid AND parcel.kind = 'defer'
RETURNING parcel.id;

-- name: stats
-- Count all records by state, effects and operation.
WITH {clock}
SELECT record.state, record.effects, record.operation, count(*) AS records,
       count(*) FILTER (WHERE record.state = 'in_progress' AND record.lease_until <= clock.now) AS stale,
       count(*) FILTER (WHERE record.state = 'failed_retryable'
                          AND record.memo_version > 0) AS resumable,
       count(*) FILTER (WHERE record.state IN ('completed', 'failed_retryable', 'expired')
                          AND record.expires_at <= clock.now) AS expired,
       min(record.created_at) AS oldest, max(record.created_at) AS newest
FROM clock, oncekey.record AS record
GROUP BY record.state, record.effects, record.operation
ORDER BY record.state, record.effects, record.operation;

-- name: standing
-- Count what is unfinished and what waits, up to a bound; the result is one row.
-- Unfinished records are read once, by record_key. Other kinds, which may be many, are counted along their index, up to a
-- bound: record_expiring, outbox_due, dead_letter_died. The number of finished ones is the server's estimate of all rows
-- minus the unfinished ones, because counting them would read them all.
WITH {clock}, unfinished AS MATERIALIZED (
    SELECT count(*) AS records,
           count(*) FILTER (WHERE record.state = 'pending') AS pending,
           count(*) FILTER (WHERE record.state = 'in_progress') AS in_progress,
           count(*) FILTER (WHERE record.state = 'failed_retryable') AS failed_retryable,
           count(*) FILTER (WHERE record.state = 'unknown') AS unknown,
           min(record.created_at) FILTER (WHERE record.state = 'unknown') AS unknown_oldest,
           count(*) FILTER (WHERE record.state = 'in_progress' AND record.lease_until <= clock.now) AS stale,
           min(record.lease_until) FILTER (WHERE record.state = 'in_progress' AND record.lease_until <= clock.now)
               AS stale_oldest,
           count(*) FILTER (WHERE record.state = 'failed_retryable' AND record.effects = 'phased'
                              AND record.memo_version > 0) AS resumable,
           min(record.last_run_at) FILTER (WHERE record.state = 'failed_retryable' AND record.effects = 'phased'
                                             AND record.memo_version > 0) AS resumable_oldest
    FROM oncekey.record AS record, clock
    WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
)
SELECT clock.now, unfinished.*,
       greatest(0, greatest(pg_stat_get_live_tuples('oncekey.record'::regclass),
                            (SELECT reltuples FROM pg_class WHERE oid = 'oncekey.record'::regclass)::bigint)
                   - unfinished.records) AS finished,
       expired.records AS expired, expired.oldest AS expired_oldest,
       due.records AS parcels_due, due.oldest AS parcels_due_oldest,
       dead.records AS dead_letters, dead.oldest AS dead_letters_oldest
FROM clock, unfinished,
    (SELECT count(*) AS records, min(few.expires_at) AS oldest FROM (
        SELECT record.expires_at FROM oncekey.record AS record
        WHERE record.state IN ('completed', 'failed_retryable') AND record.expires_at <= (SELECT clock.now FROM clock)
        ORDER BY record.expires_at LIMIT 10000) AS few) AS expired,
    (SELECT count(*) AS records, min(few.due_at) AS oldest FROM (
        SELECT parcel.due_at FROM oncekey.outbox AS parcel WHERE parcel.due_at <= (SELECT clock.now FROM clock)
        ORDER BY parcel.due_at LIMIT 10000) AS few) AS due,
    (SELECT count(*) AS records, min(few.died_at) AS oldest FROM (
        SELECT letter.died_at FROM oncekey.dead_letter AS letter ORDER BY letter.died_at LIMIT 10000) AS few) AS dead;

-- name: unresolved
-- Count what waits for a worker or an operator, each with its oldest.
WITH {clock}
SELECT clock.now, 'unknown' AS what, count(record.scope) AS records, min(record.created_at) AS oldest
FROM clock LEFT JOIN oncekey.record AS record ON record.state = 'unknown'
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'stale', count(record.scope), min(record.lease_until)
FROM clock LEFT JOIN oncekey.record AS record
  ON record.state = 'in_progress' AND record.lease_until <= clock.now
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'resumable', count(record.scope), min(record.last_run_at)
FROM clock LEFT JOIN oncekey.record AS record
  ON record.effects = 'phased' AND record.state = 'failed_retryable'
 AND record.memo_version > 0
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'expired', count(record.scope), min(record.expires_at)
FROM clock LEFT JOIN oncekey.record AS record
  ON record.state IN ('completed', 'failed_retryable') AND record.expires_at <= clock.now
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'parcels_due', count(parcel.id), min(parcel.due_at)
FROM clock LEFT JOIN oncekey.outbox AS parcel ON parcel.due_at <= clock.now
GROUP BY clock.now
UNION ALL
SELECT clock.now, 'dead_letters', count(letter.id), min(letter.died_at)
FROM clock LEFT JOIN oncekey.dead_letter AS letter ON true
GROUP BY clock.now;

-- name: outbox_census
-- Count the parcels of each topic.
SELECT parcel.aggregatetype AS topic, parcel.kind, count(*) AS parcels,
       count(*) FILTER (WHERE parcel.state = 'held') AS held, min(parcel.due_at) AS oldest_due
FROM oncekey.outbox AS parcel
GROUP BY parcel.aggregatetype, parcel.kind
ORDER BY parcel.aggregatetype, parcel.kind;

-- name: letter_census
-- Count the dead letters of each topic.
SELECT letter.aggregatetype AS topic, letter.kind, count(*) AS letters, min(letter.died_at) AS oldest
FROM oncekey.dead_letter AS letter
GROUP BY letter.aggregatetype, letter.kind
ORDER BY letter.aggregatetype, letter.kind;
