-- name: forget_calls
-- Delete a batch of old calls whose record is gone.
DELETE FROM oncekey_call
WHERE (incarnation, phase) IN (
    SELECT old.incarnation, old.phase FROM oncekey_call AS old
    WHERE old.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age
      AND NOT EXISTS (
          SELECT 1 FROM oncekey_record AS record
          WHERE record.scope = old.scope AND record.key = old.key AND record.incarnation = old.incarnation)
    ORDER BY old.at
    LIMIT :limit)
RETURNING phase;

-- name: forget_evidence
-- Delete a batch of old evidence.
DELETE FROM oncekey_evidence
WHERE id IN (
    SELECT old.id FROM (SELECT id, at FROM oncekey_evidence ORDER BY id LIMIT :limit) AS old
    WHERE old.at <= COALESCE(:now, (SELECT now FROM oncekey_clock)) - :age)
RETURNING id;
