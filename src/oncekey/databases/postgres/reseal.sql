-- The queries of `oncekey rekey` and `oncekey doctor` about sealed content, and the one write that changes its key.

-- name: content_records
-- List the records that have content which can be sealed.
-- Served by record_pkey.
SELECT {now} AS now, record.*
FROM oncekey.whole AS record
WHERE (record.scope, record.key) > (:after_scope::text, :after_key::text)
  AND (record.response_status IS NOT NULL OR record.memo IS NOT NULL OR record.request IS NOT NULL)
ORDER BY record.scope, record.key
LIMIT :limit::bigint;

-- name: reseal_record
-- Store a record's content under another key; the record does not move.
-- The write proves the version. An owner compares the memo that it has read byte by byte, so an owned record is not
-- changed.
WITH {durable_clock}, written AS (
UPDATE oncekey.record AS record
SET version = record.version + 1, response_headers = :response_headers, response_body = :response_body::bytea,
    response_schema = :response_schema::integer,
    memo_version = CASE WHEN :memo::text IS NULL AND seen.intent IS NULL THEN 0 ELSE record.version + 1 END
FROM clock, oncekey.whole AS seen
WHERE clock.durable = 'on' AND record.scope = :scope AND record.key = :key
  AND record.incarnation = :seen_incarnation::uuid AND record.version = :seen_version::bigint
  AND seen.scope = record.scope AND seen.key = record.key
  AND record.state <> 'in_progress'
RETURNING clock.now, {hot}, record.memo_version,
    :memo::text AS memo, seen.intent, :request::bytea AS request, seen.reconcile_after, seen.reconcile_tries
), {kept}, {emptied}
SELECT written.version FROM written;

-- name: content_parcels
-- List all parcels and dead letters.
-- Served by outbox_pkey and dead_letter_pkey.
SELECT parcel.* FROM (
    SELECT id, kind, scope, key, incarnation, aggregatetype, payload, downstream_key, position, order_by
    FROM oncekey.outbox WHERE id > :after::uuid
    UNION ALL
    SELECT id, kind, scope, key, incarnation, aggregatetype, payload, downstream_key, position, order_by
    FROM oncekey.dead_letter WHERE id > :after::uuid) AS parcel
ORDER BY parcel.id
LIMIT :limit::bigint;

-- name: reseal_parcel
-- Store a parcel's payload under another key.
UPDATE oncekey.outbox SET payload = :payload WHERE id = :id::uuid AND payload = :seen RETURNING id;

-- name: reseal_letter
-- Store a dead letter's payload under another key.
UPDATE oncekey.dead_letter SET payload = :payload WHERE id = :id::uuid AND payload = :seen RETURNING id;

-- name: content_evidence
-- List all evidence.
SELECT * FROM oncekey.evidence WHERE id > :after::bigint ORDER BY id LIMIT :limit::bigint;

-- name: reseal_evidence
-- Store a piece of evidence under another key.
UPDATE oncekey.evidence SET said = :said WHERE id = :id::bigint AND said = :seen RETURNING id;

-- name: seals
-- Count how much of each kind is sealed under which key; NULL stands for content that is not sealed.
SELECT 'answers' AS part, CASE WHEN page.response_schema = 2 THEN page.response_headers::json -> 0 ->> 1 END AS name,
       count(*) AS found
FROM (SELECT response_headers, response_schema FROM oncekey.record
      WHERE response_status IS NOT NULL LIMIT :limit::bigint) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'results', substring(page.result FROM '^(?:{"\$":"rejected","v":)?oncekey-sealed:([A-Za-z0-9_-]+):'), count(*)
FROM (SELECT step.value ->> 2 AS result
      FROM oncekey.whole AS record CROSS JOIN LATERAL json_array_elements(record.memo::json) AS step (value)
      WHERE record.memo IS NOT NULL LIMIT :limit::bigint) AS page
WHERE page.result NOT LIKE '{"$":"not\_sent"%'
GROUP BY 1, 2
UNION ALL
SELECT 'requests', substring(encode(substring(page.request FROM 1 FOR 50), 'escape') FROM '^oncekey-sealed:([A-Za-z0-9_-]+):'),
       count(*)
FROM (SELECT record.request FROM oncekey.whole AS record WHERE record.request IS NOT NULL LIMIT :limit::bigint) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'payloads', substring(page.payload FROM '^oncekey-sealed:([A-Za-z0-9_-]+):'), count(*)
FROM (SELECT payload FROM oncekey.outbox UNION ALL SELECT payload FROM oncekey.dead_letter LIMIT :limit::bigint) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'evidence', substring(page.said FROM '^oncekey-sealed:([A-Za-z0-9_-]+):'), count(*)
FROM (SELECT said FROM oncekey.evidence LIMIT :limit::bigint) AS page
GROUP BY 1, 2;
