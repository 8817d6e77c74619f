"""Where a request is on its way, with a key and without."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.frameworks.asgi.exchange import Exchange
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.lending import Lending
    from oncekey.frameworks.asgi.nesting import Passage
    from oncekey.frameworks.asgi.types import Scope


class Phase(IntEnum):
    """Where an exchange is."""

    OPEN = 0
    RUNNING = 1
    ANSWERED = 2
    SETTLING = 3
    DONE = 4


class UnsettledError(Exception):
    """Raised out of `send` after our own answer went out, so that no background task runs on a false success."""


class Visit:
    """A request without a key: nothing is captured and nothing stored."""

    __slots__ = ("installation", "lent", "outer", "passage", "phase", "scope")

    def __init__(
        self, installation: Installation, scope: Scope, passage: Passage, outer: Exchange | Visit | None
    ) -> None:
        self.installation = installation
        self.scope = scope
        self.passage = passage
        self.outer = outer
        self.phase = Phase.OPEN
        self.lent: Lending | None = None
