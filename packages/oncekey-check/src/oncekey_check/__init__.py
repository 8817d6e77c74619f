"""A black-box tester for idempotency keys: it sends requests to any API and reports the guarantees that the API breaks.

`check(Target(...))` runs it; `oncekey-check URL` does the same from a shell. It does not import oncekey, and only the
command needs more than the standard library.
"""

from oncekey_check.catalogue import CLAUSES, chosen, planned
from oncekey_check.clauses import Area, CheckProfile, Clause, Failed, Inconclusive, Need, Passed, Severity, Skipped
from oncekey_check.errors import CheckError
from oncekey_check.probe import CannotCheckError
from oncekey_check.raw_http import Address
from oncekey_check.running import CheckReport, Finding, check
from oncekey_check.target import Target

__all__ = [
    "CLAUSES",
    "Address",
    "Area",
    "CannotCheckError",
    "CheckError",
    "CheckProfile",
    "CheckReport",
    "Clause",
    "Failed",
    "Finding",
    "Inconclusive",
    "Need",
    "Passed",
    "Severity",
    "Skipped",
    "Target",
    "check",
    "chosen",
    "planned",
]
