-- The reads and writes of resolvers and webhooks, except the moves that they share with operators (operate.sql).

-- name: unknown_due
-- List the unknown records to check with their provider now, longest due first.
-- Served by work_due, and record_pkey for each. A record that the reconciler gave up has no instant, and only operators
-- find it. OFFSET 0 keeps the planner from joining whole tables: it expects one row of a join by three columns, and a
-- page would read every unknown record, which are many during an outage of a provider.
WITH {clock}
SELECT clock.now, page.*
FROM clock LEFT JOIN (
    SELECT record.*
    FROM oncekey.work AS due
    CROSS JOIN LATERAL (
        SELECT * FROM oncekey.whole AS record
        WHERE record.scope = due.scope AND record.key = due.key AND record.incarnation = due.incarnation
          AND record.state = 'unknown'
        OFFSET 0) AS record
    WHERE due.reconcile_after <= (SELECT clock.now FROM clock)
      AND (due.reconcile_after, due.scope, due.key) > (:after_at::bigint, :after_scope::text, :after_key::text)
    ORDER BY due.reconcile_after, due.scope, due.key
    LIMIT :limit::bigint) AS page ON true
ORDER BY page.reconcile_after, page.scope, page.key;

-- name: still_unknown
-- Set when an unknown record is checked with its provider again (row 23).
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1,
    memo_version = CASE WHEN seen.memo IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state = 'unknown'
RETURNING clock.now, {hot}, record.memo_version,
    seen.memo, seen.intent, seen.request, clock.now + :after::bigint AS reconcile_after,
    seen.reconcile_tries + :tries::integer AS reconcile_tries
), {kept}
SELECT written.* FROM written;

-- name: add_evidence
-- Insert evidence about a call, once per source and event.
WITH {durable_clock}
INSERT INTO oncekey.evidence (at, source, event_id, downstream_key, provider_id, said)
SELECT clock.now, :source::text, :event_id::text, :downstream_key::text, :provider_id::text, :said::text
FROM clock WHERE clock.durable = 'on'
ON CONFLICT DO NOTHING
RETURNING evidence.*;

-- name: find_evidence
-- Read the evidence of one event.
SELECT evidence.* FROM oncekey.evidence AS evidence
WHERE evidence.source = :source::text AND evidence.event_id = :event_id::text;

-- name: evidence_about
-- Read the evidence about a record's call that has no verdict yet, oldest first.
-- Served by evidence_open_key and evidence_open_provider. Evidence from before the record began does not concern it.
SELECT evidence.* FROM oncekey.evidence AS evidence
WHERE evidence.verdict IS NULL AND evidence.at >= :since::bigint
  AND (evidence.downstream_key = :downstream_key::text
       OR (evidence.downstream_key IS NULL AND evidence.provider_id IN (
           SELECT call.provider_id FROM oncekey.call AS call
           WHERE call.incarnation = :incarnation::uuid AND call.provider_id IS NOT NULL)))
ORDER BY evidence.id
LIMIT 20;

-- name: open_evidence
-- List all evidence that has no verdict yet, oldest first.
SELECT evidence.* FROM oncekey.evidence AS evidence
WHERE evidence.verdict IS NULL AND evidence.id > :after::bigint
ORDER BY evidence.id
LIMIT :limit::bigint;

-- name: judge_evidence
-- Store the verdict on evidence, once.
UPDATE oncekey.evidence AS evidence
SET verdict = :verdict::text
WHERE evidence.id = :id::bigint AND evidence.verdict IS NULL
RETURNING evidence.id;

-- name: find_calls
-- Find announced calls by downstream key or by the provider's id, newest first.
-- Served by call_downstream_key and call_provider_id; the same request may have made the same call in an earlier incarnation.
SELECT call.* FROM oncekey.call AS call
WHERE call.downstream_key = :downstream_key::text OR call.provider_id = :provider_id::text
ORDER BY call.at DESC
LIMIT 10;

-- name: keys_named
-- Read the downstream keys for which a source reported this provider's id, at most two.
-- Served by evidence_open_provider and evidence_judged_provider. Two are enough to show that the id is ambiguous.
SELECT open.downstream_key FROM oncekey.evidence AS open
WHERE open.verdict IS NULL AND open.provider_id = :provider_id::text AND open.source = :source::text
  AND open.downstream_key IS NOT NULL
UNION
SELECT judged.downstream_key FROM oncekey.evidence AS judged
WHERE judged.verdict IS NOT NULL AND judged.provider_id = :provider_id::text AND judged.source = :source::text
  AND judged.downstream_key IS NOT NULL
LIMIT 2;

-- name: add_call
-- Insert the call of an INLINE handler, which does not announce it.
INSERT INTO oncekey.call (incarnation, phase, downstream_key, scope, key, operation, at)
VALUES (:incarnation::uuid, :phase::text, :downstream_key::text, :scope::text, :key::text, :operation::text,
        {now})
ON CONFLICT DO NOTHING
RETURNING phase;

-- name: name_call
-- Store the provider's id of a call, once.
UPDATE oncekey.call AS call
SET provider_id = :provider_id::text
WHERE call.incarnation = :incarnation::uuid AND call.phase = :phase::text AND call.provider_id IS NULL
RETURNING call.phase;

-- name: list_calls
-- List calls since an instant with their records, oldest first.
-- Served by call_at, and record_pkey for each.
WITH {clock}
SELECT clock.now, call.phase AS call_phase, call.downstream_key AS call_downstream_key,
       call.provider_id AS call_provider_id, call.scope AS call_scope, call.key AS call_key,
       call.operation AS call_operation, call.incarnation AS call_incarnation, call.at AS call_at, record.*
FROM clock CROSS JOIN (
    SELECT made.* FROM oncekey.call AS made
    WHERE made.at >= :since::bigint
      AND (made.at, made.incarnation, made.phase) > (:after_at::bigint, :after_incarnation::uuid, :after_phase::text)
    ORDER BY made.at, made.incarnation, made.phase
    LIMIT :limit::bigint) AS call
LEFT JOIN oncekey.whole AS record
  ON record.scope = call.scope AND record.key = call.key AND record.incarnation = call.incarnation
ORDER BY call.at, call.incarnation, call.phase;

-- name: forget_calls
-- Delete a batch of old calls whose record is gone.
WITH {clock}
DELETE FROM oncekey.call AS call
WHERE (call.incarnation, call.phase) IN (
    SELECT old.incarnation, old.phase FROM oncekey.call AS old
    WHERE old.at <= (SELECT clock.now FROM clock) - :age::bigint
      AND NOT EXISTS (
          SELECT 1 FROM oncekey.record AS record
          WHERE record.scope = old.scope AND record.key = old.key AND record.incarnation = old.incarnation)
    ORDER BY old.at
    LIMIT :limit::bigint)
RETURNING call.phase;

-- name: forget_evidence
-- Delete a batch of old evidence.
WITH {clock}
DELETE FROM oncekey.evidence AS evidence
WHERE evidence.id IN (
    SELECT old.id FROM (
        SELECT first.id, first.at FROM oncekey.evidence AS first ORDER BY first.id LIMIT :limit::bigint) AS old
    WHERE old.at <= (SELECT clock.now FROM clock) - :age::bigint)
RETURNING evidence.id;
