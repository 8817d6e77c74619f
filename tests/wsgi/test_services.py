"""What WSGI has through the parts that it shares with ASGI: status, cache, limits, and completing without a client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import flask
import pytest

from harness.patience import PATIENCE, wait_until
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.core.scope import BindTo
from oncekey.engine.operation import SyncOperation
from oncekey.frameworks.resuming import resumed_as
from oncekey.once import Once
from oncekey.workers.completer import Completer
from wsgi.shop import Shop, execute, send, served
from wsgi.test_serving import new_key

STATUS = "/idempotency-keys"


@contextmanager
def closing(shop: Shop) -> Iterator[Shop]:
    yield shop
    for threads in shop.once._threaded.values():
        assert threads.stop(10)
    shop.once.blocking().close()


def test_the_wsgi_status_resource_reports_key_states(shop: Shop, kind: str) -> None:
    # R29, R84
    with served(shop.application(kind)) as port:
        key = new_key()
        assert send(port, f"{STATUS}/{key}", key=None, method="GET").status == 404
        send(port, "/local", {"item": "tea"}, key=key)
        seen = send(port, f"{STATUS}/{key}", key=None, method="GET")
        stranger = send(port, f"{STATUS}/{key}", key=None, method="GET", Tenant="other")
        key, order = new_key(), {"item": "b", "does": "stumble"}
        send(port, "/inline", order, key=key)
        unknown = send(port, "/inline", order, key=key)
        where = unknown.headers["location"]
        doubt = send(port, where, key=None, method="GET")
    assert (seen.status, seen.json()["state"], seen.headers["cache-control"]) == (200, "completed", "no-store")
    assert (stranger.status, stranger.json()["code"]) == (404, "idempotency_key_not_found")
    assert (where, doubt.json()["state"]) == (f"{STATUS}/{key}", "unknown")


def test_the_wsgi_status_of_a_running_key_is_in_progress(shop: Shop, kind: str) -> None:
    # L8, F21: LOCAL in one commit has no row yet
    key = new_key()
    with served(shop.application(kind)) as port:
        running = threading.Thread(
            target=send, args=(port, "/local", {"item": "tea", "does": "wait"}), kwargs={"key": key}
        )
        running.start()
        assert shop.entered.acquire(timeout=PATIENCE)
        seen = send(port, f"{STATUS}/{key}", key=None, method="GET")
        shop.go_on.set()
        running.join()
    assert (seen.status, seen.json()["state"]) == (200, "in_progress")


def test_the_wsgi_status_returns_503_during_an_outage(kind: str) -> None:
    shop = Shop("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with served(shop.application(kind)) as port:
        reply = send(port, f"{STATUS}/{new_key()}", key=None, method="GET")
    assert (reply.status, reply.json()["code"]) == (503, "idempotency_store_unavailable")


def test_the_replay_cache_serves_a_deleted_record(url: str, kind: str) -> None:
    # Filled by what was read from the store, and given although the store has forgotten it
    table = "oncekey_record" if url.startswith("sqlite") else "oncekey.record"
    cached_by = Policy(replay_cache=timedelta(minutes=5))
    with closing(Shop(url, policy=cached_by)) as shop, served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea"}
        first, again = send(port, "/local", order, key=key), send(port, "/local", order, key=key)
        execute(url, f"DELETE FROM {table}")
        cached = send(port, "/local", order, key=key)
        other = send(port, "/local", {"item": "milk"}, key=key)
    assert (first.replayed, again.replayed, cached.replayed) == (False, True, True)
    assert (cached.body, other.status, shop.runs) == (first.body, 422, ["local"])


def test_twelve_threads_share_the_replay_cache(url: str) -> None:
    cached_by = Policy(replay_cache=timedelta(minutes=5))
    with closing(Shop(url, policy=cached_by)) as shop, served(shop.application("plain")) as port:
        keys = [new_key() for _ in range(3)]
        for key in keys:
            send(port, "/local", {"item": "tea"}, key=key)
        replies: list[bool] = []

        def ask(key: str) -> None:
            replies.extend(send(port, "/local", {"item": "tea"}, key=key).replayed for _ in range(5))

        threads = [threading.Thread(target=ask, args=(keys[number % 3],)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert replies == [True] * 60


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The second that all counting takes place in."""
    clock = SimpleNamespace(now=1_800_000_000.25)
    for module in ("limits.storage.memory", "limits.strategies"):
        __import__(module)
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=lambda: clock.now), raising=False)
    return clock


def test_rate_limits_apply_to_new_keys_and_lookups(url: str, kind: str, second: SimpleNamespace) -> None:
    # R187, R188: who is known is answered however many there are
    limited = Policy(max_new_keys_per_second=2, max_lookups_per_second=1)
    with closing(Shop(url, policy=limited)) as shop, served(shop.application(kind)) as port:
        key = new_key()
        new = [send(port, "/local", {"item": "tea"}, key=one) for one in (key, new_key(), new_key())]
        stranger = send(port, "/local", {"item": "tea"}, key=new_key(), Tenant="other")
        known = send(port, "/local", {"item": "tea"}, key=key)
        looks = [send(port, f"{STATUS}/{key}", key=None, method="GET") for _ in range(2)]
        second.now += 2
        later = send(port, "/local", {"item": "tea"}, key=new_key())
    assert [reply.status for reply in new] == [201, 201, 429]
    assert (stranger.status, known.replayed, later.status) == (201, True, 201)
    assert [reply.status for reply in looks] == [200, 429]
    assert len(shop.sold) == 4


def test_an_unusable_limits_storage_fails_the_startup(tmp_path: Any) -> None:
    policy = Policy(max_new_keys_per_second=1, limits_storage="nowhere://user:secret@host")
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, policy=policy)
    with pytest.raises(ConfigurationError, match="limits_storage") as raised:
        once.start_blocking()
    assert "secret" not in str(raised.value)
    once.blocking().close()


@pytest.mark.parametrize("bound", [BindTo.PRINCIPAL, BindTo.TOKEN])
def test_bind_to_separates_principals_under_wsgi(tmp_path: Any, bound: BindTo) -> None:
    # R29: in the same tenant, too, and for the status as for the answer
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, policy=Policy(bind_to=bound))
    app = flask.Flask("shop")

    @app.post("/draw")
    @once.protect(effects=INLINE)
    def draw() -> str:
        return new_key()

    once.wsgi(app, tenant=lambda _: "acme", principal=lambda environ: environ["HTTP_WHO"], status=STATUS)
    client, key = app.test_client(), new_key()
    ann, bob = ({"Who": who, "Authorization": f"Bearer {who}"} for who in ("ann", "bob"))
    drawn = [client.post("/draw", headers={"Idempotency-Key": key, **who}).data for who in (ann, bob, ann)]
    assert drawn[0] == drawn[2] != drawn[1]
    other = new_key()
    client.post("/draw", headers={"Idempotency-Key": other, **ann})
    assert [client.get(f"{STATUS}/{other}", headers=who).status_code for who in (ann, bob)] == [200, 404]
    once.blocking().close()


# Without the client


def due(url: str) -> None:
    """What was handed back may be gone on with now."""
    table = "oncekey_record" if url.startswith("sqlite") else "oncekey.work"
    execute(url, f"UPDATE {table} SET reconcile_after = 1 WHERE reconcile_after IS NOT NULL")


async def complete(once: Once) -> int:
    """One look of a completer, as `oncekey worker` takes it."""
    await once.start()
    try:
        return await Completer(once).run_once()
    finally:
        await once.stop()


def test_a_completer_resumes_a_wsgi_request(shop: Shop, kind: str) -> None:
    # H7, R120
    key, order = new_key(), {"item": "t\u00e4a", "does": "stumble"}
    with served(shop.application(kind)) as port:
        assert send(port, "/phased", order, key=key).status == 500
        due(shop.url)
        assert asyncio.run(complete(shop.once)) == 1
        assert shop.sold == ["t\u00e4a", "t\u00e4a paid"]
        replayed = send(port, "/phased", order, key=key)
    assert (replayed.status, replayed.replayed, replayed.json()["attempt"]) == (201, True, 2)
    assert (len(shop.charges), len(shop.runs)) == (1, 2)


def test_in_process_workers_resume_wsgi_requests(url: str, kind: str) -> None:
    # `workers=True` under WSGI: an event loop beside the threads
    key, order = new_key(), {"item": "tea", "does": "stumble"}
    with closing(Shop(url, workers=True, policy=Policy(complete_interval=timedelta(seconds=0.2)))) as shop:
        with served(shop.application(kind)) as port:
            assert send(port, "/phased", order, key=key).status == 500
            while shop.sold != ["tea", "tea paid"]:
                threading.Event().wait(0.05)
            reply = send(port, "/phased", order, key=key)
            while reply.status == 409:  # its rows are seen before its answer
                threading.Event().wait(0.05)
                reply = send(port, "/phased", order, key=key)
        assert (reply.status, reply.replayed, len(shop.charges)) == (201, True, 1)
        assert shop.once._aside is not None
        shop.once._aside.stop()
        assert not shop.once._aside._thread.is_alive()


def test_the_first_request_of_any_kind_starts_the_workers(
    url: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # after a restart, a request without a key is enough to resume what the dead process left
    policy, starts = Policy(complete_interval=timedelta(seconds=0.2)), list[int]()
    with closing(Shop(url)) as dead, served(dead.application(kind)) as port:
        assert send(port, "/phased", {"item": "tea", "does": "stumble"}, key=new_key()).status == 500
    start = Once.start_blocking

    def failing_first(once: Once) -> None:
        starts.append(1)
        if len(starts) == 1:
            raise ConfigurationError("not today")
        start(once)

    monkeypatch.setattr(Once, "start_blocking", failing_first)
    with closing(Shop(url, workers=True, policy=policy, stumbled={"tea"})) as shop:
        with served(shop.application(kind)) as port:
            assert send(port, "/stream", {}, key=None).status == 200
            wait_until(lambda: "the workers of this process did not start: not today" in caplog.text)
            wait_until(lambda: send(port, "/stream", {}, key=None).status == 200 and shop.sold == ["tea", "tea paid"])
        assert (len(starts), len(shop.charges)) == (2, 0)
        assert shop.once._aside is not None
        shop.once._aside.stop()


def test_a_request_without_a_key_does_not_open_the_store_without_workers(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        assert send(port, "/stream", {}, key=None).status == 200
    assert not any(threads.started for threads in shop.once._threaded.values())


def test_a_completer_resumes_as_the_wsgi_principal_only(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)
    app, names = flask.Flask("shop"), []
    who: Callable[[Any], str | None] = lambda _: None  # noqa: E731  (it changes below)

    @app.post("/pay")
    @once.protect(effects=PHASED)
    def pay(op: SyncOperation[Any]) -> Any:
        resumed = (resumed_as(flask.request), resumed_as(flask.request.environ))
        names.append((*resumed, flask.request.headers.get("X-Own"), flask.request.is_secure))
        drawn = op.phase("drawn", lambda _: "paid")
        assert op.attempt > 1
        return drawn

    once.wsgi(
        app,
        tenant=lambda _: "acme",
        principal=lambda environ: who(environ) or environ.get("HTTP_WHO", "nobody"),
        keep_headers=["X-Own"],
    )
    elsewhere = flask.Flask("elsewhere")
    once.wsgi(elsewhere, tenant=lambda _: "acme")  # of several applications, the one with its view is asked
    lines = {"Idempotency-Key": new_key(), "Who": "ann", "X-Own": "mine", "X-Other": "never kept"}
    assert app.test_client().post("/pay?a=%20b", json={}, headers=lines).status_code == 500
    execute(once.store, "UPDATE oncekey_record SET reconcile_after = 1")  # type: ignore[arg-type]
    assert asyncio.run(complete(once)) == 0
    assert "as the principal 'nobody', but it belongs to 'ann'" in caplog.text
    assert names == [(None, None, "mine", False)]
    who = resumed_as
    assert asyncio.run(complete(once)) == 1
    assert names == [(None, None, "mine", False), ("ann", "ann", "mine", True)]
    once.blocking().close()


def test_app_of_finds_class_based_handlers(tmp_path: Any) -> None:
    shop = Shop(f"sqlite:///{tmp_path}/shop.db")
    shop.flask()
    other = flask.Flask("other")
    shop.once.wsgi(other, tenant=lambda _: "acme")
    assert shop.once.app_of("flask orders") is not None
    assert shop.once.app_of("flask /local") is not None

    @shop.once.protect(effects=LOCAL, operation="nowhere")
    def nowhere() -> None: ...

    assert shop.once.app_of("nowhere") is None
