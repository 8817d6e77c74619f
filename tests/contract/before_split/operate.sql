-- What operators ask and write. Writes prove the version that was read (V); the record is locked before its parcels,
-- as workers do it. Lists carry the clock even if they are empty, and no answers: bodies may be large.

-- name: list_records
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point, record.memo, record.intent,
        record.response_status, '[]' AS response_headers, NULL::bytea AS response_body, 1 AS response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL::bytea AS request
    FROM oncekey.record AS record
    WHERE (:within::text IS NULL OR starts_with(record.scope, :within::text))
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
-- One look into the primary key for each scope.
WITH RECURSIVE clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
), scopes (scope) AS (
    SELECT COALESCE(:scope::text, (SELECT min(one.scope) FROM oncekey.record AS one))
    UNION ALL
    SELECT (SELECT min(one.scope) FROM oncekey.record AS one WHERE one.scope > scopes.scope)
    FROM scopes
    WHERE scopes.scope IS NOT NULL AND :scope::text IS NULL
)
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point, record.memo, record.intent,
        record.response_status, '[]' AS response_headers, NULL::bytea AS response_body, record.response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL::bytea AS request
    FROM scopes
    JOIN oncekey.record AS record ON record.scope = scopes.scope AND record.key = :first::text
    WHERE :last::text IS NOT NULL AND (:within::text IS NULL OR starts_with(scopes.scope, :within::text))
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: find_open_keys
-- Served by record_key.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point, record.memo, record.intent,
        record.response_status, '[]' AS response_headers, NULL::bytea AS response_body, record.response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL::bytea AS request
    FROM oncekey.record AS record
    WHERE record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown')
      AND record.key COLLATE "C" >= :first::text AND record.key COLLATE "C" < :last::text
      AND (:within::text IS NULL OR starts_with(record.scope, :within::text))
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: find_done_keys
-- No index is ordered by the bytes of finished keys: without a scope this reads them all.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT
        record.scope, record.key, record.incarnation, record.operation, record.effects, record.recovery,
        record.method, record.path, record.fingerprint, record.seed, record.state, record.outcome, record.entered,
        record.fence, record.version, record.owner, record.lease_until, record.deadline, record.call_timeout,
        record.ttl, record.attempts, record.recovery_point, record.memo, record.intent,
        record.response_status, '[]' AS response_headers, NULL::bytea AS response_body, record.response_schema,
        record.last_error, record.reconcile_after, record.reconcile_tries, record.created_at, record.last_run_at,
        record.finished_at, record.expires_at, NULL::bytea AS request
    FROM oncekey.record AS record
    WHERE record.state IN ('completed', 'expired') AND starts_with(record.key, :first::text) AND :last::text IS NOT NULL
      AND (:within::text IS NULL OR starts_with(record.scope, :within::text))
    ORDER BY record.key COLLATE "C", record.scope
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.key COLLATE "C", page.scope;

-- name: last_results
-- Served by call_at: the newest calls, of which few are looked at.
SELECT record.memo
FROM (SELECT made.* FROM oncekey.call AS made ORDER BY made.at DESC, made.incarnation DESC, made.phase DESC
      LIMIT :looked_at::bigint) AS call
JOIN oncekey.record AS record
  ON record.scope = call.scope AND record.key = call.key AND record.incarnation = call.incarnation
WHERE call.operation = :operation::text AND call.phase = :phase::text AND record.memo IS NOT NULL
ORDER BY call.at DESC
LIMIT :limit::bigint;

-- name: parcels_of
SELECT parcel.id, parcel.kind, false AS dead, parcel.lease_until
FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :incarnation::uuid
UNION ALL
SELECT letter.id, letter.kind, true, NULL
FROM oncekey.dead_letter AS letter
WHERE letter.incarnation = :incarnation::uuid;

-- name: hold_parcels_of
SELECT parcel.id, parcel.kind, false AS dead, parcel.lease_until
FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :incarnation::uuid
ORDER BY parcel.id
FOR UPDATE;

-- name: letters_of
SELECT letter.id, letter.kind, true AS dead, NULL AS lease_until
FROM oncekey.dead_letter AS letter
WHERE letter.incarnation = :incarnation::uuid
ORDER BY letter.id
FOR UPDATE;

-- name: operator_answer
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = version + 1, intent = NULL,
    response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, reconcile_after = NULL, finished_at = clock.now, recovery_point = 'finished', request = NULL,
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'unknown' AND record.effects IN ('inline', 'outbox')
RETURNING clock.now, record.*;

-- name: operator_result
-- A record that can be gone on with is not parked again before somebody could.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = version + 1, memo = :memo::text, recovery_point = :recovery_point::text,
    intent = NULL, reconcile_after = NULL, expires_at = GREATEST(record.expires_at, clock.now + record.ttl)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'unknown' AND record.effects = 'phased' AND record.intent IS NOT NULL
RETURNING clock.now, record.*;

-- name: operator_replace
-- Whoever ran with the result that was there before writes nothing any more: the fence goes up.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', fence = fence + 1, version = version + 1, memo = :memo::text,
    recovery_point = :recovery_point::text, reconcile_after = NULL,
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state IN ('failed_retryable', 'unknown') AND record.effects = 'phased'
  AND record.intent IS NULL AND record.memo IS NOT NULL
RETURNING clock.now, record.*;

-- name: operator_unexecuted
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = version + 1, intent = NULL, reconcile_after = NULL,
    expires_at = CASE WHEN record.memo IS NULL THEN record.expires_at
                      ELSE GREATEST(record.expires_at, clock.now + record.ttl) END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'unknown'
RETURNING clock.now, record.*;

-- name: operator_pend
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'pending', version = version + 1, reconcile_after = NULL,
    intent = CASE WHEN :forget::boolean THEN NULL ELSE record.intent END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'unknown' AND record.effects = 'outbox'
RETURNING clock.now, record.*;

-- name: operator_bust
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', outcome = NULL, fence = fence + 1, version = version + 1,
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    finished_at = NULL, recovery_point = :recovery_point::text, last_error = :last_error::text,
    expires_at = CASE WHEN record.memo IS NULL THEN record.expires_at
                      ELSE GREATEST(record.expires_at, clock.now + record.ttl) END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND record.state = 'completed' AND record.effects <> 'outbox'
RETURNING clock.now, record.*;

-- name: drop_deferred
DELETE FROM oncekey.outbox AS parcel
WHERE parcel.incarnation = :seen_incarnation::uuid AND parcel.kind = 'defer'
RETURNING parcel.id;

-- name: stats
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
SELECT record.state, record.effects, record.operation, count(*) AS records,
       count(*) FILTER (WHERE record.state = 'in_progress' AND record.lease_until <= clock.now) AS stale,
       count(*) FILTER (WHERE record.state = 'failed_retryable'
                          AND (record.memo IS NOT NULL OR record.intent IS NOT NULL)) AS resumable,
       count(*) FILTER (WHERE record.state IN ('completed', 'failed_retryable', 'expired')
                          AND record.expires_at <= clock.now) AS expired,
       min(record.created_at) AS oldest, max(record.created_at) AS newest
FROM clock, oncekey.record AS record
GROUP BY record.state, record.effects, record.operation
ORDER BY record.state, record.effects, record.operation;

-- name: unresolved
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
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
 AND (record.memo IS NOT NULL OR record.intent IS NOT NULL)
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
SELECT parcel.aggregatetype AS topic, parcel.kind, count(*) AS parcels,
       count(*) FILTER (WHERE parcel.state = 'held') AS held, min(parcel.due_at) AS oldest_due
FROM oncekey.outbox AS parcel
GROUP BY parcel.aggregatetype, parcel.kind
ORDER BY parcel.aggregatetype, parcel.kind;

-- name: letter_census
SELECT letter.aggregatetype AS topic, letter.kind, count(*) AS letters, min(letter.died_at) AS oldest
FROM oncekey.dead_letter AS letter
GROUP BY letter.aggregatetype, letter.kind
ORDER BY letter.aggregatetype, letter.kind;
