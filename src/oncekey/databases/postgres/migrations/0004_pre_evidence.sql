-- What is needed to settle what nobody knows: where to look for it, which calls were announced, and what was heard of them.
CREATE INDEX record_unknown ON oncekey.record (reconcile_after, scope, key) WHERE state = 'unknown';

-- Every call that was announced, by the name that the provider knows it by. Written with the announcement; it outlives its
-- record, so that the provider's books can be compared with ours.
CREATE TABLE oncekey.call (
    incarnation    uuid    NOT NULL,  -- the life of the key that made it
    phase          text    NOT NULL,
    downstream_key text    NOT NULL,
    provider_id    text,              -- the provider's own name for it, once somebody told us
    scope          text    NOT NULL,
    key            text    NOT NULL,
    operation      text    NOT NULL,
    at             bigint  NOT NULL,
    PRIMARY KEY (incarnation, phase)
);
CREATE INDEX call_downstream_key ON oncekey.call (downstream_key);
CREATE INDEX call_provider_id ON oncekey.call (provider_id) WHERE provider_id IS NOT NULL;
CREATE INDEX call_at ON oncekey.call (at, incarnation, phase);

-- What was heard about calls, from whom and when: only added to, and needing no proof, because it moves nothing by itself.
-- The verdict is written once, when what became of the call is known.
CREATE TABLE oncekey.evidence (
    id             bigint  NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             bigint  NOT NULL,
    source         text    NOT NULL,
    event_id       text    NOT NULL,  -- by which a repetition is recognised
    downstream_key text,
    provider_id    text,
    said           text    NOT NULL,  -- JSON
    verdict        text,
    CONSTRAINT about_something CHECK (downstream_key IS NOT NULL OR provider_id IS NOT NULL),
    CONSTRAINT verdict_known CHECK (verdict IN ('settled', 'agrees', 'contradicts'))
);
CREATE UNIQUE INDEX evidence_event ON oncekey.evidence (source, event_id);
CREATE INDEX evidence_open_key ON oncekey.evidence (downstream_key, id) WHERE verdict IS NULL;
CREATE INDEX evidence_open_provider ON oncekey.evidence (provider_id, id) WHERE verdict IS NULL;
CREATE INDEX evidence_open ON oncekey.evidence (id) WHERE verdict IS NULL;
