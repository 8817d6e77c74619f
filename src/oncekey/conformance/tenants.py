"""Clauses about other callers: a key belongs to one caller, and another one who knows it gets nothing."""

from __future__ import annotations

from typing import Final

from oncekey.conformance.clauses import Area, Clause, Failed, Need, Passed, Severity, UndecidedError, Verdict
from oncekey.conformance.judging import is_marked, shown
from oncekey.conformance.probe import Probe


def independent(probe: Probe) -> Verdict:
    """The same key and body from another tenant."""
    _other_tenant_is_known(probe)
    key = probe.fresh()
    first = probe.first(key)
    before = probe.count(other_tenant=True)
    answer = probe.fire(probe.as_other_tenant(probe.shot(key)))
    if not answer.ok:
        return Failed("the other tenant's request is executed as its own", shown(answer))
    if is_marked(answer):
        return Failed("an answer of its own for the other tenant", shown(answer))
    if not probe.same(first, answer):
        return Passed()
    if before is None and not probe.habits.distinct:
        raise UndecidedError("both tenants get equal answers", Need.COUNT)
    after = probe.count(other_tenant=True)
    if before is not None and after is not None and after > before:
        return Passed()
    return Failed("the other tenant's request is executed as its own", f"{shown(answer)}, the first tenant's answer")


def unseen(probe: Probe) -> Verdict:
    """Another tenant cannot find out that a key is used."""
    _other_tenant_is_known(probe)
    key = probe.fresh()
    probe.first(key)
    answer = probe.fire(probe.as_other_tenant(probe.shot(key, body=probe.other_body)))
    return Passed() if answer.ok else Failed("for another tenant the key is as good as new", shown(answer))


def no_pass(probe: Probe) -> Verdict:
    """A key without credentials."""
    _credentials_are_needed(probe)
    key = probe.fresh()
    first = probe.first(key)
    answer = probe.fire(probe.as_nobody(probe.shot(key)))
    if not answer.status:
        raise UndecidedError(f"without credentials there was no answer ({answer.reason})")
    if answer.ok or (first.body and first.body in answer.body):
        return Failed("without credentials a refusal, and nothing of the answer", shown(answer))
    return Passed()


def not_spoilt(probe: Probe) -> Verdict:
    """A request without credentials does not use up the key."""
    _credentials_are_needed(probe)
    key = probe.fresh()
    probe.fire(probe.as_nobody(probe.shot(key)))
    answer = probe.until_settled(probe.shot(key))
    return Passed() if answer.ok else Failed("with credentials the same key is executed", shown(answer))


def _other_tenant_is_known(probe: Probe) -> None:
    """Raise unless the other tenant's request succeeds under a key of its own: else a refusal proves nothing."""
    control = probe.control(probe.as_other_tenant(probe.shot(probe.fresh())))
    if not control.ok:
        got = control.status or control.reason
        raise UndecidedError(f"the other tenant's request with a fresh key got {got}", Need.OTHER_TENANT)


def _credentials_are_needed(probe: Probe) -> None:
    """Raise if the API accepts requests without credentials: then it has nothing to hide."""
    control = probe.control(probe.as_nobody(probe.shot(probe.fresh())))
    if control.ok:
        raise UndecidedError("a fresh key is taken without credentials, too")


CLAUSES: Final = (
    Clause(
        id="tenants.independent",
        title="The same key of two tenants is two operations",
        why="One tenant would be shown the other's answer, and its own request would not happen.",
        area=Area.TENANTS,
        severity=Severity.CRITICAL,
        needs=(Need.OTHER_TENANT,),
        shots=6,
        judge=independent,
        sight=True,
    ),
    Clause(
        id="tenants.unseen",
        title="A tenant cannot find out which keys another one uses",
        why="A refusal that only used keys get tells who does business with whom.",
        area=Area.TENANTS,
        severity=Severity.HIGH,
        needs=(Need.OTHER_TENANT, Need.OTHER_BODY),
        shots=3,
        judge=unseen,
    ),
    Clause(
        id="tenants.no-pass",
        title="A used key opens nothing to those without credentials",
        why="Keys are in logs; a replay to every caller who knows one is a leak.",
        area=Area.TENANTS,
        severity=Severity.CRITICAL,
        needs=(Need.CREDENTIALS,),
        shots=3,
        judge=no_pass,
    ),
    Clause(
        id="tenants.not-spoilt",
        title="A request that was refused for its credentials does not use up the key",
        why="An expired token would turn a key into a dead end.",
        area=Area.TENANTS,
        severity=Severity.MEDIUM,
        needs=(Need.CREDENTIALS,),
        shots=4,
        judge=not_spoilt,
    ),
)
