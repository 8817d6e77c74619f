-- The live workers. Each updates its row with every heartbeat, and deletes it when it stops.
CREATE TABLE oncekey_worker (
    name        TEXT    NOT NULL PRIMARY KEY,   -- of one process
    tasks       TEXT    NOT NULL,               -- the tasks that it runs, as a JSON array of names
    started_at  INTEGER  NOT NULL,
    seen_at     INTEGER  NOT NULL,              -- the last heartbeat, by the store's clock
    every       INTEGER  NOT NULL,              -- the interval of its heartbeats
    calls       TEXT     NOT NULL               -- the unannounced calls of INLINE handlers: {operation: [name]}
) STRICT, WITHOUT ROWID;
