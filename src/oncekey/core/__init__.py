"""The decisions of oncekey as pure functions and tables: no clock, no I/O, no randomness; callers pass instants."""
