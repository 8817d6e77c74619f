"""The straight path and the flow: the same statements in the same order, and the same answers, whatever happens.

Each case is served twice, with the straight path and without it, and everything that a runtime and the client could
see is compared. The real servers, the races, the simulator and the crash proof run through the straight path, too.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncekey.core.endings import Business, Decision
from oncekey.core.errors import (
    CommitAmbiguousError,
    RolledBackError,
    StoreBusyError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Body, Transaction
from oncekey.core.model import Code, Completed, Outcome, Record, RecordId, Retryable, Snapshot, State, StoredResponse
from oncekey.core.onecommit import Locked, WriteKind, WriteTarget
from oncekey.core.policy import InProgress, Policy
from oncekey.databases.postgres.server import as_text
from oncekey.databases.postgres.store import PostgresStore
from oncekey.engine import straight as path
from oncekey.engine.actions import (
    Aside,
    Begin,
    Commit,
    Drop,
    Execute,
    Interrupted,
    Invoke,
    Keep,
    Later,
    Life,
    Recall,
    Rollback,
    Sleep,
)
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.local import record_as_claimed
from oncekey.engine.run import Breaker, Run, Site
from oncekey.engine.serve import serve
from oncekey.observe.events import Event
from oncekey.testing.claims import START, ManualClock, a_claim
from proof.crash.runtime import Unasked

CLAIM: Final = a_claim("key-1", incarnation=UUID(int=7))
NEW_KEY: Final = Locked(got=True, snapshot=Snapshot(None, START), begun=5)
RUNNING: Final = record_as_claimed(CLAIM, WriteTarget(WriteKind.NEW, None), START)
JSON: Final = ((b"content-type", b"application/json"),)


def finished(fingerprint: str = CLAIM.fingerprint) -> Record:
    response = StoredResponse(201, JSON, b"{}")
    return replace(
        RUNNING, state=State.COMPLETED, outcome=Outcome.SUCCESS, response=response, fingerprint=fingerprint, owner=None
    )


def seen(record: Record | None, *, got: bool = True, other: bool = False) -> Locked:
    return Locked(got=got, snapshot=Snapshot(record, START), begun=5, other=other)


def answered(status: int, outcome: Outcome = Outcome.SUCCESS, rows: Business = Business.COMMIT) -> Decision:
    return Decision(Completed(StoredResponse(status, JSON, b'{"id":1}'), outcome), rows)


CREATED: Final = answered(201)


@dataclass(frozen=True)
class Case:
    """What happens to one request."""

    looks: Locked | StoreError = NEW_KEY
    decision: Decision = CREATED
    emits: bool = False
    commits: BaseException | Drop | None = None
    """What COMMIT leads to; None: it is confirmed."""
    waits: bool = False


LOOKS: Final = {
    "new": NEW_KEY,
    "replay": seen(finished()),
    "replay-without-the-lock": seen(finished(), got=False),
    "mismatch": seen(finished("jcs1:sha256:" + "a7" * 32)),
    "expired": seen(replace(finished(), expires_at=START - 1)),
    "in-progress": seen(None, got=False),
    "another-request-in-progress": seen(None, got=False, other=True),
    "claimed": seen(RUNNING),
    "retryable": seen(replace(RUNNING, state=State.FAILED_RETRYABLE, owner=None, lease_until=None)),
    "outage": StoreUnavailableError("down"),
    "busy": StoreBusyError("no connection"),
    "lost": StoreError("odd"),
}
DECISIONS: Final = {
    "success": CREATED,
    "redirect": answered(303),
    "declined": answered(402, Outcome.FAILURE, Business.ROLLBACK),
    "declined-with-rows": answered(402, Outcome.FAILURE),
    "success-without-rows": answered(201, rows=Business.ROLLBACK),
    "failed": Decision(Retryable("boom"), Business.ROLLBACK),
}
COMMITS: Final = {
    "taken": Drop(),
    "ambiguous": CommitAmbiguousError("no reply"),
    "outage": StoreUnavailableError("down"),
    "rolled-back": RolledBackError("a constraint"),
    "ended-by-the-handler": TransactionControlError("COMMIT"),
    "cancelled": Interrupted(),
    "bug": LookupError("of ours"),
}
CASES: Final = {
    **{f"look-{name}": Case(looks=look) for name, look in LOOKS.items()},
    **{f"wait-{name}": Case(looks=look, waits=True) for name, look in LOOKS.items()},
    **{f"decided-{name}": Case(decision=decision) for name, decision in DECISIONS.items()},
    **{f"emitted-{name}": Case(decision=decision, emits=True) for name, decision in DECISIONS.items()},
    **{f"commit-{name}": Case(commits=commit) for name, commit in COMMITS.items()},
    "emitted-commit-taken": Case(emits=True, commits=Drop()),
}


class Tx:
    connection = None


class Watched:
    """Serves one request, and notes what a runtime, an observer and the client see of it."""

    def __init__(self, case: Case, *, observed: bool = True) -> None:
        self.case = case
        self.notes: list[object] = []
        wait = InProgress.WAIT if case.waits else InProgress.CONFLICT
        self.ticks = iter(range(10**6))
        site = Site(
            PostgresStore(clock=ManualClock()),
            Breaker(lambda: 0.0),
            lambda: float(next(self.ticks)),
            float,
            wake=lambda: self.notes.append("wake"),
            notify=self._told if observed else None,
        )
        enrolment = Enrolment("create_order", CLAIM.effects, Policy(on_in_progress=wait), None)
        self.run = Run(site, CLAIM, enrolment, Unasked())

    def served(self) -> list[object]:
        """Everything in its order."""
        life = serve(self.run)
        try:
            self._perform(life)
        except StopIteration as stop:
            answer = stop.value
            code = None if answer is None else [line for line in answer.headers if line[0] != b"link"]
            self.notes.append(("answer", None if answer is None else (answer.status, code)))
        except (Exception, Interrupted) as error:
            self.notes.append(("raised", type(error)))
        run = self.run
        self.notes.append((run.expires_at, run.claim.id in run.site.settled_keys.known, run.site.breaker.failures))
        return self.notes

    def _told(self, event: Event) -> None:
        self.notes.append(("event", type(event).__name__, getattr(event, "to", None), getattr(event, "how", None)))

    def _perform(self, life: Life[Any]) -> None:
        action = next(life)
        while True:
            try:
                result = self._result(action)
            except (Exception, Interrupted) as error:
                action = life.throw(error)
            else:
                action = life.send(result)

    def _result(self, action: object) -> object:
        case = self.case
        match action:
            case Begin(first=first):
                assert first is not None
                self.notes.append(("Begin", as_text(next(first))))
                first.close()
                if isinstance(case.looks, StoreError):
                    raise case.looks
                return Tx(), case.looks
            case Invoke():
                self.notes.append(("handler", self.run.lease, self.run.tx is not None))
                if case.emits:
                    self.run.parcels.emit("shipped", {"id": 1}, None)
                return case.decision
            case Commit(last=last, fold=fold):
                assert last is not None
                self.notes.append(("Commit", None if fold is None else as_text(fold.statement), *self._said(last)))
                if isinstance(case.commits, BaseException):
                    raise case.commits
                return case.commits or Keep(None if fold is None else fold.read(()))
            case Transaction(name=name):
                self.notes.append(("Transaction", name))
                raise StoreUnavailableError("down")
            case Execute() | Rollback() | Sleep() | Later() | Aside() | Recall():
                self.notes.append(type(action).__name__)
                return None
            case _:
                raise AssertionError(action)

    @staticmethod
    def _said(last: Body[Any]) -> Iterator[str]:
        """The statements of a transaction's end, as a driver without folding executes them."""
        row = {"begun": NEW_KEY.begun, "expires_at": START}
        try:
            statement = next(last)
            while True:
                yield statement.name
                statement = last.send([row])
        except StopIteration:
            return


def both(case: Case, *, observed: bool = True) -> tuple[list[object], list[object]]:
    """What is seen of the straight path, and of the flow."""
    with patch.object(path, "TAKEN", new=False):
        flow = Watched(case, observed=observed).served()
    return Watched(case, observed=observed).served(), flow


@pytest.fixture(autouse=True)
def _taken() -> Iterator[None]:
    with patch.object(path, "TAKEN", new=True):
        yield


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "unobserved"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nobody_sees_which_way_a_request_took(case: Case, observed: bool) -> None:
    straight, flow = both(case, observed=observed)
    assert straight == flow


texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=12)
spans = st.integers(0, 2**62)
headers = st.lists(
    st.tuples(st.sampled_from([b"content-type", b"location", b"x-\xe9"]), st.binary(max_size=9)), max_size=3
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_it_sends_the_statements_of_the_flow(data: st.DataObject) -> None:
    claim = replace(
        CLAIM,
        id=RecordId(data.draw(texts), data.draw(texts)),
        incarnation=data.draw(st.uuids()),
        **{name: data.draw(texts) for name in ("operation", "method", "path", "fingerprint")},
        **{name: data.draw(spans) for name in ("lease", "deadline", "call_timeout", "ttl")},
        seed=data.draw(st.binary(max_size=32)),
    )
    response = StoredResponse(data.draw(st.integers(200, 399)), tuple(data.draw(headers)), data.draw(st.binary()))
    case = Case(decision=Decision(Completed(response, Outcome.SUCCESS), Business.COMMIT))
    with patch(f"{__name__}.CLAIM", claim):
        straight, flow = both(case)
    assert straight == flow
    assert [note[0] for note in straight if isinstance(note, tuple) and note[0] in {"Begin", "Commit"}] == [
        "Begin",
        "Commit",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"resumed": True},
        {"limits": iter(())},
        {"tx": Tx()},
        {"dependencies_hold_connections": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_request_that_has_more_to_ask_takes_the_flow(change: dict[str, Any]) -> None:
    run = Watched(Case()).run
    assert path.is_straight(run)
    assert not path.is_straight(Run(run.site, CLAIM, run.enrolment, Unasked(), **change))


@pytest.mark.parametrize("state", ["failing", "settled", "full"])
def test_so_does_one_that_may_be_answered_otherwise(state: str) -> None:
    run = Watched(Case()).run
    match state:
        case "failing":
            run.site.breaker.failed()
        case "settled":
            run.site.settled_keys.add(CLAIM.id)
        case _:
            run.site.is_full = lambda _: True
    assert not path.is_straight(run)


_SUCCESS: Final = """    if (
        decision.business is not Business.COMMIT
        or type(settlement) is not Completed
        or settlement.outcome is not Outcome.SUCCESS
        or run.parcels.used
    ):
"""
MUTANTS: Final = {
    "skips the look": (
        "local.enter(look, claim, run.policy)",
        "local.enter(type(look)(True, type(look.snapshot)(None, look.snapshot.now), look.begun), claim, run.policy)",
    ),
    "commits a 4xx directly": (_SUCCESS, "    if type(settlement) is not Completed or run.parcels.used:\n"),
    "forgets a parcel": ("one_commit_of(run, run.tx, entry, settlement)", "_alone(run, locks, entry, settlement)"),
    "does not wake the relay": ("        or run.parcels.used\n", ""),
    "takes an error for a commit": ("        sent = error\n", "        sent = Keep()\n"),
    "takes a refused record for a commit": ("if not isinstance(sent, Keep)", "if isinstance(sent, BaseException)"),
}


def _alone(run: Run, locks: Any, entry: Any, settlement: Completed) -> Commit:
    fold = locks.completing_at_commit(run.claim, entry.target, settlement, entry.begun)
    return Commit(run.tx, locks.completing(run.claim, entry.target, settlement, entry.begun), fold)


def mutated(name: str) -> Callable[[Run], Life[Any]]:
    """The straight path with one rule broken."""
    source = textwrap.dedent(inspect.getsource(path.straight))
    was, instead = MUTANTS[name]
    if name == "forgets a parcel":
        source = source.replace("        or run.parcels.used\n", "")
    assert source.count(was) == 1, "the mutant's text is gone"
    namespace = {**vars(path), "_alone": _alone}
    exec(source.replace(was, instead), namespace)
    return namespace["straight"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_one_is_noticed(name: str) -> None:
    with patch("oncekey.engine.serve.straight", mutated(name)):
        noticed = {title for title, case in CASES.items() for straight, flow in [both(case)] if straight != flow}
    assert noticed, "no case tells the mutant from the flow"
    assert noticed != set(CASES), "the mutant serves nothing"


def test_refusals_are_among_the_cases() -> None:
    """The comparison means something: the cases lead to different answers."""
    answers = {str(Watched(case).served()[-2]) for case in CASES.values()}
    assert len(answers) > len(Code) // 4
