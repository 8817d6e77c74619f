"""Whatever a request leaves open, the next one in its thread finds Django's connection as Django makes it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_shop.asking import new_key, post, sold
from django_shop.test_async import apost, in_loop
from oncekey import LOCAL, ExecutionFailedError

pytestmark = pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")


class Way(NamedTuple):
    """A request that leaves an atomic block open."""

    path: str
    body: dict[str, object]
    keyed: bool = True


WAYS = {
    "returned": Way("/orders", {"item": "tea", "does": "left_open"}),
    "raised": Way("/orders", {"item": "tea", "does": "left_open_and_raise"}),
    "without a key, returned": Way("/optional", {"item": "tea", "does": "left_open"}, keyed=False),
    "without a key, raised": Way("/optional", {"item": "tea", "does": "left_open_and_raise"}, keyed=False),
    "in a phase": Way("/payments", {"amount": 5, "in_phase": "left_open"}),
    "in a phase, raised": Way("/payments", {"amount": 5, "in_phase": "left_open_and_raise"}),
    "by an async view": Way("/aorders", {"item": "tea", "does": "left_open"}),
    "by an async view, raised": Way("/aorders", {"item": "tea", "does": "left_open_and_raise"}),
    "by a stream that is too large": Way("/exports", {}),
    "by a stream that fails": Way("/exports", {"fails": True}),
    "by an async stream that is too large": Way("/aexports", {}),
    "by an async stream that fails": Way("/aexports", {"fails": True}),
}


def unprotected(alias: str) -> str:
    """What an unprotected view does with its connection afterwards."""
    from django_shop.models import Order

    connection = connections[alias]
    found = (connection.execute_wrappers, connection.atomic_blocks, connection.savepoint_ids)
    assert found == ([], [], []), found
    with transaction.atomic(using=alias):
        if alias == "default":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        Order.objects.create(item="plain")
    return "fine"


def by_wsgi(alias: str, way: Way) -> tuple[list[int], list[str], int]:
    """Twice the request that leaves something open, each followed by one that does not."""
    statuses, others, key = [], [], new_key() if way.keyed else None
    for _ in range(2):
        statuses.append(post(way.path, way.body, key=key).status_code)
        others.append(unprotected(alias))
    return statuses, others, post("/orders", {"item": "next"}).status_code


def by_asgi(alias: str, way: Way) -> tuple[list[int], list[str], int]:
    async def work():
        statuses, others, key = [], [], new_key() if way.keyed else None
        for _ in range(2):
            statuses.append((await apost(way.path, way.body, key=key)).status_code)
            others.append(await sync_to_async(unprotected)(alias))
        return statuses, others, (await apost("/orders", {"item": "next"})).status_code

    return in_loop(work)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("served", [by_wsgi, by_asgi])
def test_the_transaction_guard_is_removed_after_every_request(alias: str, served, way: Way) -> None:
    statuses, others, following = served(alias, way)
    assert (statuses, others, following) == ([500, 500], ["fine", "fine"], 201)
    assert sold() == ["next", "plain", "plain"]


@pytest.mark.parametrize("way", [WAYS["returned"], WAYS["raised"]], ids=["returned", "raised"])
def test_the_transaction_guard_is_removed_with_atomic_requests(atomic: bool, way: Way) -> None:
    assert by_wsgi("default", way) == ([500, 500], ["fine", "fine"], 201)


@pytest.mark.parametrize(
    ("does", "wanted"), [("left_open", ExecutionFailedError), ("left_open_and_raise", ZeroDivisionError)]
)
def test_the_transaction_guard_is_removed_after_a_function(alias: str, does: str, wanted: type[Exception]) -> None:
    from django_shop import on_default, on_lite
    from django_shop.models import Order
    from django_shop.site import behave

    once = (on_default if alias == "default" else on_lite).once
    name = f"leaves.{new_key()}"

    @once.function(effects=LOCAL, key="number", operation=name)
    def leaves(number: str) -> None:
        Order.objects.create(item="tea")
        behave(alias, does)

    for _ in range(2):
        with pytest.raises(wanted):
            leaves(new_key())
        assert unprotected(alias) == "fine"
    assert sold() == ["plain", "plain"]
