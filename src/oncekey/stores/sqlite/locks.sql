-- LOCAL in one commit: whoever writes is alone in the file, looks at the record, and writes it finished, once and last.
-- The transaction itself is the lock, so `lock_file` has nothing to try; which key it is for is the process's to know.

-- name: lock_file
SELECT COALESCE(:now, clock.now) AS now, record.*
FROM oncekey_clock AS clock LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.key = :key;

-- name: commit_new
INSERT INTO oncekey_record (
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, outcome, entered, fence, version, deadline, call_timeout, ttl, attempts, recovery_point,
    response_status, response_headers, response_body, response_schema,
    reconcile_tries, created_at, last_run_at, finished_at, expires_at)
SELECT
    :scope, :key, :incarnation, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed,
    'completed', :outcome, :entered, 1, 1, clock.now + :deadline, :call_timeout, :ttl, 1, 'finished',
    :response_status, :response_headers, :response_body, :response_schema,
    0, clock.now, clock.now, clock.now, clock.now + :ttl
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock
WHERE true
ON CONFLICT (scope, key) DO NOTHING
RETURNING expires_at;

-- name: commit_retryable
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, entered = :entered, fence = fence + 1, version = version + 1,
    attempts = attempts + 1, recovery_point = 'finished', request = NULL,
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL,
    last_run_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    finished_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    expires_at = max(expires_at, COALESCE(:now, (SELECT now FROM oncekey_clock)) + ttl)
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'failed_retryable' AND effects = 'local'
  AND memo IS NULL AND intent IS NULL AND expires_at > COALESCE(:now, (SELECT now FROM oncekey_clock))
RETURNING expires_at;

-- name: commit_anew
UPDATE oncekey_record
SET incarnation = :incarnation, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed,
    state = 'completed', outcome = :outcome, entered = :entered, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :deadline,
    call_timeout = :call_timeout, ttl = :ttl, attempts = 1, recovery_point = 'finished',
    memo = NULL, intent = NULL, response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    last_run_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    finished_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    expires_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :ttl, request = NULL
WHERE scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
RETURNING expires_at;

-- name: defer_new
INSERT INTO oncekey_record (
    scope, key, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, entered, fence, version, deadline, call_timeout, ttl, attempts, recovery_point,
    reconcile_tries, created_at, last_run_at, expires_at)
SELECT
    :scope, :key, :incarnation, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed,
    'pending', :entered, 1, 1, clock.now + :deadline, :call_timeout, :ttl, 1, 'started',
    0, clock.now, clock.now, clock.now + :ttl
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock
WHERE :effects = 'outbox'
ON CONFLICT (scope, key) DO NOTHING
RETURNING expires_at;

-- name: defer_anew
UPDATE oncekey_record
SET incarnation = :incarnation, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed,
    state = 'pending', outcome = NULL, entered = :entered, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :deadline,
    call_timeout = :call_timeout, ttl = :ttl, attempts = 1, recovery_point = 'started',
    memo = NULL, intent = NULL, response_status = NULL, response_headers = NULL, response_body = NULL,
    response_schema = NULL, last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    last_run_at = COALESCE(:now, (SELECT now FROM oncekey_clock)),
    finished_at = NULL, expires_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :ttl, request = NULL
WHERE :effects = 'outbox' AND scope = :scope AND key = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
RETURNING expires_at;
