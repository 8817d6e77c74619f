-- How MariaDB and MySQL page over records, and read the name of a key (oncekey.stores.onerow has the statements).

-- part: behind_record
-- Neither server uses an index for a comparison of rows; this is equivalent.
(record.scope > :after_scope OR (record.scope = :after_scope AND record.`key` > :after_key))

-- part: first_header(text)
JSON_UNQUOTE(JSON_EXTRACT({text}, '$[0][1]')) COLLATE utf8mb4_bin

-- part: mark(text)
CASE WHEN {text} LIKE 'oncekey-sealed:%' THEN SUBSTRING_INDEX(SUBSTRING({text}, 16, 33), ':', 1) END COLLATE utf8mb4_bin

-- part: mark_of_bytes(bytes)
CASE WHEN LEFT({bytes}, 15) = 'oncekey-sealed:'
     THEN CONVERT(SUBSTRING_INDEX(SUBSTRING({bytes}, 16, 33), ':', 1) USING utf8mb4) END COLLATE utf8mb4_bin

-- part: steps
oncekey_record AS record
JOIN JSON_TABLE(record.memo, '$[*]' COLUMNS (result LONGTEXT CHARACTER SET utf8mb4 PATH '$[2]')) AS step ON true
