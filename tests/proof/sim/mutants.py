"""Mutants: the real parts with one rule broken. The checker must catch each, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from oncekey.engine import admit, deciding, local, request, serve, settle
from oncekey_demo.checker import Rule
from proof.patching import patched
from proof.sim import broken_flows as flows
from proof.sim import broken_statements as said
from proof.sim.broken_statements import OWNERS, STRANGERS, Flaw, with_flaws
from proof.sim.scenarios import CLAIMED, EVERYDAY, MIXED, OUTSIDE, RESTORED, REUSED, UNHEARD, Scenario
from proof.sim.scheduler import NEVER
from proof.sim.workers import Operator, Reaper, Relay, Resolver, Sweeper, Worker
from proof.sim.world import Parts


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken rule: what is broken, what comes of it, and the promise that breaks with it."""

    name: str
    what: str
    harm: str
    breaks: Rule
    build: Callable[[], Parts]
    scenario: Scenario = EVERYDAY


def _said(flaw: Flaw, *names: str) -> Callable[[], Parts]:
    return lambda: Parts(commands=with_flaws((flaw, names)))


def _code(*changes: tuple[Any, str, Any]) -> Callable[[], Parts]:
    return lambda: Parts(patched=lambda: patched(*changes))


def _worker(instead: type[Worker]) -> Callable[[], Parts]:
    real: tuple[type[Worker], ...] = (Sweeper, Resolver, Reaper, Operator, Relay)
    workers = tuple(instead if kind.name == instead.name else kind for kind in real)
    return lambda: Parts(workers=workers)


def _takers_fingerprint() -> Parts:
    taken = said.setting(lambda _, params: {"fingerprint": params["fingerprint"]})
    shown = said.showing(said.askers_fingerprint)
    return Parts(commands=with_flaws((shown, ["claim"]), (taken, ["take_over"])))


def _expiry_before_state() -> Parts:
    shown = said.showing(said.expired_first)
    # The statement looks at the state once more, so it has to be as blind as the look.
    return Parts(commands=with_flaws((shown, ["claim", "find"]), (said.pretending(state="expired"), ["supersede"])))


def _releases_in_finally() -> Parts:
    return Parts(
        commands=with_flaws((lambda _: said.anyhow, ["discard"])),
        patched=lambda: patched((serve, "serve", flows.releases_in_finally)),
    )


def _no_deadline() -> Parts:
    late = said.pretending(deadline=NEVER)
    return Parts(commands=with_flaws((late, ["renew"])), serving=flows.BeatsForEver)


def _reaps_anything() -> Parts:
    commands = with_flaws((lambda _: said.anyhow, ["purge"]))
    return Parts(commands=commands, workers=(Sweeper, Resolver, flows.ReapsAnything, Operator, Relay))


_NO_FENCE: Final = said.assuming(fence="fence")
_ANY_LIFE: Final = said.assuming(incarnation="incarnation")
_NO_PROOF: Final = said.both(_NO_FENCE, _ANY_LIFE)
_ANY_STATE: Final = said.pretending(state="in_progress")

_ALL: Final[tuple[Mutant, ...]] = (
    Mutant(
        "no_fence",
        "the owner proves its incarnation, but not its fence",
        "a slow owner completes a record that its successor owns",
        Rule.FENCED,
        _said(_NO_FENCE, *OWNERS),
        CLAIMED,
    ),
    Mutant(
        "fence_without_incarnation",
        "the owner proves its fence, which starts again with every row",
        "an owner of the key's last life settles the next one's request",
        Rule.FENCED,
        _said(_ANY_LIFE, *OWNERS),
        REUSED,
    ),
    Mutant(
        "fence_for_strangers_only",
        "take-overs raise the fence, and owners write without any proof",
        "a zombie can write to any record",
        Rule.FENCED,
        _said(_NO_PROOF, *OWNERS),
    ),
    Mutant(
        "no_version_proof",
        "other writers overwrite the current row without a proof",
        "a take-over erases a response that was stored after it read the record",
        Rule.FENCED,
        _said(said.assuming(seen_version="version"), *STRANGERS),
    ),
    Mutant(
        "no_version_bump",
        "writes do not raise the version, so other writers do not notice them",
        "a take-over erases a response without a trace",
        Rule.LEGAL,
        _said(said.keeping("version"), *OWNERS, "take_over", "mark_unknown"),
    ),
    Mutant(
        "expiry_before_state",
        "an unfinished record past its expiry is treated as a free key",
        "work that is still in doubt runs again the next day",
        Rule.LEGAL,
        _expiry_before_state,
    ),
    Mutant(
        "born_expired",
        "completing keeps the expiry that the claim had set",
        "the retry after a late success runs again",
        Rule.LEGAL,
        _said(said.keeping("expires_at"), "settle_completed", "resolve_executed"),
    ),
    Mutant(
        "settles_twice",
        "a release after the settlement erases the stored success",
        "the response is lost, and a retry runs again",
        Rule.LEGAL,
        _said(_ANY_STATE, "discard"),
    ),
    Mutant(
        "completes_any_state",
        "completing does not check the state, so it overwrites a response",
        "a late owner replaces the response that clients have received",
        Rule.LEGAL,
        _said(_ANY_STATE, "settle_completed"),
    ),
    Mutant(
        "takers_fingerprint",
        "a take-over stores its own fingerprint",
        "a crashed charge of 10 is retried as one of 20",
        Rule.MISMATCH,
        _takers_fingerprint,
    ),
    Mutant(
        "releases_in_finally",
        "a request without a response deletes the claim of any owner",
        "a refused duplicate frees the key of the request that runs",
        Rule.FENCED,
        _releases_in_finally,
    ),
    Mutant(
        "lost_commit_is_failure",
        "an error at COMMIT is treated as a rollback",
        'the client receives "nothing happened", although it happened',
        Rule.NO_PHANTOM,
        _code((settle, "_lost_commit", flows.takes_lost_commit_for_failure)),
    ),
    Mutant(
        "hosts_clock",
        "leases and expiries are stamped with the wall clock of the writing process",
        "a host that is an hour ahead takes over live leases",
        Rule.LEGAL,
        lambda: Parts(hosts_clock=True),
    ),
    Mutant(
        "acknowledges_before_commit",
        "the client receives a success that is not durable yet",
        "a crash loses a response that the client has received",
        Rule.NO_LOST_ACK,
        lambda: Parts(serving=flows.AnswersBeforeItSettles),
    ),
    Mutant(
        "renews_after_loss",
        "a heartbeat revives a lease that was lost, or extends another owner's",
        "a zombie holds its successor's key",
        Rule.FENCED,
        _said(said.both(_NO_PROOF, _ANY_STATE), "renew"),
    ),
    Mutant(
        "claims_anew",
        "a claim whose reply was lost is repeated as another owner's claim, and conflicts with itself",
        "no process runs the request until its lease ends",
        Rule.NO_PHANTOM,
        _code((request, "begin", flows.claims_anew)),
    ),
    Mutant(
        "claims_as_before",
        "a claim whose reply was lost is repeated with the same incarnation",
        "two lives of a key share one name, and an owner of the first may write to the second",
        Rule.LEGAL,
        _code((request, "begin", flows.claims_as_before)),
        UNHEARD,
    ),
    Mutant(
        "answers_from_memory",
        "after a refused settlement the client receives the handler's response",
        "the client receives a response that no retry will ever receive",
        Rule.NO_LOST_ACK,
        _code((settle, "_response_of_record", flows.answers_from_memory)),
        CLAIMED,
    ),
    Mutant(
        "commits_twice",
        "business rows and settlement are two transactions",
        "a crash between the two runs the business again",
        Rule.ONE_EFFECT,
        _code((settle, "_together", flows.commits_twice)),
    ),
    Mutant(
        "exception_releases",
        "a call without a reply is treated as not made",
        "a retry charges again",
        Rule.ONE_EFFECT,
        _code((deciding, "proves_nothing_sent", flows.proves_everything)),
        OUTSIDE,
    ),
    Mutant(
        "inline_retries",
        "a stale record runs again, whatever its handler called",
        "a retry charges again",
        Rule.ONE_EFFECT,
        _said(said.setting(lambda _, __: {"recovery": "retry"}), "claim", "supersede"),
        OUTSIDE,
    ),
    Mutant(
        "sweeper_fences",
        "sweeping raises the fence, so an owner that was only late is locked out",
        "the owner's own result, which is the best evidence, is refused",
        Rule.LEGAL,
        _said(said.setting(lambda before, _: {"fence": before["fence"] + 1}), "sweep"),
    ),
    Mutant(
        "never_waits",
        '"not executed" is accepted as soon as the provider reports it',
        "a call that is still in transit is made again",
        Rule.ONE_EFFECT,
        _worker(flows.NeverWaits),
        OUTSIDE,
    ),
    Mutant(
        "releases_live",
        "an operator's release does not check the lease",
        "two owners work at once",
        Rule.ONE_EFFECT,
        _worker(flows.ReleasesLive),
        OUTSIDE,
    ),
    Mutant(
        "no_deadline",
        "the heartbeat renews a hung handler's lease forever",
        "the key is in progress until the process dies",
        Rule.PROGRESS,
        _no_deadline,
    ),
    Mutant(
        "reaps_anything",
        "the reaper deletes by age, including unfinished records",
        "the key of a running request is free",
        Rule.LEGAL,
        _reaps_anything,
    ),
    Mutant(
        "reaps_by_any_clock",
        "the reaper trusts a store clock that was set forwards",
        "acknowledged responses are deleted",
        Rule.KEPT,
        _worker(flows.TrustsAnyClock),
    ),
    Mutant(
        "stale_cache",
        "a replay cache ignores expiry, fingerprint and incarnation",
        "another request's response is replayed",
        Rule.NO_PHANTOM,
        lambda: Parts(patched=lambda: patched((request, "begin", flows.cached()))),
    ),
    Mutant(
        "seed_from_incarnation",
        "the downstream key changes when the record is lost",
        "a restore from a backup charges again",
        Rule.ONE_EFFECT,
        lambda: Parts(seed=flows.seed_from_life),
        RESTORED,
    ),
    Mutant(
        "seed_without_fingerprint",
        "another body under the same key gets the same downstream key",
        "the provider returns the first body's charge for another body",
        Rule.NO_LOST_ACK,
        lambda: Parts(seed=flows.seed_from_key),
        RESTORED,
    ),
    Mutant(
        "commits_without_a_record",
        "the record's insert conflicts with another row and has no effect, and the flow does not check it",
        "the handler's rows are committed, and the record belongs to another request",
        Rule.ONE_EFFECT,
        _code((local, "store_finished", flows.notices_no_conflict)),
        MIXED,
    ),
    Mutant(
        "no_lock",
        "the lock is reported as taken, also if another request has it",
        "two handlers run at once, up to the primary key",
        Rule.ONE_RUNNER,
        _said(lambda _: said.locks_nobody, "lock"),
    ),
    Mutant(
        "waits_with_its_connection",
        "a request that waits for another one keeps its transaction meanwhile",
        "waiting requests hold all connections, and the request that they wait for gets none",
        Rule.EMPTY_HANDS,
        _code((admit, "_give_back", flows.waits_with_its_connection)),
    ),
)

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _ALL})
"""All of them by name."""
