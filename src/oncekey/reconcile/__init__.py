"""Compares the provider's books with the store: charges that one side lacks, and amounts that differ."""

from oncekey.reconcile.ledger import Difference, DifferenceKind, Expected, LedgerEntry, Report, compare

__all__ = ["Difference", "DifferenceKind", "Expected", "LedgerEntry", "Report", "compare"]
