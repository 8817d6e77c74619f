-- LOCAL in one commit: whoever writes is alone in the file, and looks at the record. The transaction itself is the lock, so
-- `lock_file` has nothing to try; which key it is for is the process's to know.

-- name: lock_file
SELECT COALESCE(:now, clock.now) AS now, record.*
FROM oncekey_clock AS clock LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.key = :key;

