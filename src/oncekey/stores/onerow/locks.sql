-- LOCAL in one commit: the finished record, written once, as the last statement. Each store locks the key in its own way.

-- name: commit_new
-- Insert the completed record of a LOCAL request (row 2).
INSERT INTO oncekey_record (
    scope, `key`, {given_names},
    state, outcome, fence, version, deadline, attempts, recovery_point,
    response_status, response_headers, response_body, response_schema,
    reconcile_tries, created_at, last_run_at, finished_at, expires_at)
SELECT
    :scope, :key, {given_values},
    'completed', :outcome, 1, 1, clock.now + :deadline, 1, 'finished',
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
SET {given_set},
    state = 'completed', outcome = :outcome, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = {now} + :deadline,
    attempts = 1, recovery_point = 'finished', {anew},
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
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
    scope, `key`, {given_names},
    state, fence, version, deadline, attempts, recovery_point,
    reconcile_tries, created_at, last_run_at, expires_at, request)
SELECT
    :scope, :key, {given_values},
    'pending', 1, 1, clock.now + :deadline, 1, 'started',
    0, clock.now, clock.now, clock.now + :ttl, :request
FROM {clock}
WHERE :effects = 'outbox'
{unless_taken}
{given(expires_at)};

-- name: defer_anew
-- Store a pending OUTBOX request in the row of an expired record (row 31).
UPDATE oncekey_record
SET {given_set},
    state = 'pending', outcome = NULL, fence = fence + 1, version = version + 1,
    owner = NULL, lease_until = NULL, deadline = {now} + :deadline,
    attempts = 1, recovery_point = 'started', {anew},
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    created_at = {now},
    last_run_at = {now},
    finished_at = NULL, expires_at = {now} + :ttl, request = :request
WHERE :effects = 'outbox' AND scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= {now}
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
{given(expires_at)};
