-- name: diagnostic_indexes
-- List oncekey's indexes, so that a missing or broken one is found.
SELECT entry.name AS name, entry.tbl_name AS on_table
FROM sqlite_master AS entry
WHERE entry.type = 'index' AND entry.tbl_name LIKE 'oncekey\_%' ESCAPE '\'
ORDER BY entry.name;

-- name: diagnostic_file
-- Read SQLite's version and the path of the file.
SELECT sqlite_version() AS version, file AS path FROM pragma_database_list WHERE name = 'main';

-- name: diagnostic_journal
-- Read the journal mode of the file.
PRAGMA journal_mode;

