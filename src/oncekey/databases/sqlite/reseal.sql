-- How SQLite pages over records, and reads the name of a key (oncekey.stores.onerow has the statements).

-- part: behind_record
(record.scope, record.`key`) > (:after_scope, :after_key)

-- part: first_header(text)
json_extract({text}, '$[0][1]')

-- part: mark(text)
CASE WHEN {text} LIKE 'oncekey-sealed:%' THEN substr({text}, 16, instr(substr({text}, 16), ':') - 1) END

-- part: mark_of_bytes(bytes)
CASE WHEN substr({bytes}, 1, 15) = CAST('oncekey-sealed:' AS BLOB)
     THEN CAST(substr({bytes}, 16, instr(substr({bytes}, 16), CAST(':' AS BLOB)) - 1) AS TEXT) END

-- part: steps
(SELECT json_extract(entry.value, '$[2]') AS result
 FROM oncekey_record AS record, json_each(record.memo) AS entry WHERE record.memo IS NOT NULL) AS step
