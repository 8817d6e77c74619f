-- What SQLite says about itself. Nothing here writes.

-- name: vital_clock
SELECT COALESCE(:now, (SELECT now FROM oncekey_clock)) AS now;

-- name: vital_indexes
SELECT entry.name AS name, entry.tbl_name AS on_table
FROM sqlite_master AS entry
WHERE entry.type = 'index' AND entry.tbl_name LIKE 'oncekey\_%' ESCAPE '\'
ORDER BY entry.name;

-- name: vital_file
SELECT sqlite_version() AS version, file AS path FROM pragma_database_list WHERE name = 'main';

-- name: vital_journal
PRAGMA journal_mode;

-- name: vital_ttl
SELECT COALESCE(min(record.ttl), 0) AS shortest_ttl, COALESCE(max(record.call_timeout), 0) AS longest_call
FROM (SELECT ttl, call_timeout FROM oncekey_record LIMIT 1000) AS record;
