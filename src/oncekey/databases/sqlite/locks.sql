-- LOCAL in one commit: the writing transaction is alone in the file, and reads the record. The transaction itself is the
-- lock, so `lock_file` takes none; the process records whose key it is.

-- name: lock_file
-- Read the record of a key in a transaction that has locked the whole file.
SELECT COALESCE(:now, clock.now) AS now, record.*
FROM oncekey_clock AS clock LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.key = :key;

