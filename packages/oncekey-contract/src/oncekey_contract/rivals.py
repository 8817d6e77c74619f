"""Another writer between a read and its write.

The scenarios create records in several states. On each, every move that the table allows is tried, and just before its
write another writer moves the same record. The store must write the move exactly if the table still allows it for the
record that the other writer left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.core import model
from oncekey.testing.claims import LEASE, TTL
from oncekey_contract.proving import STEPS, by_owner
from oncekey_contract.walking import MOVES, Walked, facts_of
from oncekey_contract.world import ORDER, REPEATABLE, announced, begun, stand

if TYPE_CHECKING:
    from oncekey_contract.world import World

Start: TypeAlias = "Callable[[World], model.RecordId]"


def _in_state(state: model.State, effects: model.Effects, recovery: model.Recovery, later: model.Duration = 0) -> Start:
    def start(world: World) -> model.RecordId:
        standing = stand(world, state, effects=effects, recovery=recovery)
        world.advance(later)
        return standing.claim.id

    return start


def _with_finished_step(world: World) -> model.RecordId:
    claim, lease = begun(world)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    world.advance(LEASE)
    return claim.id


def _with_open_call(world: World) -> model.RecordId:
    return announced(world, REPEATABLE)[0].id


def _with_unknown_call(world: World) -> model.RecordId:
    claim, lease = announced(world)
    assert world.settle(lease, model.Doubtful("provider_timeout")).ours
    return claim.id


def _handed_back(world: World) -> model.RecordId:
    claim, lease = announced(world, REPEATABLE)
    assert world.settle(lease, model.HandedBack("stopped")).ours
    return claim.id


_LOCAL: Final = (model.Effects.LOCAL, model.Recovery.RETRY)
_INLINE: Final = (model.Effects.INLINE, model.Recovery.UNKNOWN)
STARTS: Final[Mapping[str, tuple[Start, tuple[str, ...]]]] = MappingProxyType(
    {
        "in progress": (
            _in_state(model.State.IN_PROGRESS, *_LOCAL),
            ("renew", "settle as completed", "settle as unknown", "discard"),
        ),
        "in progress for too long": (
            _in_state(model.State.IN_PROGRESS, *_LOCAL, later=LEASE),
            ("renew", "take_over", "mark_unknown", "sweep to retryable"),
        ),
        "a step done": (_with_finished_step, ("checkpoint", "take_over")),
        "a call announced": (_with_open_call, ("renew", "result", "settle as unknown")),
        "handed back": (_handed_back, ("take_over",)),
        "retryable": (_in_state(model.State.FAILED_RETRYABLE, *_LOCAL), ("take_over", "settle as completed")),
        "unknown": (_in_state(model.State.UNKNOWN, *_INLINE), ("settle as completed", "not executed")),
        "unknown call": (_with_unknown_call, ("result", "not executed")),
        "completed": (_in_state(model.State.COMPLETED, *_LOCAL), ("extend", "bust")),
        "completed and expired": (_in_state(model.State.COMPLETED, *_LOCAL, later=2 * TTL), ("supersede",)),
    }
)
"""Records, and the moves of the other writer on each: the owner, the next owner, a sweeper or an operator."""


class Rivals:
    """A write is never overwritten by a writer that has not read it."""

    def test_every_move_handles_a_write_between_its_read_and_write(self, world: World) -> None:
        """Every move is tried with another one just before its write (P1, F1)."""
        wrong = [line for name in STARTS for line in outdone(world, name)]
        assert not wrong, "\n".join(wrong)


def outdone(world: World, name: str) -> Iterator[str]:
    """The store's violations of the table, for records that begin like this."""
    start, rivals = STARTS[name]
    sample = world.record(start(world))
    now = world.clock.now
    allowed = [move for move in MOVES if move.expected(sample, now) and move.tried(world.store, sample) is not None]
    for move, rival in product(allowed, (one for one in allowed if one.name in rivals)):
        tried = _Tried(world, move, rival, world.record(start(world)))
        wrong = tried.wrong()
        if wrong:
            yield f"{move.name} of a record that was {name}, after {rival.name}: {wrong}"


@dataclass(slots=True)
class _Tried:
    """One move, with another one just before its write."""

    world: World
    move: Walked
    rival: Walked
    record: model.Record
    between: model.Record | None = None
    came: bool = False

    def wrong(self) -> str | None:
        """The store's violation of the table, if any."""
        flow = self.move.tried(self.world.store, self.record)
        assert flow is not None
        self.world.between(self._write_as_rival)
        self.world.go(flow)
        if not self.came:
            return "it wrote without a writing statement"
        there = self.world.find(self.record.id).record
        written = there != self.between
        if written == self._is_allowed():
            return None
        seen = "no record" if self.between is None else facts_of(self.between)
        return f"it is {'written' if written else 'refused'}, where there was {seen}"

    def _write_as_rival(self) -> None:
        flow = self.rival.tried(self.world.store, self.record)
        assert flow is not None
        assert self.world.go(flow), f"{self.rival.name} is refused"
        self.between = self.world.find(self.record.id).record
        self.came = True

    def _is_allowed(self) -> bool:
        """Whether the proof still matches, and the table allows the move on the current record."""
        seen, there = self.record, self.between
        if there is None or seen.incarnation != there.incarnation:
            return False
        if not (seen.fence == there.fence if by_owner(self.move) else seen.version == there.version):
            return False
        if self.move.name in STEPS and seen.memo != there.memo:
            return False
        if self.move.name == "announce" and seen.intent != there.intent:
            return False
        return self.move.expected(there, self.world.clock.now)
