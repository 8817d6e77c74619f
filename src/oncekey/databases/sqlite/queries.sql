-- name: recall_all
-- Read the stored responses of several completed keys at once.
-- CROSS keeps the order: each key is looked up by itself.
SELECT COALESCE(:now, clock.now) AS now, {answer}
FROM json_each(:asked) AS asked CROSS JOIN oncekey_record AS record CROSS JOIN oncekey_clock AS clock
WHERE record.scope = json_extract(asked.value, '$.scope') AND record.key = json_extract(asked.value, '$.key')
  AND record.state = 'completed';

