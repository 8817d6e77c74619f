-- The index that operators use to find unfinished keys by prefix, and the table of workers. Collation "C" orders by
-- bytes, so that keys with the same prefix are adjacent, whatever the collation of the database is. Finished records
-- are not indexed, because that would slow down every request.
CREATE INDEX record_key ON oncekey.record (key COLLATE "C", scope)
    WHERE state IN ('pending', 'in_progress', 'failed_retryable', 'unknown');

-- The live workers. Each updates its row with every heartbeat, and deletes it when it stops.
CREATE TABLE oncekey.worker (
    name        text    NOT NULL PRIMARY KEY,  -- of one process
    tasks       text    NOT NULL,              -- the tasks that it runs, as a JSON array of names
    started_at  bigint  NOT NULL,
    seen_at     bigint  NOT NULL,              -- the last heartbeat, by the store's clock
    every       bigint  NOT NULL,              -- the interval of its heartbeats
    calls       text    NOT NULL               -- the unannounced calls of INLINE handlers: {operation: [name]}
);
