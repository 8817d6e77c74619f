"""Clients: they send, wait, give up and send again with the same key, as the answer tells them to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oncekey.core.model import MINUTE, SECOND, Code
from oncekey.testing.history import Kind
from oncekey.testing.sim.steps import Mailbox, Receive, Wait

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Effects, RecordId
    from oncekey.testing.sim.runtime import Answer
    from oncekey.testing.sim.steps import Process
    from oncekey.testing.sim.world import World


_PATIENCE: Final = (3 * SECOND, 30 * SECOND, 10 * MINUTE)


@dataclass(frozen=True, slots=True)
class Key:
    """A key that clients use, what its route does, and whether that waits for a request under way."""

    id: RecordId
    effects: Effects
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Errand:
    """What a client wants: one key, one body, and how often it tries."""

    key: Key
    body: str
    start: Duration
    tries: int


def client(world: World, name: str, errand: Errand) -> Process[None]:
    """One client and all its tries."""
    dice = world.dice
    yield Wait(errand.start)
    for attempt in range(errand.tries):
        caller = Mailbox()
        operation = f"{name}.{attempt + 1}"
        world.send(operation, errand.key, errand.body, caller)
        answer: Answer | None = yield Receive(caller, dice.pick(_PATIENCE))
        world.heard(operation, answer)
        if answer is not None and answer.code is Code.KEY_REUSED:
            return
        # A client may lose an answer that it was given, so it also asks again after a success.
        satisfied = answer is not None and answer.kind is Kind.OK
        yield Wait(dice.between(0, 90 if not satisfied else 3) * SECOND)
