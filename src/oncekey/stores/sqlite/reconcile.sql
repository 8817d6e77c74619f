-- What resolvers and webhooks ask and write, beside the moves that they share with operators (operate.sql).

-- name: unknown_due
-- Served by oncekey_record_unknown. What was given up has no instant, and is found by operators only.
SELECT clock.now, page.*
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock LEFT JOIN (
    SELECT record.* FROM oncekey_record AS record
    WHERE record.state = 'unknown' AND record.reconcile_after <= COALESCE(:now, (SELECT now FROM oncekey_clock))
      AND (record.reconcile_after, record.scope, record.key) > (:after_at, :after_scope, :after_key)
    ORDER BY record.reconcile_after, record.scope, record.key
    LIMIT :limit) AS page
ORDER BY page.reconcile_after, page.scope, page.key;

-- name: still_unknown
UPDATE oncekey_record
SET version = version + 1, reconcile_after = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :after,
    reconcile_tries = reconcile_tries + :tries
WHERE scope = :scope AND key = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown'
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: add_evidence
INSERT INTO oncekey_evidence (at, source, event_id, downstream_key, provider_id, said)
VALUES (COALESCE(:now, (SELECT now FROM oncekey_clock)), :source, :event_id, :downstream_key, :provider_id, :said)
ON CONFLICT DO NOTHING
RETURNING *;

-- name: find_evidence
SELECT * FROM oncekey_evidence WHERE source = :source AND event_id = :event_id;

-- name: evidence_about
-- Served by oncekey_evidence_open_key and oncekey_evidence_open_provider. What was heard before the record began is not
-- about it.
SELECT evidence.* FROM oncekey_evidence AS evidence
WHERE evidence.verdict IS NULL AND evidence.at >= :since
  AND (evidence.downstream_key = :downstream_key
       OR evidence.provider_id IN (
           SELECT call.provider_id FROM oncekey_call AS call
           WHERE call.incarnation = :incarnation AND call.provider_id IS NOT NULL))
ORDER BY evidence.id
LIMIT 20;

-- name: open_evidence
SELECT * FROM oncekey_evidence WHERE verdict IS NULL AND id > :after ORDER BY id LIMIT :limit;

-- name: judge_evidence
UPDATE oncekey_evidence SET verdict = :verdict WHERE id = :id AND verdict IS NULL RETURNING id;

-- name: find_calls
-- Served by oncekey_call_downstream_key and oncekey_call_provider_id; the same request may have made the same call in an
-- earlier life.
SELECT * FROM oncekey_call
WHERE downstream_key = :downstream_key OR provider_id = :provider_id
ORDER BY at DESC
LIMIT 10;

-- name: add_call
INSERT INTO oncekey_call (incarnation, phase, downstream_key, scope, key, operation, at)
VALUES (:incarnation, :phase, :downstream_key, :scope, :key, :operation,
        COALESCE(:now, (SELECT now FROM oncekey_clock)))
ON CONFLICT DO NOTHING
RETURNING phase;

-- name: name_call
UPDATE oncekey_call SET provider_id = :provider_id
WHERE incarnation = :incarnation AND phase = :phase AND provider_id IS NULL
RETURNING phase;

-- name: list_calls
-- Served by oncekey_call_at, and the primary key of the records for each.
SELECT clock.now, call.phase AS call_phase, call.downstream_key AS call_downstream_key,
       call.provider_id AS call_provider_id, call.scope AS call_scope, call.key AS call_key,
       call.operation AS call_operation, call.incarnation AS call_incarnation, call.at AS call_at, record.*
FROM (SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock CROSS JOIN (
    SELECT made.* FROM oncekey_call AS made
    WHERE made.at >= :since
      AND (made.at, made.incarnation, made.phase) > (:after_at, :after_incarnation, :after_phase)
    ORDER BY made.at, made.incarnation, made.phase
    LIMIT :limit) AS call
LEFT JOIN oncekey_record AS record
  ON record.scope = call.scope AND record.key = call.key AND record.incarnation = call.incarnation
ORDER BY call.at, call.incarnation, call.phase;

-- name: forget_calls
DELETE FROM oncekey_call
WHERE (incarnation, phase) IN (
    SELECT old.incarnation, old.phase FROM oncekey_call AS old
    WHERE old.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
      AND NOT EXISTS (
          SELECT 1 FROM oncekey_record AS record
          WHERE record.scope = old.scope AND record.key = old.key AND record.incarnation = old.incarnation)
    ORDER BY old.at
    LIMIT :limit)
RETURNING phase;

-- name: forget_evidence
DELETE FROM oncekey_evidence
WHERE id IN (
    SELECT old.id FROM (SELECT id, at FROM oncekey_evidence ORDER BY id LIMIT :limit) AS old
    WHERE old.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
RETURNING id;
