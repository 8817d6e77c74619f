"""The contract of a store: one suite for every store behind every driver, with no branch on either.

Give it a world, and pytest does the rest:

    import pytest
    from oncekey_contract import StoreContract, blocking, under_asyncio

    class TestMyStore(StoreContract):
        @pytest.fixture
        def world(self, my_empty_database):
            with blocking(MyStore, MyDriver(my_empty_database)) as world:      # or under_asyncio(...)
                yield world

The first argument makes the store: it is called with `clock=` (a function that gives the instant) and without
(the store's own clock). The second is the driver, which the world closes. The tables must be there already.
Each test gets a world of its own, or shares one: every scenario uses keys that no other scenario uses, except for the
odd keys of `Keeping`, which want an empty store.

A `World` has blocking verbs (`begin`, `settle`, `renew`, `find`, `go(flow)`), a clock to move (`advance`), and three
faults: `lose_reply(name)` lets a transaction of that name happen and loses its reply, `before(name, action)` does
something else just before it, and `between(action)` does it after the store has read and before it writes. Verbs may be
called from many threads.

`Walk` is for stores with statements of their own: it tries every move on every kind of record, and compares what the
store accepted with the table; it also tries each move with a proof that does not fit. It wants an empty store and a way
to plant records, `blocking(..., plant=...)`.
`CellsContract` is for stores that are made of `look`, `swap` and `page`, and wants nothing but those.

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
    """Every scenario; a subclass gives the fixture `world`."""


class Walk(Accepting, Proving):
    """Every move on every kind of record; a subclass gives the fixture `world`, with a way to plant records."""
