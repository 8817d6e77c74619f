"""The headline of a finding: one sentence that says what happened and how bad it is; and the cause of a finding.

A report has one entry for each cause, so findings that follow from another one are grouped under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from oncekey.conformance.clauses import Clause, Failed, Harm, Severity

if TYPE_CHECKING:
    from oncekey.conformance.running import Finding


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a clause saw: how many effects were counted, and how many successes differ."""

    effects: int | None = None
    successes: int = 0

    @property
    def number(self) -> int:
        """How often it happened: by the count if there is one, else by the answers."""
        return self.successes if self.effects is None else self.effects


@dataclass(frozen=True, slots=True)
class Telling:
    """A harm and its sentence; `more` takes their place when more happened than `allowed`."""

    harm: Harm
    sentence: str
    more: str = ""
    more_harm: Harm = Harm.TWICE
    allowed: int = 1

    def chosen(self, evidence: Evidence) -> tuple[Harm, str]:
        """The harm and the sentence that fit the evidence."""
        if self.more and evidence.number > self.allowed:
            return self.more_harm, self.more
        return self.harm, self.sentence


def _refusal(what: str) -> Telling:
    more = f"{what} was executed, and nothing protects its retries"
    return Telling(Harm.WRONG, f"{what} was not refused with 400", more, Harm.UNPROTECTED, allowed=0)


def _spelling(name: str) -> Telling:
    return Telling(
        Harm.WRONG,
        f"{name} got another answer when it was sent again",
        f"{name} was not recognised again: " + "{number} {nouns} came of one key",
    )


def _race(many: int) -> Telling:
    return Telling(
        Harm.WRONG,
        f"{many} identical requests at once: some got an answer that is neither the success nor 'wait'",
        "{number} {nouns} came of one key: " + f"{many} identical requests arrived at the same moment",
    )


def _abandoned(where: str) -> Telling:
    return Telling(
        Harm.LOST,
        f"A client that hung up {where} cannot use its key any more",
        "{number} {nouns} came of one key: " + f"the client hung up {where} and retried",
    )


def _unseen(what: str) -> Telling:
    return Telling(
        Harm.LOST,
        f"{what} under a used key got the first one's answer: " + "the second {noun} never happened",
        f"{what} under a used key was executed: " + "{number} {nouns} came of one key",
    )


_NEVER_AGAIN: Final = "{number} {nouns} came of one key: "

HEADLINES: Final[Mapping[str, Telling]] = {
    "keys.missing": _refusal("A request without a key"),
    "keys.explained": Telling(Harm.UNTOLD, "The refusal of a missing key does not say where to read about keys"),
    "keys.empty": _refusal("A request with an empty key"),
    "keys.malformed": _refusal("A request with a key that cannot be parsed"),
    "keys.doubled": _refusal("A request with two keys"),
    "keys.too-long": _refusal("A request with a key of 256 characters"),
    "keys.too-short": _refusal("A request with a key of 4 characters"),
    "keys.status": Telling(Harm.WRONG, "A key that cannot be used was refused with another status than 400"),
    "keys.whole": Telling(
        Harm.LOST, "Long keys that differ in one character were taken for one: the second {noun} never happened"
    ),
    "keys.tricky": Telling(Harm.WRONG, "A key of odd characters broke the server"),
    "keys.longest": _spelling("A key of 255 characters"),
    "keys.quoted": _spelling("A quoted key, as the draft writes it,"),
    "keys.bare": _spelling("A bare key, as most clients send it,"),
    "keys.two-spellings": Telling(
        Harm.WRONG,
        "A key got another answer without its quotes",
        _NEVER_AGAIN + "it was sent once with quotes and once without",
    ),
    "keys.parameters": Telling(
        Harm.WRONG,
        "A key got another answer with a parameter behind it",
        _NEVER_AGAIN + "it was sent once with a parameter and once without",
    ),
    "keys.case": Telling(Harm.LOST, "Keys that differ in case were taken for one: the second {noun} never happened"),
    "keys.not-deduplication": Telling(
        Harm.LOST, "Two keys with equal bodies were taken for one: the second {noun} never happened"
    ),
    "keys.field-name": Telling(
        Harm.WRONG,
        "The key's header was not read when its name was in capitals",
        _NEVER_AGAIN + "the header's name was in capitals the second time",
    ),
    "keys.echoed": Telling(Harm.UNTOLD, "Answers do not repeat the key"),
    "replays.status": Telling(Harm.WRONG, "A retry got another status than the first request"),
    "replays.bytes": Telling(Harm.WRONG, "A retry got another body than the first request"),
    "replays.headers": Telling(Harm.WRONG, "A retry did not get the headers of the first answer"),
    "replays.many": Telling(
        Harm.WRONG, "Not every retry got the first answer", "Every retry got an answer of its own: keys are not kept"
    ),
    "replays.one-effect": Telling(
        Harm.LOST, "Three requests with one key had no effect", _NEVER_AGAIN + "the request was sent three times"
    ),
    "replays.marked": Telling(Harm.UNTOLD, "A client cannot tell a replay from a first answer"),
    "replays.expiry": Telling(Harm.UNTOLD, "Answers do not say how long a key is kept"),
    "replays.white-space": Telling(
        Harm.WRONG, "A retry with other white space was refused", _NEVER_AGAIN + "the retry had other white space"
    ),
    "replays.escapes": Telling(
        Harm.WRONG, "A retry with escaped characters was refused", _NEVER_AGAIN + "the retry had escaped characters"
    ),
    "replays.encoding": Telling(
        Harm.WRONG,
        "A retry that accepts no encoding got the compressed body of the first answer",
        _NEVER_AGAIN + "the retry did not accept gzip",
    ),
    "replays.chunked": Telling(
        Harm.WRONG,
        "A retry with its body in chunks did not get the first answer",
        _NEVER_AGAIN + "the retry came in chunks",
    ),
    "replays.chunked-other": Telling(
        Harm.LOST,
        "Another body, sent in chunks, got the first one's answer: the second {noun} never happened",
        "Another body under a used key was executed when it came in chunks",
    ),
    "mismatches.status": Telling(Harm.WRONG, "Another body under a used key got the wrong status"),
    "mismatches.nothing-happens": Telling(
        Harm.LOST,
        "Another body under a used key got the first one's answer: the second {noun} never happened",
        "Another body under a used key was executed as well: {number} {nouns} came of one key",
    ),
    "mismatches.first-stays": Telling(
        Harm.LOST, "A refused request with another body destroyed the first one's answer"
    ),
    "mismatches.while-running": Telling(
        Harm.WRONG,
        "Another body got the wrong status while the first request ran",
        "Another body was executed while the first request ran: {number} {nouns} came of one key",
    ),
    "mismatches.running-status": Telling(Harm.WRONG, "Another body got the wrong status while the first request ran"),
    "mismatches.every-member": _unseen("Another value of a member"),
    "mismatches.large-integers": _unseen("Another large integer"),
    "mismatches.types": _unseen("A value of another type"),
    "mismatches.array-order": _unseen("An array in another order"),
    "mismatches.duplicate-names": _unseen("Another member of the same name"),
    "mismatches.surrogates": _unseen("Another half of a character"),
    "mismatches.depth": _unseen("Another value far inside the body"),
    "mismatches.query": Telling(Harm.WRONG, "A request with another query got the first one's answer"),
    "mismatches.endpoint": Telling(
        Harm.LOST, "Another endpoint gave the {noun}'s answer: what was asked of it never happened"
    ),
    "mismatches.method": Telling(Harm.WRONG, "Another method got the answer that is stored for the first one"),
    "races.2": _race(2),
    "races.10": _race(10),
    "races.50": _race(50),
    "races.losers": Telling(
        Harm.WRONG, "Of identical requests at once some got an answer that is neither the success nor 'wait'"
    ),
    "races.while-running": Telling(
        Harm.WRONG,
        "A retry while the first request ran got an answer that is neither the success nor 'wait'",
        _NEVER_AGAIN + "the retry came while the first request ran",
    ),
    "races.retry-after": Telling(Harm.UNTOLD, "A client that has to wait is not told how long"),
    "races.answered": Telling(Harm.LOST, "A client that was told to wait never gets its answer"),
    "races.pipelined": Telling(
        Harm.LOST,
        "Duplicates on one connection did not get the answer",
        _NEVER_AGAIN + "both requests were on one connection",
    ),
    "tenants.independent": Telling(Harm.LEAKED, "Tenant B got tenant A's {noun}, and its own never happened"),
    "tenants.unseen": Telling(Harm.LEAKED, "Tenant B can find out which keys tenant A uses"),
    "tenants.same-caller": Telling(
        Harm.WRONG,
        "A retry with a renewed token did not get the first answer",
        _NEVER_AGAIN + "the retry came with a renewed token",
    ),
    "tenants.no-pass": Telling(Harm.LEAKED, "A caller without credentials got an answer by knowing the key"),
    "tenants.not-spoilt": Telling(Harm.LOST, "A request without credentials used up the key for its owner"),
    "failures.5xx-forgotten": Telling(Harm.LOST, "A server error is stored: every retry gets the old error"),
    "failures.no-wedge": Telling(Harm.LOST, "After a server error the key stays locked: retries are told to wait"),
    "failures.one-effect": Telling(
        Harm.WRONG,
        "A request that failed and its retry did not end with one effect",
        _NEVER_AGAIN + "the first request failed after its effect, and its retry ran again",
    ),
    "failures.corrected": Telling(Harm.LOST, "A request that was refused as invalid used up its key"),
    "hang-ups.head": _abandoned("in the head"),
    "hang-ups.body": _abandoned("in the middle of the body"),
    "hang-ups.last-byte": _abandoned("before the last byte"),
    "hang-ups.sent": _abandoned("before the answer"),
    "hang-ups.answered": _abandoned("during the answer"),
    "hang-ups.retried": Telling(Harm.LOST, "A client that hung up cannot get the answer with its retry"),
    "hang-ups.slowly": Telling(
        Harm.WRONG,
        "A body that came in slow pieces was not recognised again",
        _NEVER_AGAIN + "the body came once in slow pieces and once in one",
    ),
    "leaks.mismatch": Telling(Harm.LEAKED, "The refusal of another body shows what the first request was about"),
    "leaks.first-body": Telling(Harm.LEAKED, "The refusal of another body shows the body of the first request"),
    "leaks.fingerprint": Telling(Harm.LEAKED, "A refusal shows a hash by which the first body can be guessed"),
    "leaks.cookie": Telling(Harm.LEAKED, "A retry was given the cookie of the first answer"),
    "leaks.reflection": Telling(Harm.LEAKED, "A key with a script in it came back as a page that would run it"),
    "leaks.told-apart": Telling(Harm.UNTOLD, "Clients cannot tell one kind of refusal from another"),
    "others.get": Telling(Harm.WRONG, "GET with a used key did not read what is there now"),
    "others.get-current": Telling(Harm.WRONG, "GET with a key showed an old answer"),
    "others.get-takes-no-key": Telling(
        Harm.LOST, "A key that was sent with GET was used up: its {noun} never happened"
    ),
    "others.put-delete": Telling(Harm.WRONG, "PUT or DELETE with a key was answered from the store"),
    "others.described": Telling(Harm.UNTOLD, "The OpenAPI description does not mention the key"),
    "finals.declined": Telling(Harm.WRONG, "A final refusal was decided anew for the retry"),
    "finals.large": Telling(
        Harm.LOST,
        "The retry of a request with a large answer got neither it nor a word about it",
        _NEVER_AGAIN + "its answer was large, and the retry was executed",
    ),
    "instances.replayed": Telling(
        Harm.LOST,
        "The second instance did not answer a key that the first one had finished",
        _NEVER_AGAIN + "the retry went to the second instance",
    ),
    "instances.race": Telling(
        Harm.WRONG,
        "Identical requests at two instances: one got neither the success nor 'wait'",
        _NEVER_AGAIN + "it arrived at two instances at the same moment",
    ),
    "leases.one-effect": Telling(
        Harm.LOST,
        "A request that ran longer than its lease did not keep its answer",
        _NEVER_AGAIN + "the first request was still running when its lease ran out",
    ),
    "crashes.remembered": Telling(
        Harm.LOST,
        "After a crash the answer of a finished request was gone",
        _NEVER_AGAIN + "the server forgot the first one when it crashed",
    ),
    "crashes.one-effect": Telling(
        Harm.LOST,
        "After a crash a retry got a success, and nothing had happened",
        _NEVER_AGAIN + "the server crashed while the first request ran",
    ),
    "crashes.answered": Telling(Harm.LOST, "After a crash the key stays locked: retries are told to wait"),
    "outages.closed": Telling(
        Harm.WRONG,
        "While the store was down a request got an answer that does not say so",
        "While the store was down a request was executed, and nothing protects its retries",
        Harm.UNPROTECTED,
        allowed=0,
    ),
    "outages.told": Telling(Harm.UNTOLD, "While the store is down clients are not told when to retry"),
    "outages.recovered": Telling(
        Harm.LOST,
        "After an outage of the store the key cannot be used",
        _NEVER_AGAIN + "the first request came during an outage of the store",
    ),
    "outages.remembered": Telling(
        Harm.LOST,
        "After an outage of the store the answer of a finished request was gone",
        _NEVER_AGAIN + "the outage of the store lay between the request and its retry",
    ),
}
"""The headlines, by the clause's id."""

_BY_SEVERITY: Final = {
    Severity.LOW: Harm.UNTOLD,
    Severity.MEDIUM: Harm.WRONG,
    Severity.HIGH: Harm.WRONG,
    Severity.CRITICAL: Harm.LOST,
}


def told_of(clause: Clause, verdict: Failed, evidence: Evidence, noun: str) -> tuple[Harm, str]:
    """The harm and the headline of a clause that failed."""
    telling = HEADLINES.get(clause.id)
    if verdict.told is not None:
        harm, sentence = verdict.told
    elif telling is None:
        return _BY_SEVERITY[clause.severity], f"This promise is not kept: {clause.title}"
    else:
        harm, sentence = telling.chosen(evidence)
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


def _answers_differ(root: Finding) -> bool:
    """The retry was executed and answered as a new request: the API does not look at keys at all."""
    return root.evidence.successes > 1


CAUSES: Final = (
    Cause(
        ("replays.one-effect", "replays.many"),
        (
            *("keys.*", "replays.*", "mismatches.*", "races.*", "hang-ups.*", "failures.*", "finals.*", "instances.*"),
            *("leases.*", "crashes.*", "outages.*", "leaks.told-apart", "leaks.mismatch", "others.described"),
        ),
        holds=_answers_differ,
    ),
    Cause(
        ("replays.one-effect",),
        ("keys.*", "replays.*", "races.*", "hang-ups.*", "instances.*", "leases.*", "crashes.*", "finals.*"),
        frozenset({Harm.TWICE}),
    ),
    Cause(("replays.one-effect",), ("keys.quoted", "keys.bare", "keys.longest", "keys.field-name")),
    Cause(
        ("mismatches.nothing-happens",),
        (
            *("mismatches.status", "mismatches.while-running", "mismatches.running-status", "mismatches.query"),
            *("mismatches.endpoint", "mismatches.method", "mismatches.every-member", "mismatches.types"),
            *("mismatches.large-integers", "mismatches.array-order", "mismatches.duplicate-names"),
            *("mismatches.surrogates", "mismatches.depth", "replays.chunked-other", "leaks.told-apart"),
        ),
    ),
    Cause(("mismatches.status",), ("mismatches.while-running", "mismatches.running-status", "leaks.told-apart")),
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
    Cause(("outages.closed",), ("outages.told", "outages.recovered")),
)
"""From the most general cause to the most special one."""


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
