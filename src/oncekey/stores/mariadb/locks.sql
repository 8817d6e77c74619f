-- LOCAL in one commit: the transaction inserts the row of its key's lock first, without waiting for anybody, and writes the
-- finished record last. Only who gets that row executes. It ends with its transaction, whatever becomes of the process.

-- name: lock
-- The time-out is MariaDB's: without one, it refuses at once. MySQL reads that as a comment, and looks before it inserts: two that
-- come at the very same moment both look at nothing, and the second one waits for the first.
SAVEPOINT oncekey;
SELECT held.number FROM oncekey_lock AS held WHERE held.number = :lock FOR UPDATE NOWAIT;
/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ INSERT INTO oncekey_lock (number, mark) VALUES (:lock, :mark)
ON DUPLICATE KEY UPDATE mark = :mark;
SELECT clock.now, record.* FROM {clock} LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.`key` = :key;

-- name: refused
-- Who holds the lock is read as it is written, before it is committed. The record is not: it is read afterwards, as it stands.
ROLLBACK;
SET @oncekey_mark = NULL;
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT held.mark INTO @oncekey_mark FROM oncekey_lock AS held WHERE held.number = :lock;
START TRANSACTION;
SELECT clock.now, @oncekey_mark AS mark, record.*
FROM {clock} LEFT JOIN oncekey_record AS record ON record.scope = :scope AND record.`key` = :key;

-- name: unlock
-- Who committed before is told so: its savepoint is gone (1305).
RELEASE SAVEPOINT oncekey;
DELETE FROM oncekey_lock WHERE number = :lock;

-- name: holder
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT held.mark FROM oncekey_lock AS held WHERE held.number = :lock;

-- name: left_over
-- A row that can be locked is nobody's.
SELECT held.number FROM oncekey_lock AS held WHERE held.number = :lock FOR UPDATE SKIP LOCKED;
