"""The contract can fail: stores with one thing wrong do not pass it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import pytest

from harness.selection import assert_caught
from oncekey.databases.memory import MemoryDriver
from oncekey.stores.keystore import KeyStore
from oncekey.stores.memory import COMMANDS, audit_commands, roll_commands
from oncekey.stores.upkeep import UpkeepStore
from oncekey.testing.claims import OTHER_FINGERPRINT
from oncekey_contract import StoreContract, blocking
from oncekey_contract.claiming import Racing

OWNERS = ("renew", "settle_completed", "settle_retryable", "settle_unknown", "discard")
STRANGERS = ("take_over", "supersede", "mark_unknown")
STEPS = ("checkpoint", "announce", "result", "withdraw")


def believing(*names: str) -> Callable:
    """A statement that takes these proofs from the row itself: it compares nothing."""

    def spoil(command):
        def run(table, **params):
            cell = table.get((params["scope"], params["key"]))
            own = {} if cell is None else {name: cell[name.removeprefix("seen_")] for name in names}
            return command(table, **{**params, **own})

        return run

    return spoil


def afterwards(change: Callable[[dict, dict], dict]) -> Callable:
    """A statement that writes something else besides: `change(cell, params)` says what."""

    def spoil(command):
        def run(table, **params):
            rows = command(table, **params)
            cell = table.get((params["scope"], params["key"]))
            if not rows or cell is None:
                return rows
            cell.update(change(cell, params))
            return [{**cell, "now": params["now"]}]

        return run

    return spoil


def in_any_state(command):
    """A statement that does not look at the state."""

    def run(table, **params):
        cell = table.get((params["scope"], params["key"]))
        if cell is None:
            return command(table, **params)
        before = dict(cell)
        cell["state"] = "in_progress"
        rows = command(table, **params)
        if not rows:
            cell.update(before)
        return rows

    return run


def overwriting(command):
    """A claim that does not mind a row."""

    def run(table, **params):
        table.pop((params["scope"], params["key"]), None)
        return command(table, **params)

    return run


def forgetting(command):
    """A statement whose result is not stored."""

    def run(table, **params):
        before = {where: dict(cell) for where, cell in table.items()}
        rows = [dict(row) for row in command(table, **params)]
        table.clear()
        table.update(before)
        return rows

    return run


def taking_for(**columns) -> Callable:
    """A statement that takes the row for another: what it would compare there, it does not compare."""

    def spoil(command):
        def run(table, **params):
            cell = table.get((params["scope"], params["key"]))
            if cell is None:
                return command(table, **params)
            before = {name: cell[name] for name in columns}
            cell.update({name: make(cell) if callable(make) else make for name, make in columns.items()})
            unwritten = {name: cell[name] for name in columns}
            rows = command(table, **params)
            # What the statement did not write itself is as it was.
            cell.update({name: old for name, old in before.items() if cell[name] == unwritten[name]})
            return [{**cell, "now": params["now"]}] if rows else []

        return run

    return spoil


def intent_with(**changes) -> Callable[[dict], str | None]:
    """The row's announcement with something else in it."""
    return lambda cell: cell["intent"] and json.dumps({**json.loads(cell["intent"]), **changes})


def saying(**changes) -> Callable:
    """A statement that is given something else than the caller said."""
    return lambda command: lambda table, **params: command(table, **{**params, **changes})


def changed(**columns) -> Callable:
    """A statement whose rows say something else."""
    return lambda command: lambda table, **params: [{**row, **columns} for row in command(table, **params)]


def in_any_state_recalled(command):
    """A repeat's read that does not look at the state."""

    def run(table, **params):
        cell = table.get((params["scope"], params["key"]))
        return [] if cell is None else [{**cell, "now": params["now"]}]

    return run


def for_any_scope(command):
    """A repeat's read that looks for the key alone."""

    def run(table, **params):
        scopes = [scope for scope, key in table if key == params["key"]]
        return command(table, **{**params, "scope": (scopes or [params["scope"]])[0]})

    return run


def many(spoil: Callable) -> Callable:
    """The read of many, each by a spoilt read of one; a key is found where it was asked for."""
    one = spoil(COMMANDS["recall"])
    return lambda _command: (
        lambda table, asked, now: [{**row, **each} for each in json.loads(asked) for row in one(table, **each, now=now)]
    )


FAR = 1 << 62


def purging(also) -> Callable:
    """A purge that deletes other rows, too, whatever their time."""

    def spoil(command):
        def run(table, **params):
            gone = [dict(cell) for cell in table.values() if also(cell)]
            for cell in gone:
                del table[cell["scope"], cell["key"]]
            return [*command(table, **params), *({**cell, "now": params["now"]} for cell in gone)]

        return run

    return spoil


MUTANTS = {
    **{f"{name} proves no fence": ((name,), believing("fence")) for name in (*STEPS, "settle_handed_back")},
    **{f"{name} proves no incarnation": ((name,), believing("incarnation")) for name in (*STEPS, "settle_handed_back")},
    **{f"{name} is not stored": ((name,), forgetting) for name in (*STEPS, "settle_handed_back")},
    **{
        f"{name} does not look at the state": ((name,), taking_for(state="in_progress"))
        for name in (*STEPS, "settle_handed_back")
    },
    **{
        f"{name} compares no memo": (
            (name,),
            lambda command: (
                lambda table, **params: command(
                    table, **{**params, "seen_memo": table[params["scope"], params["key"]]["memo"]}
                )
            ),
        )
        for name in ("checkpoint", "announce", "result")
    },
    **{
        f"{name} is for any effects": ((name,), taking_for(effects="phased"))
        for name in ("result", "withdraw", "settle_handed_back")
    },
    "a phase is finished beside an open call": (("checkpoint",), taking_for(intent=None)),
    "a phase shortens its lease": (
        ("checkpoint",),
        afterwards(lambda _, params: {"lease_until": params["now"] + params["lease"]}),
    ),
    "a phase leaves the recovery point": (("checkpoint",), afterwards(lambda _cell, _: {"recovery_point": "started"})),
    "a call is repeated after its window": (("announce",), taking_for(intent=intent_with(repeatable_until=FAR))),
    "a call is repeated with other parameters": (
        ("announce",),
        lambda command: (
            lambda table, **params: taking_for(intent=intent_with(digest=params["digest"]))(command)(table, **params)
        ),
    ),
    "a call is announced over another": (
        ("announce",),
        lambda command: (
            lambda table, **params: taking_for(intent=intent_with(phase=params["phase"]))(command)(table, **params)
        ),
    ),
    "sends are not counted": (
        ("announce",),
        lambda command: (
            lambda table, **params: taking_for(intent=intent_with(sends=params["sends"] - 1))(command)(table, **params)
        ),
    ),
    "a repetition opens its window anew": (
        ("announce",),
        afterwards(
            lambda cell, params: {
                "intent": intent_with(repeatable_until=params["repeatable"] and params["now"] + params["repeatable"])(
                    cell
                )
            }
        ),
    ),
    "a call's lease ends before the call": (("announce",), saying(busy=0)),
    "a second send is withdrawn": (("withdraw",), taking_for(intent=intent_with(sends=1))),
    "a late result is refused": (
        ("result",),
        lambda command: (
            lambda table, **params: (
                command(table, **params) if table[params["scope"], params["key"]]["state"] == "in_progress" else []
            )
        ),
    ),
    "a result leaves its call open": (
        ("result",),
        lambda command: (
            lambda table, **params: afterwards(
                lambda _, __, intent=table[params["scope"], params["key"]]["intent"]: {"intent": intent}
            )(command)(table, **params)
        ),
    ),
    "a late result keeps the error": (("result",), afterwards(lambda _cell, _: {"last_error": "old"})),
    "a call is handed back after its window": (
        ("settle_handed_back",),
        taking_for(intent=intent_with(repeatable_until=FAR)),
    ),
    "every attempt is spared": (("settle_handed_back",), saying(spared=1)),
    "no attempt is spared": (("settle_handed_back",), saying(spared=0)),
    "nobody is told when to go on": (("settle_handed_back",), saying(resume_after=0)),
    "handing back forgets the call": (("settle_handed_back",), afterwards(lambda _cell, _: {"intent": None})),
    "handing back forgets the memo": (("settle_handed_back",), afterwards(lambda _cell, _: {"memo": None})),
    "an open call is answered": (("settle_completed",), taking_for(intent=None)),
    "an open call is retryable": (("settle_retryable",), taking_for(intent=None)),
    "a finished phase is retryable": (("settle_retryable",), taking_for(memo=None)),
    "an open call is discarded": (("discard",), taking_for(intent=None)),
    "a finished phase is discarded": (("discard",), taking_for(memo=None)),
    "what is to be resumed is answered late": (("settle_completed",), taking_for(memo=None)),
    "a claim loses its request": (("claim",), saying(request=None)),
    "a take-over brings its own request": (
        ("take_over",),
        afterwards(lambda _, params: {"request": params["request"]}),
    ),
    "a take-over forgets the memo": (("take_over",), afterwards(lambda _cell, _: {"memo": None})),
    "a take-over forgets the open call": (("take_over",), afterwards(lambda _cell, _: {"intent": None})),
    "an answered request is kept": (("settle_completed",), afterwards(lambda _cell, _: {"request": b"still there"})),
    "an answer is not the end": (("settle_completed",), afterwards(lambda _cell, _: {"recovery_point": "started"})),
    "a new start keeps the request": (("supersede",), saying(request=b"old")),
    "an owner proves no fence": (OWNERS, believing("fence")),
    "an owner proves no incarnation": (OWNERS, believing("incarnation")),
    "a heartbeat proves no fence": (("renew",), believing("fence")),
    "a discard proves no incarnation": (("discard",), believing("incarnation")),
    "a stranger proves no version": (STRANGERS, believing("seen_version")),
    "a stranger proves no incarnation": (STRANGERS, believing("seen_incarnation")),
    "doubt proves no version": (("mark_unknown",), believing("seen_version")),
    "a completed record is completed again": (("settle_completed",), in_any_state),
    "a completed record is made retryable": (("settle_retryable",), in_any_state),
    "a completed record is doubted by its owner": (("settle_unknown",), in_any_state),
    "a completed record is discarded": (("discard",), in_any_state),
    "a settled record is renewed": (("renew",), in_any_state),
    "a claim overwrites": (("claim",), overwriting),
    "a claim is not stored": (("claim",), forgetting),
    "a settlement is not stored": (("settle_completed",), forgetting),
    "a failure is not stored": (("settle_retryable",), forgetting),
    "a doubt is not stored": (("mark_unknown", "settle_unknown"), forgetting),
    "a renewal is not stored": (("renew",), forgetting),
    "a discard is not stored": (("discard",), forgetting),
    "the version stands still": (("settle_completed",), afterwards(lambda cell, _: {"version": cell["version"] - 1})),
    "a take-over keeps the fence": (("take_over",), afterwards(lambda cell, _: {"fence": cell["fence"] - 1})),
    "a new start keeps the fence": (("supersede",), afterwards(lambda cell, _: {"fence": cell["fence"] - 1})),
    "a new start resets the fence": (("supersede",), afterwards(lambda _cell, _: {"fence": 1})),
    "doubt moves the fence": (("mark_unknown",), afterwards(lambda cell, _: {"fence": cell["fence"] + 1})),
    "a take-over changes the fingerprint": (
        ("take_over",),
        afterwards(lambda _, params: {"fingerprint": params["fingerprint"]}),
    ),
    "a take-over changes the effects": (("take_over",), afterwards(lambda _, params: {"effects": params["effects"]})),
    "a take-over keeps the error": (("take_over",), afterwards(lambda _cell, _: {"last_error": "old"})),
    "a take-over is the same attempt": (("take_over",), afterwards(lambda _cell, _: {"attempts": 1})),
    "a new start keeps the incarnation": (
        ("supersede",),
        afterwards(lambda _, params: {"incarnation": params["seen_incarnation"]}),
    ),
    "a new start keeps the answer": (("supersede",), afterwards(lambda _cell, _: {"finished_at": 1})),
    "an answer is born expired": (
        ("settle_completed",),
        afterwards(lambda cell, _: {"expires_at": cell["created_at"] + cell["ttl"]}),
    ),
    "an answer shortens its life": (
        ("settle_completed",),
        afterwards(lambda cell, params: {"expires_at": params["now"] + cell["ttl"]}),
    ),
    "a lease is renewed past its deadline": (
        ("renew",),
        afterwards(lambda _, params: {"lease_until": params["now"] + params["lease"]}),
    ),
    "a body loses what follows a zero": (
        ("settle_completed",),
        afterwards(lambda cell, _: {"response_body": cell["response_body"] and cell["response_body"].split(b"\0")[0]}),
    ),
    "a tombstone becomes an empty body": (
        ("settle_completed",),
        afterwards(lambda cell, _: {"response_body": cell["response_body"] or b""}),
    ),
    "a completed record keeps its owner": (("settle_completed",), afterwards(lambda _cell, _: {"owner": "somebody"})),
    "a repeat does not look at the state": (("recall",), in_any_state_recalled),
    "a repeat is told another life": (("recall",), changed(incarnation="00000000-0000-0000-0000-000000000001")),
    "a repeat is told another request": (("recall",), changed(fingerprint=OTHER_FINGERPRINT)),
    "a repeat is told a later end": (("recall",), changed(expires_at=FAR)),
    "a repeat is told another time": (("recall",), changed(now=0)),
    "a repeat gets no headers": (("recall",), changed(response_headers="[]")),
    "a repeat of another tenant's": (("recall",), for_any_scope),
    "one of many is told another's answer": (("recall_all",), changed(response_body=b"another's")),
    "many are recalled in any state": (("recall_all",), many(in_any_state_recalled)),
    "many are recalled of any tenant": (("recall_all",), many(for_any_scope)),
    "an answer is never recalled": (("recall",), lambda _command: lambda _table, **_params: []),
    "a sweep proves no version": (("sweep_retryable",), believing("seen_version")),
    "a sweep does not wait for the lease": (("sweep_retryable",), taking_for(lease_until=0)),
    "a sweep lets everything run again": (("sweep_retryable",), taking_for(recovery="retry", effects="local")),
    "what was begun is parked before its time": (("expire_begun",), taking_for(expires_at=0)),
    "what was never begun is parked": (("expire_begun",), taking_for(memo='[["a","phase","1"]]')),
    "a purge takes what was begun": (("purge_expired",), purging(lambda cell: cell["state"] == "failed_retryable")),
    "a purge takes what is unknown": (("purge_expired",), purging(lambda cell: cell["state"] == "unknown")),
    "a purge takes what is marked": (("purge_expired",), purging(lambda cell: cell["state"] == "expired")),
    "a purge knows no bounds": (("purge_expired",), saying(age=0, until=FAR, trusted_for=None)),
    "a purge takes more than asked for": (("purge_expired",), saying(limit=FAR)),
    "an answer is not marked but deleted": (("mark_expired",), lambda _: COMMANDS["purge_expired"]),
    "what is marked stays": (("purge_kept",), lambda _: lambda _table, **_params: []),
    "keys do not mind their case": (
        tuple(COMMANDS),
        lambda command: (
            lambda table, **params: command(
                table, **{**params, **({"key": params["key"].lower()} if "key" in params else {})}
            )
        ),
    ),
}


def failures(commands) -> list[str]:
    """The scenarios that a store with these statements does not pass."""

    def make_store(*, clock=None):
        store = KeyStore({**commands, **audit_commands(), **roll_commands()}, clock=clock)
        store.upkeep = UpkeepStore(store._statements, None)
        return store

    contract, failed = StoreContract(), []
    for name, scenario in inspect.getmembers(contract, inspect.ismethod):
        if not name.startswith("test_") or hasattr(Racing, name):
            continue
        with blocking(make_store, MemoryDriver()) as world:
            try:
                scenario(world)
            except Exception:
                failed.append(name)
    return failed


def test_unmodified_store_passes_the_contract():
    assert failures(dict(COMMANDS)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_contract_rejects_a_store_with_one_defect(mutant):
    names, spoil = MUTANTS[mutant]

    caught_by = failures({**COMMANDS, **{name: spoil(COMMANDS[name]) for name in names}})

    assert caught_by
    assert_caught(mutant, "contract/test_contract.py", [f"TestMemory::{name}" for name in caught_by])
