"""kill -9 and SIGSTOP of the real server and the real worker, each at a named point of techniques 3.2.

The server is `oncekey demo`, the worker `oncekey worker`, the provider a process of its own that no crash touches. Time
passes by setting the leases of the dead to be over, so nothing here waits for one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from crash.victims import UNKNOWN, Town, Victim, Waiting
from harness.databases import DatabaseServer

SQLITE, POSTGRES = "sqlite", "postgresql+asyncpg"


def on(stores: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """A test at points of stores: all of them on PostgreSQL, those that could differ on SQLite."""
    pairs = [(store, point) for store, points in stores.items() for point in points]
    return pytest.mark.parametrize(("town", "point"), pairs, ids=["-".join(pair) for pair in pairs], indirect=["town"])


@pytest.fixture(scope="module")
def towns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Town]]:
    """One town for each store, made when it is first asked for."""
    made: dict[str, Town] = {}
    with ExitStack() as stack:

        def town_on(store: str) -> Town:
            if store not in made:
                folder = tmp_path_factory.mktemp("town")
                url = f"sqlite:///{folder / 'shop.db'}"
                if store == POSTGRES:
                    server: DatabaseServer = request.getfixturevalue("postgres_server")
                    name = f"town_{uuid.uuid4().hex}"
                    url = server.create_database(name).replace("postgresql", POSTGRES, 1)
                    stack.callback(server.drop_database, name)
                made[store] = stack.enter_context(Town(folder, url))
            return made[store]

        yield town_on


@pytest.fixture
def town(request: pytest.FixtureRequest, towns: Callable[[str], Town]) -> Town:
    return towns(request.param)


@pytest.fixture
def survivor(town: Town) -> Victim:
    return town.survivor


def new_key() -> str:
    return str(uuid.uuid4())


PAYMENT = (
    "before:claim:1",  # before the claim is committed
    "after:claim:1",  # claimed
    "before:commit:1",  # a phase is written, not committed
    "after:commit:1",  # a phase is committed
    "before:charge:1",  # announced, not sent
    "after:charge:1",  # answered, not recorded
    "after:settle_completed:1",  # settled, not answered
)


@on({SQLITE: ("before:commit:1", "after:charge:1"), POSTGRES: PAYMENT})
def test_a_payment_whose_server_is_killed(town: Town, survivor: Victim, point: str) -> None:  # R116, R117, R120, F24
    key = new_key()
    victim = town.server(point)

    assert town.ask(victim, "/payments", key) is None
    victim.died()
    answer = town.settled(survivor, "/payments", key)

    assert answer.status_code == 201
    assert [charge["id"] for charge in town.charges(key)] == [answer.json()["charge_id"]]
    again = town.ask(survivor, "/payments", key)
    assert again is not None
    assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
    town.check(survivor, "/payments", key)


# One charge, unknown, 409 with the code, and no second call ever.
@on({SQLITE: ("after:charge:1",), POSTGRES: ("before:charge:1", "after:charge:1")})
def test_a_payment_that_nobody_may_repeat(town: Town, survivor: Victim, point: str) -> None:  # R85, R130, F6, F23
    key = new_key()
    victim = town.server(point)

    assert town.ask(victim, "/payments", key, x_demo_dedup="off", x_demo_repeatable="off") is None
    victim.died()
    before = len(town.charges(key))
    answer = town.settled(survivor, "/payments", key)

    assert (answer.status_code, answer.json()["code"]) == (409, UNKNOWN)
    assert town.record(key)["state"] == "unknown"
    assert before == len(town.charges(key)) == (point == "after:charge:1")
    town.check(survivor, "/payments", key)


@on({POSTGRES: ("during:charge",)})
def test_a_payment_whose_answer_was_never_read(town: Town, survivor: Victim, point: str) -> None:  # F6
    key = new_key()
    victim = town.server()
    waiting = Waiting(town, victim, "/payments", key, x_demo_fault="hang-after")
    waiting.start()
    while not town.charges(key):
        assert waiting.is_alive()
    victim.kill()
    waiting.join()

    answer = town.settled(survivor, "/payments", key)

    assert answer.status_code == 201
    assert [charge["id"] for charge in town.charges(key)] == [answer.json()["charge_id"]]
    town.check(survivor, "/payments", key)


@on({SQLITE: ("before:commit:1",), POSTGRES: ("before:commit:1", "after:commit:1")})
def test_an_order_whose_server_is_killed(town: Town, survivor: Victim, point: str) -> None:  # R71, R75
    key = new_key()
    victim = town.server(point)

    assert town.ask(victim, "/orders", key) is None
    victim.died()
    answer = town.settled(survivor, "/orders", key)

    assert answer.status_code == 201
    town.check(survivor, "/orders", key)


WORKER = (
    "after:due:1",  # claimed
    "after:commit-take_up:1",  # announced
    "after:charge:1",  # sent, not recorded
    "after:commit-deferred_result:1",  # recorded, not delivered
    "before:drop_parcel:1",  # half of the end is written
    "after:commit-deliver:1",  # all of it is
)


@on({SQLITE: ("after:charge:1",), POSTGRES: WORKER})
def test_a_transfer_whose_worker_is_killed(town: Town, survivor: Victim, point: str) -> None:  # R125, R127, F31
    key = new_key()
    accepted = town.ask(survivor, "/transfers", key)
    assert accepted is not None
    assert accepted.status_code == 202

    town.worker(point).died()
    town.leases_run_out()
    town.worker().finished()
    answer = town.settled(survivor, "/transfers", key)

    assert answer.status_code == 201
    assert len(town.charges(key)) == 1
    town.check(survivor, "/transfers", key)


@on({SQLITE: ("after:charge:1",), POSTGRES: ("after:claim:1", "before:charge:1", "after:charge:1")})
def test_a_zombie_that_was_taken_over_writes_nothing(town: Town, survivor: Victim, point: str) -> None:  # F11, F34
    key = new_key()
    victim = town.server(point, "STOP")
    waiting = Waiting(town, victim, "/payments", key)
    waiting.start()
    victim.stopped()

    town.leases_run_out()
    answer = town.settled(survivor, "/payments", key)
    version = _versions(town, key)
    victim.wake()
    late = waiting.answer()

    assert answer.status_code == 201
    assert late.content == answer.content  # P3: what the record says, not what the zombie made of it
    assert _versions(town, key) == version
    assert [charge["id"] for charge in town.charges(key)] == [answer.json()["charge_id"]]
    victim.kill()
    town.check(survivor, "/payments", key)


@on({POSTGRES: ("after:charge:1",)})
def test_a_worker_that_was_overtaken_writes_nothing(town: Town, survivor: Victim, point: str) -> None:  # F11, F31
    key = new_key()
    assert town.ask(survivor, "/transfers", key) is not None
    zombie = town.worker(point, "STOP")
    zombie.stopped()

    town.leases_run_out()
    town.worker().finished()
    answer = town.settled(survivor, "/transfers", key)
    version = _versions(town, key)
    zombie.wake()
    zombie.finished()

    assert answer.status_code == 201
    assert _versions(town, key) == version
    assert len(town.charges(key)) == 1
    town.check(survivor, "/transfers", key)


def _versions(town: Town, key: str) -> list[tuple[str, int]]:
    return [(row["state"], row["version"]) for row in town.place.look(key)["diary"]]
