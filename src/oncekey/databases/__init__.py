"""All I/O with databases: a folder for each, and what their drivers share.

A driver imports `flow`, errors, values and SQL text from `core`; no store and no engine.
"""
