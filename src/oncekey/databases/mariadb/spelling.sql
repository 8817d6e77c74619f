-- MariaDB's and MySQL's syntax for the statements that they share with SQLite (oncekey.stores.onerow). MySQL has no
-- RETURNING, and MariaDB none for UPDATE. So the written row is read by a second SQL statement of the same block, which
-- the driver sends in the same message and transaction; ROW_COUNT() is how many rows the one before it found. A
-- block with `unless taken` returns no rows if the row already exists (1062); so does one without waiting if another
-- transaction has the lock (1205, 3572). `:now` is NULL outside of tests: the server's clock, in UTC. It is constant
-- within a statement, and one that had to wait for a lock continues with the time at which it began. So leases and send
-- windows end earlier by that wait, never later.

-- part: now
COALESCE(:now, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))

-- part: clock
(SELECT {now} AS now) AS clock

-- part: greatest
GREATEST

-- part: least
LEAST

-- part: is
<=>

-- part: json(text; name)
JSON_UNQUOTE(JSON_EXTRACT({text}, '$.{name}'))

-- part: json_number(text; name)
CAST(NULLIF(JSON_UNQUOTE(JSON_EXTRACT({text}, '$.{name}')), 'null') AS SIGNED)

-- part: unless_taken
/* unless taken */

-- part: giving
;
SELECT {now} AS now, record.* FROM oncekey_record AS record
WHERE record.scope = :scope AND record.`key` = :key AND ROW_COUNT() > 0

-- part: giving_new
;
SELECT record.created_at AS now, record.* FROM oncekey_record AS record
WHERE record.scope = :scope AND record.`key` = :key AND ROW_COUNT() > 0

-- part: giving_parcel
;
SELECT {now} AS now, parcel.* FROM oncekey_outbox AS parcel WHERE parcel.id = :id AND ROW_COUNT() > 0

-- part: given(column)
;
SELECT {now} AS now, record.{column} FROM oncekey_record AS record
WHERE record.scope = :scope AND record.`key` = :key AND ROW_COUNT() > 0

-- part: written(column)
;
SELECT :{column} AS {column} FROM DUAL WHERE ROW_COUNT() > 0

-- part: written_evidence
;
SELECT evidence.* FROM oncekey_evidence AS evidence
WHERE evidence.source = :source AND evidence.event_id = :event_id AND ROW_COUNT() > 0

-- part: removed(condition)
SELECT {now} AS now, record.* FROM oncekey_record AS record
WHERE {condition}
FOR UPDATE;
DELETE FROM oncekey_record
WHERE {condition}

-- part: announced
;
INSERT INTO oncekey_call (incarnation, phase, downstream_key, scope, `key`, operation, at)
SELECT record.incarnation, :phase, :downstream_key, record.scope, record.`key`, record.operation,
       {json_number(record.intent; first_sent_at)}
FROM oncekey_record AS record
LEFT JOIN oncekey_call AS made ON made.incarnation = record.incarnation AND made.phase = :phase
WHERE record.scope = :scope AND record.`key` = :key AND made.phase IS NULL
  AND {json(record.intent; phase)} = :phase AND {json(record.intent; downstream_key)} = :downstream_key

-- part: materialized

-- part: counted
SELECT entry.expires_at FROM oncekey_record AS entry ORDER BY entry.expires_at LIMIT 100000

-- part: locked
FOR UPDATE
