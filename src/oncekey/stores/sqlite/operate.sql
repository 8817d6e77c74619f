-- name: drop_deferred
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer'
RETURNING id;

