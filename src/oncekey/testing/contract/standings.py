"""Records in every state that a request can bring about, and leases that do not fit them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oncekey.core.model import Discarded, Doubtful, Retryable, State
from oncekey.testing.claims import a_claim, answered

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Lease, Settlement
    from oncekey.testing.contract.world import World


@dataclass(frozen=True, slots=True)
class Standing:
    """A record that was brought into a state, with the claim and the lease of its owner."""

    claim: Claim
    lease: Lease
    state: State | None


SETTLEMENTS: Mapping[str, Settlement] = MappingProxyType(
    {
        "completed": answered(),
        "completed otherwise": answered(b"another answer", status=402),
        "retryable": Retryable("provider_refused"),
        "retryable otherwise": Retryable("another_error"),
        "doubtful": Doubtful("provider_timeout"),
        "doubtful otherwise": Doubtful("another_error"),
        "discarded": Discarded(),
    }
)

_INTO: Mapping[State | None, Settlement | None] = MappingProxyType(
    {
        State.IN_PROGRESS: None,
        State.COMPLETED: SETTLEMENTS["completed"],
        State.FAILED_RETRYABLE: SETTLEMENTS["retryable"],
        State.UNKNOWN: SETTLEMENTS["doubtful"],
        None: SETTLEMENTS["discarded"],
    }
)
STATES = tuple(_INTO)


def stand(world: World, state: State | None, **changes: Any) -> Standing:  # noqa: ANN401  (any field of a claim)
    """A fresh record in this state; `None` is a record that was there and was taken back."""
    claim = a_claim(**changes)
    lease = world.owned(claim)
    settlement = _INTO[state]
    if settlement is not None:
        assert world.settle(lease, settlement).ours
    return Standing(claim, lease, state)


def forgeries(lease: Lease) -> Iterator[Lease]:
    """The lease with one thing wrong at a time (P1, F1)."""
    yield replace(lease, fence=lease.fence - 1)
    yield replace(lease, fence=lease.fence + 1)
    yield replace(lease, incarnation=uuid.uuid4())
