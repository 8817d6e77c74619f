"""The headline of a finding: one sentence with what happened and how bad it is; and the cause of a finding.

A report has one entry per cause, so findings that follow from another one are grouped under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from oncekey_check.clauses import Clause, Failed, Harm, Severity

if TYPE_CHECKING:
    from oncekey_check.running import Finding


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a clause: how many effects were counted, and how many successes differ."""

    effects: int | None = None
    successes: int = 0
    differ_in_replays: bool = False
    """Plain retries receive different successes, too, so these are not proof of several executions."""

    @property
    def number(self) -> int:
        """How often it happened: by the count if there is one, otherwise by the responses."""
        if self.effects is not None:
            return self.effects
        return min(self.successes, 1) if self.differ_in_replays else self.successes


@dataclass(frozen=True, slots=True)
class Headline:
    """A harm and its sentence; `more` replaces them when more happened than `allowed`."""

    harm: Harm
    sentence: str
    more: str = ""
    more_harm: Harm = Harm.TWICE
    allowed: int = 1

    def chosen(self, evidence: Evidence) -> tuple[Harm, str]:
        """The harm and the sentence that match the evidence."""
        if self.more and evidence.number > self.allowed:
            return self.more_harm, self.more
        return self.harm, self.sentence


def _refusal(what: str) -> Headline:
    more = f"{what} was executed, and nothing protects its retries"
    return Headline(Harm.WRONG, f"{what} was not refused with 400", more, Harm.UNPROTECTED, allowed=0)


def _spelling(name: str) -> Headline:
    return Headline(
        Harm.WRONG,
        f"{name} received a different response when it was sent again",
        f"{name} was not recognised in the retry: " + "{number} {nouns} from one key",
    )


def _race(many: int) -> Headline:
    return Headline(
        Harm.WRONG,
        f"{many} identical requests at once: some received neither the success nor 'wait'",
        "{number} {nouns} from one key: " + f"{many} identical requests arrived at the same moment",
    )


def _abandoned(where: str) -> Headline:
    return Headline(
        Harm.LOST,
        f"A client that disconnected {where} cannot use its key any more",
        "{number} {nouns} from one key: " + f"the client disconnected {where} and retried",
    )


def _unseen(what: str) -> Headline:
    return Headline(
        Harm.LOST,
        f"{what} under a used key received the first response: " + "the second {noun} never happened",
        f"{what} under a used key was executed: " + "{number} {nouns} from one key",
    )


_NEVER_AGAIN: Final = "{number} {nouns} from one key: "

HEADLINES: Final[Mapping[str, Headline]] = {
    "keys.missing": _refusal("A request without a key"),
    "keys.explained": Headline(Harm.UNTOLD, "The refusal of a missing key does not link to documentation"),
    "keys.empty": _refusal("A request with an empty key"),
    "keys.malformed": _refusal("A request with a key that cannot be parsed"),
    "keys.doubled": _refusal("A request with two keys"),
    "keys.too-long": _refusal("A request with a key of 256 characters"),
    "keys.too-short": _refusal("A request with a key of 4 characters"),
    "keys.status": Headline(Harm.WRONG, "An unusable key was refused with a status other than 400"),
    "keys.whole": Headline(
        Harm.LOST, "Long keys that differ in one character were treated as one: the second {noun} never happened"
    ),
    "keys.tricky": Headline(Harm.WRONG, "A key with unusual characters broke the server"),
    "keys.longest": _spelling("A key of 255 characters"),
    "keys.quoted": _spelling("A quoted key, as the draft writes it,"),
    "keys.bare": _spelling("A bare key, as most clients send it,"),
    "keys.two-spellings": Headline(
        Harm.WRONG,
        "A key received a different response without its quotes",
        _NEVER_AGAIN + "it was sent once with quotes and once without",
    ),
    "keys.parameters": Headline(
        Harm.WRONG,
        "A key received a different response with a parameter after it",
        _NEVER_AGAIN + "it was sent once with a parameter and once without",
    ),
    "keys.case": Headline(Harm.LOST, "Keys that differ in case were treated as one: the second {noun} never happened"),
    "keys.not-deduplication": Headline(
        Harm.LOST, "Two keys with equal bodies were treated as one: the second {noun} never happened"
    ),
    "keys.field-name": Headline(
        Harm.WRONG,
        "The key's header was ignored when its name was in capitals",
        _NEVER_AGAIN + "the header's name was in capitals the second time",
    ),
    "keys.echoed": Headline(Harm.UNTOLD, "Responses do not repeat the key"),
    "replays.status": Headline(Harm.WRONG, "A retry received a different status than the first request"),
    "replays.bytes": Headline(Harm.WRONG, "A retry received a different body than the first request"),
    "replays.headers": Headline(Harm.WRONG, "A retry did not receive the headers of the first response"),
    "replays.many": Headline(
        Harm.WRONG,
        "Not every retry received the first response",
        _NEVER_AGAIN + "the request was sent eleven times",
    ),
    "replays.one-effect": Headline(
        Harm.LOST, "Three requests with one key had no effect", _NEVER_AGAIN + "the request was sent three times"
    ),
    "replays.marked": Headline(Harm.UNTOLD, "A client cannot tell a replay from a first response"),
    "replays.expiry": Headline(Harm.UNTOLD, "Responses do not state how long a key is valid"),
    "replays.white-space": Headline(
        Harm.WRONG, "A retry with other white space was refused", _NEVER_AGAIN + "the retry had other white space"
    ),
    "replays.escapes": Headline(
        Harm.WRONG, "A retry with escaped characters was refused", _NEVER_AGAIN + "the retry had escaped characters"
    ),
    "replays.encoding": Headline(
        Harm.WRONG,
        "A retry that accepts no encoding received the compressed body of the first response",
        _NEVER_AGAIN + "the retry did not accept gzip",
    ),
    "replays.chunked": Headline(
        Harm.WRONG,
        "A retry with a chunked body did not receive the first response",
        _NEVER_AGAIN + "the retry was chunked",
    ),
    "replays.chunked-other": Headline(
        Harm.LOST,
        "Another body, sent in chunks, received the first response: the second {noun} never happened",
        "Another body under a used key was executed when it was chunked",
    ),
    "mismatches.status": Headline(Harm.WRONG, "Another body under a used key received the wrong status"),
    "mismatches.nothing-happens": Headline(
        Harm.LOST,
        "Another body under a used key received the first response: the second {noun} never happened",
        "Another body under a used key was executed as well: {number} {nouns} from one key",
    ),
    "mismatches.first-stays": Headline(Harm.LOST, "A refused request with another body destroyed the first response"),
    "mismatches.while-running": Headline(
        Harm.WRONG,
        "Another body received the wrong status while the first request was running",
        "Another body was executed while the first request was running: {number} {nouns} from one key",
    ),
    "mismatches.running-status": Headline(
        Harm.WRONG, ("Another body received the wrong status while the first request was running")
    ),
    "mismatches.every-member": _unseen("Another value of a member"),
    "mismatches.large-integers": _unseen("Another large integer"),
    "mismatches.types": _unseen("A value of another type"),
    "mismatches.array-order": _unseen("An array in another order"),
    "mismatches.duplicate-names": _unseen("A duplicate member with another value"),
    "mismatches.surrogates": _unseen("Another lone surrogate"),
    "mismatches.depth": _unseen("Another value deep inside the body"),
    "mismatches.query": Headline(Harm.WRONG, "A request with another query received the first response"),
    "mismatches.endpoint": Headline(
        Harm.LOST, "Another endpoint returned the response of the {noun}: its own operation never happened"
    ),
    "mismatches.method": Headline(Harm.WRONG, "Another method received the stored response of the first one"),
    "races.2": _race(2),
    "races.10": _race(10),
    "races.50": _race(50),
    "races.losers": Headline(
        Harm.WRONG, "Some of several identical requests at once received neither the success nor 'wait'"
    ),
    "races.while-running": Headline(
        Harm.WRONG,
        "A retry during the first request received neither the success nor 'wait'",
        _NEVER_AGAIN + "the retry was sent during the first request",
    ),
    "races.retry-after": Headline(Harm.UNTOLD, "A client that must wait receives no Retry-After"),
    "races.answered": Headline(Harm.LOST, "A client that waited never receives its response"),
    "races.pipelined": Headline(
        Harm.LOST,
        "Duplicates on one connection did not receive the response",
        _NEVER_AGAIN + "both requests were on one connection",
    ),
    "tenants.independent": Headline(Harm.LEAKED, "Tenant B received tenant A's {noun}, and its own never happened"),
    "tenants.unseen": Headline(Harm.LEAKED, "Tenant B can find out which keys tenant A uses"),
    "tenants.same-caller": Headline(
        Harm.WRONG,
        "A retry with a renewed token did not receive the first response",
        _NEVER_AGAIN + "the retry was sent with a renewed token",
    ),
    "tenants.no-pass": Headline(Harm.LEAKED, "A caller without credentials received a response by knowing the key"),
    "tenants.not-spoilt": Headline(Harm.LOST, "A request without credentials used up the key for its owner"),
    "failures.5xx-forgotten": Headline(Harm.LOST, "A server error is stored: every retry receives the old error"),
    "failures.no-wedge": Headline(Harm.LOST, "After a server error the key stays locked: retries receive 'wait'"),
    "failures.one-effect": Headline(
        Harm.WRONG,
        "A request that failed and its retry did not end with one effect",
        _NEVER_AGAIN + "the first request failed after its effect, and its retry ran again",
    ),
    "failures.corrected": Headline(Harm.LOST, "A request that was refused as invalid used up its key"),
    "hang-ups.head": _abandoned("in the head"),
    "hang-ups.body": _abandoned("in the middle of the body"),
    "hang-ups.last-byte": _abandoned("before the last byte"),
    "hang-ups.sent": _abandoned("before the response"),
    "hang-ups.answered": _abandoned("during the response"),
    "hang-ups.retried": Headline(Harm.LOST, "A client that disconnected cannot get the response with its retry"),
    "hang-ups.slowly": Headline(
        Harm.WRONG,
        "A body that arrived in slow pieces was not recognised",
        _NEVER_AGAIN + "the body arrived once in slow pieces and once in one",
    ),
    "leaks.mismatch": Headline(Harm.LEAKED, "The refusal of another body reveals the first response"),
    "leaks.first-body": Headline(Harm.LEAKED, "The refusal of another body reveals the body of the first request"),
    "leaks.fingerprint": Headline(Harm.LEAKED, "A refusal contains a hash that allows guessing the first body"),
    "leaks.cookie": Headline(Harm.LEAKED, "A retry received the cookie of the first response"),
    "leaks.reflection": Headline(Harm.LEAKED, "A key that contains a script was returned in a page that would run it"),
    "leaks.distinguished": Headline(Harm.UNTOLD, "Clients cannot tell the kinds of refusals apart"),
    "others.get": Headline(Harm.WRONG, "GET with a used key did not return the current state"),
    "others.get-current": Headline(Harm.WRONG, "GET with a key returned an old response"),
    "others.get-takes-no-key": Headline(
        Harm.LOST, "A key that was sent with GET was used up: its {noun} never happened"
    ),
    "others.put-delete": Headline(Harm.WRONG, "PUT or DELETE with a key received a stored response"),
    "others.described": Headline(Harm.UNTOLD, "The OpenAPI description does not mention the key"),
    "finals.declined": Headline(Harm.WRONG, "A final refusal was decided again for the retry"),
    "finals.large": Headline(
        Harm.LOST,
        "The retry of a request with a large response received neither it nor an explanation",
        _NEVER_AGAIN + "its response was large, and the retry was executed",
    ),
    "instances.replayed": Headline(
        Harm.LOST,
        "The second instance did not recognise a key that the first one had finished",
        _NEVER_AGAIN + "the retry went to the second instance",
    ),
    "instances.race": Headline(
        Harm.WRONG,
        "Identical requests at two instances: one received neither the success nor 'wait'",
        _NEVER_AGAIN + "it arrived at two instances at the same moment",
    ),
    "leases.one-effect": Headline(
        Harm.LOST,
        "A request that ran longer than its lease lost its response",
        _NEVER_AGAIN + "the first request was still running when its lease expired",
    ),
    "crashes.remembered": Headline(
        Harm.LOST,
        "After a crash the response of a finished request was gone",
        _NEVER_AGAIN + "the server lost the first request in the crash",
    ),
    "crashes.one-effect": Headline(
        Harm.LOST,
        "After a crash a retry received a success, but nothing had happened",
        _NEVER_AGAIN + "the server crashed during the first request",
    ),
    "crashes.answered": Headline(Harm.LOST, "After a crash the key stays locked: retries receive 'wait'"),
    "outages.closed": Headline(
        Harm.WRONG,
        "While the store was down a request received a response that does not indicate it",
        "While the store was down a request was executed, and nothing protects its retries",
        Harm.UNPROTECTED,
        allowed=0,
    ),
    "outages.reported": Headline(Harm.UNTOLD, "Clients receive no Retry-After while the store is down"),
    "outages.recovered": Headline(
        Harm.LOST,
        "After an outage of the store the key cannot be used",
        _NEVER_AGAIN + "the first request was sent during an outage of the store",
    ),
    "outages.remembered": Headline(
        Harm.LOST,
        "After an outage of the store the response of a finished request was gone",
        _NEVER_AGAIN + "the store was down between the request and its retry",
    ),
}
"""The headlines, by the clause's id."""

_BY_SEVERITY: Final = {
    Severity.LOW: Harm.UNTOLD,
    Severity.MEDIUM: Harm.WRONG,
    Severity.HIGH: Harm.WRONG,
    Severity.CRITICAL: Harm.LOST,
}


def headline_of(clause: Clause, verdict: Failed, evidence: Evidence, noun: str) -> tuple[Harm, str]:
    """The harm and the headline of a clause that failed."""
    found = HEADLINES.get(clause.id)
    if verdict.headline is not None:
        harm, sentence = verdict.headline
    elif found is None:
        return _BY_SEVERITY[clause.severity], f"This guarantee is broken: {clause.title}"
    else:
        harm, sentence = found.chosen(evidence)
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return harm, sentence.format(noun=noun, nouns=plural, number=evidence.number)


_ANY: Final = frozenset(Harm)
_NOT_TWICE: Final = _ANY - {Harm.TWICE}


@dataclass(frozen=True, slots=True)
class Cause:
    """The first of `roots` that failed explains the findings of certain harms whose ids match."""

    roots: tuple[str, ...]
    explains: tuple[str, ...]
    harms: frozenset[Harm] = _ANY
    holds: Callable[[Finding], bool] = lambda root: root.harm is not None


def _is_twice(root: Finding) -> bool:
    return root.harm is Harm.TWICE


def _is_ignored(root: Finding) -> bool:
    """The retry was executed as a new request: the API ignores keys."""
    return _is_twice(root) and root.evidence.successes > 1


def _is_other_response(root: Finding) -> bool:
    return root.harm is Harm.WRONG and root.evidence.differ_in_replays


CAUSES: Final = (
    Cause(
        ("replays.one-effect", "replays.many"),
        (
            *("keys.*", "replays.*", "mismatches.*", "races.*", "hang-ups.*", "failures.*", "finals.*", "instances.*"),
            *("leases.*", "crashes.*", "outages.*", "leaks.distinguished", "leaks.mismatch", "others.described"),
        ),
        holds=_is_ignored,
    ),
    Cause(
        ("replays.one-effect",),
        ("keys.*", "replays.*", "races.*", "hang-ups.*", "instances.*", "leases.*", "crashes.*", "finals.*"),
        frozenset({Harm.TWICE}),
    ),
    # Every retry receives another response, after a crash or at another instance, too.
    Cause(
        ("replays.many",),
        (
            *("replays.headers", "replays.status", "replays.encoding", "finals.large", "instances.*"),
            *("leases.one-effect", "crashes.remembered", "outages.remembered"),
        ),
        _NOT_TWICE,
        holds=_is_other_response,
    ),
    Cause(("replays.one-effect",), ("keys.quoted", "keys.bare", "keys.longest", "keys.field-name")),
    # The key is not claimed before the effect, so any request that overlaps the first one is executed.
    Cause(
        ("races.50", "races.10", "races.2", "races.while-running"),
        ("hang-ups.sent", "hang-ups.retried", "mismatches.while-running"),
        holds=_is_twice,
    ),
    Cause(
        ("mismatches.nothing-happens",),
        (
            *("mismatches.status", "mismatches.while-running", "mismatches.running-status", "mismatches.query"),
            *("mismatches.endpoint", "mismatches.method", "mismatches.every-member", "mismatches.types"),
            *("mismatches.large-integers", "mismatches.array-order", "mismatches.duplicate-names"),
            *("mismatches.surrogates", "mismatches.depth", "replays.chunked-other", "leaks.distinguished"),
        ),
    ),
    Cause(("mismatches.status",), ("mismatches.while-running", "mismatches.running-status", "leaks.distinguished")),
    Cause(("mismatches.while-running",), ("mismatches.running-status",)),
    Cause(
        ("races.answered", "races.losers", "races.while-running"),
        ("races.*", "hang-ups.sent", "hang-ups.retried", "instances.race"),
        _NOT_TWICE,
    ),
    Cause(("races.50", "races.10", "races.2"), ("races.*", "instances.race")),
    Cause(("mismatches.every-member",), ("mismatches.types", "mismatches.array-order")),
    Cause(("keys.missing",), ("keys.explained",)),
    Cause(
        ("keys.malformed",),
        ("keys.empty", "keys.doubled", "keys.too-long", "keys.too-short"),
        frozenset({Harm.UNPROTECTED}),
    ),
    Cause(("tenants.independent",), ("tenants.unseen",)),
    Cause(("replays.white-space",), ("replays.escapes",)),
    Cause(("hang-ups.body",), ("hang-ups.last-byte", "hang-ups.head")),
    Cause(("instances.replayed",), ("instances.race",)),
    Cause(("crashes.remembered",), ("crashes.*", "outages.remembered")),
    Cause(("outages.closed",), ("outages.reported", "outages.recovered")),
)
"""From the most general cause to the most specific one."""


@dataclass(frozen=True, slots=True)
class Group:
    """A finding, and those that follow from it."""

    root: Finding
    consequences: tuple[Finding, ...] = ()

    @property
    def all(self) -> tuple[Finding, ...]:
        """The whole group, the root first."""
        return (self.root, *self.consequences)


def grouped(findings: Sequence[Finding]) -> list[Group]:
    """The findings by their causes; the groups and their members keep the order of the findings."""
    by_id = {finding.clause.id: finding for finding in findings}
    parents: dict[str, str] = {}
    for cause in CAUSES:
        root = next((by_id[name] for name in cause.roots if name in by_id and cause.holds(by_id[name])), None)
        if root is None:
            continue
        top = _top(root.clause.id, parents)
        for name, finding in by_id.items():
            if name not in {top, root.clause.id} and name not in parents and _explained(cause, finding):
                parents[name] = top
    tops = [finding for finding in findings if finding.clause.id not in parents]
    return [Group(top, tuple(one for one in findings if _under(one, top, parents))) for top in tops]


def _explained(cause: Cause, finding: Finding) -> bool:
    return finding.harm in cause.harms and any(fnmatchcase(finding.clause.id, one) for one in cause.explains)


def _under(finding: Finding, top: Finding, parents: dict[str, str]) -> bool:
    return finding.clause.id in parents and _top(finding.clause.id, parents) == top.clause.id


def _top(name: str, parents: dict[str, str]) -> str:
    while name in parents:
        name = parents[name]
    return name
