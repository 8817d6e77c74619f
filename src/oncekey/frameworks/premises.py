"""What all requests of one application share, whatever server it has: settings, counters, and what was heard lately."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from oncekey.boottime import boottime
from oncekey.core.headers import field_name
from oncekey.engine.answering import refusal
from oncekey.engine.breaker import Breaker
from oncekey.engine.enrolment import Patterns
from oncekey.engine.recent import Answers, Hints
from oncekey.engine.run import Site
from oncekey.frameworks.limits import Limits
from oncekey.observe.events import TurnedAway

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oncekey.core.answers import Answer
    from oncekey.core.model import Refuse
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.observe.events import Tell
    from oncekey.ports import Store


class Engines(Protocol):
    """Gives the engines, made at the first use: one for asyncio, one for threads."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def blocking(self) -> Engine:
        """The engine of all threads of this process."""

    def start_blocking(self) -> None:
        """The checks before the first request of a process whose server tells nobody when it starts."""


class Premises:
    """Where the operations of one application take place."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        keep_headers: Sequence[str] = (),
        blocking: bool = False,
    ) -> None:
        self.engines = engines
        self.policy = policy
        self.status_path = None if status_path is None else status_path.rstrip("/")
        self.patterns = Patterns(enrol or {})
        self.kept_headers = frozenset(map(field_name, keep_headers))
        self.breaker = Breaker()
        self.limits = Limits(blocking=blocking)
        self.stopping = False
        self.wake: Callable[[], None] = _nobody
        """Tells the workers of this process, if it has such, that parcels were committed."""
        self.inline_calls: Callable[[], Mapping[str, str]] = dict
        """By operation, the call of INLINE handlers whose provider is asked or reports by webhook."""
        self.tell: Tell | None = None
        """Tells those who observe."""
        self.max_request_bytes = policy.max_request_bytes
        self._hints = Hints()
        self._answers = Answers(boottime)

    def admit(self, enrolment: Enrolment) -> None:
        """Make room for an enrolment whose own settings are wider than the application's."""
        self.max_request_bytes = max(self.max_request_bytes, enrolment.policy.max_request_bytes)

    def status_url(self, root_path: str, key: str) -> str | None:
        """Where the key's state can be read."""
        if self.status_path is None:
            return None
        return f"{root_path}{self.status_path}/{quote(key, safe='')}"

    def turn_away(
        self, refused: Refuse, enrolment: Enrolment | None, *, echo: bytes | None = None, status_url: str | None = None
    ) -> Answer:
        """The answer to a request that is refused before it could claim; who observes hears of it."""
        if self.tell is not None:
            self.tell(TurnedAway("" if enrolment is None else enrolment.operation, refused.code))
        policy = self.policy if enrolment is None else enrolment.policy
        return refusal(refused, policy, echo=echo, status_url=status_url)

    def site_of(self, store: Store, crowded: Callable[[bool], bool]) -> Site:
        """What the operations of one event loop, or of all threads of a process, share."""
        return Site(
            store,
            self.breaker,
            clock=time.monotonic,
            boot=boottime,
            stopping=lambda: self.stopping,
            crowded=crowded,
            wake=lambda: self.wake(),  # noqa: PLW0108  (whoever is told later replaces it)
            inline_calls=lambda: self.inline_calls(),  # noqa: PLW0108
            hints=self._hints,
            tell=self.tell,
            answers=self._answers,
        )


def _nobody() -> None:
    """There are no workers."""
