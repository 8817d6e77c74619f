-- Diagnostics that both stores share. Nothing here writes.

-- name: diagnostic_clock
-- Read the database's clock, to compare it with the machine's.
SELECT {now} AS now;

-- name: diagnostic_ttl
-- Read the shortest ttl and the longest call timeout of stored records.
SELECT COALESCE(min(record.ttl), 0) AS shortest_ttl, COALESCE(max(record.call_timeout), 0) AS longest_call
FROM (SELECT ttl, call_timeout FROM oncekey_record LIMIT 1000) AS record;
