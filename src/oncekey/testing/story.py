"""One key's part of a history, with the lives it had: what the checker's rules are asked about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.testing.history import Dispatch, Effect, Final, History, Operation, Sighting, Write


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a key: from the write that began it to the one that deleted or replaced it."""

    incarnation: str
    fingerprint: str | None
    began: int
    ended: int | None
    expires_at: int | None = None
    """As its last write says: from then on the key may be used anew, though the row may still be there."""

    def binds(self, operation: Operation) -> bool:
        """Whether its time was not over while an operation was under way, as far as anybody knows."""
        return self.expires_at is None or operation.latest is None or operation.latest < self.expires_at

    def spans(self, begin: int, end: int) -> bool:
        """Whether the record was there, as this life, all the time between two events."""
        return self.began < begin and self.lasts(end)

    def lasts(self, until: int) -> bool:
        """Whether the record was still there, as this life, at an event."""
        return self.ended is None or self.ended > until


@dataclass(frozen=True)
class Story:
    """All that is known of one key."""

    scope: str
    key: str
    healed: bool
    operations: list[Operation] = field(default_factory=list)
    ledger: list[Effect] = field(default_factory=list)
    business: list[Effect] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    records: list[Final] = field(default_factory=list)
    outbox: list[Dispatch] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)

    @cached_property
    def effects(self) -> list[Effect]:
        """What was done and stays done, wherever."""
        return [effect for effect in (*self.ledger, *self.business) if not effect.undone]

    @cached_property
    def lives(self) -> dict[str, Life]:
        """The lives that the writes show, by incarnation."""
        lives: dict[str, Life] = {}
        current: Life | None = None
        for write in self.writes:
            if current is not None and (write.state is None or write.incarnation != current.incarnation):
                lives[current.incarnation] = replace(current, ended=write.at)
                current = None
            if write.state is None:
                continue
            if current is None:
                current = Life(write.incarnation, write.fingerprint, write.at, None)
            lives[write.incarnation] = current = replace(current, expires_at=write.expires_at)
        return lives

    def life_of(self, item: Operation | Effect) -> str:
        """The life that answered, or that did it; "" stands for the only one there was."""
        if item.incarnation is not None:
            return item.incarnation
        return self._only_life

    @cached_property
    def _only_life(self) -> str:
        known: dict[str | None, None] = {}
        for items in (self.writes, self.records, self.operations, self.ledger, self.business):
            known |= dict.fromkeys(item.incarnation for item in items)
        known.pop(None, None)
        return next(iter(known)) or "" if len(known) == 1 else ""

    def changes(self) -> Iterator[tuple[Write | None, Write]]:
        """Each write with the row that it found; None where there was none."""
        for before, after in pairwise((None, *self.writes)):
            assert after is not None
            yield (None if before is None or before.state is None else before), after

    def lines(self) -> tuple[str, ...]:
        """The story to read, in the order of events."""
        told = [(op.invoked, f"{op.id} sent with {op.fingerprint}") for op in self.operations]
        told += [(op.ended, _heard(op)) for op in self.operations if op.ended is not None]
        told += [(one.at, f"charged at the provider: {_done(one)}") for one in self.ledger]
        told += [(one.at, f"business row committed: {_done(one)}") for one in self.business]
        told += [(write.at, _wrote(write)) for write in self.writes]
        told.sort(key=lambda line: line[0])
        return tuple(f"{at:>5}  {text}" for at, text in told)


def stories(history: History) -> list[Story]:
    """The history, key by key: keys know nothing of each other."""
    found: dict[tuple[str, str], Story] = {}

    def of(scope: str, key: str) -> Story:
        return found.setdefault((scope, key), Story(scope, key, history.healed))

    for operation in history.operations:
        of(operation.scope, operation.key).operations.append(operation)
    for effect in history.ledger:
        of(effect.scope, effect.key).ledger.append(effect)
    for effect in history.business:
        of(effect.scope, effect.key).business.append(effect)
    for write in sorted(history.writes, key=lambda write: write.at):
        of(write.scope, write.key).writes.append(write)
    for record in history.records:
        of(record.scope, record.key).records.append(record)
    for dispatch in history.outbox:
        of(dispatch.scope, dispatch.key).outbox.append(dispatch)
    for sighting in history.sightings:
        of(sighting.scope, sighting.key).sightings.append(sighting)
    return list(found.values())


def _heard(op: Operation) -> str:
    what = op.code or f"{op.status} {op.body!r}"
    return f"{op.id} heard {op.kind}: {what}{' (replayed)' if op.replayed else ''}"


def _done(effect: Effect) -> str:
    by = f" by {effect.operation}" if effect.operation else ""
    return f"{effect.id} for {effect.fingerprint}{by}"


def _wrote(write: Write) -> str:
    row = f"incarnation {write.incarnation[:8]} fence {write.fence} version {write.version}"
    by = f" by {write.operation}" if write.operation else ""
    return f"{write.name or 'write'}{by}: {write.state or 'row deleted'}, {row}"
