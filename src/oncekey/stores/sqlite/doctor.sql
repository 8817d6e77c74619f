-- name: diagnostic_indexes
SELECT entry.name AS name, entry.tbl_name AS on_table
FROM sqlite_master AS entry
WHERE entry.type = 'index' AND entry.tbl_name LIKE 'oncekey\_%' ESCAPE '\'
ORDER BY entry.name;

-- name: diagnostic_file
SELECT sqlite_version() AS version, file AS path FROM pragma_database_list WHERE name = 'main';

-- name: diagnostic_journal
PRAGMA journal_mode;

