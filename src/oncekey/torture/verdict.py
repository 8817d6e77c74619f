"""The verdict: the shipped checker over each kind of effects, and what only a whole run can show.

Outbox (S9), money (S10), a provider's truth against ours (S16), and that nothing is left undone (S14, S15).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.model import State
from oncekey.testing.checker import Rule, check
from oncekey.testing.history import stories

if TYPE_CHECKING:
    from oncekey.torture.clients import Wish
    from oncekey.torture.evidence import Evidence, Kept

LOOKED_AT: Final = frozenset(Rule) - {Rule.OUTBOX, Rule.EMPTY, Rule.KEPT}
"""The outbox is looked at below, against what was delivered; nothing is old enough to expire."""
_CREATED: Final = 201
_EMITTING: Final = frozenset({"/orders", "/payments"})


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise, with the key that it was broken for."""

    rule: Rule
    key: str
    sentence: str


def judge(evidence: Evidence) -> list[Finding]:
    """Every broken promise of a run; none is the answer hoped for."""
    found: dict[Finding, None] = {}
    for broken in check(evidence.history(), LOOKED_AT):
        found[Finding(broken.rule, broken.key, broken.sentence)] = None
    for look in LOOKS:
        for finding in look(evidence):
            found[finding] = None
    return list(found)


def stuck(left: Mapping[str, str]) -> Iterator[Finding]:
    """What the workers had not done when all had been well for long, although nobody but they could do it."""
    for key, what in left.items():
        yield Finding(Rule.PROGRESS, key, f"{what}: no worker has ended it")


def story_of(evidence: Evidence, key: str) -> tuple[str, ...]:
    """All that is known of one key, in the order of events."""
    return next((story.lines() for story in stories(evidence.history()) if story.key == key), ())


def _outbox(evidence: Evidence) -> Iterator[Finding]:
    """Committed is delivered: every message of a committed request arrived, and none of a request that was not."""
    rule = Rule.OUTBOX
    if not evidence.shares:
        return
    for key, wish in evidence.wishes.items():
        record, names = evidence.records.get(key), evidence.deliveries.get(key, {})
        due = wish.route in _EMITTING and record is not None and record.status == _CREATED
        if due and not names:
            yield Finding(rule, key, "its message was committed, and never delivered")
        if not due and names:
            yield Finding(rule, key, "a message was delivered that no committed request has sent")
        if len(names) > 1:
            yield Finding(rule, key, f"one message was delivered under {len(names)} downstream keys")
    for row in evidence.dead_letters:
        if row["kind"] == "emit":
            yield Finding(rule, row["key"], f"its message was given up: {row['last_error']}")


def _money(evidence: Evidence) -> Iterator[Finding]:
    """What was charged is what was acknowledged, to the cent, and what nobody can know is charged once at most."""
    rule = Rule.CONSERVED
    for key, wish in evidence.wishes.items():
        lines, record = evidence.charges.get(key, ()), evidence.records.get(key)
        cents = [line.cents for line in lines]
        if not wish.charges:
            if lines:
                yield Finding(rule, key, "it was charged, and nobody may charge for it")
        elif record is None or record.state is State.FAILED_RETRYABLE:
            if lines and not (record is not None and record.resumable):
                yield Finding(rule, key, f"it was charged {cents}, and no record tells of it")
        elif record.state is State.COMPLETED:
            expected = [_cents(record)] if record.status == _CREATED else []
            if cents != expected:
                yield Finding(rule, key, f"it was answered {record.status} for {expected}, and charged {cents}")
            elif lines and _charge_of(record) != lines[0].id:
                yield Finding(rule, key, "its answer names another charge than the ledger")
    strangers = set(evidence.charges) - set(evidence.wishes)
    for key in sorted(strangers):
        yield Finding(rule, key, "it was charged, and no client has asked for it")


def _left(evidence: Evidence) -> Iterator[Finding]:
    """All is well again: nothing waits, and everybody has heard something final."""
    for key in evidence.wishes:
        record = evidence.records.get(key)
        if key not in evidence.answered:
            yield Finding(Rule.PROGRESS, key, "its client never got an answer")
        if record is not None and record.state is State.FAILED_RETRYABLE and record.resumable:
            yield Finding(Rule.PROGRESS, key, "it can be gone on with, and nobody did")
    for row in evidence.parcels:
        yield Finding(Rule.EMPTY, row["key"], f"a parcel of {row['topic']} is still {row['state']}")


def _unknown(evidence: Evidence) -> Iterator[Finding]:
    """Nobody knows only where nobody can: a call that may not be repeated."""
    rule = Rule.TRUTH
    for key, record in evidence.records.items():
        wish = evidence.wishes.get(key)
        if record.state is State.UNKNOWN and wish is not None and not _cannot_be_known(wish):
            yield Finding(rule, key, f"it is unknown ({record.last_error}), and it could have been found out")


def _last_owner(evidence: Evidence) -> Iterator[Finding]:
    """The answer that is stored is the one of whoever owned the record last."""
    for key, record in evidence.records.items():
        attempt = _body(record).get("attempt")
        if record.state is State.COMPLETED and attempt is not None and attempt != record.attempts:
            yield Finding(Rule.FENCED, key, f"attempt {attempt} has answered, and the record was at {record.attempts}")


LOOKS: Final[tuple[Callable[[Evidence], Iterator[Finding]], ...]] = (_outbox, _money, _left, _unknown, _last_owner)


def _cannot_be_known(wish: Wish) -> bool:
    return wish.charges and not wish.wanted.recognises


def _cents(record: Kept) -> int:
    return int(record.fingerprint.partition(" ")[0])


def _charge_of(record: Kept) -> object:
    return _body(record).get("charge")


def _body(record: Kept) -> dict[str, object]:
    try:
        found = json.loads(record.body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
