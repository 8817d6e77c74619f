"""The page about the crash proof, written from the code: `python -m proof.crash.page`.

`python -m proof.crash.page > docs/explanation/crash-proof.md` writes it; a test compares the two.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from oncekey.core.model import Effects
from oncekey_demo.checker import Rule
from proof.crash.crasher import Manner
from proof.crash.mutants import MUTANTS
from proof.crash.proof import CASES, PROMISES, RULES, Rescue

if TYPE_CHECKING:
    from proof.crash.proof import Case


_INTRODUCTION: Final = """\
# Crash proof

This page is generated: `PYTHONPATH=tests python -m proof.crash.page > docs/explanation/crash-proof.md`.

The crash proof interrupts a request before and after every statement. A retry or a worker then finishes the request,
and the proof checks the result in places that no crash can falsify: the provider's ledger, the business rows, and a
log of every committed write that triggers keep in the database. It also checks the responses that the clients
received.

The tested code contains no failpoints. The *crasher* (`proof.crash.crasher`) replaces the driver. Every statement has
a name, so every point has one, too: `after:announce:1` (after the first `announce`), `before:commit:2`,
`after:charge:1` (the provider has responded, and the owner has not stored the response). A run without a fault lists
the points of a case; then there is one run for each point.

The proof is in `tests/proof/crash`. In a checkout, after `export PYTHONPATH=tests`,
`python -m proof.crash --store sqlite:////tmp/proof.db` runs all of it on an empty database (SQLite or
PostgreSQL); `--mutants` runs the mutants below instead.

## Faults

| Fault | What happens |
| --- | --- |
"""

_MANNERS: Final = {
    Manner.DIE: "the process dies; uncommitted work is rolled back, and no clean-up runs",
    Manner.PAUSE: "it stalls past its lease, others finish its work, and it continues as a zombie",
    Manner.OVERTAKE: "it stalls past its lease, a new owner takes over and dies, and it continues as a zombie",
    Manner.INTERRUPT: "the request is cancelled once; its clean-up runs, and the clock does not advance",
    Manner.LOSE: "a write's reply is lost, or the write itself: the writer cannot tell which",
    Manner.KILL: "a real server or worker sends itself SIGKILL at the point",
    Manner.STOP: "a real server or worker sends itself SIGSTOP at the point; SIGCONT follows when others are done",
}

_CASES: Final = """
The exhaustive proof uses `die`, `pause`, `overtake` and `lose`, in one process with a controlled clock.
`kill` and `stop` apply to real processes: `python -m proof.crash.victim --point after:charge:1 --signal KILL`.

## Cases

Every case runs on SQLite and on PostgreSQL. After a 201, everything in the second column exists exactly once.

| Effects | A 201 means | The provider | The call | Finished by | Required result |
| --- | --- | --- | --- | --- | --- |
"""

_RULES: Final = """
"Unknown" is exact: the response is 409 `idempotency_outcome_unknown` if and only if the dead process had recorded a
call and not stored its result (INLINE: had claimed and not settled). If the provider deduplicates and the call
is repeatable, no outcome is unknown.

## Rules

"""

_MUTANTS: Final = """
Two more rules hold. While the holder of a lock runs, a duplicate is refused and does not run. When a client receives
202 from an OUTBOX route, the deferred call is committed. "Claimed first" is an OUTBOX route on a
store that writes its claim before the handler's transaction begins.

## Mutants

Each mutant is the real code with one rule broken, and a point at which the proof catches it. The test suite runs every
mutant, and runs the real code at the same point to confirm that the broken rule was the cause.

| Mutant | What is broken | Consequence | Case | Store | Caught at | By |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    lines += [f"| `{manner}` | {_MANNERS[manner]} |\n" for manner in Manner]
    lines += [_CASES, *(_case(case) for case in CASES)]
    lines += [_RULES, *(f"- **{rule.split(' ', 1)[0]}** {rule.split(' ', 1)[1]}\n" for rule in Rule if rule in RULES)]
    lines.append(_MUTANTS)
    for mutant in MUTANTS.values():
        stores = ", ".join(store.value for store in mutant.stores)
        where = f"`{mutant.fault.manner} {mutant.fault.point}`"
        said = (f"`{mutant.name}`", mutant.what, mutant.harm, str(mutant.case), stores, where, mutant.breaks)
        lines.append(f"| {' | '.join(said)} |\n")
    lines.append("\n**Next:** the [simulator](simulation.md), or the [protocol](protocol.md).\n")
    return "".join(lines)


def _case(case: Case) -> str:
    calls = case.effects is not Effects.LOCAL
    provider = ("deduplicates" if case.deduplicates else "does not deduplicate") if calls else "-"
    call = "-" if not calls or case.effects is Effects.INLINE else "repeatable" if case.repeatable else "not repeatable"
    who = {
        Rescue.CLIENT: "the client",
        Rescue.WORKER: "workers only",
        Rescue.RESTORED: "the client, after a restored backup",
    }[case.rescue]
    certain = case.effects is Effects.LOCAL or (case.deduplicates and case.repeatable)
    outcome = "201" if certain else "201, or unknown; never a second call"
    if certain and calls:
        outcome = "201, one charge"
    effects = f"{case.effects.name}, claimed first" if case.claims_first else case.effects.name
    return f"| {effects} | {', '.join(PROMISES[case.effects])} | {provider} | {call} | {who} | {outcome} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
