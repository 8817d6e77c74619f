-- What both stores report about themselves by the same statements. Nothing here writes.

-- name: diagnostic_clock
SELECT {now} AS now;

-- name: diagnostic_ttl
SELECT COALESCE(min(record.ttl), 0) AS shortest_ttl, COALESCE(max(record.call_timeout), 0) AS longest_call
FROM (SELECT ttl, call_timeout FROM oncekey_record LIMIT 1000) AS record;
