"""The checker: reads the history of a run and reports each violation of a guarantee.

Each rule is a function of one key's story. It does not depend on the source of the history, so the same rules check a
simulated run and a killed server. A committed write is checked against the row before it: its transition, its time and
its proof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from oncekey.core import transitions
from oncekey.core.model import Code, State
from oncekey.core.transitions import ROWS, Fence
from oncekey_demo.history import ClientOperation, ClientSaw, Effect, History, Lapse, Proof, Story, Write, stories

Edge: TypeAlias = tuple[State | None, State | None, bool]
"""The state before, the state after, and whether the write begins a new life."""

_PROOFS: Final[Mapping[transitions.Proof, Proof | None]] = {
    transitions.Proof.NO_ROW: Proof.NO_ROW,
    transitions.Proof.OWNER: Proof.OWNER,
    transitions.Proof.VERSION: Proof.VERSION,
    transitions.Proof.PARCEL: None,  # an outbox item's claim is not in the record
    transitions.Proof.OWNER_AND_PARCEL: None,
}


def _edges() -> Mapping[Edge, tuple[tuple[Fence, Proof | None], ...]]:
    """Edge -> how the fence may change, under which proof; computed from TRANSITIONS."""
    edges: dict[Edge, tuple[tuple[Fence, Proof | None], ...]] = defaultdict(tuple)
    for row in ROWS:
        anew = row.source is not None and "incarnation" in row.sets
        edges[row.source, row.to, anew] += ((row.fence, _PROOFS[row.proof]),)
    return MappingProxyType(dict(edges))


EDGES: Final = _edges()


def illegal(before: Write | None, after: Write) -> Iterator[str]:
    """Report a transition that has no row in TRANSITIONS."""
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
        yield f"{move} changed the fence from {fence} to {after.fence}"
    if before is not None and after.version <= before.version:
        yield f"{move} changed the version from {before.version} to {after.version}"
    if before is not None and not anew and None not in {before.steps, after.steps} and _forgot(before, after):
        yield f"{move} lost finished steps: {before.steps} before, {after.steps} now"
    if before is not None and not anew and before.fingerprint != after.fingerprint:
        yield f"{move} changed the fingerprint from {before.fingerprint} to {after.fingerprint}"


def premature(before: Write | None, after: Write) -> Iterator[str]:
    """Report a legal transition that was too early by the store's clock."""
    if after.now is None:
        return
    if after.clock is not None and after.now < after.clock:
        yield f"{after.name}: stamped with a time {after.clock - after.now} microseconds before its statement"
    entered = after.state == State.COMPLETED and (before is None or before.state != State.COMPLETED)
    if entered and after.ttl is not None and (after.expires_at or 0) < after.now + after.ttl:
        yield f"{after.name}: completed, but it expires before its time to live has passed"
    if before is None:
        return
    seen_at = after.now if after.seen_at is None else max(after.now, after.seen_at)
    by_stranger = after.proof is Proof.VERSION and before.state == State.IN_PROGRESS
    if by_stranger and before.lease_until is not None and before.lease_until > seen_at:
        yield f"{after.name}: moved a record with a live lease"
    # A record that the reaper has marked stays expired, even if the clock is set back afterwards.
    alive = before.state != State.EXPIRED
    ended = alive and (after.state in {None, State.EXPIRED} or after.incarnation != before.incarnation)
    discarded = after.state is None and after.proof is Proof.OWNER
    if ended and not discarded and before.expires_at is not None and before.expires_at > seen_at:
        yield f"{after.name}: ended a life before it expired"


def unproven(before: Write | None, after: Write) -> Iterator[str]:
    """Report a write without a valid proof of ownership or version."""
    if before is None:
        if after.proof in {Proof.OWNER, Proof.VERSION}:
            yield f"{after.name}: it proved {after.proof}, but there was no row"
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
                yield f"{after.name}: another process that had read version {seen} wrote to {there}"
        case Proof.NO_ROW:
            yield f"{after.name}: a claim overwrote an existing row"
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


class Rule(StrEnum):
    """The rules, each for one life of a key."""

    ONE_EFFECT = "S1 at most one effect"
    NO_LOST_ACK = "S2 no lost acknowledgement"
    ONE_ANSWER = "S3 one response"
    NO_PHANTOM = "S4 no phantom"
    REAL_TIME = "S5 real time"
    MISMATCH = "S6 mismatch refused"
    LEGAL = "S7 legal moves only"
    FENCED = "S8 fenced writes"
    OUTBOX = "S9 the outbox loses and invents nothing"
    CONSERVED = "S10 every effect is accounted for"
    KEPT = "S11 kept until expiry"
    ONE_RUNNER = "S12 one runner under a lock"
    EMPTY_HANDS = "S13 a waiting request holds nothing"
    PROGRESS = "S14 progress after heal"
    EMPTY = "S15 the outbox is empty after heal"
    TRUTH = "S16 the record matches the effects"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule in a sentence, with the history of its key."""

    rule: Rule
    scope: str
    key: str
    sentence: str
    story: tuple[str, ...]

    def __str__(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.story)
        return f"{self.rule}: key {self.key!r} of {self.scope!r}: {self.sentence}\n{lines}"


OUTAGES: Final = frozenset({Code.STORE_UNAVAILABLE})
"""Refusals that a server may return at any time, because it could not reach the store."""

_UNFINISHED: Final = frozenset({State.PENDING, State.IN_PROGRESS})
_ANSWERED: Final = frozenset({State.COMPLETED, State.EXPIRED})


def check(history: History, rules: frozenset[Rule] = frozenset(Rule)) -> tuple[Violation, ...]:
    """Every violation in the history."""
    return tuple(
        Violation(rule, story.scope, story.key, sentence, story.lines())
        for story in stories(history)
        for rule, look in LOOKS.items()
        if rule in rules
        for sentence in look(story)
    )


def _one_effect(story: Story) -> Iterator[str]:
    for life, effects in _by_life(story).items():
        for kind in dict.fromkeys(effect.kind for effect in effects):
            same = [effect for effect in effects if effect.kind == kind]
            if len(same) > 1:
                yield f"life {life[:8]} was executed {len(same)} times: {_names(same)}"


def _no_lost_ack(story: Story) -> Iterator[str]:
    effects = _by_life(story)
    for op in _ok(story):
        life = story.life_of(op)
        if _success(op) and not effects.get(life):
            yield f"{op.id} got {op.status}, but nothing was done for it"
        done = {effect.kind for effect in effects.get(life, [])}
        if _success(op) and (missing := [kind for kind in op.promises if kind not in done]):
            yield f"{op.id} got {op.status}, but there is no {', '.join(missing)}"
        if life in story.lives and story.lives[life].ended is None:
            record = next((one for one in story.records if one.incarnation == life), None)
            if record is None or record.state not in _ANSWERED:
                yield f"{op.id} got {op.status}, but its record is now {record and record.state}"
            elif (record.status, record.body) != (op.status, op.body):
                yield f"{op.id} got {op.status} {op.body!r}, but its record has {record.status} {record.body!r}"


def _one_answer(story: Story) -> Iterator[str]:
    answers: dict[str, list[ClientOperation]] = defaultdict(list)
    for op in _ok(story):
        answers[story.life_of(op)].append(op)
    for life, ops in answers.items():
        if len({(op.status, op.body) for op in ops}) > 1:
            yield f"life {life[:8]} sent different responses: {', '.join(f'{op.id} {op.body!r}' for op in ops)}"
        first_hand = [op for op in ops if not op.replayed]
        if len(first_hand) > 1:
            yield f"life {life[:8]} ran for more than one: {', '.join(op.id for op in first_hand)}"


def _no_phantom(story: Story) -> Iterator[str]:
    by_id = {op.id: op for op in story.operations}
    for effect in story.effects:
        asked = (op.invoked for op in story.operations if op.fingerprint == effect.fingerprint)
        if min(asked, default=effect.at) >= effect.at:
            yield f"{effect.id} was done for {effect.fingerprint}, which no client had sent"
        doer = by_id.get(effect.operation or "")
        if doer is not None and doer.kind is ClientSaw.FAIL:
            yield f"{doer.id} was refused as not executed ({doer.code}), but it did {effect.id}"
    for effect in story.effects:
        life = story.lives.get(story.life_of(effect))
        if life is not None and life.fingerprint not in {None, effect.fingerprint}:
            yield f"{effect.id} was done for {effect.fingerprint} in a life of {life.fingerprint}"
    prints = {story.life_of(effect): effect.fingerprint for effect in story.effects}
    prints |= {life.incarnation: life.fingerprint for life in story.lives.values() if life.fingerprint}
    for op in _ok(story):
        mine = prints.get(story.life_of(op), op.fingerprint)
        if mine != op.fingerprint:
            yield f"{op.id} sent {op.fingerprint} and got the response to {mine}"
    for op in story.operations:
        if op.code == Code.IN_PROGRESS and op.ended is not None:
            last = max((write for write in story.writes if write.at < op.ended), key=_at, default=None)
            if last is not None and last.operation == op.id and last.state == State.IN_PROGRESS:
                yield f"{op.id} had to wait for its own claim: no process runs it"


def _real_time(story: Story) -> Iterator[str]:
    for op in story.operations:
        if op.ended is None or op.kind is ClientSaw.INFO or op.code in OUTAGES | {Code.KEY_EXPIRED}:
            continue
        for known in _ok(story):
            life = story.life_of(known)
            there = story.lives.get(life)
            lasted = there is None or (there.lasts(op.ended) and there.binds(op))
            told_before = known.ended is not None and known.ended < op.invoked
            if not (told_before and lasted and known.fingerprint == op.fingerprint):
                continue
            if not (op.kind is ClientSaw.OK and op.replayed and story.life_of(op) == life):
                yield f"{op.id} was sent after {known.id} had its response, and got {op.code or op.status} instead"
                break


def _mismatch(story: Story) -> Iterator[str]:
    for op in story.operations:
        if op.ended is None or op.kind is ClientSaw.INFO or op.code in OUTAGES:
            continue
        for life in story.lives.values():
            other = life.fingerprint not in {None, op.fingerprint}
            stood = life.spans(op.invoked, op.ended) and life.binds(op)
            if other and stood and op.code != Code.KEY_REUSED:
                yield f"{op.id} sent {op.fingerprint} for a key of {life.fingerprint}, and got {op.code or op.status}"


def _legal(story: Story) -> Iterator[str]:
    begun: set[str] = set()
    for before, after in story.changes():
        anew = after.state is not None and (before is None or before.incarnation != after.incarnation)
        if anew and after.incarnation in begun:
            yield f"{after.name}: incarnation {after.incarnation[:8]} began a second time"
        begun.add(after.incarnation)
        yield from illegal(before, after)
        yield from premature(before, after)


def _fenced(story: Story) -> Iterator[str]:
    for before, after in story.changes():
        yield from unproven(before, after)


def _outbox(story: Story) -> Iterator[str]:
    for one in story.outbox:
        if one.committed and not (one.delivered or one.waiting or one.dead):
            yield f"message {one.id[:8]} was committed, but is neither delivered nor waiting nor dead"
        if one.delivered and not one.committed:
            yield f"message {one.id[:8]} was delivered, but its transaction was never committed"


def _conserved(story: Story) -> Iterator[str]:
    """Every effect at the provider has a response to a client, a stored response, or a record to be checked."""
    if not story.healed or not story.records:
        return
    lines = any(_success(op) for op in _ok(story))
    open_ended = any(record.state == State.UNKNOWN or record.begun for record in story.records)
    # A client may give up before its response is stored; it is enough that a retry would get it.
    answered = {write.incarnation for write in story.writes if write.state == State.COMPLETED}
    for effect in story.ledger:
        if not effect.undone and not lines and not open_ended and story.life_of(effect) not in answered:
            yield f"{effect.id} was done, but no client got its response, and no worker is due to check it"


def _empty(story: Story) -> Iterator[str]:
    if story.healed:
        for one in story.outbox:
            if one.waiting:
                yield f"the faults have ended, but message {one.id[:8]} is still waiting"


def _kept(story: Story) -> Iterator[str]:
    """Responses are kept for their ttl by a monotonic clock: a jump of the store's clock must not delete them."""
    done: dict[str, tuple[int, int]] = {}
    for write in story.writes:
        if write.elapsed is None or write.ttl is None:
            continue
        if write.state == State.COMPLETED:
            done.setdefault(write.incarnation, (write.elapsed, write.ttl))
        elif write.state is None and write.incarnation in done:
            finished, ttl = done[write.incarnation]
            if write.elapsed < finished + ttl:
                yield f"{write.name} removed a response {finished + ttl - write.elapsed} microseconds too early"


def _one_runner(story: Story) -> Iterator[str]:
    yield from _seen(story, Lapse.OVERLAP)


def _empty_hands(story: Story) -> Iterator[str]:
    yield from _seen(story, Lapse.HELD)


def _progress(story: Story) -> Iterator[str]:
    if not story.healed:
        return
    for record in story.records:
        if record.state in _UNFINISHED:
            yield f"the faults have ended, but the record is still {record.state}"
        if record.state == State.UNKNOWN and not record.ticket:
            yield "the record is unknown, but no worker is due to check it"


def _truth(story: Story) -> Iterator[str]:
    """A record at rest matches the effects that happened."""
    effects = _by_life(story)
    for record in story.records:
        done = effects.get(record.incarnation, [])
        # A record with finished steps may be retryable: the next owner resumes after them.
        if record.state == State.FAILED_RETRYABLE and done and not record.begun:
            yield f"the record is retryable without a finished step, but {_names(done)} was done"


LOOKS: Mapping[Rule, Callable[[Story], Iterator[str]]] = MappingProxyType(
    {
        Rule.ONE_EFFECT: _one_effect,
        Rule.NO_LOST_ACK: _no_lost_ack,
        Rule.ONE_ANSWER: _one_answer,
        Rule.NO_PHANTOM: _no_phantom,
        Rule.REAL_TIME: _real_time,
        Rule.MISMATCH: _mismatch,
        Rule.LEGAL: _legal,
        Rule.FENCED: _fenced,
        Rule.OUTBOX: _outbox,
        Rule.CONSERVED: _conserved,
        Rule.KEPT: _kept,
        Rule.ONE_RUNNER: _one_runner,
        Rule.EMPTY_HANDS: _empty_hands,
        Rule.PROGRESS: _progress,
        Rule.EMPTY: _empty,
        Rule.TRUTH: _truth,
    }
)
"""Rule -> the function that checks it, for every rule."""


def _seen(story: Story, lapse: Lapse) -> Iterator[str]:
    for one in story.sightings:
        if one.lapse is lapse:
            yield f"{one.operation}: {lapse}"


def _ok(story: Story) -> list[ClientOperation]:
    return [op for op in story.operations if op.kind is ClientSaw.OK]


def _at(write: Write) -> int:
    return write.at


def _success(op: ClientOperation) -> bool:
    return op.status is not None and op.status // 100 == 2  # noqa: PLR2004  (the class of the status)


def _by_life(story: Story) -> dict[str, list[Effect]]:
    lives: dict[str, list[Effect]] = defaultdict(list)
    for effect in story.effects:
        lives[story.life_of(effect)].append(effect)
    return lives


def _names(effects: list[Effect]) -> str:
    return ", ".join(effect.id for effect in effects)
