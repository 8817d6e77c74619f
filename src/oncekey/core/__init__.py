"""The decisions of oncekey as pure functions and tables: no clock, no I/O, no randomness; callers pass instants.

A code such as `P7` or `F16` in a comment refers to a rule or a finding in docs/explanation/protocol.md.
"""
