-- What a store with a broken rule says instead: whole statements, and pieces that take another piece's place.

-- name: lock
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
       pg_try_advisory_xact_lock(:lock::bigint) AS locked, false AS other,
       (extract(epoch FROM now()) * 1000000)::bigint AS begun,
       record.*
FROM oncekey.whole AS record
WHERE record.scope = convert_from(:scope::bytea, 'UTF8') AND record.key = convert_from(:key::bytea, 'UTF8')
  AND :lease_ms::integer > 0
UNION ALL
SELECT COALESCE(:now::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), true, false,
       (extract(epoch FROM now()) * 1000000)::bigint, (none.record).*
FROM (SELECT NULL::oncekey.whole AS record) AS none
WHERE NOT EXISTS (
    SELECT FROM oncekey.record
    WHERE scope = convert_from(:scope::bytea, 'UTF8') AND key = convert_from(:key::bytea, 'UTF8'));

-- name: enter
SELECT :lock::bigint;

-- name: upsert
DO UPDATE SET incarnation = EXCLUDED.incarnation, state = 'in_progress', owner = EXCLUDED.owner, fence = 1, version = 1,
    lease_until = EXCLUDED.lease_until, memo_version = 0, outcome = NULL, response_status = NULL,
    response_headers = NULL, response_body = NULL, response_schema = NULL, finished_at = NULL, last_error = NULL;

-- name: cursor_sqlite
AND parcel.attempts = 0 AND parcel.aggregatetype IN;

-- name: cursor_postgres
AND parcel.attempts = 0 AND parcel.aggregatetype = ANY;
