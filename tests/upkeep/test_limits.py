"""Limits per tenant: only what would be executed is turned away, and nobody pays for a neighbour (R187-R189)."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from frameworks.shop import Shop, new_key
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, SECOND
from oncekey.core.policy import Policy
from oncekey.frameworks.limits import check
from oncekey.once import Once
from oncekey.testing.claims import ManualClock

HOURS_3 = 3 * 3600


class Time:
    """What the package `limits` takes for the time, and what we do."""

    def __init__(self, monkeypatch):
        self.now = 1_800_000_000.25
        clock = SimpleNamespace(time=lambda: self.now)
        for module in ("limits.aio.storage.memory", "limits.aio.strategies"):
            __import__(module)
            monkeypatch.setattr(f"{module}.time", clock, raising=False)


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


def ordering(time, **settings):
    shop = Shop(policy=Policy(**settings), clock=ManualClock())

    @shop.post(effects=INLINE, status_code=201)
    async def create():
        shop.runs.append(1)
        return {"run": len(shop.runs)}

    limits = shop.once._installed[shop.app].limits
    limits._now = lambda: round(time.now * SECOND)
    limits._boot = lambda: time.now
    return shop


async def sent(shop, count, tenant="acme"):
    lines = [("x-tenant", tenant)]
    return [(await shop.send("/orders", key=new_key(), headers=lines)).status for _ in range(count)]


async def test_new_keys_of_a_tenant_are_limited_per_second(time):
    # R188
    shop = ordering(time, max_new_keys_per_second=3)
    assert await sent(shop, 5) == [201, 201, 201, 429, 429]
    assert len(shop.runs) == 3
    assert await sent(shop, 2, "other") == [201, 201]  # other tenants are untouched
    time.now += 1.01
    assert await sent(shop, 1) == [201]


async def test_a_rate_limited_request_gets_retry_after_and_no_record(time):
    shop = ordering(time, max_new_keys_per_second=1)
    await sent(shop, 1)
    key = new_key()
    refused = await shop.send("/orders", key=key)
    assert (refused.status, refused.header("retry-after")) == (429, "1")
    assert refused.json()["code"] == "idempotency_rate_limited"
    assert len(shop.ledger.records) == 1
    time.now += 1.01
    assert (await shop.send("/orders", key=key)).status == 201  # the same key, as the refusal says


async def test_replays_are_never_rate_limited(time):
    # R188
    shop = ordering(time, max_new_keys_per_second=1, max_live_keys=1)
    key = new_key()
    first = await shop.send("/orders", key=key)
    for _ in range(5):
        again = await shop.send("/orders", key=key)
        assert (again.status, again.body, again.header("idempotent-replayed")) == (201, first.body, "true")
    assert await sent(shop, 1) == [429]
    assert len(shop.runs) == 1


async def test_live_keys_of_a_tenant_are_limited(time):
    # R188
    shop = ordering(time, max_live_keys=3)
    assert await sent(shop, 5) == [201, 201, 201, 429, 429]
    assert await sent(shop, 1, "other") == [201]
    time.now += 2
    refused = await shop.send("/orders", key=new_key())
    assert (refused.status, refused.header("retry-after")) == (429, "60")
    shop.clock.advance(25 * 3600 * SECOND)  # expired keys are not live
    time.now += 2
    assert await sent(shop, 4) == [201, 201, 201, 429]


async def test_max_lookups_per_second_limits_status_requests(time):
    """Whoever tries a thousand keys learns little, and hears the same of known and unknown ones."""
    # R187
    shop = ordering(time, max_lookups_per_second=5)
    await shop.send("/orders", key="key-00000000000000001")

    async def looked(number, tenant="acme"):
        target = f"/idempotency-keys/key-{number:017}"
        return (await shop.send(target, method="GET", key=None, headers=[("x-tenant", tenant)])).status

    seen = [await looked(number) for number in range(1, 101)]
    assert seen == [200, 404, 404, 404, 404, *[429] * 95]
    assert await looked(1, "other") == 404
    assert (await shop.send("/orders", key="key-00000000000000001")).status == 201  # a retry is no look-up
    time.now += 1.01
    assert await looked(1) == 200


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("2027-01-15T08:00:00Z", 201),  # now
        ("2027-01-15T05:00:01+00:00", 201),
        ("2027-01-15T04:59:59Z", 412),
        ("2027-01-15T06:59:59+02:00", 412),
        ("Fri, 15 Jan 2027 07:30:00 GMT", 201),
        ("Thu, 14 Jan 2027 07:30:00 GMT", 412),
        ("2027-01-15T04:59:59", 412),  # without an offset nobody knows
        ("yesterday", 412),
        ("", 412),
        ("2027-01-15T08:00:00Z" * 9, 412),
        ("2027-01-15T09:30:00Z", 201),  # a client whose clock is ahead
    ],
)
async def test_a_request_older_than_max_request_age_returns_412(time, said, status):
    # R189
    shop = ordering(time, max_request_age=HOURS_3)
    reply = await shop.send("/orders", key=new_key(), headers=[("Idempotency-First-Sent", said)])
    assert reply.status == status
    assert len(shop.runs) == (status == 201)
    if status == 412:
        assert reply.json()["code"] == "idempotency_request_too_old"
        assert reply.header("retry-after") is None


async def test_an_old_request_is_replayed_but_never_run_again(time):
    """What the header is for: a captured request comes back after its key was forgotten."""
    # R189, R163
    shop = ordering(time, max_request_age=HOURS_3)
    key, lines = new_key(), [("Idempotency-First-Sent", "2027-01-15T08:00:00Z")]
    assert (await shop.send("/orders", key=key, headers=lines)).status == 201
    time.now += 10 * 3600
    assert (await shop.send("/orders", key=key, headers=lines)).header("idempotent-replayed") == "true"
    shop.clock.advance(25 * 3600 * SECOND)
    assert (await shop.send("/orders", key=key, headers=lines)).status == 412
    assert len(shop.runs) == 1


async def test_two_first_sent_headers_return_412(time):
    shop = ordering(time, max_request_age=HOURS_3)
    lines = [("Idempotency-First-Sent", "2027-01-15T08:00:00Z")] * 2
    assert (await shop.send("/orders", key=new_key(), headers=lines)).status == 412


async def test_max_request_age_needs_the_setting_and_the_header(time):
    old = [("Idempotency-First-Sent", "1999-01-01T00:00:00Z")]
    assert (await ordering(time, max_request_age=HOURS_3).send("/orders", key=new_key())).status == 201
    assert (await ordering(time).send("/orders", key=new_key(), headers=old)).status == 201


async def test_an_unavailable_limits_storage_disables_the_limit(time, caplog):
    """A limit guards against floods, not against doubles."""
    shop = ordering(time, max_new_keys_per_second=1, limits_storage="redis://127.0.0.1:1/0?stream_timeout=1")
    shop.once._installed[shop.app].limits._limiters[asyncio.get_running_loop()] = {
        shop.once.policy.limits_storage: Broken()
    }
    assert await sent(shop, 2) == [201, 201]
    assert "the rate limit is not enforced" in caplog.text


class Broken:
    async def hit(self, *_):
        from limits.errors import StorageError

        raise StorageError(OSError("away"))


def test_a_missing_package_is_found_at_start_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "limits", None)
    monkeypatch.setattr("oncekey.frameworks.limits.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'oncekey\[limits\]'"):
        check([Policy(), Policy(max_new_keys_per_second=1)])
    check([Policy(), Policy(max_live_keys=1)])  # counted by the store


async def test_a_storage_that_cannot_be_used_is_found_at_start_up():
    policy = Policy(max_lookups_per_second=1, limits_storage="nowhere://user:secret@host")
    with pytest.raises(ConfigurationError, match="limits_storage") as raised:
        await Once("memory:", policy=policy).start()
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(policy)


@pytest.mark.parametrize("wrong", ["", "redis", 7])
def test_limits_storage_must_be_a_url(wrong):
    with pytest.raises(ConfigurationError, match="limits_storage"):
        Policy(limits_storage=wrong)
