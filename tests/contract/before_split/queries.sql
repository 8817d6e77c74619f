-- What oncekey says to PostgreSQL: one block per statement. Every one is served by record_pkey (scope, key).
-- `:now` is NULL outside of tests: clock_timestamp(), because now() stands still in a transaction (E9).
-- set_config makes the commit durable whatever the server's default is, inside the statement's own transaction.
-- Statements run at READ COMMITTED; a serialisation failure under another default is said again by the driver.

-- name: find
SELECT clock.now, record.*
FROM (SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now) AS clock
LEFT JOIN oncekey.record AS record ON record.scope = :scope AND record.key = :key;

-- name: claim
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
), claimed AS (
    INSERT INTO oncekey.record (
        scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
        state, entered, fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts,
        recovery_point, reconcile_tries, created_at, last_run_at, expires_at, request)
    SELECT
        :scope, :key, :incarnation::uuid, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed::bytea,
        'in_progress', :entered::boolean, 1, 1, :owner, clock.now + :lease::bigint, clock.now + :deadline::bigint,
        :call_timeout::bigint, :ttl::bigint, 1, 'started', 0, clock.now, clock.now, clock.now + :ttl::bigint,
        :request::bytea
    FROM clock
    WHERE clock.durable = 'on'
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING *
)
SELECT clock.now, claimed.* FROM clock, claimed
UNION ALL
SELECT clock.now, record.* FROM clock, oncekey.record AS record WHERE record.scope = :scope AND record.key = :key;

-- name: take_over
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'in_progress', entered = :entered::boolean, fence = fence + 1, version = version + 1, owner = :owner,
    lease_until = clock.now + :lease::bigint, deadline = clock.now + :deadline::bigint,
    attempts = attempts + 1, last_run_at = clock.now, last_error = NULL, reconcile_after = NULL,
    -- Where nothing was done yet, what a crash means is up to the handler that runs now; a deploy may have changed it.
    effects = CASE WHEN memo IS NULL AND intent IS NULL THEN :effects::text ELSE effects END,
    recovery = CASE WHEN memo IS NULL AND intent IS NULL THEN :recovery::text ELSE recovery END,
    call_timeout = CASE WHEN memo IS NULL AND intent IS NULL THEN :call_timeout::bigint ELSE call_timeout END,
    request = CASE WHEN memo IS NULL AND intent IS NULL THEN COALESCE(request, :request::bytea) ELSE request END
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
RETURNING clock.now, record.*;

-- name: supersede
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET incarnation = :incarnation::uuid, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed::bytea,
    state = 'in_progress', outcome = NULL, entered = :entered::boolean, fence = fence + 1, version = version + 1,
    owner = :owner, lease_until = clock.now + :lease::bigint, deadline = clock.now + :deadline::bigint,
    call_timeout = :call_timeout::bigint, ttl = :ttl::bigint, attempts = 1, recovery_point = 'started',
    memo = NULL, intent = NULL, response_status = NULL, response_headers = NULL, response_body = NULL,
    response_schema = NULL, last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = clock.now, last_run_at = clock.now, finished_at = NULL, expires_at = clock.now + :ttl::bigint,
    request = :request::bytea
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
RETURNING clock.now, record.*;

-- name: mark_unknown
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = clock.now
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
RETURNING clock.now, record.*;

-- name: renew
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
)
UPDATE oncekey.record AS record
SET version = version + 1,  -- the lease of an announced call is longer, and is not made shorter
    lease_until = GREATEST(record.lease_until, LEAST(clock.now + :lease::bigint, record.deadline))
FROM clock
WHERE record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND clock.now < record.deadline
RETURNING clock.now, record.lease_until;

-- name: settle_completed
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'completed', outcome = :outcome, version = version + 1, owner = NULL, lease_until = NULL,
    intent = NULL, response_status = :response_status::integer, response_headers = :response_headers,
    response_body = :response_body::bytea, response_schema = :response_schema::integer,
    last_error = NULL, reconcile_after = NULL, finished_at = clock.now, recovery_point = 'finished', request = NULL,
    expires_at = GREATEST(record.expires_at, clock.now + record.ttl)
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND ((record.state = 'in_progress' AND record.intent IS NULL)
       OR (record.state = 'unknown' AND (record.intent IS NULL OR record.effects = 'inline'))
       OR (record.state = 'failed_retryable' AND record.memo IS NULL
           AND (record.intent IS NULL OR record.effects = 'inline')))
RETURNING clock.now, record.*;

-- name: settle_retryable
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.memo IS NULL AND record.intent IS NULL
RETURNING clock.now, record.*;

-- name: settle_unknown
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = clock.now
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress'
RETURNING clock.now, record.*;

-- name: settle_handed_back
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    attempts = attempts - :spared::integer, reconcile_after = clock.now + :resume_after::bigint
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.effects = 'phased'
  AND (record.intent IS NULL OR (record.intent::json ->> 'repeatable_until')::bigint > clock.now)
RETURNING clock.now, record.*;

-- name: settle_deferred
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
UPDATE oncekey.record AS record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = NULL
FROM clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.effects = 'outbox' AND record.memo IS NULL AND record.intent IS NULL
RETURNING clock.now, record.*;

-- name: discard
WITH clock AS MATERIALIZED (
    SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
           set_config('synchronous_commit', 'on', true) AS durable
)
DELETE FROM oncekey.record AS record
USING clock
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :incarnation::uuid AND record.fence = :fence::bigint
  AND record.state = 'in_progress' AND record.memo IS NULL AND record.intent IS NULL
RETURNING clock.now, record.*;
