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

A request is cut off at every place where that is possible, a retry or a worker comes back for it, and the rest is read
from where no crash can falsify it: the provider's own ledger, the business rows, and a diary of every committed write
that triggers keep in the database. The answers that the clients got are written down beside it.

There is no failpoint in the code that is proven. The *crasher* (`proof.crash.crasher`) stands where a driver
stands: every statement has a name, so a place is called `after:announce:1` (after the first `announce`),
`before:commit:2`, `after:charge:1` (the provider has answered, and the owner has not stored it). A run without a fault
lists the places of a case, and then there is one run for each of them.

The proof stands beside the tests, in `tests/proof/crash`. In a checkout, after `export PYTHONPATH=tests`,
`python -m proof.crash --store sqlite:////tmp/proof.db` runs all of it on an empty database of yours (SQLite or
PostgreSQL); `--mutants` runs the mutants below instead.

## What happens at a place

| Fault | What happens |
| --- | --- |
"""

_MANNERS: Final = {
    Manner.DIE: "the process is gone; what it had not committed is rolled back, and nothing is tidied up",
    Manner.PAUSE: "it stands still past its lease, others finish its work, and it goes on as a zombie",
    Manner.OVERTAKE: "it stands still past its lease, a new owner takes over and dies, and it goes on as a zombie",
    Manner.INTERRUPT: "the request is cancelled, once; what it still has to do is done, and the clock stands still",
    Manner.LOSE: "a write's reply is lost, or the write itself: the writer cannot know which",
    Manner.KILL: "`kill -9` of a real server or worker, by itself, at the place",
    Manner.STOP: "SIGSTOP of a real server or worker, by itself, at the place; SIGCONT when others are done",
}

_CASES: Final = """
`die`, `pause`, `overtake` and `lose` are for the exhaustive proof, in one process with a clock that is moved by hand.
`kill` and `stop` are for real processes: `python -m proof.crash.victim --point after:charge:1 --signal KILL`.

## What is proven

Each of these on SQLite and on PostgreSQL; a 201 means that everything in the second column is there, once.

| Effects | A 201 means | The provider | The call | Who comes back | What must come of it |
| --- | --- | --- | --- | --- | --- |
"""

_RULES: Final = """
"In doubt" is exact: the answer is 409 `idempotency_outcome_unknown` if and only if the dead process had announced a
call and not written down its result (INLINE: had claimed and not settled). Where the provider deduplicates and the call
is repeatable, there is no doubt at all.

## By which rules

"""

_MUTANTS: Final = """
In addition, the lock's own promise: while its holder runs, a duplicate is refused and does not run. And the promise of
a 202: when a client gets one from an OUTBOX route, the parcel is committed. "Claimed first" is an OUTBOX route on a
store that writes its claim before the handler's transaction begins.

## What the proof is worth

A proof that nothing fails is worth as much as what it would have caught. Each line is the real code with one rule
broken, and a place at which the proof catches it. The test suite runs every line, and runs the real code at the same
place to see that it is the broken rule that was caught.

| Mutant | What is broken | What comes of it | Case | Store | Caught at | By |
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
    outcome = "201" if certain else "201, or in doubt; never a second call"
    if certain and calls:
        outcome = "201, one charge"
    effects = f"{case.effects.name}, claimed first" if case.claims_first else case.effects.name
    return f"| {effects} | {', '.join(PROMISES[case.effects])} | {provider} | {call} | {who} | {outcome} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
