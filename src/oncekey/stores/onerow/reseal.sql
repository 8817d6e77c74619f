-- The queries of `oncekey rekey` and `oncekey doctor` about sealed content, and the one write that changes its key.

-- name: content_records
-- List the records that have content which can be sealed.
-- Served by the primary key.
SELECT {now} AS now, record.*
FROM oncekey_record AS record
WHERE {behind_record}
  AND (record.response_status IS NOT NULL OR record.memo IS NOT NULL OR record.request IS NOT NULL)
ORDER BY record.scope, record.`key`
LIMIT :limit;

-- name: reseal_record
-- Store a record's content under another key; the record does not move.
-- The write proves the version. An owner compares its memo byte by byte, so an owned record is left alone.
UPDATE oncekey_record
SET version = version + 1, response_headers = :response_headers, response_body = :response_body,
    response_schema = :response_schema, memo = :memo, request = :request
WHERE scope = :scope AND `key` = :key AND incarnation = :seen_incarnation AND version = :seen_version
  AND state <> 'in_progress'
{given(version)};

-- name: content_parcels
-- List all parcels and dead letters.
-- Served by the indexes of the ids, at most a page of each table.
SELECT parcel.* FROM (
    SELECT waiting.* FROM (
        SELECT id, kind, scope, `key`, incarnation, aggregatetype, payload, downstream_key, position, order_by
        FROM oncekey_outbox WHERE id > :after ORDER BY id LIMIT :limit) AS waiting
    UNION ALL
    SELECT dead.* FROM (
        SELECT id, kind, scope, `key`, incarnation, aggregatetype, payload, downstream_key, position, order_by
        FROM oncekey_dead_letter WHERE id > :after ORDER BY id LIMIT :limit) AS dead) AS parcel
ORDER BY parcel.id
LIMIT :limit;

-- name: reseal_parcel
-- Store a parcel's payload under another key.
UPDATE oncekey_outbox SET payload = :payload WHERE id = :id AND payload = :seen {written(id)};

-- name: reseal_letter
-- Store a dead letter's payload under another key.
UPDATE oncekey_dead_letter SET payload = :payload WHERE id = :id AND payload = :seen {written(id)};

-- name: content_evidence
-- List all evidence.
SELECT * FROM oncekey_evidence WHERE id > :after ORDER BY id LIMIT :limit;

-- name: reseal_evidence
-- Store a piece of evidence under another key.
UPDATE oncekey_evidence SET said = :said WHERE id = :id AND said = :seen {written(id)};

-- name: seals
-- Count how much of each kind is sealed under which key; NULL stands for content that is not sealed.
SELECT 'answers' AS part, CASE WHEN page.response_schema = 2 THEN {first_header(page.response_headers)} END AS name,
       count(*) AS found
FROM (SELECT response_headers, response_schema FROM oncekey_record WHERE response_status IS NOT NULL LIMIT :limit) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'results', {mark(page.result)}, count(*)
FROM (SELECT replace(step.result, '{"$":"rejected","v":oncekey-sealed:', 'oncekey-sealed:') AS result
      FROM {steps} LIMIT :limit) AS page
WHERE page.result NOT LIKE '{"$":"not_sent"%'
GROUP BY 1, 2
UNION ALL
SELECT 'requests', {mark_of_bytes(page.request)}, count(*)
FROM (SELECT request FROM oncekey_record WHERE request IS NOT NULL LIMIT :limit) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'payloads', {mark(page.payload)}, count(*)
FROM (SELECT payload FROM oncekey_outbox UNION ALL SELECT payload FROM oncekey_dead_letter LIMIT :limit) AS page
GROUP BY 1, 2
UNION ALL
SELECT 'evidence', {mark(page.said)}, count(*)
FROM (SELECT said FROM oncekey_evidence LIMIT :limit) AS page
GROUP BY 1, 2;
