-- What oncekey says to SQLite: one block per statement. Every one is served by the primary key (scope, key).
-- `:now` is NULL outside of tests: the machine's clock, in SQLite's own resolution of a millisecond.
-- Within one statement SQLite's clock stands still, so every `now` below is the same instant.

-- part: runs_again
CASE WHEN effects = 'phased'
            THEN recovery = 'resume' AND (intent IS NULL OR json_extract(intent, '$.repeatable_until') > COALESCE(:now, (SELECT now FROM oncekey_clock)))
            ELSE recovery = 'retry' AND memo IS NULL AND intent IS NULL END;

-- part: doubted
UPDATE oncekey_record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = COALESCE(:now, (SELECT now FROM oncekey_clock))
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version;

-- name: find
SELECT COALESCE(:now, clock.now) AS now, record.*
FROM oncekey_clock AS clock LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.key = :key;

-- part: answer
record.scope, record.key, record.incarnation, record.operation, record.effects, record.fingerprint,
       record.response_status, record.response_headers, record.response_body, record.response_schema, record.expires_at;

-- name: recall_all
-- CROSS keeps the order: each key is looked for by itself.
SELECT COALESCE(:now, clock.now) AS now, {answer}
FROM json_each(:asked) AS asked CROSS JOIN oncekey_record AS record CROSS JOIN oncekey_clock AS clock
WHERE record.scope = json_extract(asked.value, '$.scope') AND record.key = json_extract(asked.value, '$.key')
  AND record.state = 'completed';

-- name: recall
SELECT COALESCE(:now, clock.now) AS now, {answer}
FROM oncekey_record AS record, oncekey_clock AS clock
WHERE record.scope = :scope AND record.key = :key AND record.state = 'completed';

-- name: claim
INSERT INTO oncekey_record (
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, entered, fence, version, owner, lease_until, deadline, call_timeout, ttl, attempts,
    recovery_point, reconcile_tries, created_at, last_run_at, expires_at, request)
SELECT
    :scope, :key, :incarnation, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed,
    'in_progress', :entered, 1, 1, :owner, clock.now + :lease, clock.now + :deadline,
    :call_timeout, :ttl, 1, 'started', 0, clock.now, clock.now, clock.now + :ttl, :request
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock
WHERE true
ON CONFLICT (scope, key) DO NOTHING
RETURNING created_at AS now, *;

-- name: take_over
UPDATE oncekey_record
SET state = 'in_progress', entered = :entered, fence = fence + 1, version = version + 1, owner = :owner,
    lease_until = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease,
    deadline = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :deadline,
    attempts = attempts + 1,
    last_run_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    last_error = NULL, reconcile_after = NULL,
    -- Where nothing was done yet, what a crash means is up to the handler that runs now; a deploy may have changed it.
    effects = CASE WHEN memo IS NULL AND intent IS NULL THEN :effects ELSE effects END,
    recovery = CASE WHEN memo IS NULL AND intent IS NULL THEN :recovery ELSE recovery END,
    call_timeout = CASE WHEN memo IS NULL AND intent IS NULL THEN :call_timeout ELSE call_timeout END,
    request = CASE WHEN memo IS NULL AND intent IS NULL THEN COALESCE(request, :request) ELSE request END
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND ((state = 'in_progress' AND lease_until <= COALESCE(:now, (SELECT now FROM oncekey_clock)) AND {runs_again})
       OR (state = 'failed_retryable' AND (effects <> 'outbox' OR (memo IS NULL AND intent IS NULL))))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: supersede
UPDATE oncekey_record
SET incarnation = :incarnation, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed,
    state = 'in_progress', outcome = NULL, entered = :entered, fence = fence + 1, version = version + 1,
    owner = :owner,
    lease_until = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease,
    deadline = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :deadline,
    call_timeout = :call_timeout, ttl = :ttl, attempts = 1, recovery_point = 'started',
    memo = NULL, intent = NULL, response_status = NULL, response_headers = NULL, response_body = NULL,
    response_schema = NULL, last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    last_run_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    finished_at = NULL, expires_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :ttl, request = :request
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: doubt
{doubted}
  AND state = 'in_progress' AND lease_until <= COALESCE(:now, (SELECT now FROM oncekey_clock))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: renew
UPDATE oncekey_record
SET version = version + 1,  -- the lease of an announced call is longer, and is not made shorter
    lease_until = max(COALESCE(lease_until, 0), min(COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease, deadline))
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND COALESCE(:now, (SELECT now FROM oncekey_clock)) < deadline
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, lease_until;

-- name: settle_completed
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, version = version + 1, owner = NULL, lease_until = NULL,
    intent = NULL, response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, finished_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    recovery_point = 'finished', request = NULL,
    expires_at = max(expires_at, COALESCE(:now, (SELECT now FROM oncekey_clock)) + ttl)
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND ((state = 'in_progress' AND intent IS NULL)
       OR (state = 'unknown' AND (intent IS NULL OR effects = 'inline'))
       OR (state = 'failed_retryable' AND memo IS NULL
           AND (intent IS NULL OR effects = 'inline')))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: settle_retryable
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo IS NULL AND intent IS NULL
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: settle_unknown
UPDATE oncekey_record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = COALESCE(:now, (SELECT now FROM oncekey_clock))
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress'
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: settle_handed_back
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    attempts = attempts - :spared, reconcile_after = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :resume_after
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'phased' AND recovery = 'resume'
  AND (intent IS NULL OR json_extract(intent, '$.repeatable_until') > COALESCE(:now, (SELECT now FROM oncekey_clock)))
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: settle_deferred
UPDATE oncekey_record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = NULL
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'outbox' AND memo IS NULL AND intent IS NULL
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: discard
DELETE FROM oncekey_record
WHERE scope = :scope AND key = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo IS NULL AND intent IS NULL
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;
