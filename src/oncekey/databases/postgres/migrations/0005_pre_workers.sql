-- Who works here, and where an operator finds an unfinished key of which only its beginning is known: "C" orders by bytes,
-- so that keys with one beginning lie side by side whatever the database's own order is. Finished ones are not in it,
-- because every request would pay for that.
CREATE INDEX record_key ON oncekey.record (key COLLATE "C", scope)
    WHERE state IN ('pending', 'in_progress', 'failed_retryable', 'unknown');

-- Which workers are alive: each writes its row again and again, and deletes it when it stops.
CREATE TABLE oncekey.worker (
    name        text    NOT NULL PRIMARY KEY,  -- one process
    tasks       text    NOT NULL,              -- what it runs, as a JSON array of names
    started_at  bigint  NOT NULL,
    seen_at     bigint  NOT NULL,              -- by the store's clock
    every       bigint  NOT NULL,              -- after how long it promises to be seen again
    calls       text    NOT NULL               -- the calls of INLINE handlers, which announce none: {operation: [name]}
);
