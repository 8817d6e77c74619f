"""How a tortured application is told what it is part of, and a policy by which trouble takes seconds, not minutes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Self

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import SECOND
from oncekey.core.policy import Policy
from oncekey.core.scope import bound_scope
from oncekey.engine.enrolment import NO_NAMESPACE
from oncekey.starting import STEPS
from oncekey.wire import declared, understand

LEASE: Final = 1.0
CALL_TIMEOUT: Final = 0.8
SEND_WINDOW: Final = 0.5
ENOUGH: Final = 100_000
"""Attempts that nobody runs out of: what is safe to repeat has to end with an answer, however often it was hit."""

STORE: Final = "ONCEKEY_TORTURE_STORE"
PROVIDER: Final = "ONCEKEY_TORTURE_PROVIDER"
TENANT: Final = "ONCEKEY_TORTURE_TENANT"


@dataclass(frozen=True, slots=True)
class Settings:
    """Where an application finds its store and its provider, and whose keys it serves."""

    store: str
    provider: str
    tenant: str

    @classmethod
    def from_environment(cls) -> Self:
        """What the run has set for its processes."""
        missing = [name for name in (STORE, PROVIDER, TENANT) if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(f"{missing[0]} is not set: `oncekey torture` starts this application, nobody else")
        return cls(os.environ[STORE], os.environ[PROVIDER], os.environ[TENANT])

    def environment(self) -> dict[str, str]:
        """The same for a process that is started."""
        return {**os.environ, STORE: self.store, PROVIDER: self.provider, TENANT: self.tenant}

    @property
    def scope(self) -> str:
        """The scope that the keys of this run have in the store."""
        return bound_scope(POLICY.bind_to, POLICY.namespace or NO_NAMESPACE, self.tenant)


def policy_for(store: str) -> Policy:
    """The policy of a run; where the store's clock goes by seconds, leases are as long as they have to be."""
    least = STEPS * declared(understand(store).kind).store().resolution / SECOND
    return POLICY.override(lease=max(LEASE, least))


POLICY: Final = Policy().override(
    lease=LEASE,
    deadline=60.0,
    call_timeout=CALL_TIMEOUT,
    send_window=SEND_WINDOW,
    outbox_lease=LEASE,
    complete_interval=0.3,
    max_attempts=ENOUGH,
    outbox_max_attempts=ENOUGH,
)
