-- LOCAL in one commit: the finished record, written once and last. Each store locks the key in its own way.

-- name: commit_new
-- Insert the completed record of a LOCAL request (row 2).
INSERT INTO oncekey_record (
    scope, `key`, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, outcome, entered, fence, version, deadline, call_timeout, ttl, attempts, recovery_point,
    response_status, response_headers, response_body, response_schema,
    reconcile_tries, created_at, last_run_at, finished_at, expires_at)
SELECT
    :scope, :key, :incarnation, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed,
    'completed', :outcome, :entered, 1, 1, clock.now + :deadline, :call_timeout, :ttl, 1, 'finished',
    :response_status, :response_headers, :response_body, :response_schema,
    0, clock.now, clock.now, clock.now, clock.now + :ttl
FROM {clock}
WHERE true
{unless_taken}
{given(expires_at)};

-- name: commit_retryable
-- Complete a retryable LOCAL record (row 17).
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, entered = :entered, fence = fence + 1, version = version + 1,
    attempts = attempts + 1, recovery_point = 'finished', request = NULL,
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL,
    last_run_at = {now},
    finished_at = {now},
    expires_at = {greatest}(expires_at, {now} + ttl)
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'failed_retryable' AND effects = 'local'
  AND memo IS NULL AND intent IS NULL AND expires_at > {now}
{given(expires_at)};

-- name: commit_anew
-- Store a completed LOCAL request in the row of an expired record (row 31).
UPDATE oncekey_record
SET incarnation = :incarnation, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed,
    state = 'completed', outcome = :outcome, entered = :entered, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = {now} + :deadline,
    call_timeout = :call_timeout, ttl = :ttl, attempts = 1, recovery_point = 'finished',
    memo = NULL, intent = NULL, response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = {now},
    last_run_at = {now},
    finished_at = {now},
    expires_at = {now} + :ttl, request = NULL
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= {now}
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
{given(expires_at)};

-- name: defer_new
-- Insert the pending record of an OUTBOX request (row 3).
INSERT INTO oncekey_record (
    scope, `key`, incarnation, operation, effects, recovery, method, path, fingerprint, seed,
    state, entered, fence, version, deadline, call_timeout, ttl, attempts, recovery_point,
    reconcile_tries, created_at, last_run_at, expires_at, request)
SELECT
    :scope, :key, :incarnation, :operation, :effects, :recovery, :method, :path, :fingerprint, :seed,
    'pending', :entered, 1, 1, clock.now + :deadline, :call_timeout, :ttl, 1, 'started',
    0, clock.now, clock.now, clock.now + :ttl, :request
FROM {clock}
WHERE :effects = 'outbox'
{unless_taken}
{given(expires_at)};

-- name: defer_anew
-- Store a pending OUTBOX request in the row of an expired record (row 31).
UPDATE oncekey_record
SET incarnation = :incarnation, operation = :operation, effects = :effects, recovery = :recovery,
    method = :method, path = :path, fingerprint = :fingerprint, seed = :seed,
    state = 'pending', outcome = NULL, entered = :entered, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = {now} + :deadline,
    call_timeout = :call_timeout, ttl = :ttl, attempts = 1, recovery_point = 'started',
    memo = NULL, intent = NULL, response_status = NULL, response_headers = NULL, response_body = NULL,
    response_schema = NULL, last_error = NULL, reconcile_after = NULL, reconcile_tries = 0,
    created_at = {now},
    last_run_at = {now},
    finished_at = NULL, expires_at = {now} + :ttl, request = :request
WHERE :effects = 'outbox' AND scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= {now}
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
{given(expires_at)};
