"""One request as one generator: the lifecycle that ships, with the handler's own actions in the place of `Invoke`.

An adapter leaves the flow at `Invoke` and runs a handler that it does not control. A proof wants to stop, kill or
interrupt at every action, the handler's among them. So here the handler is a flow, too, and `life` splices the two: a
runtime sees one flow from the claim to what the client hears. Everything between is `serve` and `decided`, as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.core.model import Bypass, Code, Effects
from oncekey.engine import serve as lifecycle
from oncekey.engine.actions import Interrupted, Invoke, Life
from oncekey.engine.deciding import HandlerEnded, decided
from oncekey_demo.history import ClientSaw

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.endings import Decision
    from oncekey.core.model import Headers
    from oncekey.engine.run import Run


JSON: Final = ((b"content-type", b"application/json"),)
ACCEPTED: Final = 202
FAILED: Final = 500


@dataclass(slots=True)
class Said:
    """What a handler answered, whole."""

    status: int | None = None
    body: bytes = b""
    headers: Headers = JSON
    refused: str | None = None

    @property
    def kept(self) -> bytes | None:
        """The body as it is stored."""
        return self.body


Handler: TypeAlias = "Callable[[Run], Life[Said]]"


class NotEntered(Exception):  # noqa: N818  (a course of the proof, no fault)
    """The handler is not called: a login or a validation in front of it says no."""

    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said


@dataclass(frozen=True, slots=True)
class CallReport:
    """What goes out to the client. `own`: the handler's own bytes, which the record has, too."""

    status: int
    body: bytes
    headers: Headers = ()
    own: bool = False

    @property
    def code(self) -> Code | None:
        """The code of a problem of ours."""
        if (b"content-type", b"application/problem+json") not in self.headers:
            return None
        said = json.loads(self.body)
        return Code(said["code"]) if "code" in said else None

    @property
    def replayed(self) -> bool:
        """Whether it says that it is a replay."""
        return any(name == b"idempotent-replayed" for name, _ in self.headers)

    def kind(self, effects: Effects) -> ClientSaw:
        """What a client may conclude from it; whoever has steps may have taken some before it heard a no."""
        code = self.code
        if code is None and self.status != ACCEPTED:
            return ClientSaw.OK if self.status < FAILED else ClientSaw.INFO
        nothing = code in _NOTHING_HAPPENED and self.status != ACCEPTED
        return (
            ClientSaw.FAIL
            if nothing or (effects is Effects.LOCAL and code in _NOTHING_IN_ONE_COMMIT)
            else ClientSaw.INFO
        )


_NOTHING_HAPPENED: Final = frozenset({Code.STORE_UNAVAILABLE, Code.KEY_REUSED})
_NOTHING_IN_ONE_COMMIT: Final = frozenset({Code.IN_PROGRESS, Code.EXECUTION_FAILED})


def life(run: Run, handler: Handler) -> Life[CallReport]:
    """From the claim to what the client hears. `Interrupted` is raised where nothing is to be said to anybody."""
    ours: Answer | None = None
    said: Said | None = None
    flow = lifecycle.serve(run)
    try:
        action = next(flow)
        while True:
            if type(action) is Invoke:
                said, (decision, ours) = yield from _invoked(run, handler)
                action = flow.send(decision)
                continue
            try:
                result = yield action
            except (Exception, Interrupted) as error:
                action = flow.throw(error)
            else:
                action = flow.send(result)
    except StopIteration as stop:
        told: Answer | Bypass | None = stop.value
    assert not isinstance(told, Bypass)
    reply = ours if told is None else told
    if reply is not None:
        return CallReport(reply.status, reply.body, reply.headers)
    if said is None or said.status is None:
        return CallReport(FAILED, b"the application's own error page")
    return CallReport(said.status, said.body, said.headers, own=True)


def _invoked(run: Run, handler: Handler) -> Life[tuple[Said, tuple[Decision, Answer | None]]]:
    """The handler's turn, and the decision about how it ended: only once its answer is whole."""
    ended, said, error = HandlerEnded(entered=True), Said(), None
    try:
        said = yield from handler(run)
    except NotEntered as no:
        said, ended.entered = no.said, False
    except (Exception, Interrupted) as raised:
        ended.error = error = raised
        ended.cancelled = isinstance(raised, Interrupted)
    return said, decided(run, ended, said, error)
