"""Compares the provider's books with the store: charges that one side lacks, and amounts that differ."""

from oncekey.reconcile.ledger import Difference, Expected, Kind, LedgerEntry, Report, compare

__all__ = ["Difference", "Expected", "Kind", "LedgerEntry", "Report", "compare"]
