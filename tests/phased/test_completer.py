"""Going on without the client: what is kept of a request, in whose name it goes on, and what stops it (H7, F28)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request

from frameworks.shop import tenant_of
from harness.asgi import Caller
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import PHASED, SECOND
from oncekey.core.policy import Policy
from oncekey.engine import kept_request
from oncekey.engine.operation import Operation
from oncekey.frameworks.resuming import resumed_as
from oncekey.workers.completer import Completer
from phased.bank import KEY, LEASE, Bank, ClockedOnce

SECRET = b"a secret of 16 b"
CREDENTIALS = [("Authorization", "Bearer t0p-secret"), ("Cookie", "session=t0p-secret"), ("X-Api-Key", "t0p-secret")]


async def stranded(bank: Bank, dead: Any, **request: Any) -> None:
    await dead.send_and_freeze("order", **request)
    bank.lease_over()


async def test_two_completers_resume_a_request_once(mixed_bank: Bank) -> None:
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as one, bank.process() as two:
        await stranded(bank, dead)
        await asyncio.gather(Completer(one.once).run_once(), Completer(two.once).run_once())
        assert one.runs + two.runs == 1
    assert (bank.state, bank.effects, bank.provider.charges) == ("completed", ["order", "paid"], 1)


async def test_a_completer_and_the_client_resume_a_request_once(mixed_bank: Bank) -> None:
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as one, bank.process() as two:
        await stranded(bank, dead)
        await asyncio.gather(Completer(one.once).run_once(), two.send())
        assert one.runs + two.runs == 1
        assert (await two.send()).status == 201
    assert (bank.effects, bank.provider.charges) == (["order", "paid"], 1)


async def test_a_failed_request_is_resumed_after_its_pause(mixed_bank: Bank) -> None:
    # H6: the client's own retry does not wait, a completer does
    bank = mixed_bank
    bank.provider.faults.append(ConnectionResetError())
    async with bank.process() as process:
        completer = Completer(process.once)
        assert (await process.send()).status == 500
        assert await completer.run_once() == 0
        bank.clock.advance(6 * SECOND)
        assert await completer.run_once() == 1
        assert (await process.send()).replayed
    assert bank.provider.charges == 1


async def test_a_completer_resumes_many_requests(small_bank: Bank) -> None:
    keys = [f"key-{number:016}" for number in range(7)]
    async with small_bank.process() as dead, small_bank.process() as alive:
        for key in keys:
            dead.frozen = False
            await dead.send_and_freeze("order", key=key)
        small_bank.lease_over()
        completer = Completer(alive.once, page=3)
        assert await completer.run_once() == 7
        assert await completer.run_once() == 0
    assert small_bank.provider.charges == 7


class PanicException(BaseException):
    pass


async def test_a_panicking_handler_does_not_stop_the_completer(
    small_bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"key-{number:016}" for number in range(3)]
    async with small_bank.process() as dead, small_bank.process() as alive:
        for key in keys:
            dead.frozen = False
            await dead.send_and_freeze("order", key=key)
        small_bank.lease_over()
        small_bank.provider.faults.append(PanicException("index out of bounds"))
        completer = Completer(alive.once, concurrency=1)
        assert await completer.run_once() == 3
        assert (completer.done, completer.failed) == (2, 1)
    assert "pay failed again: PanicException; its record is failed_retryable" in caplog.text
    assert small_bank.provider.charges == 3


async def test_a_resumed_request_that_fails_is_counted_as_failed(
    mixed_bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    bank = mixed_bank
    async with bank.process() as dead, bank.process() as alive:
        await stranded(bank, dead)
        bank.provider.faults.append(ConnectionResetError())
        completer = Completer(alive.once)
        assert await completer.run_once() == 1
        assert (completer.done, completer.failed) == (0, 1)
        assert "pay failed again: ConnectionResetError; its record is failed_retryable" in caplog.text
        bank.clock.advance(11 * SECOND)
        assert await completer.run_once() == 1
        assert (completer.done, completer.failed) == (1, 1)


async def test_a_completer_waits_twice_as_long_after_each_failure(
    small_bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    # ten attempts outlast a provider's outage of half an hour; a client's retry never waits
    bank = small_bank
    async with bank.process() as alive:
        bank.provider.faults.extend(ConnectionResetError("too busy") for _ in range(5))
        assert (await alive.send()).status == 500
        completer = Completer(alive.once)
        for seconds in (5, 10, 20):
            bank.clock.advance((seconds - 1) * SECOND)
            assert await completer.run_once() == 0
            bank.clock.advance(2 * SECOND)
            assert await completer.run_once() == 1
        assert (await alive.send()).status == 500
        assert (await alive.send()).status == 201
    assert bank.provider.charges == 1
    assert caplog.text.count("the call 'charge' failed, and whether it was executed is not known: ConnectionReset") == 5


async def test_complete_false_leaves_the_request_to_its_client(small_bank: Bank) -> None:
    # H7: complete=False keeps nothing
    async with small_bank.process(complete=False) as dead, small_bank.process(complete=False) as alive:
        await stranded(small_bank, dead)
        assert (await small_bank.record()).request is None
        assert await Completer(alive.once).run_once() == 0
        assert (await alive.send()).status == 201


async def test_a_completer_skips_operations_it_does_not_serve(small_bank: Bank) -> None:
    async with small_bank.process() as dead, small_bank.process(operation="another") as alive:
        await stranded(small_bank, dead)
        assert await Completer(alive.once).run_once() == 0
    assert small_bank.provider.charges == 0


async def test_credentials_are_never_kept(small_bank: Bank) -> None:
    # H7: what says how to read the body is, and what the application asked for
    async with small_bank.process(install={"keep_headers": ["X-Locale"]}) as process:
        headers = [*CREDENTIALS, ("Accept-Language", "de"), ("X-Locale", "de-CH"), ("X-Other", "t0p-secret")]
        await process.send_and_freeze("order", headers=headers, body={"amount": 7})
        kept = (await small_bank.record()).request
        assert kept is not None
        assert b"t0p-secret" not in kept
        for known in (b"accept-language", b"x-locale", b"content-type", b"acme"):
            assert known in kept
        assert KEY.encode() not in kept


async def test_a_completer_resumes_as_the_original_principal(small_bank: Bank) -> None:
    # H7: authentication asks whose work is gone on with; the request is the client's own otherwise
    seen: list[tuple[str | None, str | None, bytes, str]] = []

    async def known(request: Request) -> None:
        body = await request.body()
        seen.append((resumed_as(request), request.headers.get("x-locale"), body, request.url.scheme))
        if resumed_as(request) is None and request.headers.get("authorization") is None:
            raise HTTPException(401)

    options: dict[str, Any] = {
        "install": {"principal": lambda request: "alice", "keep_headers": ["X-Locale"]},
        "route": {"dependencies": [Depends(known)]},
    }
    async with small_bank.process(**options) as dead, small_bank.process(**_copy(options)) as alive:
        await stranded(small_bank, dead, headers=[CREDENTIALS[0], ("X-Locale", "de-CH")], body={"amount": 7})
        assert (await alive.send(body={"amount": 7})).status == 401
        assert await Completer(alive.once).run_once() == 1
    assert seen[0] == (None, "de-CH", b'{"amount": 7}', "http")
    assert seen[-1] == ("alice", "de-CH", b'{"amount": 7}', "https"), "applications redirect http"


async def test_a_worker_authenticated_as_another_principal_is_refused(
    small_bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    # R27: the tenant is right, and the handler would run for another of its users
    names = ["alice", "bob", "alice"]  # of the client's request, and of two by the worker
    options: dict[str, Any] = {"install": {"principal": lambda _: names.pop(0)}}
    async with small_bank.process(**options) as dead, small_bank.process(**_copy(options)) as alive:
        await stranded(small_bank, dead)
        completer = Completer(alive.once)
        assert await completer.run_once() == 0
        assert "as the principal 'bob', but it belongs to 'alice'" in caplog.text
        assert (small_bank.provider.charges, completer.failed) == (0, 1)
        assert await completer.run_once() == 0  # it rests for a round
        assert await completer.run_once() == 1
    assert small_bank.provider.charges == 1


@pytest.mark.parametrize("function", ["tenant", "principal"])
@pytest.mark.parametrize(
    ("fails", "end"),
    [(None, "ConfigurationError"), (LookupError("no member"), "LookupError"), (HTTPException(403), "403")],
    ids=["none", "error", "403"],
)
async def test_a_worker_that_the_application_does_not_identify_is_refused(
    small_bank: Bank, caplog: pytest.LogCaptureFixture, function: str, fails: Exception | None, end: str
) -> None:
    def identify(request: Request) -> str | None:
        if resumed_as(request) is None:
            return "acme" if function == "tenant" else "alice"
        if fails is None:
            return None
        raise fails

    names = {"tenant": lambda _: "acme", "principal": lambda _: "alice"}
    options: dict[str, Any] = {"install": {**names, function: identify}}
    async with small_bank.process(**options) as dead, small_bank.process(**_copy(options)) as alive:
        await stranded(small_bank, dead)
        before = await small_bank.record()
        completer = Completer(alive.once)
        assert await completer.run_once() == 0
        assert (await small_bank.record(), completer.failed, alive.runs) == (before, 1, 0)
        assert f"received {end} before its handler" in caplog.text
        assert (f"as the {function} None, but it belongs to" in caplog.text) is (fails is None)
        assert (await alive.send()).status == 201


async def test_a_caller_without_a_principal_is_resumed_as_the_tenant(small_bank: Bank) -> None:
    options: dict[str, Any] = {"install": {"principal": lambda _: None}}
    async with small_bank.process(**options) as dead, small_bank.process(**_copy(options)) as alive:
        await stranded(small_bank, dead)
        assert await Completer(alive.once).run_once() == 1


def _copy(options: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) for name, value in options.items()}


async def test_a_rejected_completer_retries_with_backoff(small_bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def known(request: Request) -> None:
        asked.append(1)
        if request.headers.get("authorization") is None:
            raise HTTPException(401)

    options: dict[str, Any] = {"route": {"dependencies": [Depends(known)]}}
    async with small_bank.process(**options) as dead, small_bank.process(**_copy(options)) as alive:
        await stranded(small_bank, dead, headers=[CREDENTIALS[0]])
        asked.clear()
        completer = Completer(alive.once)
        times = []
        for round_ in range(12):
            before = len(asked)
            assert await completer.run_once() == 0
            if len(asked) > before:
                times.append(round_)
        assert times == [0, 2, 5, 10]
        assert "accept oncekey.resumed_as(request) in the application's authentication, in the `tenant`" in caplog.text
        assert KEY not in caplog.text
        assert (await alive.send(headers=[CREDENTIALS[0]])).status == 201
    assert small_bank.provider.charges == 1


async def test_a_client_cannot_impersonate_a_completer(small_bank: Bank) -> None:
    seen: list[str | None] = []

    def known(request: Request) -> None:
        seen.append(resumed_as(request))

    route = {"dependencies": [Depends(known)]}
    async with small_bank.process(route=route) as process:
        await process.send(headers=[("oncekey.resumption", "alice"), ("X-Oncekey-Resumption", "alice")])
    assert seen == [None]


async def test_stored_requests_are_encrypted_with_a_secret(mixed_bank: Bank) -> None:
    bank = mixed_bank
    policy = Policy(lease=LEASE, secret=SECRET)
    async with bank.process(policy=policy) as dead, bank.process(policy=policy) as alive:
        await stranded(bank, dead, body={"iban": "CH93"})
        kept = (await bank.record()).request
        assert kept is not None
        assert b"CH93" not in kept
        assert b"acme" not in kept
        assert await Completer(alive.once).run_once() == 1
    assert (bank.state, bank.provider.charges) == ("completed", 1)


@pytest.mark.parametrize("now", [b"another secret!!", None])
async def test_a_changed_secret_leaves_the_request_to_its_client(
    small_bank: Bank, now: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    # F37: and the downstream key stays what it was
    old, new = (Policy(lease=LEASE, secret=secret) for secret in (SECRET, now))
    async with small_bank.process(policy=old) as dead, small_bank.process(policy=new) as alive:
        await stranded(small_bank, dead)
        completer = Completer(alive.once)
        assert await completer.run_once() == 0
        assert (completer.done, completer.failed) == (0, 1)
    assert "cannot be completed without its client" in caplog.text
    assert "before its handler was called" not in caplog.text
    assert small_bank.provider.charges == 0


async def test_a_stored_request_of_another_record_is_rejected(small_bank: Bank) -> None:
    policy = Policy(lease=LEASE, secret=SECRET)
    async with small_bank.process(policy=policy) as dead, small_bank.process(policy=policy) as alive:
        await dead.send_and_freeze("order", key="key-of-somebody-else")
        dead.frozen = False
        await dead.send_and_freeze("order")
        small_bank.execute(
            "UPDATE {record} SET request = (SELECT request FROM {record} WHERE key = 'key-of-somebody-else')"
        )
        small_bank.lease_over()
        assert await Completer(alive.once).run_once() == 1  # its own


async def test_a_missing_cryptography_package_fails_the_startup(
    small_bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(secret: bytes) -> None:
        raise ConfigurationError(kept_request.NEEDS_CRYPTOGRAPHY)

    monkeypatch.setattr(kept_request, "_cipher", absent)
    with pytest.raises(ConfigurationError, match=r"oncekey\[encryption\]"):
        async with small_bank.process(policy=Policy(secret=SECRET)):
            pass
    async with small_bank.process(policy=Policy(secret=SECRET), complete=False) as process:
        assert (await process.send()).status == 201


async def test_a_completer_resumes_requests_below_a_mount(async_bank: Bank) -> None:
    # a mount has changed the scope by the time of the claim
    once = ClockedOnce(async_bank.database.url, async_bank.clock, Policy(lease=LEASE))
    app, inner = FastAPI(), FastAPI()
    app.mount("/api", inner)
    once.install(app, tenant=tenant_of)
    runs: list[str] = []
    frozen = asyncio.Event()

    @inner.post("/payments/{number}", status_code=201)
    @once.protect(effects=PHASED, operation="mounted")
    async def pay(number: str, op: Operation, request: Request) -> str:
        async def write(connection: Any) -> None:
            await async_bank.write(connection, number)

        runs.append(str(request.url.path) + "?" + request.url.query)
        await op.phase("order", write)
        if len(runs) == 1:
            frozen.set()
            await asyncio.Event().wait()
        return "paid"

    async with once.lifespan(app):
        headers = [("Idempotency-Key", KEY)]
        caller = Caller(app, "POST", "/shop/api/payments/a%20b?c=%C3%A9", headers=headers, root_path="/shop")
        first = asyncio.create_task(caller.run())
        await frozen.wait()
        async_bank.lease_over()
        assert await Completer(once).run_once() == 1
        first.cancel()
    assert len(set(runs)) == 1
    assert len(runs) == 2
    assert (async_bank.state, async_bank.effects) == ("completed", ["a b"])
