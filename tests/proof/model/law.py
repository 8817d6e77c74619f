"""The law that a model runs under: the real tables, and the few rules that live in statements beside them.

`SOUND` is the law as it is. A mutant is a law with one rule left out, and the model must find the hole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from oncekey.core.guards import Facts
from oncekey.core.model import (
    SECOND,
    Claim,
    EntryKind,
    Intent,
    Lease,
    MemoEntry,
    Outcome,
    Record,
    RecordId,
    Recovery,
    Snapshot,
    State,
    StoredResponse,
)
from oncekey.core.onecommit import Locked, write_target_for
from oncekey.core.policy import Policy
from oncekey.core.rulings import Next, answer_from, rule
from oncekey.core.transitions import ROWS, Actor, Table, Transition, Trigger, find_transition, tabulate
from oncekey.engine import local
from proof.model.world import CHARGE, REST, Answer, Breach, Parcel, Proc, Rec, Scenario
from proof.patching import patched

if TYPE_CHECKING:
    from oncekey.core.model import Effects, Verdict
    from oncekey.engine.local import Entry


NOW = 1_000 * SECOND
"""The moment at which everybody looks: what has passed lies before it, everything else after it."""

_ID = RecordId("tenant", "key")
_OURS = "ours"

Rule: TypeAlias = Callable[[Snapshot, Claim, Policy, Table], Next]


class Downstream(StrEnum):
    """What the key that goes to the provider is made from; only the first is right (D1)."""

    REQUEST = "scope, key and fingerprint"
    INCARNATION = "incarnation"
    ATTEMPT = "attempt"
    KEY = "scope and key"


@dataclass(frozen=True, slots=True)
class Law:
    """Every rule that a mutant may leave out."""

    rows: tuple[Transition, ...] = ROWS
    rule: Rule = rule
    owner_proves_incarnation: bool = True
    owner_proves_fence: bool = True
    version_moves: bool = True
    commit_proves_version: bool = True
    completion_extends: bool = True
    record_names_effects: bool = True
    window_closes: bool = True
    sends_are_counted: bool = True
    parcel_follows_result: bool = True
    record_answers: bool = True
    asks_after_waiting: bool = True
    downstream: Downstream = Downstream.REQUEST


SOUND = Law()


class Trial:
    """A law and a scenario, with the verdicts of the real functions remembered."""

    def __init__(self, law: Law, scenario: Scenario) -> None:
        self.law = law
        self.scenario = scenario
        self.table = tabulate(law.rows)
        self.used: set[int] = set()
        """Which rows have been made use of, by their place in the law."""
        self.places = {id(row): place for place, row in enumerate(law.rows)}
        self.policy = Policy(max_attempts=scenario.max_attempts)
        self._judged: dict[tuple[object, ...], Transition | None] = {}
        self._answered: dict[tuple[object, ...], Verdict] = {}
        self._ruled: dict[tuple[object, ...], Next] = {}
        self._entered: dict[tuple[object, ...], Entry] = {}

    def judged(
        self,
        trigger: Trigger,
        actor: Actor,
        rec: Rec | None,
        parcel: Parcel | None = None,
        said: tuple[str, ...] = (),
        *,
        phase: str = "",
        route: Effects | None = None,
    ) -> Transition | None:
        """The row of the table that allows this move, if one does."""
        asked = (trigger, actor, rec, parcel, said, phase, route)
        if asked not in self._judged:
            facts = self._facts(rec, parcel, frozenset(said), phase, route)
            row = find_transition(trigger, actor, facts, self.table)
            self._judged[asked] = row if isinstance(row, Transition) else None
        return self._judged[asked]

    def ruled(self, rec: Rec | None, body: str, route: Effects, *, ours: bool = False) -> Next:
        """What the real ruling says to a request with this body."""
        asked = (rec, body, route, ours)
        if asked not in self._ruled:
            snapshot = Snapshot(self._shown(rec, route), NOW)
            ruled = self.law.rule(snapshot, self._claim(body, route, ours=ours), self.policy, self.table)
            self._ruled[asked] = ruled
        return self._ruled[asked]

    def entered(self, rec: Rec | None, body: str, route: Effects, *, taken: bool) -> Entry:
        """What the lifecycle makes of the lock and the look (`engine.local.enter`), under this law."""
        asked = (rec, body, route, taken)
        if asked not in self._entered:
            look = Locked(got=not taken, snapshot=Snapshot(self._shown(rec, route), NOW), begun=NOW)
            law, table = self.law, self.table
            with patched(
                (local, "rule", lambda snapshot, claim, policy: law.rule(snapshot, claim, policy, table)),
                (local, "write_target_for", lambda snapshot, claim: write_target_for(snapshot, claim, table)),
            ):
                self._entered[asked] = local.enter(look, self._claim(body, route, ours=False), self.policy)
        return self._entered[asked]

    def answered(self, rec: Rec | None, proc: Proc) -> Verdict:
        """What the caller of a refused owner hears."""
        asked = (rec, proc.incarnation, proc.route)
        if asked in self._answered:
            return self._answered[asked]
        lease = Lease(_ID, UUID(int=proc.incarnation), 1, 1, proc.route, NOW, NOW, NOW)
        verdict = answer_from(Snapshot(self.record(rec) if rec else None, NOW), lease)
        self._answered[asked] = verdict
        return verdict

    def downstream_key(self, rec: Rec) -> str:
        """The key that goes with the call of this record's owner."""
        match self.law.downstream:
            case Downstream.REQUEST:
                return rec.body
            case Downstream.INCARNATION:
                return f"incarnation {rec.incarnation}"
            case Downstream.ATTEMPT:
                return f"{rec.body}, attempt {rec.attempts}"
            case Downstream.KEY:
                return "key"

    def _facts(
        self, rec: Rec | None, parcel: Parcel | None, said: frozenset[str], phase: str, route: Effects | None
    ) -> Facts:
        repeatable = rec is not None and self.scenario.dedup and not (rec.window_over and self.law.window_closes)
        return Facts(
            record=self._shown(rec, route),
            now=NOW,
            effects=route or self.scenario.effects,
            phase=phase,
            entered="not entered" not in said,
            never_sent="never sent" in said,
            call_open="call open" in said,
            locked="locked" in said,
            waited="waited" in said,
            result_given="result given" in said,
            parcel_claimed=parcel is not None and parcel.claimed,
            parcel_sent=rec is not None and rec.sends > 0 and "parcel not sent" not in said,
            parcel_repeatable=parcel is not None and repeatable,
            reason="reason" in said,
            soft=self.scenario.soft,
            max_attempts=self.scenario.max_attempts,
        )

    def _shown(self, rec: Rec | None, route: Effects | None) -> Record | None:
        if rec is None:
            return None
        if route is not None and not self.law.record_names_effects:
            rec = rec._replace(effects=route, recovery=Recovery.RETRY)
        return self.record(rec)

    def record(self, rec: Rec) -> Record:
        """The real record that stands for `rec`."""
        return Record(
            id=_ID,
            incarnation=UUID(int=rec.incarnation),
            operation="pay",
            effects=rec.effects,
            recovery=rec.recovery,
            method="POST",
            path="/payments",
            fingerprint=rec.body,
            seed=rec.body.encode(),
            state=rec.state,
            outcome=_outcome(rec.answer),
            entered=True,
            fence=1,
            version=1,
            owner=_OURS if rec.state is State.IN_PROGRESS else None,
            lease_until=None if rec.lease is None else _reached(not rec.lease),
            deadline=_reached(rec.deadline_over),
            call_timeout=SECOND,
            ttl=SECOND,
            attempts=rec.attempts,
            recovery_point=rec.memo[-1][0] if rec.memo else "started",
            memo=_memo(rec),
            intent=self._intent(rec),
            response=None if rec.answer is None else _response(rec.answer),
            last_error=None,
            reconcile_after=NOW if rec.state is State.UNKNOWN else None,
            reconcile_tries=0,
            created_at=0,
            last_run_at=0,
            finished_at=None,
            expires_at=_reached(rec.expired),
        )

    def _intent(self, rec: Rec) -> Intent | None:
        if not rec.sends:
            return None
        return Intent(
            phase=CHARGE,
            downstream_key=self.downstream_key(rec),
            digest="",
            sends=rec.sends if self.law.sends_are_counted else 1,
            first_sent_at=0,
            send_by=0,
            repeatable_until=_reached(rec.window_over and self.law.window_closes) if self.scenario.dedup else None,
        )

    def _claim(self, body: str, route: Effects, *, ours: bool) -> Claim:
        return Claim(
            id=_ID,
            incarnation=UUID(int=0),
            operation="pay",
            effects=route,
            recovery=Recovery.RETRY,
            method="POST",
            path="/payments",
            fingerprint=body,
            seed=body.encode(),
            owner=_OURS if ours else "another",
            lease=SECOND,
            deadline=SECOND,
            call_timeout=SECOND,
            ttl=SECOND,
        )


_KINDS = {CHARGE: EntryKind.CALL, REST: EntryKind.PHASE}


def _reached(passed: bool) -> int:
    return NOW if passed else NOW + SECOND


def _memo(rec: Rec) -> tuple[MemoEntry, ...]:
    memo = tuple(MemoEntry(name, _KINDS[name], value) for name, value in rec.memo)
    return (*memo[:-1], replace(memo[-1], by_hand=True)) if rec.by_hand else memo


def _outcome(answer: Answer | None) -> Outcome | None:
    if answer is None:
        return None
    return Outcome.SUCCESS if answer.ok else Outcome.FAILURE


def _response(answer: Answer) -> StoredResponse:
    return StoredResponse(201 if answer.ok else 402, (), repr(answer).encode())


def must(row: Transition | None, what: str) -> Transition:
    """The row for a move that the rulings asked for: the two tables may not disagree."""
    if row is None:
        raise Breach(f"the rulings ask for a move that no row allows: {what}")
    return row
