"""Mutants: the real parts with one rule broken. The checker must catch each, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oncekey.core.model import Effects
from oncekey.core.seed import seed_of
from oncekey.engine import request
from oncekey.testing.checker import Rule
from oncekey.testing.sim import broken_flows as flows
from oncekey.testing.sim.broken_statements import (
    OWNERS,
    STRANGERS,
    Flaw,
    Function,
    Line,
    Table,
    anyhow,
    assuming,
    keeping,
    line_of,
    setting,
    showing,
    whatever_the_state,
    with_flaw,
)
from oncekey.testing.sim.parts import Parts
from oncekey.testing.sim.scheduler import NEVER
from oncekey.testing.sim.timing import POLICY
from oncekey.testing.sim.workers import Operator, Reaper, Resolver, Sweeper, Worker
from oncekey.testing.sim.world import Scenario

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import RecordId
    from oncekey.flow import Rows

EVERYDAY = Scenario()
RESTORED = Scenario(effects=(Effects.INLINE,), provider_remembers=True, loses_records=True)
"""Records are lost, and a provider that remembers keys is what is left (F38)."""
RESTORED_RULES = frozenset({Rule.ONE_EFFECT, Rule.NO_LOST_ACK, Rule.NO_PHANTOM})
"""The others need the records that were lost."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken rule: what is broken, where it was seen or feared, and how to build it."""

    name: str
    what: str
    origin: str
    build: Callable[[], Parts]
    scenario: Scenario = EVERYDAY
    rules: frozenset[Rule] = frozenset(Rule)


def _workers(instead: type[Worker]) -> tuple[type[Worker], ...]:
    return tuple(
        instead if issubclass(instead, kind) and instead.name == kind.name else kind
        for kind in (Sweeper, Resolver, Reaper, Operator)
    )


def _flawed(flaw: Flaw, *names: str) -> Callable[[], Parts]:
    return lambda: Parts(commands=with_flaw(flaw, names))


def _no_proof(command: Function) -> Function:
    return assuming(fence="fence", incarnation="incarnation")(command)


def _zombie_renewal(command: Function) -> Function:
    return _no_proof(whatever_the_state(command))


def _expired_first(row: Line) -> Line:
    return {"state": "expired"} if row["expires_at"] is not None and row["expires_at"] <= row["now"] else {}


def _takers_fingerprint() -> Parts:
    def shown(row: Line) -> Line:
        over = row["lease_until"] is not None and row["lease_until"] <= row["now"]
        free = over or row["state"] == "failed_retryable"
        return {"fingerprint": row["asked"]["fingerprint"]} if free else {}

    taken = setting(lambda _, params: {"fingerprint": params["fingerprint"]})
    commands = with_flaw(showing(shown), ["claim"])
    return Parts(commands={**commands, "take_over": with_flaw(taken, ["take_over"])["take_over"]})


def _no_deadline() -> Parts:
    def late(command: Function) -> Function:
        def run(table: Table, **params: Any) -> Rows:  # noqa: ANN401  (a statement's parameters)
            line = line_of(table, params)
            if line is not None:
                line["deadline"] = NEVER
            return command(table, **params)

        return run

    return Parts(commands=with_flaw(late, ["renew"]), heartbeat=flows.beats_for_ever)


def _seed_from_life(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:
    return seed_of(record_id, fingerprint + str(incarnation), POLICY.secret)


def _seed_from_key(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:  # noqa: ARG001  (as the real)
    return seed_of(record_id, "", POLICY.secret)


_ALL: tuple[Mutant, ...] = (
    Mutant(
        "no_fence",
        "the owner proves its incarnation, not its fence",
        "peers 13",
        _flawed(assuming(fence="fence"), *OWNERS),
    ),
    Mutant(
        "fence_without_incarnation",
        "the owner proves its fence, which starts again with every row",
        "F1",
        _flawed(assuming(incarnation="incarnation"), *OWNERS),
    ),
    Mutant(
        "fence_for_strangers_only",
        "take-overs put the fence up, and owners write without proving anything",
        "peers 13",
        _flawed(_no_proof, *OWNERS),
    ),
    Mutant(
        "no_version_proof",
        "strangers write over whatever is there by now",
        "peers 1, 9",
        _flawed(assuming(seen_version="version"), *STRANGERS),
    ),
    Mutant(
        "no_version_bump",
        "writes leave the version as it was, so a stranger cannot see them",
        "design 1.3",
        _flawed(keeping("version"), *OWNERS, "take_over", "doubt"),
    ),
    Mutant(
        "expiry_before_state",
        "an unfinished record past its expiry is taken for a free key",
        "F3",
        _flawed(showing(_expired_first), "claim", "find"),
    ),
    Mutant(
        "born_expired",
        "completing leaves the expiry where the claim had set it",
        "F2",
        _flawed(keeping("expires_at"), "settle_completed", "resolve_executed"),
    ),
    Mutant(
        "settles_twice",
        "a release after the settlement wipes the stored success",
        "apishape 1",
        _flawed(whatever_the_state, "discard"),
    ),
    Mutant(
        "completes_any_state",
        "completing does not look at the state, so it writes over an answer",
        "techniques 3.4",
        _flawed(whatever_the_state, "settle_completed"),
    ),
    Mutant(
        "takers_fingerprint",
        "a take-over brings its own fingerprint",
        "peers 12",
        _takers_fingerprint,
    ),
    Mutant(
        "releases_in_finally",
        "a request without an answer deletes the claim, whoever owns it",
        "peers 3, 6, 13",
        lambda: Parts(commands=with_flaw(lambda _: anyhow, ["discard"]), serving=flows.ReleasesInFinally),
    ),
    Mutant(
        "lost_commit_is_failure",
        "an error at COMMIT is taken for a roll-back",
        "F8, F20",
        lambda: Parts(local=flows.TakesLostCommitForFailure),
    ),
    Mutant(
        "hosts_clock",
        "leases and expiries are stamped with the wall clock of whoever writes",
        "peers 2.4",
        lambda: Parts(hosts_clock=True),
    ),
    Mutant(
        "acknowledges_before_commit",
        "the client hears of a success that is not durable yet",
        "peers 12",
        lambda: Parts(local=flows.AcknowledgesBeforeCommit),
    ),
    Mutant(
        "renews_after_loss",
        "a heartbeat revives a lease that was lost, or extends somebody else's",
        "peers 13",
        _flawed(_zombie_renewal, "renew"),
    ),
    Mutant(
        "claims_anew",
        "a claim whose reply was lost is repeated as somebody else's, and conflicts with itself",
        "peers 18",
        lambda: Parts(begin=flows.claims_anew),
    ),
    Mutant(
        "answers_from_memory",
        "a refused settlement is answered with what the handler said",
        "P3, L2",
        lambda: Parts(local=flows.AnswersFromMemory),
    ),
    Mutant(
        "commits_twice",
        "business rows and settlement are two transactions",
        "design 3",
        lambda: Parts(local=flows.CommitsTwice),
    ),
    Mutant(
        "exception_releases",
        "a call without a reply is taken for one that was not made",
        "peers 15",
        lambda: Parts(inline=flows.CallsUncertainNotExecuted),
    ),
    Mutant(
        "sweeps_for_retry",
        "every stale record may run again, whatever it did to the outside",
        "F4",
        lambda: Parts(workers=_workers(flows.SweepsForRetry)),
    ),
    Mutant(
        "sweeper_fences",
        "sweeping puts the fence up, so an owner that was only late is locked out",
        "F11",
        _flawed(setting(lambda before, _: {"fence": before["fence"] + 1}), "sweep"),
    ),
    Mutant(
        "never_waits",
        '"not executed" is believed as soon as the provider says so',
        "F34",
        lambda: Parts(workers=_workers(flows.NeverWaits)),
    ),
    Mutant(
        "releases_live",
        "an operator's release does not look at the lease",
        "F39",
        lambda: Parts(workers=_workers(flows.ReleasesLive)),
    ),
    Mutant(
        "no_deadline",
        "the heartbeat keeps a hung handler's lease for ever",
        "F9",
        _no_deadline,
    ),
    Mutant(
        "reaps_anything",
        "the reaper deletes by age, unfinished records too",
        "F3, peers 11",
        lambda: Parts(commands=with_flaw(lambda _: anyhow, ["purge"]), workers=_workers(flows.ReapsAnything)),
    ),
    Mutant(
        "reaps_by_any_clock",
        "the reaper believes a store clock that was set forwards",
        "F41",
        lambda: Parts(workers=_workers(flows.TrustsAnyClock)),
    ),
    Mutant(
        "stale_cache",
        "a replay cache that knows no expiry, fingerprint or incarnation",
        "F40",
        lambda: Parts(begin=flows.cached(request.begin)),
    ),
    Mutant(
        "seed_from_incarnation",
        "the downstream key changes when the record is lost",
        "F38",
        lambda: Parts(seed=_seed_from_life),
        RESTORED,
        RESTORED_RULES,
    ),
    Mutant(
        "seed_without_fingerprint",
        "another body under the same key gets the same downstream key",
        "F38",
        lambda: Parts(seed=_seed_from_key),
        RESTORED,
        RESTORED_RULES,
    ),
)

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _ALL})
"""All of them by name."""
