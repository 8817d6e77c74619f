"""The states of an exchange, and the request without a key."""

from __future__ import annotations

from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING

from oncekey.frameworks.asgi.intake import TooLargeError

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi.exchange import Exchange
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.intake import Intake
    from oncekey.frameworks.asgi.nesting import Passage
    from oncekey.frameworks.asgi.transactions import RequestTransaction
    from oncekey.frameworks.asgi.types import Message, Receive, Scope


class ExchangeState(IntEnum):
    """The state of an exchange, from its request to its answer."""

    OPEN = 0
    RUNNING = 1
    ANSWERED = 2
    SETTLING = 3
    DONE = 4


class UnsettledError(Exception):
    """Raised by `send` after we sent our own answer instead of the handler's: its background tasks must not run."""


class UnkeyedRequest:
    """A request without a key: the middleware captures nothing, and stores nothing."""

    __slots__ = (
        "_complete",
        "_intake",
        "_receive",
        "installation",
        "outer",
        "passage",
        "scope",
        "state",
        "transaction",
    )

    def __init__(
        self,
        installation: Installation,
        scope: Scope,
        receive: Receive,
        passage: Passage,
        outer: Exchange | UnkeyedRequest | None,
    ) -> None:
        self.installation = installation
        self.scope = scope
        self.passage = passage
        self.outer = outer
        self.state = ExchangeState.OPEN
        self.transaction: RequestTransaction | None = None
        self._receive = receive
        self._intake: Intake | None = None
        self._complete = False

    @property
    def tx(self) -> None:
        """Always None: a request without a key settles nothing."""

    @property
    def enrolment(self) -> None:
        """Always None: a request without a key claims nothing."""

    async def receive(self) -> Message:
        """The next message of the request."""
        message = await (self._receive() if self._intake is None else self._intake.receive())
        self._complete = not message.get("more_body", False)
        return message

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body before a dependency gets a connection. One that is too large is passed on as it comes."""
        if self._complete or self._intake is not None:
            return
        self._intake = self.passage.intake(self._receive, policy.max_request_bytes)
        with suppress(TooLargeError):
            await self._intake.body(policy.body_timeout.total_seconds())
