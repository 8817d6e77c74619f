"""The table of all clauses, with references to their public texts: the draft, the RFCs, and vendors' documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from oncekey_check import failures, keys, leaks, mismatches, others, races, replays, servers
from oncekey_check.clauses import Clause, Need
from oncekey_check.errors import CheckError
from oncekey_check.target import Target


class NoSuchClauseError(CheckError):
    """A pattern for clauses matches none of them."""


CLAUSES: Final[tuple[Clause, ...]] = (
    *keys.CLAUSES,
    *replays.CLAUSES,
    *mismatches.CLAUSES,
    *races.CLAUSES,
    *leaks.TENANTS,
    *failures.CLAUSES,
    *leaks.CLAUSES,
    *others.CLAUSES,
    *servers.CLAUSES,
)
"""Every clause, in the order in which the run tries them."""

ABOUT_HEADERS: Final = frozenset(
    f"keys.{name}" for name in ("malformed", "doubled", "quoted", "bare", "two-spellings", "parameters", "field-name")
) | {"keys.echoed", "keys.status"}
"""Clauses that do not apply if the key is not in a header."""

NOT_IN_PATH: Final = frozenset({"keys.missing", "keys.explained", "keys.empty", "leaks.distinguished"}) | frozenset(
    f"others.{name}" for name in ("get", "get-current", "get-takes-no-key", "described")
)
"""Clauses that do not apply if the key is part of the path: without the key, the path names another resource."""

SIGHTING_REQUESTS: Final = 15
"""The approximate number of requests before the first clause."""


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Clause, ...]:
    """The clauses whose ids match a pattern of `only`, without those that match one of `skip`.

    A pattern is an id, an area's first word (`races`), or has wildcards (`*.one-effect`).

    Raises:
        NoSuchClauseError: A pattern matches nothing, so it must be a mistake.
    """
    for pattern in (*only, *skip):
        if not any(_matches(clause, pattern) for clause in CLAUSES):
            raise NoSuchClauseError(f"no clause matches {pattern!r}: --list shows all clauses")
    return tuple(
        clause
        for clause in CLAUSES
        if (not only or any(_matches(clause, pattern) for pattern in only))
        and not any(_matches(clause, pattern) for pattern in skip)
    )


def _matches(clause: Clause, pattern: str) -> bool:
    return fnmatchcase(clause.id, pattern) or clause.id.startswith(f"{pattern}.")


def planned(clauses: tuple[Clause, ...] = CLAUSES, target: Target | None = None) -> int:
    """The approximate number of requests of these clauses; with a target, only of those that can be tried on it.

    A plain request follows each area. For a JSON body, another body is derived from it.
    """

    def lacks(need: Need) -> bool:
        made = need is Need.OTHER_BODY and target is not None and target.is_json
        return target is not None and target.lacks(need) and not made

    tried = [clause for clause in clauses if not any(map(lacks, clause.needs))]
    return SIGHTING_REQUESTS + sum(clause.requests for clause in tried) + len({clause.area for clause in tried})


@dataclass(frozen=True, slots=True)
class Reference:
    """A public text."""

    name: str
    url: str
    short: str
    """The short name, for tables."""


def _draft(section: str, what: str) -> Reference:
    url = f"https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07#section-{section}"
    return Reference(f"Idempotency-Key draft 07, section {section} ({what})", url, f"draft {section}")


def _rfc(number: int, section: str, what: str) -> Reference:
    url = f"https://www.rfc-editor.org/rfc/rfc{number}.html#section-{section}"
    return Reference(f"RFC {number}, section {section} ({what})", url, f"RFC {number} {section}")


_SYNTAX: Final = _draft("2.1", "syntax")
_UNIQUE: Final = _draft("2.2", "uniqueness")
_EXPIRY: Final = _draft("2.3", "expiry")
_FINGERPRINT: Final = _draft("2.4", "fingerprint")
_ENFORCED: Final = _draft("2.6", "enforcement")
_ERRORS: Final = _draft("2.7", "errors")
_SECURITY: Final = _draft("5", "security")
_STRING: Final = _rfc(8941, "3.3.3", "strings")
_PARSING: Final = _rfc(9651, "4.2", "parsing")
_RETRIES: Final = _rfc(9110, "9.2.2", "idempotent methods")
_CONFLICT: Final = _rfc(9110, "15.5.10", "409")
_RETRY_AFTER: Final = _rfc(9110, "10.2.3", "Retry-After")
_PROBLEMS: Final = _rfc(9457, "3", "problem details")
_CANONICAL: Final = _rfc(8785, "3.2", "canonical JSON")
_CHUNKED: Final = _rfc(9112, "7.1", "chunked bodies")
_UNAVAILABLE: Final = _rfc(9110, "15.6.4", "503")
_STRIPE: Final = Reference("Stripe, Idempotent requests", "https://docs.stripe.com/api/idempotent_requests", "Stripe")
_PHASES: Final = Reference("Implementing Stripe-like idempotency keys", "https://brandur.org/idempotency-keys", "Leach")
_AWS: Final = Reference(
    "AWS, Making retries safe with idempotent APIs",
    "https://aws.amazon.com/builders-library/making-retries-safe-with-idempotent-APIs/",
    "AWS",
)
_OPENAPI: Final = Reference(
    "OpenAPI 3.1, Parameter Object", "https://spec.openapis.org/oas/v3.1.0#parameter-object", "OpenAPI"
)
_SCRIPTS: Final = Reference("CWE-79, cross-site scripting", "https://cwe.mitre.org/data/definitions/79.html", "CWE-79")
_EXPOSED: Final = Reference(
    "CWE-209, error messages with sensitive information", "https://cwe.mitre.org/data/definitions/209.html", "CWE-209"
)

REFERENCES: Final[Mapping[str, tuple[Reference, ...]]] = {
    "keys.missing": (_ERRORS,),
    "keys.explained": (_ERRORS, _PROBLEMS),
    "keys.empty": (_SYNTAX, _SECURITY),
    "keys.malformed": (_SYNTAX, _PARSING),
    "keys.doubled": (_SYNTAX, _PARSING),
    "keys.too-long": (_SECURITY, _STRIPE),
    "keys.too-short": (_UNIQUE, _SECURITY),
    "keys.status": (_ERRORS, _SYNTAX),
    "keys.whole": (_UNIQUE,),
    "keys.tricky": (_SECURITY,),
    "keys.longest": (_STRIPE,),
    "keys.quoted": (_SYNTAX, _STRING),
    "keys.bare": (_STRIPE,),
    "keys.two-spellings": (_SYNTAX, _UNIQUE),
    "keys.parameters": (_SYNTAX, _rfc(9651, "3.1.2", "parameters")),
    "keys.case": (_UNIQUE, _STRING),
    "keys.not-deduplication": (_UNIQUE,),
    "keys.field-name": (_rfc(9110, "5.1", "field names"),),
    "keys.echoed": (_rfc(9110, "5.5", "field values"),),
    "replays.status": (_ENFORCED, _STRIPE),
    "replays.bytes": (_ENFORCED, _STRIPE),
    "replays.headers": (_ENFORCED, _rfc(9110, "10.2.2", "Location")),
    "replays.many": (_ENFORCED,),
    "replays.one-effect": (_ENFORCED, _RETRIES),
    "replays.marked": (_STRIPE,),
    "replays.expiry": (_EXPIRY,),
    "replays.white-space": (_FINGERPRINT, _CANONICAL),
    "replays.escapes": (_FINGERPRINT, _CANONICAL),
    "replays.encoding": (_ENFORCED, _rfc(9110, "12.5.3", "Accept-Encoding")),
    "replays.chunked": (_ENFORCED, _CHUNKED),
    "replays.chunked-other": (_ERRORS, _CHUNKED),
    "mismatches.status": (_ERRORS, _rfc(9110, "15.5.21", "422"), _STRIPE),
    "mismatches.nothing-happens": (_UNIQUE, _ERRORS),
    "mismatches.first-stays": (_ENFORCED,),
    "mismatches.while-running": (_ERRORS, _CONFLICT),
    "mismatches.running-status": (_ERRORS, _CONFLICT),
    "mismatches.every-member": (_FINGERPRINT,),
    "mismatches.large-integers": (_FINGERPRINT, _rfc(7493, "2.2", "numbers in I-JSON")),
    "mismatches.types": (_FINGERPRINT, _CANONICAL),
    "mismatches.array-order": (_FINGERPRINT, _CANONICAL),
    "mismatches.duplicate-names": (_FINGERPRINT, _rfc(7493, "2.3", "duplicate names in I-JSON")),
    "mismatches.surrogates": (_FINGERPRINT, _rfc(7493, "2.1", "characters in I-JSON")),
    "mismatches.depth": (_FINGERPRINT, _rfc(8259, "9", "limits of JSON parsers")),
    "mismatches.query": (_FINGERPRINT, _rfc(9110, "7.1", "target of a request")),
    "mismatches.endpoint": (_FINGERPRINT, _STRIPE),
    "mismatches.method": (_FINGERPRINT, _rfc(9110, "9.1", "methods")),
    "races.2": (_ENFORCED, _CONFLICT),
    "races.10": (_ENFORCED, _CONFLICT),
    "races.50": (_ENFORCED, _CONFLICT),
    "races.losers": (_ENFORCED, _CONFLICT),
    "races.while-running": (_ENFORCED, _ERRORS, _CONFLICT),
    "races.retry-after": (_RETRY_AFTER,),
    "races.answered": (_ENFORCED,),
    "races.pipelined": (_ENFORCED, _rfc(9112, "9.3.2", "pipelining")),
    "tenants.independent": (_SECURITY,),
    "tenants.unseen": (_SECURITY,),
    "tenants.same-caller": (_UNIQUE, _RETRIES),
    "tenants.no-pass": (_SECURITY, _rfc(9110, "15.5.2", "401")),
    "tenants.not-spoilt": (_ENFORCED, _rfc(9110, "15.5.2", "401")),
    "failures.5xx-forgotten": (_ERRORS, _PHASES),
    "failures.no-wedge": (_ENFORCED, _PHASES),
    "failures.one-effect": (_RETRIES, _PHASES),
    "failures.corrected": (_ERRORS, _STRIPE),
    "hang-ups.head": (_ENFORCED, _rfc(9112, "8", "incomplete messages")),
    "hang-ups.body": (_ENFORCED, _rfc(9112, "8", "incomplete messages")),
    "hang-ups.last-byte": (_ENFORCED, _rfc(9112, "8", "incomplete messages")),
    "hang-ups.sent": (_ENFORCED, _RETRIES),
    "hang-ups.answered": (_ENFORCED, _RETRIES),
    "hang-ups.retried": (_ENFORCED, _RETRIES),
    "hang-ups.slowly": (_FINGERPRINT, _rfc(9112, "6.3", "length of a body")),
    "leaks.mismatch": (_SECURITY, _EXPOSED),
    "leaks.first-body": (_SECURITY, _EXPOSED),
    "leaks.fingerprint": (_SECURITY, _EXPOSED),
    "leaks.cookie": (_SECURITY, _rfc(6265, "8.4", "session identifiers")),
    "leaks.reflection": (_SECURITY, _SCRIPTS),
    "leaks.distinguished": (_PROBLEMS,),
    "others.get": (_rfc(9110, "9.2.1", "safe methods"),),
    "others.get-current": (_rfc(9110, "9.2.1", "safe methods"),),
    "others.get-takes-no-key": (_rfc(9110, "9.2.1", "safe methods"), _UNIQUE),
    "others.put-delete": (_RETRIES,),
    "others.described": (_draft("2.5.2", "responsibilities of the resource"), _OPENAPI),
    "finals.declined": (_ENFORCED, _STRIPE),
    "finals.large": (_ENFORCED, _AWS),
    "instances.replayed": (_ENFORCED, _AWS),
    "instances.race": (_ENFORCED, _AWS),
    "leases.one-effect": (_ENFORCED, _PHASES),
    "crashes.remembered": (_ENFORCED, _PHASES),
    "crashes.one-effect": (_RETRIES, _PHASES),
    "crashes.answered": (_ENFORCED, _PHASES),
    "outages.closed": (_UNAVAILABLE, _PHASES),
    "outages.reported": (_UNAVAILABLE, _RETRY_AFTER),
    "outages.recovered": (_ENFORCED, _RETRY_AFTER),
    "outages.remembered": (_ENFORCED, _PHASES),
}
"""The public texts, by the clause's id."""


def references(clause_id: str) -> tuple[Reference, ...]:
    """The public texts of a clause."""
    return REFERENCES.get(clause_id, ())
