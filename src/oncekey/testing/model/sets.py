"""What a row sets: the record and its item after a move, as the statements of a store would leave them."""

from __future__ import annotations

from typing import NamedTuple

from oncekey.core.model import State
from oncekey.core.transitions import Row, Trigger
from oncekey.testing.model.law import Trial
from oncekey.testing.model.world import CHARGE, Answer, Item, Rec


class Said(NamedTuple):
    """What goes with a write: facts for the guards, the phase it is about, and the values it stores."""

    facts: tuple[str, ...] = ()
    phase: str = ""
    value: str = ""
    answer: Answer | None = None


NOTHING = Said()


def after(trial: Trial, rec: Rec, item: Item | None, row: Row, said: Said) -> tuple[Rec | None, Item | None]:
    """The record and the item as this row leaves them."""
    if row.to is None:
        return None, None
    rec = rec._replace(state=row.to, waited=False, lease=True if row.to is State.IN_PROGRESS else None)
    if row.to is State.COMPLETED:
        expired = rec.expired and not trial.law.completion_extends
        return rec.closed()._replace(answer=said.answer, expired=expired), None
    match row.trigger:
        case Trigger.ANNOUNCE:
            rec = rec._replace(sends=min(rec.sends + 1, 2))
        case Trigger.CHECKPOINT:
            rec = rec.learned(said.phase, said.value)
        case Trigger.RESULT | Trigger.DEFERRED_RESULT | Trigger.EXECUTED:
            rec = rec.learned(CHARGE, said.value).closed()._replace(by_hand="by hand" in said.facts)
        case Trigger.REPLACE:
            rec = rec._replace(memo=(*rec.memo[:-1], (CHARGE, said.value)))
        case Trigger.WITHDRAW:
            rec = rec.closed()
        case Trigger.NOT_EXECUTED if item is None:
            rec = rec.closed()
        case Trigger.TAKE_OVER:
            rec = _begun_again(trial, rec)
        case Trigger.BUST:
            rec = rec._replace(answer=None)
        case _:
            pass
    if item is None and row.trigger is not Trigger.DEFER:
        return rec, None
    return _with_item(trial, rec, item or Item(), row, said)


def _with_item(trial: Trial, rec: Rec, item: Item, row: Row, said: Said) -> tuple[Rec, Item]:
    """A deferred record: the item's lease is its only lease (O1)."""
    rec = rec._replace(lease=None)
    match row.trigger:
        case Trigger.DEFERRED_RESULT if trial.law.item_follows_result:
            item = item._replace(lease=True, parked=False)
        case Trigger.WORKER_CLAIM if row.to is State.IN_PROGRESS:
            sends = 0 if rec.result(CHARGE) else min(rec.sends + 1, 2)
            rec, item = _begun_again(trial, rec)._replace(sends=sends), Item(claimed=True, lease=True)
        case Trigger.WORKER_CLAIM | Trigger.DEAD_LETTER | Trigger.DOUBT:
            item = Item(claimed=True, parked=True)
        case Trigger.TRY_AGAIN:
            rec = rec.closed() if "item not sent" in said.facts else rec
            item = Item(claimed=True)
        case Trigger.NOT_EXECUTED | Trigger.DLQ_RETRY:
            # Sent again because that is safe, or because it is taken for not sent: only the second forgets.
            repeatable = trial.scenario.dedup and not rec.window_over
            rec = rec if repeatable and "waited" not in said.facts else rec.closed()
            item = item._replace(lease=None, parked=False)
        case _:
            pass
    return rec, item


def _begun_again(trial: Trial, rec: Rec) -> Rec:
    return rec._replace(attempts=min(rec.attempts + 1, trial.scenario.max_attempts))
