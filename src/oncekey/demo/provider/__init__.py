"""A payment provider to try things on: its own process, its own ledger, and faults that can be asked for by name."""
