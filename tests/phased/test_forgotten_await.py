"""A step without `await` has not run, so the handler's response is not stored."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from harness.asgi import Caller
from oncekey import PHASED, SINGLE_TENANT, ConfigurationError, NotRunError, Once, Operation, Policy

KEY = "a-key-without-await"
STEPS = ("value", "phase", "call")


async def drawn(*_: Any, key: str = "") -> str:
    return f"drawn {key}"


def step(op: Operation[Any], name: str) -> Any:
    options: dict[str, Any] = {"repeatable": False} if name == "call" else {}
    return getattr(op, name)(name, drawn, **options)


def expected(forgotten: str) -> Any:
    """The next step raises; after the last one there is only the response."""
    if forgotten == STEPS[-1]:
        return nullcontext()
    return pytest.raises(ConfigurationError, match=f"the step op.{forgotten}.* was not awaited, so it has not run")


@pytest.mark.parametrize("forgotten", STEPS)
async def test_a_response_after_a_step_without_await_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forgotten: str
) -> None:
    # H1: the steps before it stay, and the deploy that adds the `await` completes the request
    once, app, mended = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True), FastAPI(), []
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/pay")
    @once.protect(effects=PHASED)
    async def pay(op: Operation[Any]) -> dict[str, Any]:
        done: dict[str, Any] = {"phases": await op.phase("first", drawn)}
        for name in STEPS:
            begun = step(op, name)
            if mended or name != forgotten:
                done[name] = await begun
        return done

    async with app.router.lifespan_context(app):
        for _ in range(2):
            with expected(forgotten):
                reply = await Caller(app, "POST", "/pay", headers=[("Idempotency-Key", KEY)]).run(raising=True)
                assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
                assert f"the step op.{forgotten}('{forgotten}', ...) was not awaited, so it has not run" in caplog.text
        mended.append(True)
        reply = await Caller(app, "POST", "/pay", headers=[("Idempotency-Key", KEY)]).run()
        assert (reply.status, sorted(reply.json())) == (200, ["call", "phase", "phases", "value"])


async def test_a_function_with_a_step_without_await_has_not_succeeded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, policy=Policy(complete=False))

    @once.function(effects=PHASED, key="order", operation="pay")
    async def pay(op: Operation[Any], order: str) -> str:
        step(op, "call")
        return "paid"

    async with once.lifespan():
        with pytest.raises(NotRunError):
            await pay("o-1")
    assert "op.call('call', ...) was not awaited" in caplog.text
