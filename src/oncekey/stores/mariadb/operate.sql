-- name: drop_deferred
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer';
SELECT ROW_COUNT() AS dropped FROM DUAL WHERE ROW_COUNT() > 0;
