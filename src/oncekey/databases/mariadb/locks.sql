-- LOCAL in one commit: the transaction inserts the row of its key's lock first, without waiting, and writes the finished
-- record last. Only the request that inserts that row executes. InnoDB releases it with the transaction, even if the process dies.

-- name: lock
-- Lock a key for a LOCAL request without waiting, and read its record.
-- The timeout is MariaDB syntax, so it refuses at once. MySQL reads it as a comment, and checks before it inserts: if
-- two requests arrive at the same moment, both find no row, and the second one waits for the first.
SELECT held.number FROM oncekey_lock AS held WHERE held.number = :lock FOR UPDATE NOWAIT;
/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ INSERT INTO oncekey_lock (number, mark) VALUES (:lock, :mark)
ON DUPLICATE KEY UPDATE mark = :mark;
SELECT clock.now, record.* FROM {clock} LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.`key` = :key;

-- name: refused
-- Read which request holds the lock, and the record, after `lock` was refused.
-- The uncommitted row of the lock's holder is read first, then the committed record. The second
-- ROLLBACK ends the isolation level of the first read: on MySQL it would last through START TRANSACTION.
ROLLBACK;
SET @oncekey_mark = NULL;
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT held.mark INTO @oncekey_mark FROM oncekey_lock AS held WHERE held.number = :lock;
ROLLBACK;
START TRANSACTION;
SELECT clock.now, @oncekey_mark AS mark, record.*
FROM {clock} LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.`key` = :key;

-- name: unlock
-- Delete the row of a lock before the transaction that holds it commits.
DELETE FROM oncekey_lock WHERE number = :lock;

-- name: holder
-- Read which request holds the lock of a key, without taking it.
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT held.mark FROM oncekey_lock AS held WHERE held.number = :lock;

-- name: left_over
-- Check whether the row of a lock has lost its transaction.
-- A row that can be locked has no holder.
SELECT held.number FROM oncekey_lock AS held WHERE held.number = :lock FOR UPDATE SKIP LOCKED;
