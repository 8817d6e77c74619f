"""The reference service that `oncekey-demo` runs: a small shop whose requests are safe to retry.

`oncekey_demo.torture` puts servers and workers under faults; `oncekey_demo.checker` judges the history of such a run.
"""
