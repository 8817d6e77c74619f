"""A black-box tester for idempotency keys: it sends requests to any API and reports the promises that the API breaks.

`check(Target(...))` runs it; `oncekey-check URL` does the same from a shell. It imports nothing of the library, and the
standard library is enough for everything but the command.
"""

from oncekey_check.catalogue import CLAUSES, chosen, planned
from oncekey_check.clauses import Area, Clause, Failed, Need, Passed, Profile, Severity, Skipped, Undecided
from oncekey_check.errors import CheckError
from oncekey_check.probe import CannotCheckError
from oncekey_check.raw_http import Address
from oncekey_check.running import Finding, Report, check
from oncekey_check.target import Target

__all__ = [
    "CLAUSES",
    "Address",
    "Area",
    "CannotCheckError",
    "CheckError",
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
