"""Adapters that break the order of the lifecycle, and what catches them: whole first, settled next, then sent."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.responses import StreamingResponse

from frameworks.shop import Shop
from oncekey.core.answers import Answer
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.capture import Capture
from oncekey.engine.operation import Operation
from oncekey.frameworks.asgi.middleware import Exchange


class BrokenOffError(Exception):
    """The application fails in the middle of its answer."""


def decides_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow is resumed at the first piece of the body."""
    body = Capture.body

    def first(self: Capture, chunk: bytes, *, more: bool) -> None:
        body(self, chunk, more=False)

    monkeypatch.setattr(Capture, "body", first)


def a_shop(*, breaks_off: bool) -> Shop:
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> StreamingResponse:
        op.connection.add("row")

        async def pieces() -> Any:
            yield b"one, "
            if breaks_off:
                raise BrokenOffError
            yield b"two"

        return StreamingResponse(pieces(), media_type="text/plain")

    return shop


async def stored_whole() -> None:
    shop = a_shop(breaks_off=False)
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.body, again.body, again.replayed) == (b"one, two", b"one, two", True)


async def broken_off_is_undone() -> None:
    shop = a_shop(breaks_off=True)
    await shop.caller("/orders").run()
    assert (shop.state, shop.ledger.rows) == ("failed_retryable", [])


@pytest.mark.parametrize("promise", [stored_whole, broken_off_is_undone])
async def test_settling_before_the_response_is_complete_is_detected(
    promise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R97, F42: with half an answer nobody knows whether the handler succeeds."""
    await promise()

    decides_early(monkeypatch)
    with pytest.raises(AssertionError):
        await promise()


async def sent_after_it_was_settled() -> None:
    shop = Shop()
    seen: list[str | None] = []

    @shop.post(effects=INLINE)
    async def create() -> dict[str, int]:
        return {"id": 7}

    await shop.caller("/orders", on_send=lambda _: seen.append(shop.state)).run()
    assert seen
    assert set(seen) == {"completed"}


async def test_sending_before_the_settlement_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """R75: no byte of a success leaves while a crash could still take it back."""
    await sent_after_it_was_settled()

    finish, conclude = Exchange.finish, Exchange._conclude

    async def answers_first(self: Exchange, error: BaseException | None = None) -> bool:
        await conclude(self, None, error)
        return await finish(self, error)

    async def nothing(self: Exchange, reply: Answer | None, error: BaseException | None) -> None:
        """It was sent already."""

    monkeypatch.setattr(Exchange, "_conclude", nothing)
    monkeypatch.setattr(Exchange, "finish", answers_first)
    with pytest.raises(AssertionError):
        await sent_after_it_was_settled()
