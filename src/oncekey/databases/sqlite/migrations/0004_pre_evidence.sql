-- For unknown outcomes: the index that finds their records, the announced calls, and the evidence about calls.
CREATE INDEX oncekey_record_unknown ON oncekey_record (reconcile_after, scope, key) WHERE state = 'unknown';

-- All announced calls, each with the downstream key that the provider receives.
-- A row outlives its record, so that the provider's ledger can be compared with the calls.
CREATE TABLE oncekey_call (
    incarnation    TEXT     NOT NULL,  -- of the record that made the call
    phase          TEXT     NOT NULL,
    downstream_key TEXT     NOT NULL,
    provider_id    TEXT,               -- the provider's id of the call; NULL until it is reported
    scope          TEXT     NOT NULL,
    key            TEXT     NOT NULL,
    operation      TEXT     NOT NULL,
    at             INTEGER  NOT NULL,
    PRIMARY KEY (incarnation, phase)
) STRICT, WITHOUT ROWID;
CREATE INDEX oncekey_call_downstream_key ON oncekey_call (downstream_key);
CREATE INDEX oncekey_call_provider_id ON oncekey_call (provider_id) WHERE provider_id IS NOT NULL;
CREATE INDEX oncekey_call_at ON oncekey_call (at, incarnation, phase);

-- Inserts a call when it is announced, because one statement of SQLite cannot write to two tables.
CREATE TRIGGER oncekey_call_announced AFTER UPDATE OF intent ON oncekey_record
WHEN OLD.intent IS NULL AND NEW.intent IS NOT NULL
BEGIN
    INSERT INTO oncekey_call (incarnation, phase, downstream_key, scope, key, operation, at)
    VALUES (NEW.incarnation, json_extract(NEW.intent, '$.phase'), json_extract(NEW.intent, '$.downstream_key'),
            NEW.scope, NEW.key, NEW.operation, json_extract(NEW.intent, '$.first_sent_at'))
    ON CONFLICT DO NOTHING;
END;

-- Evidence: reports about calls, with their source and time. Rows are only added. Adding one requires no fence or version,
-- because it does not change a record. The verdict is written once, when the outcome of the call is determined.
CREATE TABLE oncekey_evidence (
    id             INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,
    at             INTEGER  NOT NULL,
    source         TEXT     NOT NULL,
    event_id       TEXT     NOT NULL,  -- identifies repeated reports of a source
    downstream_key TEXT,
    provider_id    TEXT,
    said           TEXT     NOT NULL,  -- JSON
    verdict        TEXT,
    CONSTRAINT about_something CHECK (downstream_key IS NOT NULL OR provider_id IS NOT NULL),
    CONSTRAINT verdict_known CHECK (verdict IN ('settled', 'agrees', 'contradicts'))
) STRICT;
CREATE UNIQUE INDEX oncekey_evidence_event ON oncekey_evidence (source, event_id);
CREATE INDEX oncekey_evidence_open_key ON oncekey_evidence (downstream_key, id) WHERE verdict IS NULL;
CREATE INDEX oncekey_evidence_open_provider ON oncekey_evidence (provider_id, id) WHERE verdict IS NULL;
CREATE INDEX oncekey_evidence_open ON oncekey_evidence (id) WHERE verdict IS NULL;
