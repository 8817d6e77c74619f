-- What is needed to settle what nobody knows: where to look for it, which calls were announced, and what was heard of them.
CREATE INDEX oncekey_record_unknown ON oncekey_record (reconcile_after, scope, key) WHERE state = 'unknown';

-- Every call that was announced, by the name that the provider knows it by. It outlives its record, so that the
-- provider's books can be compared with ours.
CREATE TABLE oncekey_call (
    incarnation    TEXT     NOT NULL,  -- the life of the key that made it
    phase          TEXT     NOT NULL,
    downstream_key TEXT     NOT NULL,
    provider_id    TEXT,               -- the provider's own name for it, once somebody told us
    scope          TEXT     NOT NULL,
    key            TEXT     NOT NULL,
    operation      TEXT     NOT NULL,
    at             INTEGER  NOT NULL,
    PRIMARY KEY (incarnation, phase)
) STRICT, WITHOUT ROWID;
CREATE INDEX oncekey_call_downstream_key ON oncekey_call (downstream_key);
CREATE INDEX oncekey_call_provider_id ON oncekey_call (provider_id) WHERE provider_id IS NOT NULL;
CREATE INDEX oncekey_call_at ON oncekey_call (at, incarnation, phase);

-- Written with the announcement itself: SQLite has no statement that writes to two tables.
CREATE TRIGGER oncekey_call_announced AFTER UPDATE OF intent ON oncekey_record
WHEN OLD.intent IS NULL AND NEW.intent IS NOT NULL
BEGIN
    INSERT INTO oncekey_call (incarnation, phase, downstream_key, scope, key, operation, at)
    VALUES (NEW.incarnation, json_extract(NEW.intent, '$.phase'), json_extract(NEW.intent, '$.downstream_key'),
            NEW.scope, NEW.key, NEW.operation, json_extract(NEW.intent, '$.first_sent_at'))
    ON CONFLICT DO NOTHING;
END;

-- What was heard about calls, from whom and when: only added to, and needing no proof, because it moves nothing by itself.
-- The verdict is written once, when what became of the call is known.
CREATE TABLE oncekey_evidence (
    id             INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,
    at             INTEGER  NOT NULL,
    source         TEXT     NOT NULL,
    event_id       TEXT     NOT NULL,  -- by which a repetition is recognised
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
