-- The reads and writes of resolvers and webhooks, except the moves that they share with operators (operate.sql).

-- name: unknown_due
-- List the unknown records to check with their provider now, longest due first.
-- Served by oncekey_record_unknown. A record that the reconciler gave up has no instant, and only operators find it.
SELECT clock.now, page.*
FROM {clock} LEFT JOIN (
    SELECT record.* FROM oncekey_record AS record
    WHERE record.state = 'unknown' AND record.reconcile_after <= {now}
      AND (record.reconcile_after, record.scope, record.`key`) > (:after_at, :after_scope, :after_key)
    ORDER BY record.reconcile_after, record.scope, record.`key`
    LIMIT :limit) AS page ON true
ORDER BY page.reconcile_after, page.scope, page.`key`;

-- name: still_unknown
-- Set when an unknown record is checked with its provider again (row 23).
UPDATE oncekey_record
SET version = version + 1, reconcile_after = {now} + :after,
    reconcile_tries = reconcile_tries + :tries
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state = 'unknown'
{giving};

-- name: add_evidence
-- Insert evidence about a call, once per source and event.
INSERT INTO oncekey_evidence (at, source, event_id, downstream_key, provider_id, said)
VALUES ({now}, :source, :event_id, :downstream_key, :provider_id, :said)
{unless_taken}
{written_evidence};

-- name: find_evidence
-- Read the evidence of one event.
SELECT * FROM oncekey_evidence WHERE source = :source AND event_id = :event_id;

-- name: evidence_about
-- Read the evidence about a record's call that has no verdict yet, oldest first.
-- Served by oncekey_evidence_open_key and oncekey_evidence_open_provider. Evidence from before the record began does
-- not concern it.
SELECT evidence.* FROM oncekey_evidence AS evidence
WHERE evidence.verdict IS NULL AND evidence.at >= :since
  AND (evidence.downstream_key = :downstream_key
       OR (evidence.downstream_key IS NULL AND evidence.provider_id IN (
           SELECT called.provider_id FROM oncekey_call AS called
           WHERE called.incarnation = :incarnation AND called.provider_id IS NOT NULL)))
ORDER BY evidence.id
LIMIT 20;

-- name: open_evidence
-- List all evidence that has no verdict yet, oldest first.
SELECT * FROM oncekey_evidence WHERE verdict IS NULL AND id > :after ORDER BY id LIMIT :limit;

-- name: judge_evidence
-- Store the verdict on evidence, once.
UPDATE oncekey_evidence SET verdict = :verdict WHERE id = :id AND verdict IS NULL {written(id)};

-- name: find_calls
-- Find announced calls by downstream key or by the provider's id, newest first.
-- Served by oncekey_call_downstream_key and oncekey_call_provider_id; the same request may have made the same call in an
-- earlier incarnation.
SELECT * FROM oncekey_call
WHERE downstream_key = :downstream_key OR provider_id = :provider_id
ORDER BY at DESC
LIMIT 10;

-- name: keys_named
-- Read the downstream keys for which a source reported this provider's id, at most two.
-- Served by oncekey_evidence_open_provider and oncekey_evidence_judged_provider. Two are enough to show that the id is ambiguous.
SELECT open.downstream_key FROM oncekey_evidence AS open
WHERE open.verdict IS NULL AND open.provider_id = :provider_id AND open.source = :source
  AND open.downstream_key IS NOT NULL
UNION
SELECT judged.downstream_key FROM oncekey_evidence AS judged
WHERE judged.verdict IS NOT NULL AND judged.provider_id = :provider_id AND judged.source = :source
  AND judged.downstream_key IS NOT NULL
LIMIT 2;

-- name: add_call
-- Insert the call of an INLINE handler, which does not announce it.
INSERT INTO oncekey_call (incarnation, phase, downstream_key, scope, `key`, operation, at)
VALUES (:incarnation, :phase, :downstream_key, :scope, :key, :operation,
        {now})
{unless_taken}
{written(phase)};

-- name: name_call
-- Store the provider's id of a call, once.
UPDATE oncekey_call SET provider_id = :provider_id
WHERE incarnation = :incarnation AND phase = :phase AND provider_id IS NULL
{written(phase)};

-- name: list_calls
-- List calls since an instant with their records, oldest first.
-- Served by oncekey_call_at, and the primary key of the records for each.
SELECT clock.now, called.phase AS call_phase, called.downstream_key AS call_downstream_key,
       called.provider_id AS call_provider_id, called.scope AS call_scope, called.`key` AS call_key,
       called.operation AS call_operation, called.incarnation AS call_incarnation, called.at AS call_at, record.*
FROM {clock} CROSS JOIN (
    SELECT made.* FROM oncekey_call AS made
    WHERE made.at >= :since
      AND (made.at, made.incarnation, made.phase) > (:after_at, :after_incarnation, :after_phase)
    ORDER BY made.at, made.incarnation, made.phase
    LIMIT :limit) AS called
LEFT JOIN oncekey_record AS record
  ON record.scope = called.scope AND record.`key` = called.`key` AND record.incarnation = called.incarnation
ORDER BY called.at, called.incarnation, called.phase;

