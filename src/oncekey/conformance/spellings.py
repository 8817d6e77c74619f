"""Clauses about how a key is spelt, and which spellings are one key."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Final

from oncekey.conformance.clauses import (
    DRAFT,
    EVERY,
    SAFE,
    Area,
    Clause,
    Failed,
    Passed,
    Profile,
    Severity,
    UndecidedError,
    Verdict,
)
from oncekey.conformance.judging import one_operation, shown, two_operations, worst_of
from oncekey.conformance.keys import of_length
from oncekey.conformance.probe import KEY, Probe
from oncekey.conformance.shots import Shot

_BARE: Final = frozenset({Profile.STRIPE, Profile.CONFLICT})


def quoted(probe: Probe) -> Verdict:
    """Quoted keys, whatever their first character is."""
    return worst_of(probe, (_taken(probe, f'"{key}"', f'the quoted key "{key}"') for key in _firsts()))


def bare(probe: Probe) -> Verdict:
    """Bare keys, whatever their first character is."""
    return worst_of(probe, (_taken(probe, key, f"the bare key {key}") for key in _firsts()))


def two_spellings(probe: Probe) -> Verdict:
    """The same key with and without quotes."""
    return _never_again(probe, '"{}"', "{}", "the key once quoted and once bare")


def parameters(probe: Probe) -> Verdict:
    """A key with a parameter, which is not part of it."""
    return _never_again(probe, '"{}"', '"{}";v=1', "the key once with a parameter and once without")


def case_counts(probe: Probe) -> Verdict:
    """Keys that differ in the case of letters only."""
    if not probe.habits.opaque:
        raise UndecidedError("keys must be UUIDs here, in which the case of letters means nothing")
    key = probe.fresh_text()
    return _two_operations(probe, key, key.upper(), "two keys that differ in the case of letters")


def not_deduplication(probe: Probe) -> Verdict:
    """Equal bodies under different keys."""
    return _two_operations(probe, probe.fresh(), probe.fresh(), "two keys with equal bodies")


def field_name(probe: Probe) -> Verdict:
    """Names of header fields have no case."""
    key, before = probe.fresh(), probe.count()
    first = probe.first(key)
    shot = probe.shot(key)
    again = probe.fire(replace(shot, headers=_renamed(shot)))
    return one_operation(probe, probe.since(before), first, again, "the field's name in capitals")


def echoed(probe: Probe) -> Verdict:
    """The key comes back."""
    key = probe.fresh()
    for answer in (probe.first(key), probe.send(key)):
        if answer.header(KEY) != probe.written(key):
            return Failed(f"{KEY} in the answer, as it was sent", f"{shown(answer)}; {KEY}: {answer.header(KEY)}")
    return Passed()


def longest(probe: Probe) -> Verdict:
    """255 characters."""
    if not probe.habits.opaque:
        raise UndecidedError("keys must be UUIDs here")
    return _taken(probe, probe.written(of_length(255)), "a key of 255 characters")


def _taken(probe: Probe, value: str, what: str) -> Verdict:
    before = probe.count()
    first = probe.fire(probe.raw_shot(value))
    if not first.ok:
        return Failed(f"{what}: taken", shown(first))
    again = probe.fire(probe.raw_shot(value))
    return one_operation(probe, probe.since(before, at_least=1), first, again, what)


def _never_again(probe: Probe, one: str, two: str, what: str) -> Verdict:
    """The second spelling is refused, or is the same key; it is never another operation."""
    key, before = probe.fresh(), probe.count()
    first = probe.fire(probe.raw_shot(one.format(key)))
    again = probe.fire(probe.raw_shot(two.format(key)))
    effects = probe.since(before, at_least=int(first.ok))
    if not first.ok or not again.ok:
        return Passed()
    return one_operation(probe, effects, first, again, what)


def _two_operations(probe: Probe, one: str, two: str, what: str) -> Verdict:
    before = probe.count()
    first, second = probe.first(one), probe.send(two)
    return two_operations(probe, probe.since(before), first, second, what)


def _firsts() -> tuple[str, str]:
    """A UUID that begins with a digit, and one that begins with a letter."""
    rest = str(uuid.uuid4())[1:]
    return f"5{rest}", f"f{rest}"


def _renamed(shot: Shot) -> tuple[tuple[str, str], ...]:
    return tuple((name.upper() if name == KEY else name, value) for name, value in shot.headers)


CLAUSES: Final = (
    Clause(
        id="keys.longest",
        title="A key of 255 characters is taken",
        why="It is the limit that clients know.",
        area=Area.KEYS,
        severity=Severity.LOW,
        must=SAFE,
        should=EVERY - SAFE,
        shots=4,
        judge=longest,
        sight=True,
    ),
    Clause(
        id="keys.quoted",
        title="Quoted keys are taken, whether they begin with a digit or a letter",
        why="The draft's keys are quoted; UUIDs that begin with a digit parse differently from others.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        must=DRAFT,
        shots=8,
        judge=quoted,
        sight=True,
    ),
    Clause(
        id="keys.bare",
        title="Bare keys are taken, whether they begin with a digit or a letter",
        why="Most clients send them so.",
        area=Area.KEYS,
        severity=Severity.MEDIUM,
        must=_BARE,
        should=DRAFT,
        shots=8,
        judge=bare,
        sight=True,
    ),
    Clause(
        id="keys.two-spellings",
        title="A key with and without quotes is never two operations",
        why="A client library that is updated between two tries would execute twice.",
        area=Area.KEYS,
        severity=Severity.CRITICAL,
        must=DRAFT,
        shots=4,
        judge=two_spellings,
        sight=True,
    ),
    Clause(
        id="keys.parameters",
        title="A parameter after the key does not make it another key",
        why="RFC 9651 lets intermediaries and later versions add parameters.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        must=DRAFT,
        shots=4,
        judge=parameters,
        sight=True,
    ),
    Clause(
        id="keys.case",
        title="Keys that differ in case are two operations",
        why="Keys are opaque; a database that compares without case would drop an operation.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        shots=4,
        judge=case_counts,
        sight=True,
    ),
    Clause(
        id="keys.not-deduplication",
        title="Equal bodies under different keys are two operations",
        why="Two customers who order the same thing are two customers.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        shots=4,
        judge=not_deduplication,
        sight=True,
    ),
    Clause(
        id="keys.field-name",
        title="The field's name is read in any case",
        why="Proxies change it.",
        area=Area.KEYS,
        severity=Severity.HIGH,
        shots=4,
        judge=field_name,
        sight=True,
    ),
    Clause(
        id="keys.echoed",
        title="Answers repeat the key's header",
        why="The client sees that its key was understood.",
        area=Area.KEYS,
        severity=Severity.LOW,
        must=frozenset(),
        should=SAFE,
        shots=2,
        judge=echoed,
    ),
)
