-- The reads and writes of operators. Writes prove the version that was read.
-- Lists return the clock even if they are empty, and no responses: bodies may be large.

-- name: list_records
-- List the records that match a search, newest first.
SELECT clock.now, page.*
FROM {clock} LEFT JOIN (
    SELECT
        {all_but_content}, record.memo, record.response_status,
        '[]' AS response_headers, NULL AS response_body, 1 AS response_schema, NULL AS request
    FROM oncekey_record AS record
    WHERE (:within IS NULL OR substr(record.scope, 1, length(:within)) = :within)
      AND (:state IS NULL OR record.state = :state)
      AND (:operation IS NULL OR record.operation = :operation)
      AND (:effects IS NULL OR record.effects = :effects)
      AND record.created_at <= {now} - :age
      AND (NOT :stale OR (record.state = 'in_progress'
                          AND record.lease_until <= {now}))
      AND (record.created_at, record.scope, record.`key`) < (:before_at, :before_scope, :before_key)
    ORDER BY record.created_at DESC, record.scope DESC, record.`key` DESC
    LIMIT :limit) AS page ON true
ORDER BY page.created_at DESC, page.scope DESC, page.`key` DESC;

-- part: keys_found(one; named; fits)
WITH RECURSIVE scopes (scope) AS (
    SELECT COALESCE({one}, (SELECT min(first.scope) FROM oncekey_record AS first))
    UNION ALL
    SELECT (SELECT min(next.scope) FROM oncekey_record AS next WHERE next.scope > scopes.scope)
    FROM scopes
    WHERE scopes.scope IS NOT NULL AND {one} IS NULL
)
SELECT clock.now, page.*
FROM {clock} LEFT JOIN (
    SELECT
        {all_but_content}, record.memo, record.response_status,
        '[]' AS response_headers, NULL AS response_body, record.response_schema, NULL AS request
    FROM scopes
    JOIN oncekey_record AS record ON record.scope = scopes.scope AND {named}
    WHERE {fits}
      AND (:within IS NULL OR substr(scopes.scope, 1, length(:within)) = :within)
    ORDER BY record.`key`, record.scope
    LIMIT :limit) AS page ON true
ORDER BY page.`key`, page.scope;

-- name: find_key
-- Find a key in one scope, in all scopes that begin with a text, or in all.
-- One lookup in the primary key for each scope.
{keys_found(:scope; record.`key` = :first; :last IS NOT NULL)};

-- name: find_open_keys
-- Find the unfinished records whose key begins with a text.
-- Both stores order keys by their bytes.
{keys_found(NULL; record.`key` >= :first AND record.`key` < :last; record.state IN ('pending', 'in_progress', 'failed_retryable', 'unknown'))};

-- name: find_done_keys
-- Find the finished records whose key begins with a text.
{keys_found(NULL; record.`key` >= :first AND record.`key` < :last; record.state IN ('completed', 'expired'))};

-- name: last_results
-- Read the steps of the last records that made the same call, as a template for an operator's result.
-- Served by oncekey_call_at: the newest calls, of which few are read.
SELECT record.memo
FROM (SELECT made.* FROM oncekey_call AS made ORDER BY made.at DESC, made.incarnation DESC, made.phase DESC
      LIMIT :looked_at) AS called
JOIN oncekey_record AS record
  ON record.scope = called.scope AND record.`key` = called.`key` AND record.incarnation = called.incarnation
WHERE called.operation = :operation AND called.phase = :phase AND record.memo IS NOT NULL
ORDER BY called.at DESC
LIMIT :limit;

-- name: parcels_of
-- Read where the parcels of a record are: in the outbox or among the dead letters.
SELECT parcel.id, parcel.kind, 0 AS dead, parcel.lease_until
FROM oncekey_outbox AS parcel
WHERE parcel.incarnation = :incarnation
UNION ALL
SELECT letter.id, letter.kind, 1, NULL
FROM oncekey_dead_letter AS letter
WHERE letter.incarnation = :incarnation;

-- name: hold_parcels_of
-- Lock the parcels of a record that are in the outbox.
SELECT parcel.id, parcel.kind, 0 AS dead, parcel.lease_until
FROM oncekey_outbox AS parcel
WHERE parcel.incarnation = :incarnation
ORDER BY parcel.id
{locked};

-- name: letters_of
-- Read the parcels of a record that are dead letters.
SELECT letter.id, letter.kind, 1 AS dead, NULL AS lease_until
FROM oncekey_dead_letter AS letter
WHERE letter.incarnation = :incarnation
ORDER BY letter.id;

-- name: operator_answer
-- Complete an unknown record with the response of an operator, a resolver or a webhook (row 19).
UPDATE oncekey_record
SET state = 'completed', outcome = :outcome, version = version + 1, intent = NULL,
    response_status = :response_status, response_headers = :response_headers,
    response_body = :response_body, response_schema = :response_schema,
    last_error = NULL, reconcile_after = NULL, recovery_point = 'finished', request = NULL,
    finished_at = {now},
    expires_at = {greatest}(expires_at, {now} + ttl)
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown' AND effects IN ('inline', 'outbox')
{giving};

-- name: operator_result
-- Store the result of the open call of an unknown record, so that it can be resumed (row 20).
-- A resumable record is not parked again before a worker could resume it.
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, memo = :memo, recovery_point = :recovery_point,
    intent = NULL, reconcile_after = NULL,
    expires_at = {greatest}(expires_at, {now} + ttl)
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown' AND effects = 'phased' AND intent IS NOT NULL
{giving};

-- name: operator_replace
-- Replace the last result of a record, which an operator entered (row 34).
-- An owner that ran with the former result can no longer write: the fence is raised.
UPDATE oncekey_record
SET state = 'failed_retryable', fence = fence + 1, version = version + 1, memo = :memo,
    recovery_point = :recovery_point, reconcile_after = NULL,
    expires_at = {greatest}(expires_at, {now} + ttl)
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state IN ('failed_retryable', 'unknown') AND effects = 'phased' AND intent IS NULL AND memo IS NOT NULL
{giving};

-- name: operator_unexecuted
-- Release an unknown record whose call was not executed (row 21).
UPDATE oncekey_record
SET state = 'failed_retryable', version = version + 1, intent = NULL, reconcile_after = NULL,
    expires_at = CASE WHEN memo IS NULL THEN expires_at
                      ELSE {greatest}(expires_at, {now} + ttl) END
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown'
  AND (effects <> 'outbox' OR (memo IS NULL AND intent IS NULL))
{giving};

-- name: operator_pend
-- Leave an unknown deferred record pending: its parcel is delivered again (row 22).
UPDATE oncekey_record
SET state = 'pending', version = version + 1, reconcile_after = NULL,
    intent = CASE WHEN :forget THEN NULL ELSE intent END
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown' AND effects = 'outbox'
  AND (memo IS NOT NULL OR intent IS NOT NULL)
{giving};

-- name: operator_bust
-- Remove the stored response of a record, so that a retry runs (row 32).
UPDATE oncekey_record
SET state = 'failed_retryable', outcome = NULL, fence = fence + 1, version = version + 1,
    response_status = NULL, response_headers = NULL, response_body = NULL, response_schema = NULL,
    finished_at = NULL, recovery_point = :recovery_point, last_error = :last_error,
    expires_at = CASE WHEN memo IS NULL THEN expires_at
                      ELSE {greatest}(expires_at, {now} + ttl) END
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'completed' AND effects <> 'outbox'
{giving};

-- name: operator_extend
-- Extend the time to live of a completed record (row 35).
UPDATE oncekey_record
SET version = version + 1, expires_at = {greatest}(expires_at, :expires_at)
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'completed' AND expires_at > {now}
{giving};

-- name: stats
-- Count all records by state, effects and operation.
SELECT record.state, record.effects, record.operation, count(*) AS records,
       count(CASE WHEN record.state = 'in_progress' AND record.lease_until <= clock.now THEN 1 END) AS stale,
       count(CASE WHEN record.state = 'failed_retryable'
                          AND (record.memo IS NOT NULL OR record.intent IS NOT NULL) THEN 1 END) AS resumable,
       count(CASE WHEN record.state IN ('completed', 'failed_retryable', 'expired')
                          AND record.expires_at <= clock.now THEN 1 END) AS expired,
       min(record.created_at) AS oldest, max(record.created_at) AS newest
FROM {clock}, oncekey_record AS record
GROUP BY record.state, record.effects, record.operation
ORDER BY record.state, record.effects, record.operation;

-- name: standing
-- Count what is unfinished and what waits, up to a bound; the result is one row.
-- Unfinished records are read once, by the indexes of states. Other kinds, which may be many, are counted along their
-- index, up to a bound: oncekey_record_expiring, oncekey_outbox_due, oncekey_dead_letter_died. All records are counted
-- only by the entries of an index, up to a larger bound.
WITH clock AS {materialized} (
    SELECT {now} AS now
), unfinished AS {materialized} (
    SELECT count(*) AS records,
           count(CASE WHEN record.state = 'pending' THEN 1 END) AS pending,
           count(CASE WHEN record.state = 'in_progress' THEN 1 END) AS in_progress,
           count(CASE WHEN record.state = 'failed_retryable' THEN 1 END) AS failed_retryable,
           count(CASE WHEN record.state = 'unknown' THEN 1 END) AS unknown,
           min(CASE WHEN record.state = 'unknown' THEN record.created_at END) AS unknown_oldest,
           count(CASE WHEN record.state = 'in_progress' AND record.lease_until <= clock.now THEN 1 END) AS stale,
           min(CASE WHEN record.state = 'in_progress' AND record.lease_until <= clock.now THEN record.lease_until END)
               AS stale_oldest,
           count(CASE WHEN record.state = 'failed_retryable' AND record.effects = 'phased'
                              AND (record.memo IS NOT NULL OR record.intent IS NOT NULL) THEN 1 END) AS resumable,
           min(CASE WHEN record.state = 'failed_retryable' AND record.effects = 'phased'
                                             AND (record.memo IS NOT NULL OR record.intent IS NOT NULL) THEN record.last_run_at END) AS resumable_oldest
    FROM clock, (
        SELECT waiting.state, waiting.effects, waiting.created_at, waiting.last_run_at, waiting.lease_until, waiting.memo,
               waiting.intent
        FROM oncekey_record AS waiting WHERE waiting.state IN ('pending', 'failed_retryable', 'unknown')
        UNION ALL
        SELECT running.state, running.effects, running.created_at, running.last_run_at, running.lease_until, running.memo,
               running.intent
        FROM oncekey_record AS running WHERE running.state = 'in_progress') AS record
)
SELECT clock.now, unfinished.*,
       {greatest}(0, (SELECT count(*) FROM ({counted}) AS counted)
              - unfinished.records) AS finished,
       expired.records AS expired, expired.oldest AS expired_oldest,
       due.records AS parcels_due, due.oldest AS parcels_due_oldest,
       dead.records AS dead_letters, dead.oldest AS dead_letters_oldest
FROM clock, unfinished,
    (SELECT count(*) AS records, min(few.expires_at) AS oldest FROM (
        SELECT past.expires_at FROM oncekey_record AS past
        WHERE past.state IN ('completed', 'failed_retryable', 'pending') AND past.state <> 'pending'
          AND past.expires_at <= {now}
        ORDER BY past.expires_at LIMIT 10000) AS few) AS expired,
    (SELECT count(*) AS records, min(few.due_at) AS oldest FROM (
        SELECT parcel.due_at FROM oncekey_outbox AS parcel WHERE parcel.due_at <= {now}
        ORDER BY parcel.due_at LIMIT 10000) AS few) AS due,
    (SELECT count(*) AS records, min(few.died_at) AS oldest FROM (
        SELECT letter.died_at FROM oncekey_dead_letter AS letter ORDER BY letter.died_at LIMIT 10000) AS few) AS dead;

-- name: unresolved
-- Count what waits for a worker or an operator, each with its oldest.
WITH clock AS (SELECT {now} AS now)
SELECT clock.now, 'unknown' AS what, count(record.scope) AS records, min(record.created_at) AS oldest
FROM clock LEFT JOIN oncekey_record AS record ON record.state = 'unknown'
UNION ALL
SELECT clock.now, 'stale', count(record.scope), min(record.lease_until)
FROM clock LEFT JOIN oncekey_record AS record
  ON record.state = 'in_progress' AND record.lease_until <= clock.now
UNION ALL
SELECT clock.now, 'resumable', count(record.scope), min(record.last_run_at)
FROM clock LEFT JOIN oncekey_record AS record
  ON record.effects = 'phased' AND record.state = 'failed_retryable'
 AND (record.memo IS NOT NULL OR record.intent IS NOT NULL)
UNION ALL
SELECT clock.now, 'expired', count(record.scope), min(record.expires_at)
FROM clock LEFT JOIN oncekey_record AS record
  ON record.state IN ('completed', 'failed_retryable') AND record.expires_at <= clock.now
UNION ALL
SELECT clock.now, 'parcels_due', count(parcel.id), min(parcel.due_at)
FROM clock LEFT JOIN oncekey_outbox AS parcel ON parcel.due_at <= clock.now
UNION ALL
SELECT clock.now, 'dead_letters', count(letter.id), min(letter.died_at)
FROM clock LEFT JOIN oncekey_dead_letter AS letter ON true;

-- name: outbox_census
-- Count the parcels of each topic.
SELECT parcel.aggregatetype AS topic, parcel.kind, count(*) AS parcels,
       count(CASE WHEN parcel.state = 'held' THEN 1 END) AS held, min(parcel.due_at) AS oldest_due
FROM oncekey_outbox AS parcel
GROUP BY parcel.aggregatetype, parcel.kind
ORDER BY parcel.aggregatetype, parcel.kind;

-- name: letter_census
-- Count the dead letters of each topic.
SELECT letter.aggregatetype AS topic, letter.kind, count(*) AS letters, min(letter.died_at) AS oldest
FROM oncekey_dead_letter AS letter
GROUP BY letter.aggregatetype, letter.kind
ORDER BY letter.aggregatetype, letter.kind;
