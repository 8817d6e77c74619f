"""kill -9 and SIGSTOP of the real server and the real worker, each at a named point of techniques 3.2.

The server is `oncekey demo`, the worker `oncekey worker`, the provider a process of its own that no crash touches. Time
passes by setting the leases of the dead to be over, so nothing here waits for one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness.databases import DatabaseServer
from proof.crash.victims import UNKNOWN, Cluster, Victim, Waiting

SQLITE, POSTGRES = "sqlite", "postgresql+asyncpg"


def on(stores: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """A test at points of stores: all of them on PostgreSQL, those that could differ on SQLite."""
    pairs = [(store, point) for store, points in stores.items() for point in points]
    return pytest.mark.parametrize(
        ("cluster", "point"), pairs, ids=["-".join(pair) for pair in pairs], indirect=["cluster"]
    )


@pytest.fixture(scope="module")
def clusters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Cluster]]:
    """One cluster for each store, made when it is first asked for."""
    made: dict[str, Cluster] = {}
    with ExitStack() as stack:

        def cluster_on(store: str) -> Cluster:
            if store not in made:
                folder = tmp_path_factory.mktemp("cluster")
                url = f"sqlite:///{folder / 'shop.db'}"
                if store == POSTGRES:
                    server: DatabaseServer = request.getfixturevalue("postgres_server")
                    name = f"cluster_{uuid.uuid4().hex}"
                    url = server.create_database(name).replace("postgresql", POSTGRES, 1)
                    stack.callback(server.drop_database, name)
                made[store] = stack.enter_context(Cluster(folder, url))
            return made[store]

        yield cluster_on


@pytest.fixture
def cluster(request: pytest.FixtureRequest, clusters: Callable[[str], Cluster]) -> Cluster:
    return clusters(request.param)


@pytest.fixture
def healthy_server(cluster: Cluster) -> Victim:
    return cluster.healthy_server


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
def test_payment_is_charged_once_after_its_server_is_killed(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # R116, R117, R120, R249, F24
    key = new_key()
    victim = cluster.server(point)

    assert cluster.ask(victim, "/payments", key) is None
    victim.died()
    answer = cluster.settled(healthy_server, "/payments", key)

    assert answer.status_code == 201
    assert [charge["id"] for charge in cluster.charges(key)] == [answer.json()["charge_id"]]
    again = cluster.ask(healthy_server, "/payments", key)
    assert again is not None
    assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
    cluster.check(healthy_server, "/payments", key)


# One charge, unknown, 409 with the code, and no second call ever.
@on({SQLITE: ("after:charge:1",), POSTGRES: ("before:charge:1", "after:charge:1")})
def test_unrepeatable_payment_becomes_unknown_after_a_kill(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # R85, R130, F6, F23
    key = new_key()
    victim = cluster.server(point)

    assert cluster.ask(victim, "/payments", key, x_demo_dedup="off", x_demo_repeatable="off") is None
    victim.died()
    before = len(cluster.charges(key))
    answer = cluster.settled(healthy_server, "/payments", key)

    assert (answer.status_code, answer.json()["code"]) == (409, UNKNOWN)
    assert cluster.record(key)["state"] == "unknown"
    assert before == len(cluster.charges(key)) == (point == "after:charge:1")
    cluster.check(healthy_server, "/payments", key)


@on({POSTGRES: ("during:charge",)})
def test_payment_with_unread_provider_reply_is_charged_once(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # F6
    key = new_key()
    victim = cluster.server()
    waiting = Waiting(cluster, victim, "/payments", key, x_demo_fault="hang-after")
    waiting.start()
    while not cluster.charges(key):
        assert waiting.is_alive()
    victim.kill()
    waiting.join()

    answer = cluster.settled(healthy_server, "/payments", key)

    assert answer.status_code == 201
    assert [charge["id"] for charge in cluster.charges(key)] == [answer.json()["charge_id"]]
    cluster.check(healthy_server, "/payments", key)


@on({SQLITE: ("before:commit:1",), POSTGRES: ("before:commit:1", "after:commit:1")})
def test_order_is_completed_after_its_server_is_killed(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # R71, R75
    key = new_key()
    victim = cluster.server(point)

    assert cluster.ask(victim, "/orders", key) is None
    victim.died()
    answer = cluster.settled(healthy_server, "/orders", key)

    assert answer.status_code == 201
    cluster.check(healthy_server, "/orders", key)


WORKER = (
    "after:due:1",  # claimed
    "after:commit-take_up:1",  # announced
    "after:charge:1",  # sent, not recorded
    "after:commit-deferred_result:1",  # recorded, not delivered
    "before:drop_parcel:1",  # half of the end is written
    "after:commit-deliver:1",  # all of it is
)


@on({SQLITE: ("after:charge:1",), POSTGRES: WORKER})
def test_transfer_is_made_once_after_its_worker_is_killed(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # R125, R127, F31
    key = new_key()
    accepted = cluster.ask(healthy_server, "/transfers", key)
    assert accepted is not None
    assert accepted.status_code == 202

    cluster.worker(point).died()
    cluster.leases_run_out()
    cluster.worker().finished()
    answer = cluster.settled(healthy_server, "/transfers", key)

    assert answer.status_code == 201
    assert len(cluster.charges(key)) == 1
    cluster.check(healthy_server, "/transfers", key)


@on({SQLITE: ("after:charge:1",), POSTGRES: ("after:claim:1", "before:charge:1", "after:charge:1")})
def test_stopped_server_writes_nothing_after_a_takeover(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # F11, F34
    key = new_key()
    victim = cluster.server(point, "STOP")
    waiting = Waiting(cluster, victim, "/payments", key)
    waiting.start()
    victim.stopped()

    cluster.leases_run_out()
    answer = cluster.settled(healthy_server, "/payments", key)
    version = _versions(cluster, key)
    victim.wake()
    late = waiting.answer()

    assert answer.status_code == 201
    assert late.content == answer.content  # P3: what the record says, not what the zombie made of it
    assert _versions(cluster, key) == version
    assert [charge["id"] for charge in cluster.charges(key)] == [answer.json()["charge_id"]]
    victim.kill()
    cluster.check(healthy_server, "/payments", key)


@on({POSTGRES: ("after:charge:1",)})
def test_stopped_worker_writes_nothing_after_a_takeover(
    cluster: Cluster, healthy_server: Victim, point: str
) -> None:  # F11, F31
    key = new_key()
    assert cluster.ask(healthy_server, "/transfers", key) is not None
    zombie = cluster.worker(point, "STOP")
    zombie.stopped()

    cluster.leases_run_out()
    cluster.worker().finished()
    answer = cluster.settled(healthy_server, "/transfers", key)
    version = _versions(cluster, key)
    zombie.wake()
    zombie.finished()

    assert answer.status_code == 201
    assert _versions(cluster, key) == version
    assert len(cluster.charges(key)) == 1
    cluster.check(healthy_server, "/transfers", key)


def _versions(cluster: Cluster, key: str) -> list[tuple[str, int]]:
    return [(row["state"], row["version"]) for row in cluster.place.look(key)["diary"]]
