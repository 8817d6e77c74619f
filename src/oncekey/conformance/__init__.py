"""A black-box tester for idempotency keys: it sends requests to any API and reports the promises that the API breaks.

`check(Target(...))` runs it; `oncekey check URL` does the same from a shell. It needs the standard library only.
"""

from oncekey.conformance.catalogue import CLAUSES, chosen, planned
from oncekey.conformance.clauses import Area, Clause, Failed, Need, Passed, Profile, Severity, Skipped, Undecided
from oncekey.conformance.probe import CannotCheckError
from oncekey.conformance.raw_http import Address
from oncekey.conformance.running import Finding, Report, check
from oncekey.conformance.target import Target

__all__ = [
    "CLAUSES",
    "Address",
    "Area",
    "CannotCheckError",
    "Clause",
    "Failed",
    "Finding",
    "Need",
    "Passed",
    "Profile",
    "Report",
    "Severity",
    "Skipped",
    "Target",
    "Undecided",
    "check",
    "chosen",
    "planned",
]
