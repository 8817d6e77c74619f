"""Whether one committed write was a legal one: its edge, its moment and its proof, from the two rows alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.core import transitions
from oncekey.core.model import State
from oncekey.core.transitions import ROWS, Fence
from oncekey.testing.history import Proof

if TYPE_CHECKING:
    from oncekey.testing.history import Write


Edge: TypeAlias = tuple[State | None, State | None, bool]
"""From, to, and whether in a new life."""

_PROOFS: Final[Mapping[transitions.Proof, Proof | None]] = {
    transitions.Proof.NO_ROW: Proof.NO_ROW,
    transitions.Proof.OWNER: Proof.OWNER,
    transitions.Proof.VERSION: Proof.VERSION,
    transitions.Proof.ITEM: None,  # an outbox item's claim is not in the record
    transitions.Proof.OWNER_AND_ITEM: None,
}


def _edges() -> Mapping[Edge, tuple[tuple[Fence, Proof | None], ...]]:
    """Edge -> what may become of the fence under which proof; drawn from TRANSITIONS itself."""
    edges: dict[Edge, tuple[tuple[Fence, Proof | None], ...]] = defaultdict(tuple)
    for row in ROWS:
        anew = row.source is not None and "incarnation" in row.sets
        edges[row.source, row.to, anew] += ((row.fence, _PROOFS[row.proof]),)
    return MappingProxyType(dict(edges))


EDGES: Final = _edges()


def illegal(before: Write | None, after: Write) -> Iterator[str]:
    """No row of TRANSITIONS makes this move."""
    source, to = _state(before), _state(after)
    anew = before is not None and after.state is not None and before.incarnation != after.incarnation
    move = f"{after.name}: {source or 'no row'} -> {to or 'no row'}{' in a new life' if anew else ''}"
    ways = EDGES.get((source, to, anew))
    if ways is None:
        yield f"{move} is not a legal move"
        return
    fences = [fence for fence, proof in ways if None in {proof, after.proof} or proof is after.proof]
    if not fences:
        yield f"{move} cannot be made by proving {after.proof}"
        return
    if to is None:
        return
    fence = before.fence if before else 0
    if not any(after.fence == _fence(change, fence) for change in fences):
        yield f"{move} took the fence from {fence} to {after.fence}"
    if before is not None and after.version <= before.version:
        yield f"{move} took the version from {before.version} to {after.version}"
    if before is not None and not anew and None not in {before.steps, after.steps} and _forgot(before, after):
        yield f"{move} forgot finished steps: {before.steps} before, {after.steps} now"
    if before is not None and not anew and before.fingerprint != after.fingerprint:
        yield f"{move} changed the fingerprint from {before.fingerprint} to {after.fingerprint}"


def premature(before: Write | None, after: Write) -> Iterator[str]:
    """The move is legal, but its time had not come by the store's own clock."""
    if after.now is None:
        return
    if after.clock is not None and after.now < after.clock:
        yield f"{after.name}: stamped with an instant {after.clock - after.now} microseconds before it was said"
    entered = after.state == State.COMPLETED and (before is None or before.state != State.COMPLETED)
    if entered and after.ttl is not None and (after.expires_at or 0) < after.now + after.ttl:
        yield f"{after.name}: completed, yet it expires before its time to live has passed"
    if before is None:
        return
    seen_at = after.now if after.seen_at is None else max(after.now, after.seen_at)
    by_stranger = after.proof is Proof.VERSION and before.state == State.IN_PROGRESS
    if by_stranger and before.lease_until is not None and before.lease_until > seen_at:
        yield f"{after.name}: moved a record whose lease was not over"
    # What the reaper has marked is over: a clock that is set back afterwards does not give it its life back.
    alive = before.state != State.EXPIRED
    ended = alive and (after.state in {None, State.EXPIRED} or after.incarnation != before.incarnation)
    discarded = after.state is None and after.proof is Proof.OWNER
    if ended and not discarded and before.expires_at is not None and before.expires_at > seen_at:
        yield f"{after.name}: ended a life before it expired"


def unproven(before: Write | None, after: Write) -> Iterator[str]:
    """The writer did not hold what it wrote to."""
    if before is None:
        if after.proof in {Proof.OWNER, Proof.VERSION}:
            yield f"{after.name}: what was proven is {after.proof}, and there was no row"
        return
    proven = (after.proven_incarnation or "")[:8]
    match after.proof:
        case Proof.OWNER:
            if (before.incarnation, before.fence) != (after.proven_incarnation, after.proven_fence):
                held, there = f"{proven}/{after.proven_fence}", f"{before.incarnation[:8]}/{before.fence}"
                yield f"{after.name}: the owner of {held} wrote to {there}"
        case Proof.VERSION:
            if (before.incarnation, before.version) != (after.proven_incarnation, after.proven_version):
                seen, there = f"{proven}/{after.proven_version}", f"{before.incarnation[:8]}/{before.version}"
                yield f"{after.name}: a stranger who had seen version {seen} wrote to {there}"
        case Proof.NO_ROW:
            yield f"{after.name}: a claim wrote over a row that was there"
        case None:
            return


def _forgot(before: Write, after: Write) -> bool:
    return (after.steps or 0) < (before.steps or 0)


def _state(write: Write | None) -> State | None:
    return None if write is None or write.state is None else State(write.state)


def _fence(change: Fence, before: int) -> int | None:
    match change:
        case Fence.UP:
            return before + 1
        case Fence.SAME:
            return before
        case Fence.FIRST:
            return 1
        case Fence.GONE:
            return None
