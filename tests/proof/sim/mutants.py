"""Mutants: the real parts with one rule broken. The checker must catch each, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from oncekey.engine import admit, deciding, local, request, serve, settle, straight
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
        "the owner proves its incarnation, not its fence",
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
        "take-overs put the fence up, and owners write without proving anything",
        "a zombie writes wherever it likes",
        Rule.FENCED,
        _said(_NO_PROOF, *OWNERS),
    ),
    Mutant(
        "no_version_proof",
        "strangers write over whatever is there by now",
        "a take-over wipes an answer that was stored after it looked",
        Rule.FENCED,
        _said(said.assuming(seen_version="version"), *STRANGERS),
    ),
    Mutant(
        "no_version_bump",
        "writes leave the version as it was, so a stranger cannot see them",
        "a take-over wipes an answer without a trace",
        Rule.LEGAL,
        _said(said.keeping("version"), *OWNERS, "take_over", "doubt"),
    ),
    Mutant(
        "expiry_before_state",
        "an unfinished record past its expiry is taken for a free key",
        "work that is still in doubt runs again the next day",
        Rule.LEGAL,
        _expiry_before_state,
    ),
    Mutant(
        "born_expired",
        "completing leaves the expiry where the claim had set it",
        "the retry after a late success runs again",
        Rule.LEGAL,
        _said(said.keeping("expires_at"), "settle_completed", "resolve_executed"),
    ),
    Mutant(
        "settles_twice",
        "a release after the settlement wipes the stored success",
        "the answer is gone, and a retry runs again",
        Rule.LEGAL,
        _said(_ANY_STATE, "discard"),
    ),
    Mutant(
        "completes_any_state",
        "completing does not look at the state, so it writes over an answer",
        "a late owner replaces the answer that clients were given",
        Rule.LEGAL,
        _said(_ANY_STATE, "settle_completed"),
    ),
    Mutant(
        "takers_fingerprint",
        "a take-over brings its own fingerprint",
        "a crashed charge of 10 is retried as one of 20",
        Rule.MISMATCH,
        _takers_fingerprint,
    ),
    Mutant(
        "releases_in_finally",
        "a request without an answer deletes the claim of any owner",
        "a refused duplicate frees the key of the request that runs",
        Rule.FENCED,
        _releases_in_finally,
    ),
    Mutant(
        "lost_commit_is_failure",
        "an error at COMMIT is taken for a roll-back",
        "the client gets the answer that nothing happened, and it happened",
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
        "the client gets a success that is not durable yet",
        "a crash takes back what was promised",
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
        "a claim whose reply was lost is repeated as another owner's, and conflicts with itself",
        "no process runs the request until its lease is over",
        Rule.NO_PHANTOM,
        _code((request, "begin", flows.claims_anew)),
    ),
    Mutant(
        "claims_as_before",
        "a claim whose reply was lost is repeated in the incarnation that it had",
        "two lives of a key share one name, and an owner of the first may write to the second",
        Rule.LEGAL,
        _code((request, "begin", flows.claims_as_before)),
        UNHEARD,
    ),
    Mutant(
        "answers_from_memory",
        "a refused settlement is answered with what the handler said",
        "the client gets an answer that no retry will ever get again",
        Rule.NO_LOST_ACK,
        _code((settle, "_record_says", flows.answers_from_memory)),
        CLAIMED,
    ),
    Mutant(
        "commits_twice",
        "business rows and settlement are two transactions",
        "a crash between the two runs the business again",
        Rule.ONE_EFFECT,
        _code((settle, "_together", flows.commits_twice), (straight, "TAKEN", False)),
    ),
    Mutant(
        "exception_releases",
        "a call without a reply is taken for one that was not made",
        "a retry charges again",
        Rule.ONE_EFFECT,
        _code((deciding, "proves_nothing_sent", flows.proves_everything)),
        OUTSIDE,
    ),
    Mutant(
        "inline_retries",
        "a stale record runs again, whatever its handler did to the outside",
        "a retry charges again",
        Rule.ONE_EFFECT,
        _said(said.setting(lambda _, __: {"recovery": "retry"}), "claim", "supersede"),
        OUTSIDE,
    ),
    Mutant(
        "sweeper_fences",
        "sweeping puts the fence up, so an owner that was only late is locked out",
        "the owner's own result, the best evidence there is, is refused",
        Rule.LEGAL,
        _said(said.setting(lambda before, _: {"fence": before["fence"] + 1}), "sweep"),
    ),
    Mutant(
        "never_waits",
        '"not executed" is believed as soon as the provider says so',
        "a call that is still on its way is made again",
        Rule.ONE_EFFECT,
        _worker(flows.NeverWaits),
        OUTSIDE,
    ),
    Mutant(
        "releases_live",
        "an operator's release does not look at the lease",
        "two owners work at once",
        Rule.ONE_EFFECT,
        _worker(flows.ReleasesLive),
        OUTSIDE,
    ),
    Mutant(
        "no_deadline",
        "the heartbeat keeps a hung handler's lease for ever",
        "the key is in progress until the process dies",
        Rule.PROGRESS,
        _no_deadline,
    ),
    Mutant(
        "reaps_anything",
        "the reaper deletes by age, unfinished records too",
        "the key of a running request is free",
        Rule.LEGAL,
        _reaps_anything,
    ),
    Mutant(
        "reaps_by_any_clock",
        "the reaper believes a store clock that was set forwards",
        "acknowledged answers are forgotten",
        Rule.KEPT,
        _worker(flows.TrustsAnyClock),
    ),
    Mutant(
        "stale_cache",
        "a replay cache that knows no expiry, fingerprint or incarnation",
        "another request's answer is replayed",
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
        "the provider answers another body with the first one's charge",
        Rule.NO_LOST_ACK,
        lambda: Parts(seed=flows.seed_from_key),
        RESTORED,
    ),
    Mutant(
        "commits_without_a_record",
        "the record's insert meets another row and does nothing, and the flow does not check it",
        "the handler's rows are committed, and the record speaks of another request's",
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
        "those who wait have all connections, and the one that they wait for gets none",
        Rule.EMPTY_HANDS,
        _code((admit, "_give_back", flows.waits_with_its_connection)),
    ),
)

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _ALL})
"""All of them by name."""
