"""All I/O with stores. A driver imports `flow`, errors, values and SQL text from `core`; no store and no engine."""
