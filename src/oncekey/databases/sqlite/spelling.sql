-- SQLite's syntax for the statements that it shares with MariaDB (oncekey.stores.onerow). `:now` is NULL outside of
-- tests: the machine's clock, in SQLite's own resolution of a millisecond. Within one statement SQLite's clock is
-- constant, so every `now` is the same instant.

-- part: now
COALESCE(:now, (SELECT now FROM oncekey_clock))

-- part: clock
(SELECT COALESCE(:now, now) AS now FROM oncekey_clock) AS clock

-- part: greatest
max

-- part: least
min

-- part: is
IS

-- part: json(text; name)
json_extract({text}, '$.{name}')

-- part: json_number(text; name)
json_extract({text}, '$.{name}')

-- part: unless_taken
ON CONFLICT DO NOTHING

-- part: giving
RETURNING {now} AS now, *

-- part: giving_new
RETURNING created_at AS now, *

-- part: giving_parcel
RETURNING {now} AS now, *

-- part: given(column)
RETURNING {now} AS now, {column}

-- part: written(column)
RETURNING {column}

-- part: written_evidence
RETURNING *

-- part: removed(condition)
DELETE FROM oncekey_record
WHERE {condition}
RETURNING {now} AS now, *

-- part: announced
-- A SQLite trigger records the calls.

-- part: materialized
MATERIALIZED

-- part: counted
SELECT entry.`key` FROM oncekey_record AS entry ORDER BY entry.scope, entry.`key` LIMIT 100000

-- part: locked
-- SQLite has one writer, so nothing needs a separate lock.
