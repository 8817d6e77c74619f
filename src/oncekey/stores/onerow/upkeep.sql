-- The statements of the sweeper and the reaper. Pages return the clock even if they are empty, and no responses: bodies
-- may be large. Writes prove the version that was read, so a record that another actor moved first is left alone.

-- name: stale
-- List the records in progress whose lease has expired, oldest first.
SELECT clock.now, page.*
FROM {clock} LEFT JOIN (
    SELECT record.*
    FROM oncekey_record AS record
    WHERE record.state = 'in_progress'
      AND (record.created_at, record.scope, record.`key`) > (:after_at, :after_scope, :after_key)
      AND record.lease_until <= {now}
    ORDER BY record.created_at, record.scope, record.`key`
    LIMIT :limit) AS page ON true
ORDER BY page.created_at, page.scope, page.`key`;

-- name: runs
-- Read how long the operations that finished last took.
SELECT record.operation, record.finished_at - record.last_run_at AS took
FROM oncekey_record AS record
WHERE record.state IN ('completed', 'failed_retryable', 'pending') AND record.finished_at > record.last_run_at
ORDER BY record.expires_at DESC, record.scope DESC, record.`key` DESC
LIMIT :limit;

-- name: sweep_retryable
-- Release a record whose lease has expired and that may run again (row 14).
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, owner = NULL, lease_until = NULL, last_error = :last_error
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'in_progress' AND lease_until <= {now} AND {runs_again}
{giving};

-- name: expire_begun
-- Mark an expired retryable record unknown if steps are finished or a call is open (row 18).
{doubted}
  AND state = 'failed_retryable' AND expires_at <= {now} AND (memo IS NOT NULL OR intent IS NOT NULL)
{giving};

-- part: past_expiry(state)
SELECT clock.now, page.*
FROM {clock} LEFT JOIN (
    SELECT
        {all_but_content},
        CASE WHEN record.state = 'failed_retryable' THEN record.memo END AS memo, NULL AS response_status,
        NULL AS response_headers, NULL AS response_body, NULL AS response_schema, NULL AS request
    FROM oncekey_record AS record
    WHERE {state}
      AND record.expires_at <= {now} - :age
      AND (record.expires_at, record.scope, record.`key`) > (:after_at, :after_scope, :after_key)
    ORDER BY record.expires_at, record.scope, record.`key`
    LIMIT :limit) AS page ON true
ORDER BY page.expires_at, page.scope, page.`key`;

-- name: expiring
-- List the records whose ttl is over and that are not marked as expired, the oldest expiry first.
{past_expiry(record.state IN ('completed', 'failed_retryable', 'pending'))};

-- name: kept_expired
-- List the records that are marked as expired, the oldest expiry first.
{past_expiry(record.state = 'expired')};

-- name: abandon
-- Complete an expired pending record, whose parcel no worker ever claimed (row 28).
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, version = version + 1, owner = NULL, lease_until = NULL,
    intent = NULL,
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, recovery_point = 'finished', request = NULL,
    finished_at = {now},
    expires_at = {now} + :kept
WHERE scope = :scope AND `key` = :key
  AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'pending' AND expires_at <= {now}
{giving};

-- name: live_keys
-- Count the live keys of a scope, up to a limit.
SELECT count(*) AS live
FROM (
    SELECT 1 FROM oncekey_record AS record
    WHERE record.scope = :scope
      AND record.state <> 'expired'
      AND (record.state IN ('pending', 'in_progress', 'unknown')
           OR record.expires_at > {now})
    LIMIT :limit) AS counted;

-- name: history
-- Read the audit lines of one key, oldest first.
SELECT line.*
FROM oncekey_audit AS line
WHERE line.scope = :scope AND line.key_digest = :key_digest AND line.id > :after
ORDER BY line.id
LIMIT :limit;

-- name: deletions
-- Read the latest audit lines about several keys of a scope, newest first.
SELECT line.*
FROM oncekey_audit AS line
WHERE line.scope = :scope AND line.key_digest = ''
ORDER BY line.id DESC
LIMIT :limit;

-- name: workers
-- List the workers, each with its last heartbeat.
SELECT clock.now, worker.name, worker.tasks, worker.started_at, worker.seen_at, worker.every, worker.calls
FROM {clock} LEFT JOIN oncekey_worker AS worker ON true
ORDER BY worker.started_at, worker.name;

