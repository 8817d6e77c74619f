-- part: bygone
WHERE at <= {now} - :age
  AND NOT EXISTS (
      SELECT 1 FROM oncekey_record AS record
      WHERE record.scope = oncekey_call.scope AND record.`key` = oncekey_call.`key`
        AND record.incarnation = oncekey_call.incarnation)
ORDER BY at LIMIT :limit

-- name: forget_calls
-- Delete a batch of old calls whose record is gone.
SELECT phase FROM oncekey_call
{bygone} FOR UPDATE;
DELETE FROM oncekey_call
{bygone};

-- name: forget_evidence
-- Delete a batch of old evidence.
SELECT id FROM oncekey_evidence WHERE at <= {now} - :age ORDER BY id LIMIT :limit FOR UPDATE;
DELETE FROM oncekey_evidence WHERE at <= {now} - :age ORDER BY id LIMIT :limit;
