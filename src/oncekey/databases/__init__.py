"""All I/O with databases: a folder for each database, and the code that their drivers share.

A driver imports `flow`, errors, values and SQL text from `core`, but no store and no engine.
"""
