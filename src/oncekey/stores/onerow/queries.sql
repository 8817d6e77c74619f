-- The statements for SQLite and MariaDB, one block each. Every one is served by the primary key (scope, key).
-- Other parts, such as the clock {now}, are in each store's spelling.sql.

-- part: runs_again
CASE WHEN effects = 'phased'
            THEN recovery = 'resume' AND (intent IS NULL OR {json_number(intent; repeatable_until)} > {now})
            ELSE recovery = 'retry' AND memo IS NULL AND intent IS NULL END;

-- part: doubted
-- A failed lease (on_lease_expired="fail") goes to an operator at once: no resolver checks it.
UPDATE oncekey_record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = CASE WHEN :last_error = 'failed_lock_expired' THEN NULL ELSE {now} END
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version;

-- name: find
-- Read one record; without a record, the row has only the store's clock.
SELECT clock.now AS now, record.*
FROM {clock} LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.`key` = :key;

-- part: answer
record.scope, record.`key`, record.incarnation, record.operation, record.effects, record.fingerprint,
       record.response_status, record.response_headers, record.response_body, record.response_schema, record.expires_at;

-- name: recall
-- Read the stored response of one completed key.
SELECT clock.now AS now, {answer}
FROM {clock}, oncekey_record AS record
WHERE record.scope = :scope AND record.`key` = :key AND record.state = 'completed';

-- name: claim
-- Insert the record of a new request, which becomes its owner (row 1).
INSERT INTO oncekey_record (
    scope, `key`, {given_names},
    state, fence, version, owner, lease_until, deadline, attempts,
    recovery_point, reconcile_tries, created_at, last_run_at, expires_at, request)
SELECT
    :scope, :key, {given_values},
    'in_progress', 1, 1, :owner, clock.now + :lease, clock.now + :deadline,
    1, 'started', 0, clock.now, clock.now, clock.now + :ttl, :request
FROM {clock}
WHERE true
{unless_taken}
{giving_new};

-- name: take_over
-- Make a request or the completer the next owner of a stale or retryable record (rows 13 and 16).
UPDATE oncekey_record
SET state = 'in_progress', entered = :entered, fence = fence + 1, version = version + 1, owner = :owner,
    lease_until = {now} + :lease,
    deadline = {now} + :deadline,
    attempts = attempts + 1,
    last_run_at = {now},
    last_error = NULL, reconcile_after = NULL,
    -- If nothing was done yet, what a crash means is set by the handler that runs now; a deploy may have changed it.
    {renewed(memo IS NULL AND intent IS NULL; )},
    request = CASE WHEN memo IS NULL AND intent IS NULL THEN COALESCE(request, :request) ELSE request END
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND ((state = 'in_progress' AND lease_until <= {now} AND {runs_again})
       OR (state = 'failed_retryable' AND (effects <> 'outbox' OR (memo IS NULL AND intent IS NULL))))
{giving};

-- name: supersede
-- Begin a new incarnation in the row of an expired record (row 31).
UPDATE oncekey_record
SET {given_set},
    state = 'in_progress', outcome = NULL, fence = fence + 1, version = version + 1,
    owner = :owner,
    lease_until = {now} + :lease,
    deadline = {now} + :deadline,
    attempts = 1, recovery_point = 'started', {anew},
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    created_at = {now},
    last_run_at = {now},
    finished_at = NULL, expires_at = {now} + :ttl, request = :request
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND expires_at <= {now}
  AND (state IN ('completed', 'expired') OR (state = 'failed_retryable' AND memo IS NULL AND intent IS NULL))
{giving};

-- name: mark_unknown
-- Mark a record unknown whose lease has expired and that must not run again (row 15).
{doubted}
  AND state = 'in_progress' AND lease_until <= {now}
{giving};

-- name: renew
-- Extend the owner's lease, up to the deadline (row 4).
UPDATE oncekey_record
SET version = version + 1,  -- the lease of an announced call is longer, and is not made shorter
    lease_until = {greatest}(COALESCE(lease_until, 0), {least}({now} + :lease, deadline))
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND {now} < deadline
{given(lease_until)};

-- name: settle_completed
-- Complete the owner's record, with its response (rows 7 and 8).
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, version = version + 1, owner = NULL, lease_until = NULL,
    intent = NULL, response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, finished_at = {now},
    recovery_point = 'finished', request = NULL,
    expires_at = {greatest}(expires_at, {now} + ttl)
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND ((state = 'in_progress' AND intent IS NULL)
       OR (state = 'unknown' AND (intent IS NULL OR effects = 'inline'))
       OR (state = 'failed_retryable' AND memo IS NULL
           AND (intent IS NULL OR effects = 'inline')))
{giving};

-- name: settle_retryable
-- Release the owner's record, which executed nothing: a retry runs it (row 10).
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo IS NULL AND intent IS NULL
{giving};

-- name: settle_unknown
-- Mark the owner's record unknown: its call may have been executed (row 12).
UPDATE oncekey_record
SET state = 'unknown', version = version + 1, owner = NULL, lease_until = NULL,
    last_error = :last_error, reconcile_after = {now}
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress'
{giving};

-- name: settle_handed_back
-- Release the owner's unfinished PHASED record: a retry or the completer resumes it (row 11).
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error,
    attempts = attempts - :spared, reconcile_after = {now} + :resume_after
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'phased' AND recovery = 'resume'
  AND (intent IS NULL OR {json_number(intent; repeatable_until)} > {now})
{giving};

-- name: settle_deferred
-- Leave the owner's record pending: a worker delivers its parcel (row 3).
UPDATE oncekey_record
SET state = 'pending', version = version + 1, owner = NULL, lease_until = NULL, last_error = NULL, request = :request
WHERE scope = :scope AND `key` = :key
  AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND effects = 'outbox' AND memo IS NULL AND intent IS NULL
{giving};

-- name: discard
-- Delete the owner's record, whose handler was never called: the key is unused again (row 9).
{removed(scope = :scope AND `key` = :key AND incarnation = :incarnation AND fence = :fence
  AND state = 'in_progress' AND memo IS NULL AND intent IS NULL)};
