-- name: drop_deferred
-- Delete the parcel of a deferred record that was completed by hand.
DELETE FROM oncekey_outbox
WHERE incarnation = :seen_incarnation AND kind = 'defer';
SELECT ROW_COUNT() AS dropped FROM DUAL WHERE ROW_COUNT() > 0;
