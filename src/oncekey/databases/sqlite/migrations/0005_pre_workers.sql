-- Which workers are alive: each writes its row again and again, and deletes it when it stops.
CREATE TABLE oncekey_worker (
    name        TEXT    NOT NULL PRIMARY KEY,  -- one process
    tasks       TEXT    NOT NULL,              -- what it runs, as a JSON array of names
    started_at  INTEGER  NOT NULL,
    seen_at     INTEGER  NOT NULL,              -- by the store's clock
    every       INTEGER  NOT NULL,              -- after how long it promises to be seen again
    calls       TEXT     NOT NULL               -- the calls of INLINE handlers, which announce none: {operation: [name]}
) STRICT, WITHOUT ROWID;
