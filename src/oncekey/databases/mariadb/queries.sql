-- name: recall_all
-- Read the stored responses of several completed keys at once.
-- The list comes first, so that each key is looked up by itself.
SELECT {now} AS now, {answer}
FROM JSON_TABLE(:asked, '$[*]' COLUMNS (
    scope VARCHAR(2000) CHARACTER SET utf8mb4 PATH '$.scope', name VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$.key')) AS asked
STRAIGHT_JOIN oncekey_record AS record ON record.scope = CAST(asked.scope AS BINARY) AND record.`key` = CAST(asked.name AS BINARY)
WHERE record.state = 'completed';
