"""The contract of a store: one suite for every store behind every driver, with no branch on either.

Provide a fixture `world`, and run pytest:

    import pytest
    from oncekey_contract import StoreContract, blocking, under_asyncio

    class TestMyStore(StoreContract):
        @pytest.fixture
        def world(self, my_empty_database):
            with blocking(MyStore, MyDriver(my_empty_database)) as world:      # or under_asyncio(...)
                yield world

The first argument creates the store: it is called with `clock=` (a function that returns the time) and without
(the store then uses its own clock). The second is the driver, which the world closes. The tables must exist.
Tests may share a world: every scenario uses its own keys, except for the unusual keys of `Keeping`, which need an
empty store.

A `World` has blocking methods (`begin`, `settle`, `renew`, `find`, `go(flow)`), a clock to move (`advance`), and three
faults: `lose_reply(name)` commits a transaction of that name and loses its reply, `before(name, action)` runs an action
just before it, and `between(action)` runs one after the store has read and before it writes. The methods may be called
from many threads.

`Walk` is for stores with their own statements: it tries every move on every kind of record, and compares what the
store accepted with the table; it also tries each move with a wrong proof. It needs an empty store and a way to plant
records, `blocking(..., plant=...)`.
`CellsContract` is for stores that implement `look`, `swap` and `page`, and needs only those.

For pytest's detailed assertions, call `pytest.register_assert_rewrite("oncekey_contract")` in a conftest before the
first import.
"""

from __future__ import annotations

from oncekey_contract.cells import CellsContract
from oncekey_contract.claiming import Claiming, Racing
from oncekey_contract.expiring import Expiring, Sweeping
from oncekey_contract.keeping import Keeping, Recalling
from oncekey_contract.owning import Renewing, Settling, TakingOver
from oncekey_contract.phases import Announcing, Stepping
from oncekey_contract.proving import Proving
from oncekey_contract.resuming import HandingBack, Remembering, Resulting
from oncekey_contract.rivals import Rivals
from oncekey_contract.walking import Accepting, planting
from oncekey_contract.world import World, blocking, under_asyncio

__all__ = ["CellsContract", "StoreContract", "Walk", "World", "blocking", "planting", "under_asyncio"]


class StoreContract(
    Claiming,
    TakingOver,
    Settling,
    Renewing,
    Stepping,
    Announcing,
    Resulting,
    HandingBack,
    Remembering,
    Expiring,
    Sweeping,
    Keeping,
    Recalling,
    Racing,
    Rivals,
):
    """Every scenario; a subclass provides the fixture `world`."""


class Walk(Accepting, Proving):
    """Every move on every kind of record; a subclass provides the fixture `world`, with a way to plant records."""
