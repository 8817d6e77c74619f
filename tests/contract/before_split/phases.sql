-- Steps of phased records: what an owner writes between its claim and its settlement. All are served by record_pkey.
-- The memo is compared whole: a resolver may have added the open call's result without a new fence.

-- name: checkpoint
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET version = version + 1, memo = :memo::text, recovery_point = :recovery_point,
    lease_until = GREATEST(record.lease_until, LEAST(clock.now + :lease::bigint, record.deadline))
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.intent IS NULL AND record.memo IS NOT DISTINCT FROM :seen_memo::text
RETURNING clock.now, record.*;

-- name: announce
-- The call can be looked up from the moment it is announced.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
), announced AS (
UPDATE oncekey.record AS record
SET version = version + 1, memo = :memo::text, recovery_point = :recovery_point,
    intent = json_build_object(
        'phase', :phase::text, 'downstream_key', :downstream_key::text, 'digest', :digest::text,
        'sends', :sends::integer,
        'first_sent_at', COALESCE((record.intent::json ->> 'first_sent_at')::bigint, clock.now),
        'send_by', clock.now + :send_window::bigint,
        'repeatable_until',
        COALESCE((record.intent::json ->> 'first_sent_at')::bigint, clock.now) + :repeatable::bigint)::text,
    lease_until = GREATEST(record.lease_until, clock.now + :busy::bigint)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.memo IS NOT DISTINCT FROM :seen_memo::text
  AND CASE WHEN record.intent IS NULL THEN :sends::integer = 1
           ELSE record.intent::json ->> 'phase' = :phase::text
                AND record.intent::json ->> 'digest' = :digest::text
                AND (record.intent::json ->> 'sends')::integer = :sends::integer - 1
                AND (record.intent::json ->> 'repeatable_until')::bigint > clock.now END
RETURNING clock.now, record.*
), called AS (
    INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
    SELECT announced.incarnation, :phase::text, :downstream_key::text, announced.scope, announced.key,
           announced.operation, announced.now
    FROM announced
    ON CONFLICT DO NOTHING
)
SELECT announced.* FROM announced;

-- name: result
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'in_progress', version = version + 1, memo = :memo::text, recovery_point = :recovery_point, intent = NULL,
    owner = :owner, lease_until = LEAST(clock.now + :lease::bigint, GREATEST(record.deadline, clock.now)),
    last_error = NULL, reconcile_after = NULL
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state IN ('in_progress', 'unknown', 'failed_retryable') AND record.effects = 'phased'
  AND record.memo IS NOT DISTINCT FROM :seen_memo::text
RETURNING clock.now, record.*;

-- name: withdraw
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET version = version + 1, intent = NULL
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.effects = 'phased' AND (record.intent::json ->> 'sends')::integer = 1
RETURNING clock.now, record.*;

-- name: resumable
-- Served by record_resumable. The cursor goes on from the last row that was looked at, so that a page of rows that
-- nobody can resume does not stand in the way of the others.
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
SELECT clock.now, record.*
FROM clock, oncekey.record AS record
WHERE record.effects = 'phased' AND record.state IN ('in_progress', 'failed_retryable')
  AND (record.created_at, record.scope, record.key) > (:after_created::bigint, :after_scope, :after_key)
  AND record.request IS NOT NULL
  AND CASE record.state WHEN 'in_progress' THEN record.lease_until <= clock.now
           ELSE (record.memo IS NOT NULL OR record.intent IS NOT NULL)
                AND COALESCE(record.reconcile_after, 0) <= clock.now END
ORDER BY record.created_at, record.scope, record.key
LIMIT :limit::integer;
