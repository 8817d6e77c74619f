-- name: put_parcels
-- Insert the parcels of a handler, in the transaction of its business rows.
INSERT INTO oncekey_outbox (
    id, aggregatetype, aggregateid, type, payload, kind, scope, key, incarnation, downstream_key, position, order_by,
    state, attempts, fence, due_at, created_at)
SELECT json_extract(given.value, '$.id'), json_extract(given.value, '$.topic'),
       COALESCE(json_extract(given.value, '$.order_by'), json_extract(given.value, '$.incarnation')), json_extract(given.value, '$.topic'),
       json_extract(given.value, '$.payload'), json_extract(given.value, '$.kind'), json_extract(given.value, '$.scope'), json_extract(given.value, '$.key'),
       json_extract(given.value, '$.incarnation'), json_extract(given.value, '$.downstream_key'), json_extract(given.value, '$.position'),
       json_extract(given.value, '$.order_by'), 'ready', 0, 0, COALESCE(:now, (SELECT now FROM oncekey_clock)),
       COALESCE(:now, (SELECT now FROM oncekey_clock))
FROM json_each(:parcels) AS given
ORDER BY json_extract(given.value, '$.position')
RETURNING id;

-- name: due
-- Claim the parcels that a worker delivers next, longest waiting first.
-- At most `careful` of the next parcels are claimed that are a request's own call or were attempted
-- before. A scope that begins with a digit has its namespace first.
UPDATE oncekey_outbox
SET state = 'held', fence = fence + 1, attempts = attempts + 1, owner = :owner,
    lease_until = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock)) + :lease
WHERE place IN (
    SELECT ranked.place
    FROM (
        SELECT next.place, next.careful,
               row_number() OVER (PARTITION BY next.careful ORDER BY next.due_at, next.place) AS turn
        FROM (
            SELECT parcel.place, parcel.due_at, parcel.kind = 'defer' OR parcel.attempts > 0 AS careful
            FROM oncekey_outbox AS parcel
            WHERE parcel.due_at <= COALESCE(:now, (SELECT now FROM oncekey_clock))
              AND parcel.aggregatetype IN (SELECT value FROM json_each(:topics))
              AND (substr(parcel.scope, 1, 1) NOT BETWEEN '0' AND '9'
                   OR substr(parcel.scope, 1, length(:beginning)) = :beginning)
              AND (parcel.order_by IS NULL OR NOT EXISTS (
                  SELECT 1 FROM oncekey_outbox AS older
                  WHERE older.order_by = parcel.order_by AND older.place < parcel.place))
            ORDER BY parcel.due_at, parcel.place
            LIMIT :limit) AS next) AS ranked
    WHERE NOT ranked.careful OR ranked.turn <= :careful)
RETURNING COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now, *;

-- name: sent
-- Delete messages that were delivered.
DELETE FROM oncekey_outbox
WHERE (id, fence) IN (SELECT json_extract(held.value, '$.id'), json_extract(held.value, '$.fence') FROM json_each(:held) AS held)
  AND state = 'held' AND kind = 'emit'
RETURNING id;

-- name: remaining
-- Read which parcels are still in the outbox, after the reply to `sent` was lost.
SELECT parcel.id FROM oncekey_outbox AS parcel
WHERE parcel.id IN (SELECT json_extract(held.value, '$.id') FROM json_each(:held) AS held);

-- name: hand_back
-- Release parcels that a worker claimed and did not begin; the attempt does not count.
UPDATE oncekey_outbox
SET state = 'ready', owner = NULL, lease_until = NULL, attempts = attempts - 1,
    due_at = COALESCE(:now, (SELECT now FROM oncekey_clock))
WHERE (id, fence) IN (SELECT json_extract(held.value, '$.id'), json_extract(held.value, '$.fence') FROM json_each(:held) AS held)
  AND state = 'held'
RETURNING id;

